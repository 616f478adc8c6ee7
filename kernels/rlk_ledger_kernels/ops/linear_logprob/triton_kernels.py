"""The kernels of linear_logprob in Triton; `triton.py` says how they make the operator.

Every product is a block of rows by a block of columns over blocks of K, first to last, accumulated in float32; `ROWS`,
`COLUMNS` and `BLOCK_K` are fixed by dtype and vocabulary tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rlk_ledger_kernels.triton_language import dot, round_to, rounded_through


@triton.jit
def _logits(
    hidden_ptr,
    weight_ptr,
    row,
    column,
    rows,
    stop,
    k,
    hidden_stride,
    weight_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LOGITS: tl.constexpr,
):
    """Logits of a block, rounded as the contract says and float32, -inf in columns from `stop` on."""
    in_k = tl.arange(0, BLOCK_K)
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    hidden_at = row.to(tl.int64)[:, None] * hidden_stride + in_k[None, :]
    weight_at = column.to(tl.int64)[None, :] * weight_stride + in_k[:, None]
    for start in range(0, k, BLOCK_K):
        left = in_k < k - start
        h = tl.load(hidden_ptr + hidden_at + start, mask=(row < rows)[:, None] & left[None, :], other=0.0)
        w = tl.load(weight_ptr + weight_at + start, mask=(column < stop)[None, :] & left[:, None], other=0.0)
        acc = dot(h, w, acc)
    return tl.where((column < stop)[None, :], rounded_through(acc, LOGITS), float("-inf"))


@triton.jit(do_not_specialize=["rows", "row_blocks"])
def statistics_kernel(
    hidden_ptr,
    weight_ptr,
    tokens_ptr,
    top_ptr,
    sum_ptr,
    chosen_ptr,
    rows,
    width,
    k,
    hidden_stride,
    weight_stride,
    row_blocks,
    tiles,
    first,
    scale,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LOGITS: tl.constexpr,
):
    program = tl.program_id(0)
    row = (program % row_blocks) * ROWS + tl.arange(0, ROWS)
    tile = program // row_blocks
    stop = tl.minimum((tile + 1) * TILE, width)
    token = tl.load(tokens_ptr + row, mask=row < rows, other=-1).to(tl.int64) - first
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    chosen = tl.full((ROWS,), float("-inf"), tl.float32)
    for block in range(0, TILE, COLUMNS):
        column = tile * TILE + block + tl.arange(0, COLUMNS)
        z = _logits(
            hidden_ptr,
            weight_ptr,
            row,
            column,
            rows,
            stop,
            k,
            hidden_stride,
            weight_stride,
            ROWS,
            COLUMNS,
            BLOCK_K,
            LOGITS,
        )
        new_top = tl.maximum(top, tl.max(z, axis=1))
        anchor = tl.where(new_top == float("-inf"), 0.0, new_top)
        part = tl.sum(tl.exp2((z - anchor[:, None]) * scale), axis=1)
        total = total * tl.exp2((top - anchor) * scale) + part
        top = new_top
        # A copy: at most one column is the token's.
        picked = tl.where(column[None, :] == token[:, None], z, float("-inf"))
        chosen = tl.maximum(chosen, tl.max(picked, axis=1))
    at = row.to(tl.int64) * tiles + tile
    tl.store(top_ptr + at, top, mask=row < rows)
    tl.store(sum_ptr + at, total, mask=row < rows)
    owned = (token >= tile * TILE) & (token < stop)
    tl.store(chosen_ptr + row, chosen, mask=(row < rows) & owned)


@triton.jit(do_not_specialize=["rows", "row_blocks"])
def slope_kernel(
    hidden_ptr,
    weight_ptr,
    tokens_ptr,
    grad_ptr,
    top_ptr,
    total_ptr,
    out_ptr,
    rows,
    width,
    k,
    hidden_stride,
    weight_stride,
    out_stride,
    row_blocks,
    offset,
    first,
    ignored_id,
    temperature,
    scale,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LOGITS: tl.constexpr,
    OUTPUT: tl.constexpr,
):
    program = tl.program_id(0)
    row = (program % row_blocks) * ROWS + tl.arange(0, ROWS)
    local = (program // row_blocks) * COLUMNS + tl.arange(0, COLUMNS)
    column = offset + local
    z = _logits(
        hidden_ptr,
        weight_ptr,
        row,
        column,
        rows,
        width,
        k,
        hidden_stride,
        weight_stride,
        ROWS,
        COLUMNS,
        BLOCK_K,
        LOGITS,
    )
    token = tl.load(tokens_ptr + row, mask=row < rows, other=-1).to(tl.int64)
    top = tl.load(top_ptr + row, mask=row < rows, other=0.0)
    total = tl.load(total_ptr + row, mask=row < rows, other=1.0)
    slope = tl.load(grad_ptr + row, mask=row < rows, other=0.0).to(tl.float32)
    slope = tl.div_rn(slope, tl.zeros_like(slope) + temperature)
    anchor = tl.where(top == float("-inf"), 0.0, top)
    share = tl.div_rn(tl.exp2((z - anchor[:, None]) * scale), tl.zeros_like(z) + total[:, None])
    d = tl.where(column[None, :] == (token - first)[:, None], 1.0 - share, -share) * slope[:, None]
    ignored = (token == ignored_id) & (ignored_id < 0)
    d = tl.where((ignored == 0)[:, None] & (column < width)[None, :], d, 0.0)
    at = row.to(tl.int64)[:, None] * out_stride + local[None, :]
    tl.store(out_ptr + at, round_to(d, OUTPUT), mask=(row < rows)[:, None] & (local < out_stride)[None, :])


@triton.jit(do_not_specialize=["rows", "row_blocks"])
def hidden_kernel(
    d_ptr,
    weight_ptr,
    out_ptr,
    rows,
    width,
    k,
    d_stride,
    weight_stride,
    row_blocks,
    TILE: tl.constexpr,
    PER_TILE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """out += d @ weight, the running sum of a row continued over the vocabulary in order."""
    program = tl.program_id(0)
    row = (program % row_blocks) * ROWS + tl.arange(0, ROWS)
    column = (program // row_blocks) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < k)[None, :]
    at = row.to(tl.int64)[:, None] * k + column[None, :]
    acc = tl.load(out_ptr + at, mask=inside, other=0.0)
    in_block = tl.arange(0, BLOCK_K)
    for step in range(tl.cdiv(width, TILE) * PER_TILE):
        # Blocks begin anew at every tile, so it matters not where a round or a shard ends.
        in_tile = (step % PER_TILE) * BLOCK_K + in_block
        line = (step // PER_TILE) * TILE + in_tile
        held = (in_tile < TILE) & (line < width)
        d_at = row.to(tl.int64)[:, None] * d_stride + line[None, :]
        d = tl.load(d_ptr + d_at, mask=(row < rows)[:, None] & held[None, :], other=0.0)
        w_at = line.to(tl.int64)[:, None] * weight_stride + column[None, :]
        w = tl.load(weight_ptr + w_at, mask=held[:, None] & (column < k)[None, :], other=0.0)
        acc = dot(d, w, acc)
    tl.store(out_ptr + at, acc, mask=inside)


@triton.jit(do_not_specialize=["rows"])
def weight_kernel(
    d_ptr,
    hidden_ptr,
    tokens_ptr,
    out_ptr,
    rows,
    width,
    k,
    d_stride,
    hidden_stride,
    width_blocks,
    ignored_id,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """out = d^T @ hidden, tokens summed in blocks of BLOCK_K from the first to the last."""
    program = tl.program_id(0)
    line = (program % width_blocks) * ROWS + tl.arange(0, ROWS)
    column = (program // width_blocks) * COLUMNS + tl.arange(0, COLUMNS)
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, rows, BLOCK_K):
        row = start + tl.arange(0, BLOCK_K)
        d_at = row.to(tl.int64)[None, :] * d_stride + line[:, None]
        d = tl.load(d_ptr + d_at, mask=(line < width)[:, None] & (row < rows)[None, :], other=0.0)
        token = tl.load(tokens_ptr + row, mask=row < rows, other=-1).to(tl.int64)
        # What an ignored row holds, NaN included, must not meet its zeros.
        counted = (row < rows) & (((token == ignored_id) & (ignored_id < 0)) == 0)
        h_at = row.to(tl.int64)[:, None] * hidden_stride + column[None, :]
        h = tl.load(hidden_ptr + h_at, mask=counted[:, None] & (column < k)[None, :], other=0.0)
        acc = dot(d, h, acc)
    at = line.to(tl.int64)[:, None] * k + column[None, :]
    tl.store(out_ptr + at, acc, mask=(line < width)[:, None] & (column < k)[None, :])
