"""Pieces shared by Triton kernels and by what launches them. Importing this module imports triton.

`tl.dot` on bfloat16 operands is wrong in the interpreter and its float32 to bfloat16 store truncates, so kernels
multiply with `dot`, which widens operands there (exact), and round with `round_to`, which is spelled out in integers
there; a GPU has instructions for both. A kernel is built anew for every alignment and divisibility of its arguments,
and the layout of a sum may follow: so `dense` fixes how operands lie, and no kernel specialises on a number of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import triton
import triton.language as tl

from rlk_ledger_kernels.errors import OperandError
from rlk_ledger_kernels.triton_device import interpreted

TRITON_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}

INTERPRETED = tl.constexpr(interpreted())
"""Fixed when this module is imported, as Triton's own choice is."""

_TILE_ELEMENTS = 16384 if interpreted() else 4096
"""Elements of one operand a program of four warps holds: 32 to a thread, loaded 16 bytes at a time. The interpreter
takes about as long for a large tile as for a small one; no row's bits depend on how many rows share its tile."""


@triton.jit
def dot(a, b, acc=None):
    """a b, added to acc where one is given: float32 sums of exact products, never TF32."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc, input_precision="ieee")


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


def dense(x: torch.Tensor) -> torch.Tensor:
    """`x` contiguous from a 16-byte boundary on, copied only where it does not lie so."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def launcher(kernel: Any, grid: tuple[int, ...]) -> Callable[..., None]:
    """`kernel[grid]` on the device its operands lie on, whichever is current; a grid of no program launches nothing.

    Calling it raises OperandError when the tensors among its arguments lie on more than one device.
    """

    def launch(*arguments: Any, **options: Any) -> None:
        devices = {one.device for one in arguments if isinstance(one, torch.Tensor)}
        if len(devices) > 1:
            told = " and ".join(sorted(str(one) for one in devices))
            operator = kernel.fn.__module__.split(".")[-2]
            raise OperandError(f"{operator}: operands lie on {told}; move them to one device")
        (device,) = devices
        if 0 not in grid:
            with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
                kernel[grid](*arguments, **options)

    return launch
