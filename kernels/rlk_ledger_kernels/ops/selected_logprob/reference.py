"""selected_logprob, float32 reference: log softmax(z / temperature)[token]."""

from __future__ import annotations

import torch


def selected_logprob(logits_NV: torch.Tensor, tokens_N: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """Score tokens.

    logits_NV: [N, V]. tokens_N: int64 [N]. Returns float32 [N].
    """
    scores_NV = torch.log_softmax(logits_NV.to(torch.float32) / temperature, dim=-1)
    return scores_NV.gather(1, tokens_N[:, None])[:, 0]
