"""grouped_experts for autograd: differentiable in x, in the weights of the routes and in every expert's weights."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from rlk_ledger_kernels.derivative import first_only
from rlk_ledger_kernels.ops.grouped_experts.contract import GroupedExpertsContract


class _GroupedExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        module: ModuleType,
        experts_NT: torch.Tensor,
        contract: GroupedExpertsContract,
        *operands: torch.Tensor,
    ) -> torch.Tensor:
        x_NH, weights_NT, gate_EIH, up_EIH, down_EHI = operands
        ctx.save_for_backward(experts_NT, *operands)
        ctx.module, ctx.contract = module, contract
        packed = module.pack_experts(gate_EIH, up_EIH, down_EHI, contract)
        result: torch.Tensor = module.grouped_experts(x_NH, packed, weights_NT, experts_NT)
        return result

    @staticmethod
    @first_only
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        experts_NT, x_NH, weights_NT, *weights = ctx.saved_tensors
        packed = ctx.module.pack_experts(*weights, ctx.contract)
        found = ctx.module.grouped_experts_backward(grads[0], x_NH, packed, weights_NT, experts_NT)
        operands = (x_NH, weights_NT, *weights)
        return None, None, None, *(grad.to(operand.dtype) for grad, operand in zip(found, operands, strict=True))


def grouped_experts(
    module: ModuleType,
    x_NH: torch.Tensor,
    experts: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    weights_NT: torch.Tensor,
    experts_NT: torch.Tensor,
    contract: GroupedExpertsContract,
) -> torch.Tensor:
    """`module.grouped_experts`, differentiable by `module.grouped_experts_backward`.

    experts: (gate [E, I, H], up [E, I, H], down [E, H, I]), packed anew in each pass since they change in training.
    """
    operands = (x_NH, weights_NT, *experts)
    result: torch.Tensor = _GroupedExperts.apply(module, experts_NT, contract, *operands)  # type: ignore[no-untyped-call]
    return result
