"""The backward pass of attention in Triton: one kernel for dq, one for dk and dv, neither with atomics.

A query row sums its key blocks forward; a key block sums its query tiles forward, each a fixed run of positions counted
from the start of the sequence. Both orders follow from positions alone, so the gradients of a sequence do not depend
on the others. Where the contract rounds the weights to a 16-bit dtype, the operands of these products round to it too.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from rlk_ledger_kernels.ops.attention.launch import key_tiles, launch
from rlk_ledger_kernels.ops.attention.plan import AttentionPlan
from rlk_ledger_kernels.ops.attention.triton_block import block_scores, visible
from rlk_ledger_kernels.triton_language import dense, dot, launcher, round_to


@triton.jit(do_not_specialize=["rows"])
def slope_kernel(
    grad_ptr, grad_lse_ptr, out_ptr, slope_ptr, rows,
    HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """dlse - do . o of every row, summed at one shape."""
    row, column = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < HEAD_DIM)[None, :]
    at = row[:, None] * HEAD_DIM + column[None, :]
    grad = tl.load(grad_ptr + at, mask=inside, other=0.0).to(tl.float32)
    out = tl.load(out_ptr + at, mask=inside, other=0.0).to(tl.float32)
    grad_lse = tl.load(grad_lse_ptr + row, mask=row < rows, other=0.0).to(tl.float32)
    tl.store(slope_ptr + row, grad_lse - tl.sum(grad * out, axis=1), mask=row < rows)


@triton.jit
def weights_and_slopes(
    q, k, v, grad, slope, lse, position, key, real, scale,
    WINDOW: tl.constexpr, SCALE_SCORE: tl.constexpr, PV: tl.constexpr,
):  # fmt: skip
    """p and ds, float32 [rows, kv_block]; exactly zero where a key is invisible. k and v: [D, kv_block]."""
    seen = visible(position, key, WINDOW) & real[:, None]
    # A row that saw nothing has lse = -inf; against 0 its scores are all masked anyway.
    base = tl.where(lse == float("-inf"), 0.0, lse)
    scores = tl.where(seen, block_scores(q, k, scale, SCALE_SCORE), float("-inf"))
    p = tl.exp(scores - base[:, None])
    ds = p * (dot(grad.to(PV), v) + slope[:, None])
    return p, tl.where(seen, ds, 0.0)


@triton.jit
def query_kernel(
    q_ptr, k_ptr, v_ptr, pages_ptr, tiles_ptr, grad_ptr, slope_ptr, lse_ptr, dq_ptr, heads, scale,
    k_page, k_head, k_row, v_page, v_head, v_row,
    GROUP: tl.constexpr, PACKED: tl.constexpr, RUNS: tl.constexpr, ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr, KV_BLOCK: tl.constexpr, WINDOW: tl.constexpr,
    SCALE_SCORE: tl.constexpr, QK: tl.constexpr, PV: tl.constexpr,
):  # fmt: skip
    """dq of one run of queries and the heads of one kv head."""
    tile_ptr = tiles_ptr + tl.program_id(0) * 4
    first_row, first, count = tl.load(tile_ptr), tl.load(tile_ptr + 1), tl.load(tile_ptr + 2)
    pages_ptr += tl.load(tile_ptr + 3)
    kv_head = (tl.program_id(1) // RUNS).to(tl.int64)
    row, column, key = tl.arange(0, ROWS), tl.arange(0, COLUMNS), tl.arange(0, KV_BLOCK)
    query, in_group = row // PACKED, tl.program_id(1) % RUNS * PACKED + row % PACKED
    real = (query < count) & (in_group < GROUP)
    place = (first_row + query).to(tl.int64) * heads + kv_head * GROUP + in_group
    inside = real[:, None] & (column < HEAD_DIM)[None, :]
    at = place[:, None] * HEAD_DIM + column[None, :]
    q = tl.load(q_ptr + at, mask=inside, other=0.0)
    if SCALE_SCORE == 0:
        q = q.to(tl.float32) * scale
    q = q.to(QK)
    grad = tl.load(grad_ptr + at, mask=inside, other=0.0)
    slope, lse = tl.load(slope_ptr + place, mask=real, other=0.0), tl.load(lse_ptr + place, mask=real, other=0.0)
    begin, end = 0, (first + count - 1) // KV_BLOCK + 1
    if WINDOW > 0:
        begin = tl.maximum(first - WINDOW + 1, 0) // KV_BLOCK
    dq = tl.zeros((ROWS, COLUMNS), tl.float32)
    within = (column < HEAD_DIM)[:, None]
    for block in range(begin, end):
        page = tl.load(pages_ptr + block).to(tl.int64)
        k_at = page * k_page + kv_head * k_head + key[None, :] * k_row + column[:, None]
        v_at = page * v_page + kv_head * v_head + key[None, :] * v_row + column[:, None]
        k = tl.load(k_ptr + k_at, mask=within, other=0.0).to(QK)
        v = tl.load(v_ptr + v_at, mask=within, other=0.0).to(PV)
        _, ds = weights_and_slopes(
            q, k, v, grad, slope, lse, first + query, block * KV_BLOCK + key, real, scale, WINDOW, SCALE_SCORE, PV
        )
        dq = dq + dot(round_to(ds, QK), tl.trans(k))
    tl.store(dq_ptr + at, dq * scale + 0.0, mask=inside)


@triton.jit
def key_kernel(
    q_ptr, k_ptr, v_ptr, tiles_ptr, grad_ptr, slope_ptr, lse_ptr, dk_ptr, dv_ptr, heads, scale,
    k_page, k_head, k_row, v_page, v_head, v_row,
    GROUP: tl.constexpr, PACKED: tl.constexpr, RUNS: tl.constexpr, ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr, KV_BLOCK: tl.constexpr, WINDOW: tl.constexpr,
    SCALE_SCORE: tl.constexpr, QK: tl.constexpr, PV: tl.constexpr,
):  # fmt: skip
    """dk and dv of one logical block of one sequence and kv head."""
    tile_ptr = tiles_ptr + tl.program_id(0) * 4
    first_row, length, block = tl.load(tile_ptr), tl.load(tile_ptr + 1), tl.load(tile_ptr + 2)
    page, kv_head = tl.load(tile_ptr + 3).to(tl.int64), tl.program_id(1).to(tl.int64)
    row, column, key = tl.arange(0, ROWS), tl.arange(0, COLUMNS), tl.arange(0, KV_BLOCK)
    written, within = block * KV_BLOCK + key < length, column < HEAD_DIM
    k_at = page * k_page + kv_head * k_head + key[None, :] * k_row + column[:, None]
    v_at = page * v_page + kv_head * v_head + key[None, :] * v_row + column[:, None]
    # Slots behind the end of the sequence were perhaps never written: what they hold must not be multiplied.
    k = tl.load(k_ptr + k_at, mask=within[:, None] & written[None, :], other=0.0).to(QK)
    v = tl.load(v_ptr + v_at, mask=within[:, None] & written[None, :], other=0.0).to(PV)
    queries = ROWS // PACKED
    begin, end = block * KV_BLOCK // queries, (length - 1) // queries + 1
    if WINDOW > 0:
        end = tl.minimum(end, (block * KV_BLOCK + KV_BLOCK + WINDOW - 2) // queries + 1)
    dk = tl.zeros((KV_BLOCK, COLUMNS), tl.float32)
    dv = tl.zeros((KV_BLOCK, COLUMNS), tl.float32)
    for step in range(begin * RUNS, end * RUNS):
        position = step // RUNS * queries + row // PACKED
        in_group = step % RUNS * PACKED + row % PACKED
        real = (position < length) & (in_group < GROUP)
        place = tl.where(real, first_row + position, 0).to(tl.int64) * heads + kv_head * GROUP + in_group
        inside = real[:, None] & within[None, :]
        at = place[:, None] * HEAD_DIM + column[None, :]
        q = tl.load(q_ptr + at, mask=inside, other=0.0)
        if SCALE_SCORE == 0:
            q = q.to(tl.float32) * scale
        q = q.to(QK)
        grad = tl.load(grad_ptr + at, mask=inside, other=0.0)
        slope, lse = tl.load(slope_ptr + place, mask=real, other=0.0), tl.load(lse_ptr + place, mask=real, other=0.0)
        p, ds = weights_and_slopes(
            q, k, v, grad, slope, lse, position, block * KV_BLOCK + key, real, scale, WINDOW, SCALE_SCORE, PV
        )
        dv = dv + dot(tl.trans(round_to(p, PV)), grad.to(PV))
        dk = dk + dot(tl.trans(round_to(ds, QK)), q)
    if SCALE_SCORE:
        dk = dk * scale
    place = (first_row + block * KV_BLOCK + key).to(tl.int64) * tl.num_programs(1) + kv_head
    at = place[:, None] * HEAD_DIM + column[None, :]
    inside = written[:, None] & within[None, :]
    tl.store(dk_ptr + at, dk + 0.0, mask=inside)
    tl.store(dv_ptr + at, dv + 0.0, mask=inside)


def run_backward(
    grad_NHD: torch.Tensor,
    grad_lse_NH: torch.Tensor,
    q_NHD: torch.Tensor,
    out_NHD: torch.Tensor,
    lse_NH: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    plan: AttentionPlan,
    scale: float,
    packing: dict[str, int],
    settings: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Launch the three kernels; float32 dq [N, heads, D], dk and dv [rows of the plan, kv heads, D].

    packing: GROUP, PACKED and RUNS of the forward launch. settings: its compile-time arguments.
    """
    rows, heads, head_dim = q_NHD.shape
    kv_heads, tile_rows = keys.shape[1], settings["ROWS"]
    grad_NHD, out_NHD, q_NHD = dense(grad_NHD), dense(out_NHD), dense(q_NHD)
    slope_NH = torch.empty((rows, heads), dtype=torch.float32, device=q_NHD.device)
    launcher(slope_kernel, (triton.cdiv(rows * heads, 32),))(
        grad_NHD, grad_lse_NH.contiguous(), out_NHD, slope_NH, rows * heads,
        HEAD_DIM=head_dim, COLUMNS=settings["COLUMNS"], ROWS=32, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    dq_NHD = torch.zeros((rows, heads, head_dim), dtype=torch.float32, device=q_NHD.device)
    dk_NKD, dv_NKD = torch.empty((2, plan.rows, kv_heads, head_dim), dtype=torch.float32, device=q_NHD.device)
    work = launch(plan, tile_rows // packing["PACKED"])
    strides = (*keys.stride()[:3], *values.stride()[:3])
    sums = (grad_NHD, slope_NH, lse_NH.contiguous())
    launcher(query_kernel, (len(work.tiles_T4), kv_heads * packing["RUNS"]))(
        q_NHD, keys, values, work.pages_P, work.tiles_T4, *sums, dq_NHD, heads, scale, *strides, **packing, **settings
    )
    tiles_B4 = key_tiles(plan)
    # A stage holds queries and their gradients: of three, Hopper's shared memory has no room.
    stages = min(settings["num_stages"], 2 if settings["COLUMNS"] <= 128 else 1)
    launcher(key_kernel, (len(tiles_B4), kv_heads))(
        q_NHD, keys, values, tiles_B4, *sums, dk_NKD, dv_NKD, heads, scale, *strides, **packing,
        **{**settings, "num_stages": stages},
    )  # fmt: skip
    return dq_NHD, dk_NKD, dv_NKD
