"""masked_mean, Triton: integer significands added by exponent, one pass, no atomics.

A program holds [BLOCK, LIMBS] integer counters in registers while it walks its span of a row, and writes one row of
partial state; states are integers, so their sum is exact in any order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rlk_ledger_kernels.errors import OperandError
from rlk_ledger_kernels.ops.masked_mean.exact import COUNTERS, LIMB_BITS, MaskedSum, check_operands, from_limbs
from rlk_ledger_kernels.triton_language import TRITON_DTYPES, launcher

_LIMBS = 32
_LOWEST = 149
_BLOCK = 128
_SPAN = 4096


@triton.jit(do_not_specialize=["length", "spans"])
def _limbs_kernel(
    values_ptr,
    mask_ptr,
    state_ptr,
    length,
    spans,
    SPAN: tl.constexpr,
    BLOCK: tl.constexpr,
    LIMBS: tl.constexpr,
    BITS: tl.constexpr,
    WIDTH: tl.constexpr,
    BRAIN: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    span = tl.program_id(1)
    limb = tl.arange(0, LIMBS)
    sums = tl.zeros((BLOCK, LIMBS), tl.int64)
    active = tl.zeros((BLOCK,), tl.int64)
    nans = tl.zeros((BLOCK,), tl.int64)
    above = tl.zeros((BLOCK,), tl.int64)
    below = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, SPAN, BLOCK):
        at = span * SPAN + start + tl.arange(0, BLOCK)
        inside = at < length
        real = inside & (tl.load(mask_ptr + row * length + at, mask=inside, other=0) != 0)
        loaded = tl.load(values_ptr + row * length + at, mask=real, other=0)
        if BRAIN:
            bits = loaded.to(tl.int32) << 16
        else:
            bits = loaded.to(tl.float32).to(tl.int32, bitcast=True)
        exponent = (bits >> 23) & 0xFF
        fraction = bits & 0x7FFFFF
        special = real & (exponent == 0xFF)
        whole = tl.where(exponent > 0, fraction | 0x800000, fraction).to(tl.int64)
        whole = tl.where(special, 0, tl.where(bits < 0, -whole, whole))
        place = tl.maximum(exponent - 1, 0)
        digit = whole << (place % BITS).to(tl.int64)
        sums += tl.where((place // BITS)[:, None] == limb[None, :], digit[:, None], 0)
        active += real.to(tl.int64)
        nans += (special & (fraction != 0)).to(tl.int64)
        above += (special & (fraction == 0) & (bits >= 0)).to(tl.int64)
        below += (special & (fraction == 0) & (bits < 0)).to(tl.int64)
    state = state_ptr + (row * spans + span) * WIDTH
    tl.store(state + limb, tl.sum(sums, axis=0))
    tl.store(state + LIMBS, tl.sum(active, axis=0))
    tl.store(state + LIMBS + 1, tl.sum(nans, axis=0))
    tl.store(state + LIMBS + 2, tl.sum(above, axis=0))
    tl.store(state + LIMBS + 3, tl.sum(below, axis=0))


def masked_sums(values_NT: torch.Tensor, mask_NT: torch.Tensor) -> list[MaskedSum]:
    """The exact sum of the active values of each row (a sample, say).

    values_NT: [N, T], float16, bfloat16 or float32. mask_NT: bool or 0/1. Inactive values, NaN included, are never read
    into a sum. Raises OperandError when the shapes differ or the dtype is another.
    """
    check_operands(values_NT, mask_NT)
    if values_NT.dtype not in TRITON_DTYPES:
        raise OperandError(
            f"masked_mean: values are {values_NT.dtype}; the Triton kernel takes 16 and 32 bit floats, "
            "use backend torch"
        )
    rows, length = values_NT.shape
    if not values_NT.numel():
        return [MaskedSum() for _ in range(rows)]
    span = min(_SPAN, triton.next_power_of_2(length))
    spans = triton.cdiv(length, span)
    brain = values_NT.dtype == torch.bfloat16  # read as integers: the interpreter's widening loses bf16 subnormals
    state = torch.empty((rows, spans, _LIMBS + COUNTERS), dtype=torch.int64, device=values_NT.device)
    launcher(_limbs_kernel, (rows, spans))(
        values_NT.contiguous().view(torch.int16) if brain else values_NT.contiguous(),
        mask_NT.to(torch.bool).contiguous().view(torch.int8),
        state,
        length,
        spans,
        SPAN=span,
        BLOCK=min(_BLOCK, span),
        LIMBS=_LIMBS,
        BITS=LIMB_BITS,
        WIDTH=_LIMBS + COUNTERS,
        BRAIN=brain,
        num_warps=4,
    )
    return from_limbs(state.sum(1), _LOWEST)


def masked_sum(values: torch.Tensor, mask: torch.Tensor) -> MaskedSum:
    """The exact sum of the active values, any shape."""
    check_operands(values, mask)
    return masked_sums(values.reshape(1, -1), mask.reshape(1, -1))[0]


def masked_mean(values: torch.Tensor, mask: torch.Tensor) -> float:
    """Mean of the active values, rounded once; raises ZeroActiveTokensError when there is none."""
    return masked_sum(values, mask).mean
