"""The slow, obvious attention in float64, and sequences laid out in a paged cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rlk_ledger_kernels.ops.attention.cache import KVCache
from rlk_ledger_kernels.ops.attention.contract import AttentionContract
from rlk_ledger_kernels.ops.attention.plan import AttentionPlan, Chunk, plan_attention

Sequence3 = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def drawn(seed: int, length: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> Sequence3:
    """Random q, k and v of one sequence."""
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn((length, many, head_dim), generator=g).to(dtype) for many in (heads, kv_heads, kv_heads))
    return q, k, v


def plain(
    q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, scale: float, window: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [T, heads, D] and log-sum-exp [T, heads] in float64, one query and head at a time in spirit."""
    q, k, v = (x.double() for x in (q_THD, k_TKD, v_TKD))
    group = q.shape[1] // k.shape[1]
    scores = torch.einsum("thd,shd->hts", q, k.repeat_interleave(group, 1)) * scale
    i, j = torch.arange(len(q))[:, None], torch.arange(len(q))[None, :]
    visible = (j <= i) if window is None else (j <= i) & (j > i - window)
    scores = scores.masked_fill(~visible, float("-inf"))
    return torch.einsum("hts,shd->thd", scores.softmax(-1), v.repeat_interleave(group, 1)), scores.logsumexp(-1).T


def packed(
    sequences: Sequence[Sequence3],
    contract: AttentionContract,
    dtype: str = "float32",
    *,
    wide: bool = True,
    stale: float = 0.0,
    q_tile: int | None = None,
) -> tuple[torch.Tensor, KVCache, AttentionPlan]:
    """Whole sequences side by side in shuffled pages that held `stale` before: queries, cache, plan."""
    block = contract.schedule.kv_block
    counts = [-(-len(q) // block) for q, _, _ in sequences]
    order = torch.randperm(sum(counts) + 2, generator=torch.Generator().manual_seed(7)).tolist()
    starts = [sum(counts[:i]) for i in range(len(counts))]
    chunks = [Chunk(0, len(s[0]), order[a : a + n]) for s, a, n in zip(sequences, starts, counts)]
    plan = plan_attention(chunks, contract.schedule, q_tile, contract.window)
    q, k, v = (torch.cat(parts) for parts in zip(*sequences))
    cache = KVCache(len(order), k.shape[1], block, k.shape[2], dtype, wide=wide)  # type: ignore[arg-type]
    cache.keys.fill_(stale)
    cache.values[..., : cache.head_dim].fill_(stale)
    cache.write(k, v, plan)
    return q, cache, plan
