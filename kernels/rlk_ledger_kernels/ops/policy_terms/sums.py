"""Global sums of policy terms over active tokens: exact, mergeable, divided once."""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

import torch

from rlk_ledger_kernels.ops.masked_mean.exact import MaskedSum
from rlk_ledger_kernels.ops.policy_terms.contract import PolicyTerms


class PolicySums(NamedTuple):
    """Sums over the active tokens of one rank, micro-batch or run, and how many ratios were clamped or outside."""

    ratio: MaskedSum
    k1: MaskedSum
    k2: MaskedSum
    k3: MaskedSum
    surrogate: MaskedSum
    clamped: int
    outside: int

    def merged(self, other: PolicySums) -> PolicySums:
        """Both parts together; the same bits in any order."""
        return PolicySums(
            self.ratio + other.ratio,
            self.k1 + other.k1,
            self.k2 + other.k2,
            self.k3 + other.k3,
            self.surrogate + other.surrogate,
            self.clamped + other.clamped,
            self.outside + other.outside,
        )


def policy_sums(masked_mean: ModuleType, terms: PolicyTerms, mask_N: torch.Tensor) -> PolicySums:
    """Sum every term over the active tokens with a backend module of masked_mean.

    mask_N: bool or 0/1 [N]. The mean of a term is `.mean` of its sum, over the global count of active tokens.
    """
    active_N = mask_N.to(torch.bool)
    sums: list[MaskedSum] = [masked_mean.masked_sum(term_N, active_N) for term_N in terms[:5]]
    ratio, k1, k2, k3, surrogate = sums
    flags = (int((flag_N & active_N).sum()) for flag_N in (terms.clamped_N, terms.outside_N))
    return PolicySums(ratio, k1, k2, k3, surrogate, *flags)
