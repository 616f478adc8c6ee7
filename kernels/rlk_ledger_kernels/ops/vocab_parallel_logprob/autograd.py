"""vocab_parallel_logprob for autograd: one rank's shard of the logits, the other ranks in a group.

The backward pass needs no exchange: given the normaliser of the whole vocabulary, a shard's gradient is its own.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from rlk_ledger_kernels.derivative import first_only
from rlk_ledger_kernels.ops.selected_logprob.contract import LogprobContract
from rlk_ledger_kernels.ops.vocab_parallel_logprob.exchange import gather_statistics
from rlk_ledger_kernels.parallel.group import Group


class _VocabParallelLogprob(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        module: ModuleType,
        logits_NS: torch.Tensor,
        first: int,
        vocabulary: int,
        tokens_N: torch.Tensor,
        contract: LogprobContract,
        group: Group,
    ) -> torch.Tensor:
        own = module.shard_statistics(logits_NS, first, vocabulary, tokens_N, contract)
        parts = gather_statistics([own], tokens_N, group)
        ctx.save_for_backward(logits_NS, tokens_N, *module.normaliser(parts, contract))
        ctx.module, ctx.first, ctx.vocabulary, ctx.contract = module, first, vocabulary, contract
        result: torch.Tensor = module.merge_statistics(parts, contract)
        return result

    @staticmethod
    @first_only
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        logits_NS, tokens_N, top_N, total_N = ctx.saved_tensors
        normal = (top_N, total_N)
        made = ctx.module.shard_backward(grads[0], logits_NS, ctx.first, ctx.vocabulary, tokens_N, normal, ctx.contract)
        return None, made.to(logits_NS.dtype), None, None, None, None, None


def vocab_parallel_logprob(
    module: ModuleType,
    logits_NS: torch.Tensor,
    first: int,
    vocabulary: int,
    tokens_N: torch.Tensor,
    contract: LogprobContract,
    group: Group,
) -> torch.Tensor:
    """Score one token per row from this rank's columns of the logits, differentiable in them; float32 [N] (nats).

    logits_NS: [N, S], columns of tokens first..first+S-1. tokens_N: int64 [N], global ids, equal on all ranks. group:
    of which this process holds one rank. Every rank gets the same bits. Raises OperandError for shards that cut a
    vocabulary tile, overlap or leave a gap.
    """
    made = _VocabParallelLogprob.apply(module, logits_NS, first, vocabulary, tokens_N, contract, group)  # type: ignore[no-untyped-call]
    result: torch.Tensor = made
    return result
