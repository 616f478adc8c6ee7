"""policy_terms for autograd: a backend's forward and its own backward as one function."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from rlk_ledger_kernels.derivative import first_only
from rlk_ledger_kernels.ops.policy_terms.contract import PolicyTerms, PolicyTermsContract, TermGradients


class _PolicyTerms(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        module: ModuleType,
        training_N: torch.Tensor,
        rollout_N: torch.Tensor,
        advantage_N: torch.Tensor,
        contract: PolicyTermsContract,
    ) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(training_N, rollout_N, advantage_N)
        ctx.module, ctx.contract = module, contract
        ctx.set_materialize_grads(False)
        terms: PolicyTerms = module.policy_terms(training_N, rollout_N, advantage_N, contract)
        ctx.mark_non_differentiable(terms.clamped_N, terms.outside_N)
        return tuple(terms)

    @staticmethod
    @first_only
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        given = TermGradients(*grads[:5])
        return None, ctx.module.policy_terms_backward(given, *ctx.saved_tensors, ctx.contract), None, None, None


def policy_terms(
    module: ModuleType,
    training_N: torch.Tensor,
    rollout_N: torch.Tensor,
    advantage_N: torch.Tensor,
    contract: PolicyTermsContract,
) -> PolicyTerms:
    """`module.policy_terms`, differentiable in the training log-probability by `module.policy_terms_backward`.

    The rollout's log-probability and the advantage are constants of the loss and get no gradient.
    """
    fixed = (rollout_N.detach(), advantage_N.detach(), contract)
    return PolicyTerms(*_PolicyTerms.apply(module, training_N, *fixed))  # type: ignore[no-untyped-call]
