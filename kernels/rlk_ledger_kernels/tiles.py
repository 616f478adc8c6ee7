"""Rows in fixed tiles, contractions in fixed leaves: the two rules that make a matrix product repeatable.

`torch.mm` picks its path by shape, alignment and thread count. Every product here runs at one of a few row
counts on operands whose tiles start on 64-byte boundaries, over at most `k_leaf` elements of K at a time.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from rlk_ledger_kernels.schedule import ALIGNMENT

_BYTES = 64


def row_spans(rows: int, tiles: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Cut `rows`, a multiple of the smallest tile, into spans whose lengths are all in `tiles`, largest first."""
    start = 0
    for tile in reversed(tiles):
        while rows - start >= tile:
            yield start, start + tile
            start += tile


def padded_rows(rows: int, tiles: tuple[int, ...]) -> int:
    """`rows` rounded up to a multiple of the smallest tile, at least one tile."""
    tile = tiles[0]
    return max(tile, -(-rows // tile) * tile)


def aligned_float32(x_NK: torch.Tensor, tiles: tuple[int, ...]) -> torch.Tensor:
    """`x_NK` in float32 with padded rows, a row stride that is a multiple of 64 bytes and an aligned start.

    Returns `x_NK` itself when it already is so; otherwise a zero-padded copy whose row stride may exceed K.
    """
    rows, k = x_NK.shape
    wanted = padded_rows(rows, tiles)
    stride = -(-k // ALIGNMENT) * ALIGNMENT
    fits = x_NK.dtype == torch.float32 and wanted == rows and x_NK.stride() == (stride, 1)
    if fits and x_NK.data_ptr() % _BYTES == 0:
        return x_NK
    scratch = torch.empty((wanted, stride), dtype=torch.float32, device=x_NK.device)
    scratch[:rows, :k] = x_NK
    if wanted > rows:
        scratch[rows:].zero_()
    return scratch[:, :k]
