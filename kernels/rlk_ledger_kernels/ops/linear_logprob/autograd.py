"""linear_logprob for autograd: hidden states and a head's weight, or this rank's rows of it, the others in a group.

In a group the gradient of the hidden states passes from rank to rank, each continuing the sum over its own vocabulary
tiles: the bits of one rank, at the price of taking turns. Every rank gets the whole of it, so nothing is left to add.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from rlk_ledger_kernels.derivative import first_only
from rlk_ledger_kernels.ops.linear_logprob.contract import LogprobContract
from rlk_ledger_kernels.ops.vocab_parallel_logprob.exchange import gather_statistics
from rlk_ledger_kernels.parallel.group import Group, SimulatedGroup


class _LinearLogprob(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        module: ModuleType,
        hidden_NK: torch.Tensor,
        weight_VK: torch.Tensor,
        tokens_N: torch.Tensor,
        contract: LogprobContract,
        first: int,
        vocabulary: int | None,
        group: Group,
    ) -> torch.Tensor:
        head = module.pack_head(weight_VK, contract, first, vocabulary)
        parts = gather_statistics([module.head_statistics(hidden_NK, head, tokens_N)], tokens_N, group)
        ctx.save_for_backward(hidden_NK, weight_VK, tokens_N, *module.normaliser(parts, contract))
        ctx.module, ctx.contract, ctx.first, ctx.vocabulary, ctx.group = module, contract, first, vocabulary, group
        result: torch.Tensor = module.merge_statistics(parts, contract)
        return result

    @staticmethod
    @first_only
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        hidden_NK, weight_VK, tokens_N, top_N, total_N = ctx.saved_tensors
        head = ctx.module.pack_head(weight_VK, ctx.contract, ctx.first, ctx.vocabulary)
        normal, group = (top_N, total_N), ctx.group
        carry_NK: torch.Tensor | None = None
        grad_weight_VK = torch.zeros((), dtype=torch.float32, device=weight_VK.device)
        for rank in range(group.size):
            if rank in group.ranks:
                carry_NK, grad_weight_VK = ctx.module.head_backward(
                    grads[0], hidden_NK, head, tokens_N, normal, carry_NK
                )
            if group.size > 1:
                rows = [len(hidden_NK) if other == rank else 0 for other in range(group.size)]
                sent = carry_NK if rank in group.ranks and carry_NK is not None else hidden_NK[:0].float()
                carry_NK = group.all_gather([sent], rows, "global_vocab_shard_index")[rank]
        assert carry_NK is not None
        return None, carry_NK.to(hidden_NK.dtype), grad_weight_VK.to(weight_VK.dtype), *[None] * 5


def linear_logprob(
    module: ModuleType,
    hidden_NK: torch.Tensor,
    weight_VK: torch.Tensor,
    tokens_N: torch.Tensor,
    contract: LogprobContract,
    first: int = 0,
    vocabulary: int | None = None,
    group: Group | None = None,
) -> torch.Tensor:
    """Score one token per row from hidden states, differentiable in them and in the weight; float32 [N] (nats).

    hidden_NK: [N, K], whole on every rank. weight_VK: [V, K], the rows of tokens first..first+V-1; those from
    `vocabulary` on are padding. group: of which this process holds one rank; None for a whole head. Gradients have
    their operands' dtype. Raises OperandError as the operator does.
    """
    group = group or SimulatedGroup(1)
    made = _LinearLogprob.apply(module, hidden_NK, weight_VK, tokens_N, contract, first, vocabulary, group)  # type: ignore[no-untyped-call]
    result: torch.Tensor = made
    return result
