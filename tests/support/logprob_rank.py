"""One rank of a vocabulary-parallel group over gloo, and what it computes: values and gradients of its shard."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

import torch

from rlk_ledger_kernels.ops.linear_logprob import autograd as linear_autograd
from rlk_ledger_kernels.ops.selected_logprob.contract import LogprobContract
from rlk_ledger_kernels.ops.vocab_parallel_logprob import autograd as shard_autograd
from rlk_ledger_kernels.parallel.group import DistributedGroup, SimulatedGroup
from rlk_ledger_kernels.schedule import Schedule

N, K, V, PADDED, TILE = 21, 24, 118, 128, 16
CONTRACT = LogprobContract(temperature=0.7, ignore_index=-100, schedule=Schedule(vocab_tile=TILE))


def module(operator: str, backend: str) -> ModuleType:
    return import_module(f"rlk_ledger_kernels.ops.{operator}.{backend}")


def operands() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(hidden, weight, tokens, cotangent); row 4 is ignored, rows of the weight beyond V are padding."""
    generator = torch.Generator().manual_seed(3)
    hidden_NK = torch.randn((N, K), generator=generator)
    weight_VK = torch.randn((PADDED, K), generator=generator)
    tokens_N = torch.randint(0, V, (N,), generator=generator)
    tokens_N[4] = -100
    return hidden_NK, weight_VK, tokens_N, torch.randn(N, generator=generator)


def shard_results(rank: int, ranks: int, group: DistributedGroup | SimulatedGroup) -> dict[str, torch.Tensor]:
    """Values and gradients of both operators on one rank's columns."""
    hidden_NK, weight_VK, tokens_N, grad_N = operands()
    width = PADDED // ranks
    own = slice(rank * width, (rank + 1) * width)
    logits_NS = (hidden_NK @ weight_VK.T)[:, own].contiguous().requires_grad_()
    from_logits = shard_autograd.vocab_parallel_logprob(
        module("vocab_parallel_logprob", "torch"), logits_NS, own.start, V, tokens_N, CONTRACT, group
    )
    (from_logits * grad_N).sum().backward()
    hidden_NK.requires_grad_()
    shard_SK = weight_VK[own].clone().requires_grad_()
    from_hidden = linear_autograd.linear_logprob(
        module("linear_logprob", "torch"), hidden_NK, shard_SK, tokens_N, CONTRACT, own.start, V, group
    )
    (from_hidden * grad_N).sum().backward()
    assert logits_NS.grad is not None
    assert shard_SK.grad is not None
    assert hidden_NK.grad is not None
    return {
        "from_logits": from_logits.detach(),
        "logits_grad": logits_NS.grad,
        "from_hidden": from_hidden.detach(),
        "hidden_grad": hidden_NK.grad,
        "weight_grad": shard_SK.grad,
    }
