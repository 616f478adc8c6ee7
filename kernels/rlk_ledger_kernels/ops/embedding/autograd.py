"""embedding for autograd: a backend's forward and its own backward as one function."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from rlk_ledger_kernels.derivative import first_only


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, module: ModuleType, ids_N: torch.Tensor, table_VH: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(ids_N)
        ctx.module, ctx.rows, ctx.dtype = module, table_VH.shape[0], table_VH.dtype
        result: torch.Tensor = module.embedding(ids_N, table_VH)
        return result

    @staticmethod
    @first_only
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        (ids_N,) = ctx.saved_tensors
        return None, None, ctx.module.embedding_backward(grads[0], ids_N, ctx.rows).to(ctx.dtype)


def embedding(module: ModuleType, ids_N: torch.Tensor, table_VH: torch.Tensor) -> torch.Tensor:
    """`module.embedding`, differentiable in the table by `module.embedding_backward`."""
    result: torch.Tensor = _Embedding.apply(module, ids_N, table_VH)  # type: ignore[no-untyped-call]
    return result
