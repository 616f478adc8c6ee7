"""attention, Triton: one program per run of queries and kv head, KV in logical blocks of one shape.

A program holds ROWS rows: consecutive queries x the query heads that share the kv head, so prefill, chunks and decode
run the same products at the same shape. Each block is reduced under its own maximum and then merged, with the
roundings spelled out (`fma` where one is meant, no other fusion), so a block computed alone and merged later, for
split KV or context parallelism, gives the same bits. Blocks beyond the causal edge or the window are not visited;
only those at an edge are masked. ROWS, warps and stages follow from head_dim, kv_block and dtype, never from a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from rlk_ledger_kernels.dtypes import torch_dtype
from rlk_ledger_kernels.ops.attention.cache import KVCache
from rlk_ledger_kernels.ops.attention.contract import AttentionContract
from rlk_ledger_kernels.ops.attention.launch import launch, places, visit_lists
from rlk_ledger_kernels.ops.attention.operands import check, check_whole
from rlk_ledger_kernels.ops.attention.partials import BlockPartials, Owned, collected, entries
from rlk_ledger_kernels.ops.attention.plan import AttentionPlan
from rlk_ledger_kernels.ops.attention.triton_backward import run_backward
from rlk_ledger_kernels.ops.attention.triton_block import finished, merged, reduced_block
from rlk_ledger_kernels.triton_device import interpreted
from rlk_ledger_kernels.triton_language import TRITON_DTYPES, launcher, round_to

_SHARED_MEMORY = 200 * 1024
"""Bytes of a Hopper multiprocessor that a program plans with."""

_UNROLLED_ROWS = 16
"""Rows of a program whose products cannot run on tensor cores; the interpreter, which unrolls nothing, takes more."""


@triton.jit
def _span(
    m, total, out, q, k_ptr, v_ptr, pages_ptr, position, start, stop, scale, k_page, k_row, v_page, v_row,
    HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr, KV_BLOCK: tl.constexpr, WINDOW: tl.constexpr,
    REVERSE: tl.constexpr, SCALE_SCORE: tl.constexpr, WEIGHTS: tl.constexpr, QK: tl.constexpr, PV: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Merge the logical blocks start..stop-1."""
    column, key = tl.arange(0, COLUMNS), tl.arange(0, KV_BLOCK)
    real = column < HEAD_DIM
    for index in range(start, stop):
        block = index
        if REVERSE:
            block = start + stop - 1 - index
        page = tl.load(pages_ptr + block).to(tl.int64)
        k = tl.load(k_ptr + page * k_page + key[None, :] * k_row + column[:, None], mask=real[:, None], other=0.0)
        v = tl.load(v_ptr + page * v_page + key[:, None] * v_row + column[None, :], mask=real[None, :], other=0.0)
        m_block, total_block, out_block = reduced_block(
            q, k.to(QK), v.to(PV), position, block * KV_BLOCK, scale, KV_BLOCK, WINDOW, SCALE_SCORE, WEIGHTS, PV, MASKED
        )
        m, total, out = merged(m, total, out, m_block, total_block, out_block)
    return m, total, out


@triton.jit
def _forward_kernel(
    q_ptr, k_ptr, v_ptr, pages_ptr, tiles_ptr, out_ptr, lse_ptr, heads, scale,
    k_page, k_head, k_row, v_page, v_head, v_row,
    GROUP: tl.constexpr, PACKED: tl.constexpr, RUNS: tl.constexpr, ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr, KV_BLOCK: tl.constexpr, WINDOW: tl.constexpr,
    REVERSE: tl.constexpr, SCALE_SCORE: tl.constexpr, WEIGHTS: tl.constexpr, QK: tl.constexpr, PV: tl.constexpr,
    OUTPUT: tl.constexpr,
):  # fmt: skip
    tile_ptr = tiles_ptr + tl.program_id(0) * 4
    first_row, first, count = tl.load(tile_ptr), tl.load(tile_ptr + 1), tl.load(tile_ptr + 2)
    pages_ptr += tl.load(tile_ptr + 3)
    kv_head = (tl.program_id(1) // RUNS).to(tl.int64)
    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    query, in_group = row // PACKED, tl.program_id(1) % RUNS * PACKED + row % PACKED
    real = (query < count) & (in_group < GROUP)
    position = first + query
    place = (first_row + query).to(tl.int64) * heads + kv_head * GROUP + in_group
    inside = real[:, None] & (column < HEAD_DIM)[None, :]
    q = tl.load(q_ptr + place[:, None] * HEAD_DIM + column[None, :], mask=inside, other=0.0)
    if SCALE_SCORE == 0:
        q = q.to(tl.float32) * scale
    q = q.to(QK)
    k_ptr += kv_head * k_head
    v_ptr += kv_head * v_head
    end = (first + count - 1) // KV_BLOCK + 1
    begin, clear = 0, 0
    if WINDOW > 0:
        begin = tl.maximum(first - WINDOW + 1, 0) // KV_BLOCK
        clear = tl.minimum(tl.maximum(first + count - 1 - WINDOW + KV_BLOCK, 0) // KV_BLOCK, end)
        clear = tl.maximum(clear, begin)
    edge = tl.maximum(tl.minimum((first + 1) // KV_BLOCK, end), clear)
    m = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    out = tl.zeros((ROWS, COLUMNS), tl.float32)
    if REVERSE:
        m, total, out = _span(
            m, total, out, q, k_ptr, v_ptr, pages_ptr, position, edge, end, scale, k_page, k_row, v_page, v_row,
            HEAD_DIM, COLUMNS, KV_BLOCK, WINDOW, REVERSE, SCALE_SCORE, WEIGHTS, QK, PV, True,
        )  # fmt: skip
    elif WINDOW > 0:
        m, total, out = _span(
            m, total, out, q, k_ptr, v_ptr, pages_ptr, position, begin, clear, scale, k_page, k_row, v_page, v_row,
            HEAD_DIM, COLUMNS, KV_BLOCK, WINDOW, REVERSE, SCALE_SCORE, WEIGHTS, QK, PV, True,
        )  # fmt: skip
    m, total, out = _span(
        m, total, out, q, k_ptr, v_ptr, pages_ptr, position, clear, edge, scale, k_page, k_row, v_page, v_row,
        HEAD_DIM, COLUMNS, KV_BLOCK, WINDOW, REVERSE, SCALE_SCORE, WEIGHTS, QK, PV, False,
    )  # fmt: skip
    if REVERSE == 0:
        m, total, out = _span(
            m, total, out, q, k_ptr, v_ptr, pages_ptr, position, edge, end, scale, k_page, k_row, v_page, v_row,
            HEAD_DIM, COLUMNS, KV_BLOCK, WINDOW, REVERSE, SCALE_SCORE, WEIGHTS, QK, PV, True,
        )  # fmt: skip
    elif WINDOW > 0:
        m, total, out = _span(
            m, total, out, q, k_ptr, v_ptr, pages_ptr, position, begin, clear, scale, k_page, k_row, v_page, v_row,
            HEAD_DIM, COLUMNS, KV_BLOCK, WINDOW, REVERSE, SCALE_SCORE, WEIGHTS, QK, PV, True,
        )  # fmt: skip
    out, lse = finished(m, total, out)
    tl.store(out_ptr + place[:, None] * HEAD_DIM + column[None, :], round_to(out, OUTPUT), mask=inside)
    tl.store(lse_ptr + place, lse, mask=real)


@triton.jit
def _partials_kernel(
    q_ptr, k_ptr, v_ptr, pages_ptr, tile_ptr, block_ptr, packed_ptr, start_ptr, offset_ptr, m_ptr, l_ptr, o_ptr,
    heads, scale, k_page, k_head, k_row, v_page, v_head, v_row,
    GROUP: tl.constexpr, Q_TILE: tl.constexpr, ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr, KV_BLOCK: tl.constexpr, WINDOW: tl.constexpr,
    SCALE_SCORE: tl.constexpr, WEIGHTS: tl.constexpr, QK: tl.constexpr, PV: tl.constexpr,
):  # fmt: skip
    entry, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    tile, block = tl.load(tile_ptr + entry).to(tl.int64), tl.load(block_ptr + entry)
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    column, key = tl.arange(0, COLUMNS), tl.arange(0, KV_BLOCK)
    in_group, query = row // Q_TILE, row % Q_TILE
    packed = tl.load(packed_ptr + tile * Q_TILE + query).to(tl.int64)
    real = (packed >= 0) & (in_group < GROUP)
    inside = real[:, None] & (column < HEAD_DIM)[None, :]
    place = tl.where(real, packed, 0) * heads + kv_head * GROUP + in_group
    q = tl.load(q_ptr + place[:, None] * HEAD_DIM + column[None, :], mask=inside, other=0.0)
    if SCALE_SCORE == 0:
        q = q.to(tl.float32) * scale
    page = tl.load(pages_ptr + tl.load(offset_ptr + tile) + block).to(tl.int64)
    k_ptr += page * k_page + kv_head * k_head
    v_ptr += page * v_page + kv_head * v_head
    k = tl.load(k_ptr + key[None, :] * k_row + column[:, None], mask=(column < HEAD_DIM)[:, None], other=0.0)
    v = tl.load(v_ptr + key[:, None] * v_row + column[None, :], mask=(column < HEAD_DIM)[None, :], other=0.0)
    position = tl.load(start_ptr + tile) + query
    m, total, out = reduced_block(
        q.to(QK),
        k.to(QK),
        v.to(PV),
        position,
        block * KV_BLOCK,
        scale,
        KV_BLOCK,
        WINDOW,
        SCALE_SCORE,
        WEIGHTS,
        PV,
        True,
    )
    within = in_group < GROUP
    at = (entry * tl.num_programs(1) + kv_head) * GROUP * Q_TILE + row
    tl.store(m_ptr + at, m, mask=within)
    tl.store(l_ptr + at, total, mask=within)
    tl.store(o_ptr + at[:, None] * HEAD_DIM + column[None, :], out, mask=within[:, None] & (column < HEAD_DIM)[None, :])


@triton.jit
def _merge_kernel(
    m_ptr, l_ptr, o_ptr, visit_ptr, offset_ptr, packed_ptr, out_ptr, lse_ptr,
    GROUP: tl.constexpr, Q_TILE: tl.constexpr, ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr, OUTPUT: tl.constexpr,
):  # fmt: skip
    tile, kv_head, kv_heads = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.num_programs(1)
    row, column = tl.program_id(2) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    in_group, query = row // Q_TILE, row % Q_TILE
    within = in_group < GROUP
    inside = within[:, None] & (column < HEAD_DIM)[None, :]
    m = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    out = tl.zeros((ROWS, COLUMNS), tl.float32)
    for visit in range(tl.load(offset_ptr + tile), tl.load(offset_ptr + tile + 1)):
        entry = tl.load(visit_ptr + visit).to(tl.int64)
        at = (entry * kv_heads + kv_head) * GROUP * Q_TILE + row
        m_block = tl.load(m_ptr + at, mask=within, other=float("-inf"))
        total_block = tl.load(l_ptr + at, mask=within, other=0.0)
        out_block = tl.load(o_ptr + at[:, None] * HEAD_DIM + column[None, :], mask=inside, other=0.0)
        m, total, out = merged(m, total, out, m_block, total_block, out_block)
    out, lse = finished(m, total, out)
    packed = tl.load(packed_ptr + tile * Q_TILE + query).to(tl.int64)
    real = within & (packed >= 0)
    place = tl.where(real, packed, 0) * kv_heads * GROUP + kv_head * GROUP + in_group
    inside = real[:, None] & (column < HEAD_DIM)[None, :]
    tl.store(out_ptr + place[:, None] * HEAD_DIM + column[None, :], round_to(out, OUTPUT), mask=inside)
    tl.store(lse_ptr + place, lse, mask=real)


def attention(
    q_NHD: torch.Tensor, cache: KVCache, plan: AttentionPlan, contract: AttentionContract
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend causally from the plan's rows to the cache: out = sum_j exp(s_j - lse) v_j, lse = log sum_j exp(s_j).

    Shapes, masks and errors as `ops.attention.torch.attention`; rows that are padding come back as zeros.
    Products run on tensor cores where query, cache and `contract.weights` share a 16-bit dtype and the scale is
    applied to the score; elsewhere operands are widened and multiplied in IEEE float32.
    """
    check(q_NHD, cache, plan, contract)
    rows, heads, _ = q_NHD.shape
    chosen = settings(q_NHD.dtype, cache, contract)
    packing = _packing(heads // cache.keys.shape[1], chosen["ROWS"])
    work = launch(plan, chosen["ROWS"] // packing["PACKED"])
    out_NHD = torch.zeros_like(q_NHD, dtype=torch_dtype(contract.output), memory_format=torch.contiguous_format)
    lse_NH = q_NHD.new_zeros((rows, heads), dtype=torch.float32)
    launcher(_forward_kernel, (len(work.tiles_T4), cache.keys.shape[1] * packing["RUNS"]))(
        q_NHD.contiguous(), cache.keys, cache.values, work.pages_P, work.tiles_T4, out_NHD, lse_NH, heads,
        contract.scale, *cache.keys.stride()[:3], *cache.values.stride()[:3],
        **packing, REVERSE=contract.schedule.kv_order == "reverse",
        OUTPUT=TRITON_DTYPES[out_NHD.dtype], WEIGHTS=TRITON_DTYPES[torch_dtype(contract.weights)], **chosen,
    )  # fmt: skip
    return out_NHD, lse_NH


def attention_partials(
    q_NHD: torch.Tensor, cache: KVCache, plan: AttentionPlan, contract: AttentionContract, owned: Owned
) -> BlockPartials:
    """The partial results of every row of the plan with the logical blocks in `owned`, one program to each.

    Arguments, result and errors as `ops.attention.torch.attention_partials`.
    """
    check(q_NHD, cache, plan, contract)
    heads, head_dim = q_NHD.shape[1:]
    kv_heads, group = cache.keys.shape[1], heads // cache.keys.shape[1]
    tile_E, block_E = entries(plan, owned)
    chosen = settings(q_NHD.dtype, cache, contract)
    m_EKM = q_NHD.new_empty((len(tile_E), kv_heads, group * plan.q_tile), dtype=torch.float32)
    l_EKM, o_EKMD = torch.empty_like(m_EKM), m_EKM.new_empty((*m_EKM.shape, head_dim))
    if len(tile_E):
        on_device = [torch.from_numpy(x).to(q_NHD.device, torch.int32) for x in (tile_E, block_E)]
        launcher(_partials_kernel, (len(tile_E), kv_heads, -(-m_EKM.shape[2] // chosen["ROWS"])))(
            q_NHD.contiguous(), cache.keys, cache.values, launch(plan, 1).pages_P, *on_device, *places(plan),
            m_EKM, l_EKM, o_EKMD, heads, contract.scale, *cache.keys.stride()[:3], *cache.values.stride()[:3],
            GROUP=group, Q_TILE=plan.q_tile, WEIGHTS=TRITON_DTYPES[torch_dtype(contract.weights)], **chosen,
        )  # fmt: skip
    return BlockPartials(len(q_NHD), tile_E, block_E, m_EKM, l_EKM, o_EKMD)


def merge_partials(
    parts: Sequence[BlockPartials], plan: AttentionPlan, contract: AttentionContract
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge the partials of all ranks, in any order, in the global block order: what `attention` returns, bit for bit.

    Raises OperandError when a partial is missing, given twice or not in the plan.
    """
    at_V = collected(parts, plan)
    m_EKM, l_EKM, o_EKMD = (torch.cat([getattr(part, name) for part in parts]) for name in ("m_EKM", "l_EKM", "o_EKMD"))
    kv_heads, rows, head_dim = o_EKMD.shape[1:]
    heads = kv_heads * (rows // plan.q_tile)
    offset_T, place_V = (torch.from_numpy(x) for x in visit_lists(plan))
    device = m_EKM.device
    out_NHD = m_EKM.new_zeros((parts[0].rows, heads, head_dim), dtype=torch_dtype(contract.output))
    lse_NH = m_EKM.new_zeros((parts[0].rows, heads))
    launcher(_merge_kernel, (plan.tiles, kv_heads, -(-rows // _rows(head_dim))))(
        m_EKM, l_EKM, o_EKMD, at_V[place_V].to(device, torch.int32), offset_T.to(device, torch.int32),
        places(plan)[0], out_NHD, lse_NH, GROUP=rows // plan.q_tile, Q_TILE=plan.q_tile, ROWS=_rows(head_dim),
        HEAD_DIM=head_dim, COLUMNS=_columns(head_dim), OUTPUT=TRITON_DTYPES[out_NHD.dtype],
        num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
    return out_NHD, lse_NH


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
    """Gradients of a packed prefill: float32 dq [N, heads, D], dk and dv [N, kv heads, D].

    Equations, arguments and errors as `ops.attention.torch.attention_backward`; sums in another fixed order.
    """
    check(q_NHD, cache, plan, contract)
    check_whole(plan)
    chosen = settings(q_NHD.dtype, cache, contract)
    if chosen["PV"] != tl.float32:
        grad_NHD = grad_NHD.to(cache.dtype)
    return run_backward(
        grad_NHD, grad_lse_NH, q_NHD, out_NHD, lse_NH, cache.keys, cache.values, plan, contract.scale,
        _packing(q_NHD.shape[1] // cache.keys.shape[1], chosen["ROWS"]), chosen,
    )  # fmt: skip


def _packing(group: int, rows: int) -> dict[str, int]:
    """GROUP query heads to a kv head, PACKED of them (a power of two) in a program, RUNS programs to a group."""
    packed = min(1 << (group - 1).bit_length(), rows)
    return {"GROUP": group, "PACKED": packed, "RUNS": -(-group // packed)}


def _rows(head_dim: int) -> int:
    """Rows of a program, by head_dim alone: two accumulators of [rows, head_dim] must fit the registers of 8 warps."""
    return 128 if head_dim <= 128 else 64


def _columns(head_dim: int) -> int:
    return max(16, 1 << (head_dim - 1).bit_length())


def settings(q_dtype: torch.dtype, cache: KVCache, contract: AttentionContract) -> dict[str, Any]:
    """Compile-time arguments shared by the kernels that visit blocks; none depends on the batch."""
    kept = cache.dtype
    on_scores = contract.scale_at == "score"
    qk = kept if on_scores and q_dtype == kept else torch.float32
    pv = kept if torch_dtype(contract.weights) == kept else torch.float32
    # IEEE products are unrolled into single multiplications: more rows spill and take minutes to compile.
    unrolled = torch.float32 in (qk, pv) and not interpreted()
    rows = _UNROLLED_ROWS if unrolled else _rows(cache.head_dim)
    columns, block = _columns(cache.head_dim), contract.schedule.kv_block
    stage = block * columns * (qk.itemsize + pv.itemsize)
    return {
        "ROWS": rows,
        "HEAD_DIM": cache.head_dim,
        "COLUMNS": columns,
        "KV_BLOCK": block,
        "WINDOW": contract.window or 0,
        "SCALE_SCORE": on_scores,
        "QK": TRITON_DTYPES[qk],
        "PV": TRITON_DTYPES[pv],
        "num_warps": 8,
        "num_stages": 1 if unrolled else max(1, min(3, (_SHARED_MEMORY - rows * columns * qk.itemsize) // stage)),
        "enable_fp_fusion": False,
    }
