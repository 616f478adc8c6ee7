"""moe_router for autograd: weights are differentiable in the logits, routes are not."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from rlk_ledger_kernels.derivative import first_only
from rlk_ledger_kernels.ops.moe_router.contract import MoeRouterContract


class _RoutedWeights(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, module: ModuleType, logits_NE: torch.Tensor, experts_NT: torch.Tensor, contract: MoeRouterContract
    ) -> torch.Tensor:
        ctx.save_for_backward(logits_NE, experts_NT)
        ctx.module, ctx.contract = module, contract
        result: torch.Tensor = module.routed_weights(logits_NE, experts_NT, contract)
        return result

    @staticmethod
    @first_only
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        logits_NE, experts_NT = ctx.saved_tensors
        grad_NE = ctx.module.moe_router_backward(grads[0], logits_NE, experts_NT, ctx.contract)
        return None, grad_NE.to(logits_NE.dtype), None, None


def moe_router(
    module: ModuleType, logits_NE: torch.Tensor, contract: MoeRouterContract
) -> tuple[torch.Tensor, torch.Tensor]:
    """`module.moe_router`, its weights differentiable by `module.moe_router_backward`; the routes are constants."""
    with torch.no_grad():
        _, experts_NT = module.moe_router(logits_NE, contract)
    return routed_weights(module, logits_NE, experts_NT, contract), experts_NT


def routed_weights(
    module: ModuleType, logits_NE: torch.Tensor, experts_NT: torch.Tensor, contract: MoeRouterContract
) -> torch.Tensor:
    """`module.routed_weights`, differentiable in the logits: recorded routes replayed in training."""
    result: torch.Tensor = _RoutedWeights.apply(module, logits_NE, experts_NT, contract)  # type: ignore[no-untyped-call]
    return result
