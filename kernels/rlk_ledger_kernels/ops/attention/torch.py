"""attention, torch: each logical KV block reduced under its own maximum, over all tiles that see it, then merged.

The batched product runs at one shape per (q_tile, kv_block); a row's sums depend on its own query and on the
blocks in the order of the schedule, never on how queries were cut into calls. Masked scores are minus
infinity *before* the exponential, so a masked key weighs exactly zero; nothing is masked by arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rlk_ledger_kernels.dtypes import torch_dtype
from rlk_ledger_kernels.ops.attention.cache import KVCache
from rlk_ledger_kernels.ops.attention.contract import AttentionContract
from rlk_ledger_kernels.ops.attention.operands import check
from rlk_ledger_kernels.ops.attention.partials import BlockPartials, Owned, collected, entries, visits
from rlk_ledger_kernels.ops.attention.plan import AttentionPlan, Step
from rlk_ledger_kernels.schedule import ALIGNMENT

_MINUS_INFINITY = float("-inf")


def attention(
    q_NHD: torch.Tensor, cache: KVCache, plan: AttentionPlan, contract: AttentionContract
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend causally from the plan's rows to the cache, which already holds their own keys and values.

    out = sum_j exp(s_j - lse) v_j, lse = log sum_j exp(s_j), s_j = scale q . k_j over the visible j.
    q_NHD: [N, heads, D]; head h reads kv head h // (heads / kv heads). N is the plan's rows, or those padded to
    a multiple of the smallest row tile; what comes back for padding means nothing.
    Returns the output [N, heads, D] in `contract.output` and the log-sum-exp, float32 [N, heads], of the
    scaled scores; a row that sees nothing is zero, its log-sum-exp minus infinity. A key or value that is not
    finite reaches the rows that see it and no others.
    Raises OperandError when shapes, devices or the window do not fit the cache or the plan.
    """
    q_TKMD = _tiled_queries(q_NHD, cache, plan, contract)
    top_TKM, total_TKMV = _attend(q_TKMD, cache, plan, careful=False)
    if not bool(total_TKMV.sum().isfinite()):
        top_TKM, total_TKMV = _attend(q_TKMD, cache, plan, careful=True)
    total_TKMD, denominator_TKM = total_TKMV[..., : cache.head_dim], total_TKMV[..., cache.ones_at]
    return _finish(top_TKM, denominator_TKM, total_TKMD, plan, contract, len(q_NHD))


def attention_partials(
    q_NHD: torch.Tensor, cache: KVCache, plan: AttentionPlan, contract: AttentionContract, owned: Owned
) -> BlockPartials:
    """The partial results of every row of the plan with the logical blocks in `owned`, for `merge_partials`.

    q_NHD: all of the plan's rows, in token order (see `partials.restored_order`). cache: needs the owned blocks
    only; `Chunk.blocks` of others are not read. owned: for each chunk, the logical blocks this rank owns.
    Raises OperandError as `attention` does, and when `owned` names a block that does not exist.
    """
    q_TKMD = _tiled_queries(q_NHD, cache, plan, contract)
    partials = _partials(q_TKMD, cache, plan, owned, len(q_NHD), careful=False)
    if not bool(partials.o_EKMD.sum().isfinite()):
        partials = _partials(q_TKMD, cache, plan, owned, len(q_NHD), careful=True)
    return partials


def merge_partials(
    parts: Sequence[BlockPartials], plan: AttentionPlan, contract: AttentionContract
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge the partials of all ranks, in any order, in the global block order: what `attention` returns, bit for bit.

    m' = max(m, m_b), (o, l) = (o, l) exp(m - m') + (o_b, l_b) exp(m_b - m') for each block b.
    Raises OperandError when a partial is missing, given twice or not in the plan.
    """
    at_V = collected(parts, plan).to(parts[0].m_EKM.device)
    m_EKM, l_EKM, o_EKMD = (torch.cat([getattr(part, name) for part in parts]) for name in ("m_EKM", "l_EKM", "o_EKMD"))
    shape = (plan.tiles, *m_EKM.shape[1:])
    top_TKM = m_EKM.new_full(shape, _MINUS_INFINITY)
    total_TKMV = m_EKM.new_zeros((*shape, o_EKMD.shape[-1] + 1))
    first = 0
    for step in plan.steps:
        at_A = at_V[first : first + step.end - step.begin]
        first += len(at_A)
        part_AKMV = torch.cat((o_EKMD.index_select(0, at_A), l_EKM.index_select(0, at_A)[..., None]), -1)
        active = slice(step.begin, step.end)
        _merge(top_TKM[active], total_TKMV[active], m_EKM.index_select(0, at_A), part_AKMV)
    return _finish(top_TKM, total_TKMV[..., -1], total_TKMV[..., :-1], plan, contract, parts[0].rows)


def _tiled_queries(
    q_NHD: torch.Tensor, cache: KVCache, plan: AttentionPlan, contract: AttentionContract
) -> torch.Tensor:
    """Scaled float32 queries by tile, [tiles, kv heads, group x q_tile, D]."""
    check(q_NHD, cache, plan, contract)
    heads, head_dim = q_NHD.shape[1:]
    kv_heads = cache.keys.shape[1]
    q = q_NHD.to(torch.float32).mul(contract.scale).index_select(0, plan.gather_R)
    q = q.view(plan.tiles, plan.q_tile, kv_heads, heads // kv_heads, head_dim).permute(0, 2, 3, 1, 4)
    return q.reshape(plan.tiles, kv_heads, -1, head_dim).contiguous()


def _attend(
    q_TKMD: torch.Tensor, cache: KVCache, plan: AttentionPlan, careful: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(m, [o, l]) of every tile over all blocks it sees."""
    top_TKM = q_TKMD.new_full(q_TKMD.shape[:3], _MINUS_INFINITY)
    total_TKMV = q_TKMD.new_zeros((*q_TKMD.shape[:3], cache.ones_at + ALIGNMENT))
    for step in plan.steps:
        active = slice(step.begin, step.end)
        m_AKM, part_AKMV = _block(q_TKMD[active], cache, step, careful)
        _merge(top_TKM[active], total_TKMV[active], m_AKM, part_AKMV)
    return top_TKM, total_TKMV


def _partials(
    q_TKMD: torch.Tensor, cache: KVCache, plan: AttentionPlan, owned: Owned, rows: int, careful: bool
) -> BlockPartials:
    tiles = visits(plan, owned)
    tile_E, block_E = entries(plan, owned)
    m_EKM = q_TKMD.new_empty((len(tile_E), *q_TKMD.shape[1:3]))
    l_EKM, o_EKMD = torch.empty_like(m_EKM), q_TKMD.new_empty((*m_EKM.shape, cache.head_dim))
    first = 0
    for step, tile_S in zip(plan.steps, tiles):
        if not len(tile_S):
            continue
        mine = slice(first, first + len(tile_S))
        q_SKMD = q_TKMD[torch.from_numpy(tile_S).to(q_TKMD.device)]
        m_EKM[mine], part_SKMV = _block(q_SKMD, cache, step.subset(tile_S - step.begin), careful)
        l_EKM[mine], o_EKMD[mine] = part_SKMV[..., cache.ones_at], part_SKMV[..., : cache.head_dim]
        first = mine.stop
    return BlockPartials(rows, tile_E, block_E, m_EKM, l_EKM, o_EKMD)


def _block(q_AKMD: torch.Tensor, cache: KVCache, step: Step, careful: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """One logical block under its own maximum: m [A, kv heads, M] and sum_j exp(s_j - m) [v_j, 1].

    careful: values that are not finite are taken out of the product (where a masked key would make 0 x inf of them)
    and make a row NaN when the row sees them. Rows that see none keep their bits.
    """
    active, kv_heads, rows, head_dim = q_AKMD.shape
    k = cache.read_keys(step.blocks_A).view(active * kv_heads, -1, head_dim)
    v = cache.read_values(step.blocks_A).view(active * kv_heads, k.shape[1], -1)
    scores = torch.bmm(q_AKMD.reshape(-1, rows, head_dim), k.transpose(1, 2))
    by_tile = scores.view(active, kv_heads, -1, step.hidden_MQB.shape[1], k.shape[1])
    if step.edged:
        by_tile[: step.edged].masked_fill_(step.edge_EQB[:, None, None], _MINUS_INFINITY)
    if step.ending:
        by_tile[active - step.ending :].masked_fill_(step.hidden_MQB[:, None, None], _MINUS_INFINITY)
    m = scores.amax(-1)
    # A row that sees nothing here has m = -inf; against 0 instead, its weights are exp(-inf) = 0 and not NaN.
    weights = scores.sub_(m.masked_fill(m == _MINUS_INFINITY, 0.0)[..., None]).exp_()
    if careful:
        bad = ~v.isfinite()
        part = torch.bmm(weights, v.masked_fill(bad, 0.0))
        part.masked_fill_(torch.bmm((weights > 0).to(v.dtype), bad.to(v.dtype)) > 0, float("nan"))
    else:
        part = torch.bmm(weights, v)
    return m.view(active, kv_heads, rows), part.view(active, kv_heads, rows, -1)


def _merge(top: torch.Tensor, total: torch.Tensor, m: torch.Tensor, part: torch.Tensor) -> None:
    """Merge one block's (m, [o, l]) into the running one, in place; `part` is consumed."""
    new_top = torch.maximum(top, m)
    base = new_top.masked_fill(new_top == _MINUS_INFINITY, 0.0)
    total.mul_(top.sub_(base).exp_()[..., None]).add_(part.mul_(m.sub(base).exp_()[..., None]))
    top.copy_(new_top)


def _finish(
    top_TKM: torch.Tensor,
    denominator_TKM: torch.Tensor,
    total_TKMD: torch.Tensor,
    plan: AttentionPlan,
    contract: AttentionContract,
    rows: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Divide once, round once, and put tile rows back into packed order."""
    tiles, kv_heads, group_rows, head_dim = total_TKMD.shape
    shape = (tiles, kv_heads, group_rows // plan.q_tile, plan.q_tile)
    nothing_TKM = denominator_TKM == 0.0
    # Adding +0 turns a negative zero, whose sign may depend on masked keys, into a positive one.
    out_TKMD = total_TKMD.div(denominator_TKM.masked_fill(nothing_TKM, 1.0)[..., None]).add_(0.0)
    lse_TKM = top_TKM + denominator_TKM.log()
    out_RHD = out_TKMD.view(*shape, head_dim).permute(0, 3, 1, 2, 4).reshape(tiles * plan.q_tile, -1, head_dim)
    lse_RH = lse_TKM.view(shape).permute(0, 3, 1, 2).reshape(tiles * plan.q_tile, -1)
    at_N = plan.scatter_P[:rows]
    return out_RHD.index_select(0, at_N).to(torch_dtype(contract.output)), lse_RH.index_select(0, at_N)
