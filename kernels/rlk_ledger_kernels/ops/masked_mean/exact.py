"""Exact sums of floating-point numbers: whole numbers of the smallest unit, so that order and sharding cannot matter.

Every finite float is a whole number of 2^-1074. A backend adds the integer significands of the active values, sorted by
exponent into limbs of eight binary places (int64: exact for 2^32 float32 values a call), and integers add to the same
total in any order, on any number of ranks and micro-batches. Rounding happens once, when a float64 is asked for.
This is Kulisch's long accumulator (1981) with carries put off.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from rlk_ledger_kernels.errors import OperandError, ZeroActiveTokensError

UNIT = 1074
"""Sums are counted in units of 2^-UNIT."""

LIMB_BITS = 8
COUNTERS = 4
"""Numbers beside the limbs in a row of state: active values, NaN, +inf, -inf."""

_PACKED_BYTES = 272


@dataclass(frozen=True)
class MaskedSum:
    """An exact sum and the number of active tokens behind it; parts of one batch add up to the same bits as the batch.

    units: the sum of the finite active values in units of 2^-1074. nan, above, below: active NaN, +inf and -inf.
    A sum of nothing but -0 is +0.
    """

    units: int = 0
    active: int = 0
    nan: int = 0
    above: int = 0
    below: int = 0

    def __add__(self, other: MaskedSum) -> MaskedSum:
        """Both parts together: ranks, micro-batches or samples."""
        return MaskedSum(
            self.units + other.units,
            self.active + other.active,
            self.nan + other.nan,
            self.above + other.above,
            self.below + other.below,
        )

    @property
    def total(self) -> float:
        """The sum rounded once to float64; NaN and infinities as in IEEE arithmetic."""
        return self._rounded(1)

    @property
    def mean(self) -> float:
        """total / active, rounded once; raises ZeroActiveTokensError when nothing was active: a status, not 0.0."""
        if self.active == 0:
            raise ZeroActiveTokensError("masked_mean: no token is active; report the status zero_active_tokens")
        return self._rounded(self.active)

    def _rounded(self, divisor: int) -> float:
        if self.nan or (self.above and self.below):
            return float("nan")
        if self.above or self.below:
            return float("inf") if self.above else float("-inf")
        try:
            return self.units / (divisor << UNIT)
        except OverflowError:
            return float("inf") if self.units > 0 else float("-inf")

    def pack(self) -> torch.Tensor:
        """uint8 [304], what a rank sends to the others."""
        counters = torch.tensor([self.active, self.nan, self.above, self.below], dtype=torch.int64)
        units = torch.frombuffer(
            bytearray(self.units.to_bytes(_PACKED_BYTES, "little", signed=True)), dtype=torch.uint8
        )
        return torch.cat((counters.view(torch.uint8), units))


def unpack(packed: torch.Tensor) -> MaskedSum:
    """The sum another rank packed; raises OperandError for another length or dtype."""
    if packed.dtype != torch.uint8 or packed.shape != (8 * COUNTERS + _PACKED_BYTES,):
        raise OperandError(f"masked_mean: a packed sum is uint8 [304], got {packed.dtype} {tuple(packed.shape)}")
    counters = packed[: 8 * COUNTERS].clone().view(torch.int64).tolist()
    units = int.from_bytes(bytes(packed[8 * COUNTERS :].tolist()), "little", signed=True)
    return MaskedSum(units, *counters)


def merge(parts: Iterable[MaskedSum]) -> MaskedSum:
    """The sum of all parts, in whatever order and grouping they come."""
    return sum(parts, MaskedSum())


def from_limbs(limbs_NL: torch.Tensor, lowest: int) -> list[MaskedSum]:
    """Sums from rows of state.

    limbs_NL: int64 [N, L + COUNTERS]; limb i counts units of 2^(i * LIMB_BITS - lowest), the counters come last.
    """
    return [_from_row(row[:-COUNTERS], row[-COUNTERS:], lowest) for row in limbs_NL.tolist()]


def _from_row(limbs: Sequence[int], counters: Sequence[int], lowest: int) -> MaskedSum:
    units = sum(limb << (LIMB_BITS * at) for at, limb in enumerate(limbs))
    return MaskedSum(units << (UNIT - lowest), *counters)


def check_operands(values: torch.Tensor, mask: torch.Tensor) -> None:
    """Raise OperandError for another shape or a mask that is neither bool nor 0/1 whole numbers."""
    if values.shape != mask.shape:
        raise OperandError(f"masked_mean: values are {tuple(values.shape)}, mask is {tuple(mask.shape)}")
    if not values.is_floating_point():
        raise OperandError(f"masked_mean: values are {values.dtype}; pass floating-point values")


def mean_gradient(mask: torch.Tensor, active: int, grad: float = 1.0) -> torch.Tensor:
    """d mean / d values = grad / active where the mask is set, +0 elsewhere; float32 of the mask's shape.

    active: the global count, over every rank and micro-batch the mean was taken over.
    Raises ZeroActiveTokensError when it is 0.
    """
    if active < 1:
        raise ZeroActiveTokensError("masked_mean: no token is active, so the mean has no gradient")
    slope = torch.tensor(grad / active, dtype=torch.float32, device=mask.device)
    return torch.where(mask.to(torch.bool), slope, torch.zeros_like(slope))
