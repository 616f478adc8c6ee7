"""rms_norm for autograd: a backend's forward and its own backward as one function."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from rlk_ledger_kernels.derivative import first_only
from rlk_ledger_kernels.ops.rms_norm.contract import RmsNormContract


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, module: ModuleType, x: torch.Tensor, weight: torch.Tensor, contract: RmsNormContract
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.module, ctx.contract = module, contract
        result: torch.Tensor = module.rms_norm(x, weight, contract)
        return result

    @staticmethod
    @first_only
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        grad_x, grad_weight = ctx.module.rms_norm_backward(grads[0], x, weight, ctx.contract)
        return None, grad_x, grad_weight.to(weight.dtype), None


class _AddRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        module: ModuleType,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        contract: RmsNormContract,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(x, residual, weight)
        ctx.module, ctx.contract = module, contract
        result: tuple[torch.Tensor, torch.Tensor] = module.add_rms_norm(x, residual, weight, contract)
        return result

    @staticmethod
    @first_only
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        x, residual, weight = ctx.saved_tensors
        grad_x, grad_weight = ctx.module.add_rms_norm_backward(*grads, x, residual, weight, ctx.contract)
        return None, grad_x, grad_x.to(residual.dtype), grad_weight.to(weight.dtype), None


def rms_norm(module: ModuleType, x: torch.Tensor, weight: torch.Tensor, contract: RmsNormContract) -> torch.Tensor:
    """`module.rms_norm`, differentiable in x and weight by `module.rms_norm_backward`."""
    result: torch.Tensor = _RmsNorm.apply(module, x, weight, contract)  # type: ignore[no-untyped-call]
    return result


def add_rms_norm(
    module: ModuleType, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, contract: RmsNormContract
) -> tuple[torch.Tensor, torch.Tensor]:
    """`module.add_rms_norm`, differentiable in x, residual and weight by `module.add_rms_norm_backward`."""
    result: tuple[torch.Tensor, torch.Tensor] = _AddRmsNorm.apply(module, x, residual, weight, contract)  # type: ignore[no-untyped-call]
    return result
