"""masked_mean, torch: integer significands of the active values, added by exponent; exact, so nothing is scheduled."""

from __future__ import annotations

from typing import NamedTuple

import torch

from rlk_ledger_kernels.ops.masked_mean.exact import COUNTERS, LIMB_BITS, UNIT, MaskedSum, check_operands, from_limbs


class _Format(NamedTuple):
    """An IEEE format. digits: the parts a significand is cut into, (lowest bit, bits), so that int64 sums cannot
    overflow before 2^29 values."""

    integer: torch.dtype
    significand: int
    exponents: int
    lowest: int
    digits: tuple[tuple[int, int], ...]

    @property
    def limbs(self) -> int:
        return (self.exponents - 2 + self.digits[-1][0]) // LIMB_BITS + 1


_FLOAT32 = _Format(torch.int32, 23, 255, 149, ((0, 24),))
_FLOAT64 = _Format(torch.int64, 52, 2047, UNIT, ((0, 27), (27, 26)))


def masked_sums(values_NT: torch.Tensor, mask_NT: torch.Tensor) -> list[MaskedSum]:
    """The exact sum of the active values of each row (a sample, say).

    values_NT: [N, T], float16, bfloat16, float32 or float64. mask_NT: bool or 0/1. Inactive values, NaN included, are
    never read into a sum. Raises OperandError when the shapes differ.
    """
    check_operands(values_NT, mask_NT)
    rows = values_NT.shape[0]
    if not values_NT.numel():
        return [MaskedSum() for _ in range(rows)]
    kind = _FLOAT64 if values_NT.dtype == torch.float64 else _FLOAT32
    wide_NT = values_NT if kind is _FLOAT64 else values_NT.to(torch.float32)
    row_M, column_M = mask_NT.to(torch.bool).nonzero(as_tuple=True)
    return from_limbs(_limbs(wide_NT[row_M, column_M], row_M, rows, kind), kind.lowest)


def masked_sum(values: torch.Tensor, mask: torch.Tensor) -> MaskedSum:
    """The exact sum of the active values, any shape."""
    check_operands(values, mask)
    return masked_sums(values.reshape(1, -1), mask.reshape(1, -1))[0]


def masked_mean(values: torch.Tensor, mask: torch.Tensor) -> float:
    """Mean of the active values, rounded once; raises ZeroActiveTokensError when there is none."""
    return masked_sum(values, mask).mean


def _limbs(values_M: torch.Tensor, row_M: torch.Tensor, rows: int, kind: _Format) -> torch.Tensor:
    """State of the rows, int64 [N, L + COUNTERS]. Integer additions: their order on a device cannot matter."""
    bits_M = values_M.contiguous().view(kind.integer).to(torch.int64)
    exponent_M = (bits_M >> kind.significand) & kind.exponents
    fraction_M = bits_M & ((1 << kind.significand) - 1)
    finite_M = exponent_M < kind.exponents
    whole_M = torch.where(exponent_M > 0, fraction_M | (1 << kind.significand), fraction_M)
    signed_M = torch.where(bits_M < 0, -1, 1) * finite_M
    place_M = (exponent_M.clamp(max=kind.exponents - 1) - 1).clamp(min=0)
    width = kind.limbs + COUNTERS
    state = torch.zeros(rows * width, dtype=torch.int64, device=values_M.device)
    for lowest, size in kind.digits:
        digit_M = (whole_M >> lowest) & ((1 << size) - 1)
        at_M = place_M + lowest
        state.index_add_(0, row_M * width + at_M // LIMB_BITS, signed_M * (digit_M << (at_M % LIMB_BITS)))
    special_M = ~finite_M
    counted = (
        torch.ones_like(special_M),
        special_M & (fraction_M != 0),
        special_M & (fraction_M == 0) & (bits_M >= 0),
        special_M & (fraction_M == 0) & (bits_M < 0),
    )
    for at, flag_M in enumerate(counted):
        state.index_add_(0, row_M * width + kind.limbs + at, flag_M.to(torch.int64))
    return state.view(rows, width)
