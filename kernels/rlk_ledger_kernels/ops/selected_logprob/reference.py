"""selected_logprob, float32 reference: log softmax(z / temperature)[token]."""

from __future__ import annotations

import torch

from rlk_ledger_kernels.ops.selected_logprob.contract import LogprobContract
from rlk_ledger_kernels.ops.selected_logprob.statistics import check_tokens


def selected_logprob(
    logits_NV: torch.Tensor, tokens_N: torch.Tensor, contract: LogprobContract, vocabulary: int | None = None
) -> torch.Tensor:
    """Score tokens; the contract's temperature and ignored rows are kept, its roundings are not.

    logits_NV: [N, V]. tokens_N: int64 [N]. vocabulary: columns beyond it are padding. Returns float32 [N] (nats).
    """
    size = logits_NV.shape[1] if vocabulary is None else vocabulary
    ignored_N = check_tokens(tokens_N, logits_NV.shape[0], size, contract)
    scores_NV = torch.log_softmax(logits_NV[:, :size].to(torch.float32) / contract.temperature, dim=-1)
    picked_N = scores_NV.gather(1, tokens_N.to(torch.int64).clamp(0, size - 1)[:, None])[:, 0]
    return torch.where(ignored_N, 0.0, picked_N)


def selected_logprob_backward(
    grad_N: torch.Tensor,
    logits_NV: torch.Tensor,
    tokens_N: torch.Tensor,
    contract: LogprobContract,
    vocabulary: int | None = None,
) -> torch.Tensor:
    """The gradient of the logits, float32 [N, V]: grad / temperature * (onehot - softmax)."""
    size = logits_NV.shape[1] if vocabulary is None else vocabulary
    ignored_N = check_tokens(tokens_N, logits_NV.shape[0], size, contract)
    share_NV = torch.softmax(logits_NV[:, :size].to(torch.float32) / contract.temperature, dim=-1)
    chosen_N1 = tokens_N.to(torch.int64).clamp(0, size - 1)[:, None]
    out_NV = torch.zeros(logits_NV.shape, dtype=torch.float32, device=logits_NV.device)
    out_NV[:, :size] = torch.zeros_like(share_NV).scatter(1, chosen_N1, 1.0) - share_NV
    out_NV = out_NV * (grad_N.to(torch.float32) / contract.temperature)[:, None]
    return torch.where(ignored_N[:, None], 0.0, out_NV)
