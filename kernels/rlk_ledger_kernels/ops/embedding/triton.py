"""embedding, Triton: rows gathered as integers, so every bit pattern (-0, NaN payloads) arrives as it is stored.

The gradient adds one level of the token tree to a kernel call: a program adds up to `FAN_IN` children of a few nodes
in order, for one run of columns. No atomics: a node has one writer.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rlk_ledger_kernels.ops.embedding.shard import check_ids
from rlk_ledger_kernels.ops.embedding.torch import table_gradient
from rlk_ledger_kernels.token_sum import FAN_IN, TokenLevel
from rlk_ledger_kernels.triton_language import launcher, row_tile, warps

_MOST_COLUMNS = 1024
_INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@triton.jit(do_not_specialize=["tokens"])
def _gather_kernel(
    ids_ptr, table_ptr, out_ptr, tokens, width, first, size, table_stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    real = token < tokens
    row = tl.load(ids_ptr + token, mask=real, other=-1).to(tl.int64) - first
    inside = real[:, None] & (column < width)[None, :]
    owned = inside & ((row >= 0) & (row < size))[:, None]
    found = tl.load(table_ptr + row[:, None] * table_stride + column[None, :], mask=owned, other=0)
    tl.store(out_ptr + token[:, None] * width + column[None, :], found, mask=inside)


@triton.jit(do_not_specialize=["nodes"])
def _level_kernel(
    rows_ptr,
    order_ptr,
    first_ptr,
    length_ptr,
    out_ptr,
    nodes,
    width,
    NODES: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHILDREN: tl.constexpr,
):
    node = tl.program_id(0).to(tl.int64) * NODES + tl.arange(0, NODES)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    real = node < nodes
    in_width = (column < width)[None, :]
    first = tl.load(first_ptr + node, mask=real, other=0)
    length = tl.load(length_ptr + node, mask=real, other=0)
    total = tl.zeros((NODES, COLUMNS), tl.float32)
    for child in range(CHILDREN):
        has = child < length
        row = tl.load(order_ptr + first + child, mask=has, other=0)
        inside = has[:, None] & in_width
        # A missing child adds +0, which changes no sum that began at +0.
        total += tl.load(rows_ptr + row[:, None] * width + column[None, :], mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + node[:, None] * width + column[None, :], total, mask=real[:, None] & in_width)


def embedding(ids_N: torch.Tensor, table_VH: torch.Tensor) -> torch.Tensor:
    """Copy rows of a table: y[n] = table[id[n]].

    ids_N: int64 [N] in 0..V-1. table_VH: [V, H], any dtype. Returns [N, H] in the table's dtype.
    Raises OperandError naming the first id outside the table.
    """
    check_ids(ids_N, 0, table_VH.shape[0])
    return embedding_shard(ids_N, table_VH, 0)


def embedding_shard(ids_N: torch.Tensor, table_SH: torch.Tensor, first: int) -> torch.Tensor:
    """Copy the rows this shard owns; every other row is +0 throughout.

    ids_N: int64 [N], any rank's. table_SH: rows first..first+S-1 of the table. Returns [N, H] in the table's dtype.
    """
    size, width = table_SH.shape
    table_SH = table_SH if table_SH.stride(-1) == 1 else table_SH.contiguous()
    tokens = len(ids_N)
    out_NH = torch.empty((tokens, width), dtype=table_SH.dtype, device=table_SH.device)
    tile_rows, columns = row_tile(width, _MOST_COLUMNS)
    integer = _INTEGER[table_SH.element_size()]
    if out_NH.numel():
        launcher(_gather_kernel, (triton.cdiv(tokens, tile_rows), triton.cdiv(width, columns)))(
            ids_N.contiguous(),
            table_SH.view(integer),
            out_NH.view(integer),
            tokens,
            width,
            first,
            size,
            table_SH.stride(0),
            ROWS=tile_rows,
            COLUMNS=columns,
            num_warps=warps(tile_rows, columns),
        )
    return out_NH


def embedding_backward(grad_NH: torch.Tensor, ids_N: torch.Tensor, rows: int, first: int = 0) -> torch.Tensor:
    """Gradient of the table: dtable[v] = sum of grad[n] over the tokens with id[n] = v.

    Each row's tokens are added in token order along the fixed tree of `token_sum`. rows: V, or S of a shard that
    starts at `first`; ids of other shards add nothing. Returns float32 [rows, H].
    """
    return table_gradient(grad_NH, ids_N, rows, first, _add_level)


def _add_level(rows_NW: torch.Tensor, level: TokenLevel) -> torch.Tensor:
    nodes, width = len(level.first_B), rows_NW.shape[1]
    total_BW = torch.empty((nodes, width), dtype=torch.float32, device=rows_NW.device)
    tile_nodes, columns = row_tile(width, _MOST_COLUMNS)
    if total_BW.numel():
        launcher(_level_kernel, (triton.cdiv(nodes, tile_nodes), triton.cdiv(width, columns)))(
            rows_NW.contiguous(),
            level.order_N,
            level.first_B,
            level.length_B,
            total_BW,
            nodes,
            width,
            NODES=tile_nodes,
            COLUMNS=columns,
            CHILDREN=FAN_IN,
            num_warps=warps(tile_nodes, columns),
        )
    return total_BW
