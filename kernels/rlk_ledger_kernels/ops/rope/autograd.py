"""rope for autograd: a backend's forward and its own backward as one function."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from rlk_ledger_kernels.derivative import first_only
from rlk_ledger_kernels.ops.rope.contract import RopeContract
from rlk_ledger_kernels.ops.rope.table import RopeTable


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, module: ModuleType, x_NHD: torch.Tensor, rows: RopeTable, contract: RopeContract
    ) -> torch.Tensor:
        ctx.module, ctx.rows, ctx.contract, ctx.dtype = module, rows, contract, x_NHD.dtype
        result: torch.Tensor = module.rope(x_NHD, rows, contract)
        return result

    @staticmethod
    @first_only
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        return None, ctx.module.rope_backward(grads[0], ctx.rows, ctx.contract).to(ctx.dtype), None, None


def rope(module: ModuleType, x_NHD: torch.Tensor, rows: RopeTable, contract: RopeContract) -> torch.Tensor:
    """`module.rope`, differentiable in x by `module.rope_backward`."""
    result: torch.Tensor = _Rope.apply(module, x_NHD, rows, contract)  # type: ignore[no-untyped-call]
    return result
