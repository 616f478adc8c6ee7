"""The numeric contract of policy_terms, and its results by name."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from rlk_ledger_kernels.errors import ContractError, OperandError

SERIES_BELOW = 0.5
"""Below this |d|, expm1(d) - d is a series, so that nothing cancels; its 16 terms end under float64's last bit."""

SERIES_LAST = 17


@dataclass(frozen=True)
class PolicyTermsContract:
    """Terms of d = t - r (training minus rollout log-probability, both widened), computed in float64, rounded once.

    clamp: the log-ratio is clamped at +-clamp before any exponential, and the clamped tokens are counted.
    eps_low, eps_high: the surrogate's ratio is clipped to [1 - eps_low, 1 + eps_high].
    """

    clamp: float = 20.0
    eps_low: float = 0.2
    eps_high: float = 0.2

    def __post_init__(self) -> None:
        """Refuse bounds that are no bounds."""
        if not 0 < self.clamp <= 80:
            raise ContractError(f"policy_terms.clamp is {self.clamp}; choose above 0 and at most 80")
        for name, largest in (("eps_low", 1.0), ("eps_high", math.inf)):
            value = getattr(self, name)
            if not 0 <= value <= largest or math.isinf(value):
                raise ContractError(
                    f"policy_terms.{name} is {value}; choose 0 or more" + " (at most 1)" * (largest == 1)
                )


class PolicyTerms(NamedTuple):
    """Terms of N tokens, float32, in nats where they are log-ratios.

    ratio: rho = exp(c), c being d clamped. k1: -d. k2: d^2 / 2. k3: expm1(c) - c. surrogate: the smaller of rho * A and
    clip(rho) * A, to be maximised. clamped: |d| was above the clamp. outside: rho was outside the clip range.
    """

    ratio_N: torch.Tensor
    k1_N: torch.Tensor
    k2_N: torch.Tensor
    k3_N: torch.Tensor
    surrogate_N: torch.Tensor
    clamped_N: torch.Tensor
    outside_N: torch.Tensor


class TermGradients(NamedTuple):
    """Gradients with respect to the terms, each [N]; None is zero."""

    ratio_N: torch.Tensor | None = None
    k1_N: torch.Tensor | None = None
    k2_N: torch.Tensor | None = None
    k3_N: torch.Tensor | None = None
    surrogate_N: torch.Tensor | None = None


def check_operands(*operands_N: torch.Tensor) -> None:
    """Raise OperandError when log-probabilities and advantages are not one [N] each."""
    if operands_N[0].dim() != 1 or len({operand.shape for operand in operands_N}) > 1:
        shapes = ", ".join(str(tuple(operand.shape)) for operand in operands_N)
        raise OperandError(
            f"policy_terms: training, rollout, advantage are {shapes}; pass [N] each, active tokens only"
        )
