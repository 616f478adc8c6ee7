"""swiglu for autograd: a backend's forward and its own backward as one function."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from rlk_ledger_kernels.derivative import first_only
from rlk_ledger_kernels.ops.swiglu.contract import SwigluContract


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, module: ModuleType, gate: torch.Tensor, up: torch.Tensor, contract: SwigluContract
    ) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        ctx.module, ctx.contract = module, contract
        result: torch.Tensor = module.swiglu(gate, up, contract)
        return result

    @staticmethod
    @first_only
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        grad_gate, grad_up = ctx.module.swiglu_backward(grads[0], *ctx.saved_tensors, ctx.contract)
        return None, grad_gate, grad_up, None


def swiglu(module: ModuleType, gate: torch.Tensor, up: torch.Tensor, contract: SwigluContract) -> torch.Tensor:
    """`module.swiglu`, differentiable in gate and up by `module.swiglu_backward`."""
    result: torch.Tensor = _Swiglu.apply(module, gate, up, contract)  # type: ignore[no-untyped-call]
    return result
