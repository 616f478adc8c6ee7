"""policy_terms, torch: float64 elementwise, made of exp, products and sums alone.

`torch.exp` gives an element the same bits wherever it stands. expm1(d) - d is its series near 0 and exp(d) - 1 - d
elsewhere, so no other transcendental function is needed and the same formula runs in a Triton kernel.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from rlk_ledger_kernels.ops.policy_terms.contract import (
    SERIES_BELOW,
    SERIES_LAST,
    PolicyTerms,
    PolicyTermsContract,
    TermGradients,
    check_operands,
)


class _LogRatio(NamedTuple):
    """float64 [N]: d, d clamped, exp of it, expm1 of it minus it."""

    d_N: torch.Tensor
    c_N: torch.Tensor
    ratio_N: torch.Tensor
    k3_N: torch.Tensor


def policy_terms(
    training_N: torch.Tensor, rollout_N: torch.Tensor, advantage_N: torch.Tensor, contract: PolicyTermsContract
) -> PolicyTerms:
    """Terms of each token: rho = exp(c), k1 = -d, k2 = d^2/2, k3 = expm1(c) - c, min(rho A, clip(rho) A).

    training_N, rollout_N: log-probabilities [N] in nats, any float dtype. advantage_N: [N].
    Returns float32 [N] each, NaN where an operand is NaN. Raises OperandError for other shapes.
    """
    check_operands(training_N, rollout_N, advantage_N)
    r = _log_ratio(training_N, rollout_N, contract)
    advantage_N = advantage_N.to(torch.float64)
    low, high = 1 - contract.eps_low, 1 + contract.eps_high
    clipped_N = r.ratio_N.clamp(low, high) * advantage_N
    surrogate_N = torch.where(_clips(r.ratio_N, advantage_N, contract), clipped_N, r.ratio_N * advantage_N)
    wide = (r.ratio_N, -r.d_N, r.d_N * r.d_N * 0.5, r.k3_N, surrogate_N)
    outside_N = (r.ratio_N < low) | (r.ratio_N > high)
    ratio_N, k1_N, k2_N, k3_N, rounded_N = (term_N.to(torch.float32) for term_N in wide)
    return PolicyTerms(ratio_N, k1_N, k2_N, k3_N, rounded_N, r.d_N.abs() > contract.clamp, outside_N)


def policy_terms_backward(
    grads: TermGradients,
    training_N: torch.Tensor,
    rollout_N: torch.Tensor,
    advantage_N: torch.Tensor,
    contract: PolicyTermsContract,
) -> torch.Tensor:
    """Gradient with respect to the training log-probability:
    g_ratio rho - g_k1 + g_k2 d + g_k3 expm1(c) + g_surrogate rho A; the terms of rho, k3 and the surrogate are 0 where
    the log-ratio was clamped, the surrogate's also where clipping won.

    Returns [N] in `training_N`'s dtype, rounded once from float64.
    """
    check_operands(training_N, rollout_N, advantage_N)
    check_operands(training_N, *(grad_N for grad_N in grads if grad_N is not None))
    r = _log_ratio(training_N, rollout_N, contract)
    advantage_N = advantage_N.to(torch.float64)
    free_N = ~(r.d_N.abs() > contract.clamp)
    moves_N = free_N & ~_clips(r.ratio_N, advantage_N, contract)
    zero_N = torch.zeros_like(r.d_N)
    slopes = (
        torch.where(free_N, r.ratio_N, zero_N),
        torch.full_like(r.d_N, -1.0),
        r.d_N,
        torch.where(free_N, r.k3_N + r.c_N, zero_N),
        torch.where(moves_N, r.ratio_N * advantage_N, zero_N),
    )
    total_N = zero_N
    for grad_N, slope_N in zip(grads, slopes, strict=True):
        if grad_N is not None:
            total_N = total_N + grad_N.to(torch.float64) * slope_N
    return total_N.to(training_N.dtype)


def _log_ratio(training_N: torch.Tensor, rollout_N: torch.Tensor, contract: PolicyTermsContract) -> _LogRatio:
    d_N = training_N.to(torch.float64) - rollout_N.to(torch.float64)
    c_N = d_N.clamp(-contract.clamp, contract.clamp)
    ratio_N = c_N.exp()
    series_N = torch.ones_like(c_N)
    for n in range(SERIES_LAST, 2, -1):
        series_N = series_N * c_N / n + 1.0
    k3_N = torch.where(c_N.abs() < SERIES_BELOW, series_N * c_N * c_N * 0.5, ratio_N - 1.0 - c_N)
    return _LogRatio(d_N, c_N, ratio_N, k3_N)


def _clips(ratio_N: torch.Tensor, advantage_N: torch.Tensor, contract: PolicyTermsContract) -> torch.Tensor:
    """Whether the clipped ratio gives the smaller surrogate."""
    above_N = (ratio_N > 1 + contract.eps_high) & (advantage_N >= 0)
    return above_N | ((ratio_N < 1 - contract.eps_low) & (advantage_N < 0))
