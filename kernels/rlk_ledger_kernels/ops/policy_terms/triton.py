"""policy_terms, Triton: one pass, every term of a token from one load of its operands, in float64.

Nothing is summed across tokens. A token costs one float64 exponential and some fifty multiplications, which an HPC card
hides behind the loads. FMA contraction is off, so that every operation rounds as in the torch backend.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rlk_ledger_kernels.ops.policy_terms.contract import (
    SERIES_BELOW,
    SERIES_LAST,
    PolicyTerms,
    PolicyTermsContract,
    TermGradients,
    check_operands,
)
from rlk_ledger_kernels.triton_language import launcher

_BLOCK = 1024


@triton.jit
def _log_ratio(training, rollout, CLAMP: tl.constexpr, BELOW: tl.constexpr, LAST: tl.constexpr):
    """(d, d clamped, exp, expm1 - d); comparisons with NaN are false, so NaN passes through."""
    d = training.to(tl.float64) - rollout.to(tl.float64)
    c = tl.where(d > CLAMP, CLAMP, tl.where(d < -CLAMP, -CLAMP, d))
    ratio = tl.exp(c)
    series = c * 0.0 + 1.0
    for step in tl.static_range(LAST - 2):
        series = series * c / (LAST - step) + 1.0
    near = (c < BELOW) & (c > -BELOW)
    return d, c, ratio, tl.where(near, series * c * c * 0.5, ratio - 1.0 - c)


@triton.jit
def _clips(ratio, advantage, LOW: tl.constexpr, HIGH: tl.constexpr):
    return ((ratio > HIGH) & (advantage >= 0)) | ((ratio < LOW) & (advantage < 0))


@triton.jit(do_not_specialize=["tokens"])
def _forward_kernel(
    training_ptr,
    rollout_ptr,
    advantage_ptr,
    ratio_ptr,
    k1_ptr,
    k2_ptr,
    k3_ptr,
    surrogate_ptr,
    clamped_ptr,
    outside_ptr,
    tokens,
    CLAMP: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    BELOW: tl.constexpr,
    LAST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    real = at < tokens
    training = tl.load(training_ptr + at, mask=real, other=0.0)
    rollout = tl.load(rollout_ptr + at, mask=real, other=0.0)
    advantage = tl.load(advantage_ptr + at, mask=real, other=0.0).to(tl.float64)
    d, _c, ratio, k3 = _log_ratio(training, rollout, CLAMP, BELOW, LAST)
    bounded = tl.where(ratio > HIGH, HIGH, tl.where(ratio < LOW, LOW, ratio))
    surrogate = tl.where(_clips(ratio, advantage, LOW, HIGH), bounded * advantage, ratio * advantage)
    tl.store(ratio_ptr + at, ratio.to(tl.float32), mask=real)
    tl.store(k1_ptr + at, (-d).to(tl.float32), mask=real)
    tl.store(k2_ptr + at, (d * d * 0.5).to(tl.float32), mask=real)
    tl.store(k3_ptr + at, k3.to(tl.float32), mask=real)
    tl.store(surrogate_ptr + at, surrogate.to(tl.float32), mask=real)
    tl.store(clamped_ptr + at, ((d > CLAMP) | (d < -CLAMP)).to(tl.int8), mask=real)
    tl.store(outside_ptr + at, ((ratio > HIGH) | (ratio < LOW)).to(tl.int8), mask=real)


@triton.jit(do_not_specialize=["tokens"])
def _backward_kernel(
    grads_ptr,
    training_ptr,
    rollout_ptr,
    advantage_ptr,
    out_ptr,
    tokens,
    GIVEN: tl.constexpr,
    CLAMP: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    BELOW: tl.constexpr,
    LAST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    real = at < tokens
    training = tl.load(training_ptr + at, mask=real, other=0.0)
    rollout = tl.load(rollout_ptr + at, mask=real, other=0.0)
    advantage = tl.load(advantage_ptr + at, mask=real, other=0.0).to(tl.float64)
    d, c, ratio, k3 = _log_ratio(training, rollout, CLAMP, BELOW, LAST)
    held = (d > CLAMP) | (d < -CLAMP)
    still = held | _clips(ratio, advantage, LOW, HIGH)
    total = tl.zeros((BLOCK,), tl.float64)
    for term in tl.static_range(5):
        if GIVEN & (1 << term):
            grad = tl.load(grads_ptr + term * tokens + at, mask=real, other=0.0).to(tl.float64)
            if term == 0:
                slope = tl.where(held, 0.0, ratio)
            elif term == 1:
                slope = tl.full((BLOCK,), -1.0, tl.float64)
            elif term == 2:
                slope = d
            elif term == 3:
                slope = tl.where(held, 0.0, k3 + c)
            else:
                slope = tl.where(still, 0.0, ratio * advantage)
            total = total + grad * slope
    tl.store(out_ptr + at, total, mask=real)


def policy_terms(
    training_N: torch.Tensor, rollout_N: torch.Tensor, advantage_N: torch.Tensor, contract: PolicyTermsContract
) -> PolicyTerms:
    """Terms of each token: rho = exp(c), k1 = -d, k2 = d^2/2, k3 = expm1(c) - c, min(rho A, clip(rho) A).

    training_N, rollout_N: log-probabilities [N] in nats, any float dtype. advantage_N: [N].
    Returns float32 [N] each, NaN where an operand is NaN. Raises OperandError for other shapes.
    """
    check_operands(training_N, rollout_N, advantage_N)
    tokens = len(training_N)
    terms = [torch.empty(tokens, dtype=torch.float32, device=training_N.device) for _ in range(5)]
    flags = [torch.empty(tokens, dtype=torch.int8, device=training_N.device) for _ in range(2)]
    if tokens:
        launcher(_forward_kernel, (triton.cdiv(tokens, _BLOCK),))(
            training_N.contiguous(),
            rollout_N.contiguous(),
            advantage_N.contiguous(),
            *terms,
            *flags,
            tokens,
            **_constants(contract),
            num_warps=8,
            enable_fp_fusion=False,
        )
    return PolicyTerms(*terms, *(flag.to(torch.bool) for flag in flags))


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
    tokens = len(training_N)
    given = [term for term, grad_N in enumerate(grads) if grad_N is not None]
    grads_5N = torch.zeros((5, tokens), dtype=torch.float64, device=training_N.device)
    for term, grad_N in enumerate(grads):
        if grad_N is not None:
            grads_5N[term] = grad_N
    out_N = torch.zeros(tokens, dtype=torch.float64, device=training_N.device)
    if tokens:
        launcher(_backward_kernel, (triton.cdiv(tokens, _BLOCK),))(
            grads_5N,
            training_N.contiguous(),
            rollout_N.contiguous(),
            advantage_N.contiguous(),
            out_N,
            tokens,
            GIVEN=sum(1 << term for term in given),
            **_constants(contract),
            num_warps=8,
            enable_fp_fusion=False,
        )
    return out_N.to(training_N.dtype)


def _constants(contract: PolicyTermsContract) -> dict[str, float | int]:
    """Compile-time constants: a Python float passed at run time would arrive as float32."""
    return {
        "CLAMP": contract.clamp,
        "LOW": 1 - contract.eps_low,
        "HIGH": 1 + contract.eps_high,
        "BELOW": SERIES_BELOW,
        "LAST": SERIES_LAST,
        "BLOCK": _BLOCK,
    }
