"""masked_mean, torch: active values taken out by index, then added in float64 along one halving tree."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rlk_ledger_kernels.errors import OperandError, ZeroActiveTokensError


@dataclass(frozen=True)
class MaskedSum:
    """A float64 sum and the number of active tokens behind it; sums of several batches divide once, at the end."""

    total: float
    active: int

    @property
    def mean(self) -> float:
        """total / active; raises ZeroActiveTokensError when nothing was active, which is a status and not 0.0."""
        if self.active == 0:
            raise ZeroActiveTokensError("masked_mean: no token is active; report the status zero_active_tokens")
        return self.total / self.active


def masked_sum(values: torch.Tensor, mask: torch.Tensor) -> MaskedSum:
    """Sum the active values in index order.

    values: float, any shape. mask: bool or 0/1 of the same shape. Inactive values, NaN included, are never read
    into the sum. Raises OperandError when the shapes differ.
    """
    if values.shape != mask.shape:
        raise OperandError(f"masked_mean: values are {tuple(values.shape)}, mask is {tuple(mask.shape)}")
    active_N = values[mask.to(torch.bool)].to(torch.float64)
    count = active_N.numel()
    while active_N.numel() > 1:
        if active_N.numel() % 2:
            active_N = torch.cat((active_N, active_N.new_zeros(1)))
        active_N = active_N[0::2] + active_N[1::2]
    return MaskedSum(total=float(active_N[0]) if count else 0.0, active=count)


def masked_mean(values: torch.Tensor, mask: torch.Tensor) -> float:
    """Mean of the active values; raises ZeroActiveTokensError when there is none."""
    return masked_sum(values, mask).mean
