"""Pieces shared by Triton kernels. Importing this module imports triton.

`tl.dot` on bfloat16 operands is wrong in the interpreter and its float32 to bfloat16 store truncates, so kernels widen
operands first (exact) and round with `round_to`, which is round-to-nearest-even spelled out: the same bits everywhere.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

TRITON_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def round_to(x, DTYPE: tl.constexpr):
    """float32 rounded to DTYPE (float32, bfloat16 or float16), to nearest, ties to even; NaN stays NaN."""
    if DTYPE == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        quiet = (bits >> 16) | 0x40
        return tl.where(x != x, quiet, rounded).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(DTYPE)
