"""masked_mean, reference: sum(x * mask) / sum(mask) over the active values, float32."""

from __future__ import annotations

import math

import torch

from rlk_ledger_kernels.ops.masked_mean.exact import UNIT, MaskedSum, check_operands


def masked_sums(values_NT: torch.Tensor, mask_NT: torch.Tensor) -> list[MaskedSum]:
    """One float32 sum to a row."""
    check_operands(values_NT, mask_NT)
    return [masked_sum(values, mask) for values, mask in zip(values_NT, mask_NT, strict=True)]


def masked_sum(values: torch.Tensor, mask: torch.Tensor) -> MaskedSum:
    """The float32 sum of the active values, any shape."""
    check_operands(values, mask)
    active = values.to(torch.float32)[mask.to(torch.bool)]
    total = float(active.sum())
    if math.isnan(total):
        return MaskedSum(0, active.numel(), nan=1)
    if math.isinf(total):
        return MaskedSum(0, active.numel(), above=int(total > 0), below=int(total < 0))
    numerator, denominator = total.as_integer_ratio()
    return MaskedSum(numerator * (1 << UNIT) // denominator, active.numel())


def masked_mean(values: torch.Tensor, mask: torch.Tensor) -> float:
    """Average the active values; raises ZeroActiveTokensError when there is none."""
    return masked_sum(values, mask).mean
