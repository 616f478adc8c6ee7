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
from rlk_ledger_kernels.ops.attention.operands import check, check_whole
from rlk_ledger_kernels.ops.attention.partials import BlockPartials, Owned, collected, entries, visits
from rlk_ledger_kernels.ops.attention.plan import AttentionPlan, Pairs, Step, key_places, tiled_for_backward
from rlk_ledger_kernels.ops.linear.torch import row_sum
from rlk_ledger_kernels.precision import exact_products
from rlk_ledger_kernels.schedule import ALIGNMENT

_MINUS_INFINITY = float("-inf")
_LOWEST = torch.finfo(torch.float32).min
_ROWS_LEAF = 128
"""Rows of a query tile that one product of the backward pass sums; BLAS cuts longer sums itself."""


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
    with exact_products(q_NHD.device):
        top_TKM, total_TKMV = _attend(q_TKMD, cache, plan, contract, careful=False)
        if not bool(total_TKMV.sum().isfinite()):
            top_TKM, total_TKMV = _attend(q_TKMD, cache, plan, contract, careful=True)
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
    with exact_products(q_NHD.device):
        partials = _partials(q_TKMD, cache, plan, contract, owned, len(q_NHD), careful=False)
        if not bool(partials.o_EKMD.sum().isfinite()):
            partials = _partials(q_TKMD, cache, plan, contract, owned, len(q_NHD), careful=True)
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
    top_TKM = m_EKM.new_full(shape, _LOWEST)
    total_TKMV = m_EKM.new_zeros((*shape, o_EKMD.shape[-1] + 1))
    first = 0
    for step in plan.steps:
        at_A = at_V[first : first + step.end - step.begin]
        first += len(at_A)
        part_AKMV = torch.cat((o_EKMD.index_select(0, at_A), l_EKM.index_select(0, at_A)[..., None]), -1)
        active = slice(step.begin, step.end)
        _merge(top_TKM[active], total_TKMV[active], m_EKM.index_select(0, at_A), part_AKMV)
    return _finish(top_TKM, total_TKMV[..., -1], total_TKMV[..., :-1], plan, contract, parts[0].rows)


def attention_backward(
    grad_NHD: torch.Tensor,
    grad_lse_NH: torch.Tensor,
    q_NHD: torch.Tensor,
    out_NHD: torch.Tensor,
    lse_NH: torch.Tensor,
    cache: KVCache,
    plan: AttentionPlan,
    contract: AttentionContract,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of a packed prefill, in which every sequence starts at position 0.

    p_ij = exp(s_ij - lse_i), ds_ij = p_ij (do_i . v_j - do_i . o_i + dlse_i); dv_j = sum_i p_ij do_i,
    dk_j = scale sum_i ds_ij q_i, dq_i = scale sum_j ds_ij k_j (Dao et al. 2022, algorithm 4).
    grad_NHD, q_NHD, out_NHD: [N, heads, D]; grad_lse_NH, lse_NH: [N, heads]. Returns float32 dq [N, heads, D], and
    dk and dv [N, kv heads, D]. A key sums its queries tile after tile forward, a query its keys block after block
    backward, so the gradients of a sequence do not depend on the other sequences.
    Raises OperandError as `attention` does, and for a chunk that starts behind position 0.
    """
    check_whole(plan)
    plan = tiled_for_backward(plan, contract.schedule)
    q_TKMD, kv_heads = _tiled_queries(q_NHD, cache, plan, contract), cache.keys.shape[1]
    grad_NHD, grad_lse_NH = grad_NHD.to(torch.float32), grad_lse_NH.to(torch.float32)
    dots_R = row_sum((grad_NHD * out_NHD).reshape(-1, cache.head_dim), contract.schedule)
    slope_NH1 = (grad_lse_NH - dots_R.view(grad_lse_NH.shape))[..., None]
    # A row that saw nothing has lse = -inf and gets weights exp(-inf) = 0.
    lse_NH1 = lse_NH.masked_fill(lse_NH == _MINUS_INFINITY, float("inf"))[..., None]
    grad_TKMD, slope_TKM1, lse_TKM1 = (_by_tile(x, plan, kv_heads) for x in (grad_NHD, slope_NH1, lse_NH1))
    # Rows that are padding hold the first row of the batch; their weights are zero, but zero times NaN is NaN.
    padding_TQ = torch.ones_like(plan.gather_R, dtype=torch.bool)
    padding_TQ[plan.scatter_P[: plan.rows]] = False
    for x in (q_TKMD, grad_TKMD):
        by_query = x.view(plan.tiles, kv_heads, -1, plan.q_tile, cache.head_dim)
        by_query.masked_fill_(padding_TQ.view(plan.tiles, 1, 1, plan.q_tile, 1), 0.0)
    keys = sum(len(chunk.blocks) for chunk in plan.chunks)
    dq_TKMD = torch.zeros_like(q_TKMD)
    dk_PKBD, dv_PKBD = q_TKMD.new_zeros((2, keys, *cache.keys.shape[1:]))
    with exact_products(q_NHD.device):
        for pairs in plan.pairs:
            at = pairs.tile_A
            k, v = cache.read_keys(pairs.page_A), cache.read_values(pairs.page_A)[..., : cache.head_dim]
            p, ds = _weights_and_slopes(q_TKMD[at], k, v, grad_TKMD[at], slope_TKM1[at], lse_TKM1[at], pairs, contract)
            dv_PKBD[pairs.key_A] += _summed_over_rows(p, grad_TKMD[at], plan.q_tile)
            dk_PKBD[pairs.key_A] += _summed_over_rows(ds, q_TKMD[at], plan.q_tile)
            dq_TKMD[at] += torch.matmul(ds, k)
    dq_TKMD.mul_(contract.scale)
    if contract.scale_at == "score":
        dk_PKBD.mul_(contract.scale)
    group_rows = (plan.tiles, kv_heads, -1, plan.q_tile, cache.head_dim)
    dq_RHD = dq_TKMD.view(group_rows).permute(0, 3, 1, 2, 4).reshape(-1, *q_NHD.shape[1:])
    block_N, slot_N = key_places(plan)
    dk_NKD, dv_NKD = dk_PKBD[block_N, :, slot_N], dv_PKBD[block_N, :, slot_N]
    return dq_RHD.index_select(0, plan.scatter_P[: len(q_NHD)]), dk_NKD, dv_NKD


def _weights_and_slopes(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    grad: torch.Tensor,
    slope: torch.Tensor,
    lse: torch.Tensor,
    pairs: Pairs,
    contract: AttentionContract,
) -> tuple[torch.Tensor, torch.Tensor]:
    """p and ds of the visits, [A, kv heads, M, kv_block]; exactly zero where the key is invisible."""
    scores = torch.matmul(q, k.transpose(-1, -2))
    if contract.scale_at == "score":
        scores.mul_(contract.scale)
    p = scores.sub_(lse).exp_()
    ds = torch.matmul(grad, v.transpose(-1, -2)).add_(slope).mul_(p)
    if pairs.hidden_AQB is not None:
        hidden = pairs.hidden_AQB[:, None, None]
        for x in (p, ds):
            x.view(*p.shape[:2], -1, *hidden.shape[3:]).masked_fill_(hidden, 0.0)
    return p, ds


def _summed_over_rows(x_AKMB: torch.Tensor, y_AKMD: torch.Tensor, q_tile: int) -> torch.Tensor:
    """x^T y over the rows of a tile, at most one leaf of rows to a product: [A, kv heads, kv_block, D]."""
    leaf = max(1, _ROWS_LEAF // q_tile) * q_tile
    total = torch.matmul(x_AKMB[:, :, :leaf].transpose(-1, -2), y_AKMD[:, :, :leaf])
    for start in range(leaf, x_AKMB.shape[2], leaf):
        rows = slice(start, start + leaf)
        total.add_(torch.matmul(x_AKMB[:, :, rows].transpose(-1, -2), y_AKMD[:, :, rows]))
    return total


def _tiled_queries(
    q_NHD: torch.Tensor, cache: KVCache, plan: AttentionPlan, contract: AttentionContract
) -> torch.Tensor:
    """Scaled float32 queries by tile, [tiles, kv heads, group x q_tile, D]."""
    check(q_NHD, cache, plan, contract)
    kv_heads = cache.keys.shape[1]
    q = q_NHD.to(torch.float32)
    return _by_tile(q.mul(contract.scale) if contract.scale_at == "query" else q, plan, kv_heads)


def _by_tile(x_NHD: torch.Tensor, plan: AttentionPlan, kv_heads: int) -> torch.Tensor:
    """Packed rows by tile, [tiles, kv heads, group x q_tile, D]."""
    heads, head_dim = x_NHD.shape[1:]
    x = x_NHD.index_select(0, plan.gather_R)
    x = x.view(plan.tiles, plan.q_tile, kv_heads, heads // kv_heads, head_dim).permute(0, 2, 3, 1, 4)
    return x.reshape(plan.tiles, kv_heads, -1, head_dim).contiguous()


def _attend(
    q_TKMD: torch.Tensor, cache: KVCache, plan: AttentionPlan, contract: AttentionContract, careful: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(m, [o, l]) of every tile over all blocks it sees.

    Tiles seen so far are contiguous, as those of a step are. The first block of a tile is taken as it is: merging it
    into nothing would give its very bits, but for zeros, which `_finish` makes positive.
    """
    top_TKM = q_TKMD.new_empty(q_TKMD.shape[:3])
    total_TKMV = q_TKMD.new_empty((*q_TKMD.shape[:3], cache.ones_at + ALIGNMENT))
    low = high = plan.steps[0].begin
    for step in plan.steps:
        m_AKM, part_AKMV = _block(q_TKMD[step.begin : step.end], cache, step, contract, careful)
        old = slice(max(step.begin, low), max(step.begin, low, min(step.end, high)))
        for first, end in ((step.begin, old.start), (old.stop, step.end)):
            torch.clamp_min(m_AKM[first - step.begin : end - step.begin], _LOWEST, out=top_TKM[first:end])
            total_TKMV[first:end] = part_AKMV[first - step.begin : end - step.begin]
        part = slice(old.start - step.begin, old.stop - step.begin)
        _merge(top_TKM[old], total_TKMV[old], m_AKM[part], part_AKMV[part])
        low, high = min(low, step.begin), max(high, step.end)
    return top_TKM, total_TKMV


def _partials(
    q_TKMD: torch.Tensor,
    cache: KVCache,
    plan: AttentionPlan,
    contract: AttentionContract,
    owned: Owned,
    rows: int,
    careful: bool,
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
        m_EKM[mine], part_SKMV = _block(q_SKMD, cache, step.subset(tile_S - step.begin), contract, careful)
        l_EKM[mine], o_EKMD[mine] = part_SKMV[..., cache.ones_at], part_SKMV[..., : cache.head_dim]
        first = mine.stop
    return BlockPartials(rows, tile_E, block_E, m_EKM, l_EKM, o_EKMD)


def _block(
    q_AKMD: torch.Tensor, cache: KVCache, step: Step, contract: AttentionContract, careful: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """One logical block under its own maximum: m [A, kv heads, M] and sum_j exp(s_j - m) [v_j, 1].

    careful: values that are not finite are taken out of the product (where a masked key would make 0 x inf of them)
    and make a row NaN when the row sees them. Rows that see none keep their bits.
    """
    active, kv_heads, rows, head_dim = q_AKMD.shape
    k = cache.read_keys(step.blocks_A).view(active * kv_heads, -1, head_dim)
    v = cache.read_values(step.blocks_A).view(active * kv_heads, k.shape[1], -1)
    scores = torch.bmm(q_AKMD.reshape(-1, rows, head_dim), k.transpose(1, 2))
    if contract.scale_at == "score":
        scores.mul_(contract.scale)
    by_tile = scores.view(active, kv_heads, -1, step.hidden_MQB.shape[1], k.shape[1])
    if step.edged:
        by_tile[: step.edged].masked_fill_(step.edge_EQB[:, None, None], _MINUS_INFINITY)
    if step.ending:
        by_tile[active - step.ending :].masked_fill_(step.hidden_MQB[:, None, None], _MINUS_INFINITY)
    m = scores.amax(-1)
    seen = (scores > _MINUS_INFINITY).to(v.dtype) if careful else None
    # A row that sees nothing here has m = -inf; against a finite number its weights are exp(-inf) = 0 and not NaN.
    weights = scores.sub_(m.clamp_min(_LOWEST)[..., None]).exp_()
    if contract.weights != "float32":
        weights = weights.to(torch_dtype(contract.weights)).to(torch.float32)
    if seen is not None:
        bad = ~v.isfinite()
        part = torch.bmm(weights, v.masked_fill(bad, 0.0))
        part.masked_fill_(torch.bmm(seen, bad.to(v.dtype)) > 0, float("nan"))
    else:
        part = torch.bmm(weights, v)
    return m.view(active, kv_heads, rows), part.view(active, kv_heads, rows, -1)


def _merge(top: torch.Tensor, total: torch.Tensor, m: torch.Tensor, part: torch.Tensor) -> None:
    """Merge one block's (m, [o, l]) into the running one, in place; `part` is consumed.

    `top` is finite even where a row saw nothing, so that no difference of infinities is taken.
    """
    new_top = torch.maximum(top, m)
    total.mul_(top.sub_(new_top).exp_()[..., None]).add_(part.mul_(m.sub(new_top).exp_()[..., None]))
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
