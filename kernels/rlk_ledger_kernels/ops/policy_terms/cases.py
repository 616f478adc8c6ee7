"""Cases of policy_terms: drift of a healthy run and of a broken one, clamped and clipped tokens among them."""

from __future__ import annotations

from types import ModuleType

import torch

from rlk_ledger_kernels.dtypes import DType, torch_dtype
from rlk_ledger_kernels.ops.policy_terms import reference
from rlk_ledger_kernels.ops.policy_terms.contract import PolicyTermsContract, TermGradients
from rlk_ledger_kernels.suite.case import Case, RowCase, Rows

_TOKENS = {"small": 1003, "large": 1_000_003}
_CONTRACT = PolicyTermsContract()


def cases(size: str = "small") -> list[Case]:
    """Healthy drift in every dtype (noise of 0.01 nats) and, in float32, terms whose log-ratio reaches the clamp."""
    healthy: tuple[DType, ...] = ("float32", "bfloat16", "float16")
    return [*(_case(_TOKENS[size], dtype, 0.01) for dtype in healthy), _bounded(_TOKENS[size])]


def _case(tokens: int, dtype: DType, drift: float) -> RowCase:
    training_N, rollout_N, advantage_N = _operands(tokens, torch_dtype(dtype), drift)

    def run(module: ModuleType, operands: Rows) -> torch.Tensor:
        return torch.stack(module.policy_terms(*operands, _CONTRACT)[:5], -1)

    name = f"{tokens} tokens, {dtype}, drift {drift}"
    rows = (training_N, rollout_N, advantage_N)
    return RowCase("policy_terms", name, dtype, rows, run, lambda given: run(reference, given), _gradient)


def _bounded(tokens: int) -> RowCase:
    """The terms that stay small where ratios do not: both flags, and k1 in units of the clamp."""
    operands_N = _operands(tokens, torch.float32, 15.0)

    def run(module: ModuleType, operands: Rows) -> torch.Tensor:
        terms = module.policy_terms(*operands, _CONTRACT)
        flags = (terms.clamped_N.to(torch.float32), terms.outside_N.to(torch.float32))
        return torch.stack((terms.k1_N / _CONTRACT.clamp, *flags), -1)

    name = f"{tokens} tokens, float32, drift 15.0, k1 and flags"
    return RowCase("policy_terms", name, "float32", operands_N, run, lambda given: run(reference, given), _gradient)


def _gradient(module: ModuleType, operands: Rows) -> torch.Tensor:
    weights = (0.5, -1.0, 0.25, 2.0, 1.5)
    grads = TermGradients(*(torch.full_like(operands[0], weight) for weight in weights))
    grad_N: torch.Tensor = module.policy_terms_backward(grads, *operands, _CONTRACT)
    return grad_N[:, None]


def _operands(tokens: int, dtype: torch.dtype, drift: float) -> Rows:
    generator = torch.Generator().manual_seed(tokens)
    rollout_N = -2 * torch.rand((tokens,), generator=generator, dtype=torch.float32)
    training_N = rollout_N + drift * torch.randn((tokens,), generator=generator, dtype=torch.float32)
    advantage_N = torch.rand((tokens,), generator=generator, dtype=torch.float32) * 2 - 1
    return training_N.to(dtype), rollout_N.to(dtype), advantage_N.to(dtype)
