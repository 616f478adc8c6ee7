"""attention, float32 reference: softmax(q k^T * scale + causal mask) v, one sequence at a time."""

from __future__ import annotations

import torch


def attention(
    q_THD: torch.Tensor, k_SKD: torch.Tensor, v_SKD: torch.Tensor, scale: float, first: int = 0
) -> torch.Tensor:
    """Attend causally.

    q_THD: queries of positions first..first+T-1, [T, heads, D]. k_SKD, v_SKD: keys and values of positions
    0..S-1, [S, kv heads, D]; head h reads kv head h // (heads / kv heads). Returns float32 [T, heads, D].
    """
    group = q_THD.shape[1] // k_SKD.shape[1]
    q = q_THD.to(torch.float32)
    k = k_SKD.to(torch.float32).repeat_interleave(group, dim=1)
    v = v_SKD.to(torch.float32).repeat_interleave(group, dim=1)
    scores_HTS = torch.einsum("thd,shd->hts", q, k) * scale
    visible_TS = torch.arange(k.shape[0])[None, :] <= (first + torch.arange(q.shape[0]))[:, None]
    weights_HTS = scores_HTS.masked_fill(~visible_TS, float("-inf")).softmax(-1)
    return torch.einsum("hts,shd->thd", weights_HTS, v)
