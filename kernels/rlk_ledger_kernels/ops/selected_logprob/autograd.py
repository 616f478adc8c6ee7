"""selected_logprob for autograd: a backend's forward and its own backward as one function."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from rlk_ledger_kernels.derivative import first_only
from rlk_ledger_kernels.ops.selected_logprob.contract import LogprobContract


class _SelectedLogprob(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        module: ModuleType,
        logits_NV: torch.Tensor,
        tokens_N: torch.Tensor,
        contract: LogprobContract,
        vocabulary: int | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(logits_NV, tokens_N)
        ctx.module, ctx.contract, ctx.vocabulary = module, contract, vocabulary
        result: torch.Tensor = module.selected_logprob(logits_NV, tokens_N, contract, vocabulary)
        return result

    @staticmethod
    @first_only
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        logits_NV, tokens_N = ctx.saved_tensors
        made = ctx.module.selected_logprob_backward(grads[0], logits_NV, tokens_N, ctx.contract, ctx.vocabulary)
        return None, made.to(logits_NV.dtype), None, None, None


def selected_logprob(
    module: ModuleType,
    logits_NV: torch.Tensor,
    tokens_N: torch.Tensor,
    contract: LogprobContract,
    vocabulary: int | None = None,
) -> torch.Tensor:
    """`module.selected_logprob`, differentiable in the logits by `module.selected_logprob_backward`."""
    made = _SelectedLogprob.apply(module, logits_NV, tokens_N, contract, vocabulary)  # type: ignore[no-untyped-call]
    result: torch.Tensor = made
    return result
