"""Pieces shared by Triton kernels. Importing this module imports triton.

`tl.dot` on bfloat16 operands is wrong in the interpreter and its float32 to bfloat16 store truncates, so kernels widen
operands first (exact) and round with `round_to`. There it is spelled out in integers; a GPU has an instruction for it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rlk_ledger_kernels.triton_device import interpreted

TRITON_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}

INTERPRETED = tl.constexpr(interpreted())
"""Fixed when this module is imported, as Triton's own choice is."""

_TILE_ELEMENTS = 16384 if interpreted() else 4096
"""Elements of one operand a program of four warps holds: 32 to a thread, loaded 16 bytes at a time. The interpreter
takes about as long for a large tile as for a small one; no row's bits depend on how many rows share its tile."""


@triton.jit
def round_to(x, DTYPE: tl.constexpr):
    """float32 rounded to DTYPE (float32, bfloat16 or float16), to nearest, ties to even; NaN stays NaN."""
    if DTYPE == tl.bfloat16 and INTERPRETED:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        quiet = (bits >> 16) | 0x40
        return tl.where(x != x, quiet, rounded).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(DTYPE)


@triton.jit
def rounded_through(x, DTYPE: tl.constexpr):
    """float32 rounded to DTYPE and widened again."""
    return round_to(x, DTYPE).to(tl.float32)


def row_tile(width: int, most: int = _TILE_ELEMENTS) -> tuple[int, int]:
    """(rows, columns) of a tile for rows of this width, both powers of two: chosen by the width and nothing else."""
    columns = min(triton.next_power_of_2(max(width, 1)), most)
    return max(1, _TILE_ELEMENTS // columns), columns


def warps(rows: int, columns: int) -> int:
    """Warps for a tile: 32 elements to a thread, at least 4 and at most 16."""
    return min(16, max(4, rows * columns // 1024))
