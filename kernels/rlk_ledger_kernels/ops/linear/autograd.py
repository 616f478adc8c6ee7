"""linear for autograd: a weight packed for the forward pass and again for the backward pass, never kept in between."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from rlk_ledger_kernels.derivative import first_only
from rlk_ledger_kernels.ops.linear.contract import LinearContract


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        module: ModuleType,
        x_NK: torch.Tensor,
        weight_OK: torch.Tensor,
        bias_O: torch.Tensor | None,
        contract: LinearContract,
    ) -> torch.Tensor:
        ctx.save_for_backward(x_NK, weight_OK, bias_O)
        ctx.module, ctx.contract = module, contract
        result: torch.Tensor = module.linear(x_NK, module.pack_linear(weight_OK, contract, bias_O))
        return result

    @staticmethod
    @first_only
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        x_NK, weight_OK, bias_O = ctx.saved_tensors
        packed = ctx.module.pack_linear(weight_OK, ctx.contract, bias_O)
        grad_x, grad_weight, grad_bias = ctx.module.linear_backward(grads[0], x_NK, packed)
        given = None if bias_O is None else grad_bias.to(bias_O.dtype)
        return None, grad_x.to(x_NK.dtype), grad_weight.to(weight_OK.dtype), given, None


def linear(
    module: ModuleType,
    x_NK: torch.Tensor,
    weight_OK: torch.Tensor,
    contract: LinearContract,
    bias_O: torch.Tensor | None = None,
) -> torch.Tensor:
    """`module.linear` on `module.pack_linear`, differentiable in x, weight and bias by `module.linear_backward`."""
    result: torch.Tensor = _Linear.apply(module, x_NK, weight_OK, bias_O, contract)  # type: ignore[no-untyped-call]
    return result
