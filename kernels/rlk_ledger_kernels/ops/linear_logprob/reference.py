"""linear_logprob, float32 reference: the logits in full, then log softmax(z / temperature)[token].

Legend: N rows, K hidden size, V rows of the head held here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rlk_ledger_kernels.errors import OperandError
from rlk_ledger_kernels.ops.selected_logprob.contract import LogprobContract
from rlk_ledger_kernels.ops.selected_logprob.statistics import Statistics, check_tokens, part_end
from rlk_ledger_kernels.ops.vocab_parallel_logprob.reference import (
    merge_statistics,
    normaliser,
    shard_backward,
    shard_statistics,
)
from rlk_ledger_kernels.precision import exact_products

Normaliser = tuple[torch.Tensor, torch.Tensor]

__all__ = [
    "PackedHead",
    "head_backward",
    "head_statistics",
    "linear_logprob",
    "linear_logprob_backward",
    "merge_statistics",
    "normaliser",
    "pack_head",
]


@dataclass(frozen=True)
class PackedHead:
    """The rows first..end-1 of a head, as they were given."""

    weight_VK: torch.Tensor
    first: int
    end: int
    vocabulary: int
    contract: LogprobContract


def pack_head(
    weight_VK: torch.Tensor, contract: LogprobContract, first: int = 0, vocabulary: int | None = None
) -> PackedHead:
    """Keep a head's weight [V, K]; rows of tokens from `vocabulary` on are padding."""
    if weight_VK.dim() != 2:
        raise OperandError(f"linear_logprob: a head is [vocabulary, hidden], got shape {tuple(weight_VK.shape)}")
    size = first + weight_VK.shape[0] if vocabulary is None else vocabulary
    return PackedHead(weight_VK, first, part_end(first, weight_VK.shape[0], size, contract), size, contract)


def linear_logprob(hidden_NK: torch.Tensor, head: PackedHead, tokens_N: torch.Tensor) -> torch.Tensor:
    """Score one token per row, float32 [N]."""
    return merge_statistics((head_statistics(hidden_NK, head, tokens_N),), head.contract)


def head_statistics(hidden_NK: torch.Tensor, head: PackedHead, tokens_N: torch.Tensor) -> Statistics:
    """The statistics of a head or of a shard of one."""
    return shard_statistics(_logits(hidden_NK, head), head.first, head.vocabulary, tokens_N, head.contract)


def linear_logprob_backward(
    grad_N: torch.Tensor, hidden_NK: torch.Tensor, head: PackedHead, tokens_N: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(gradient of the hidden states [N, K], gradient of the weight [V, K]), float32."""
    normal = normaliser((head_statistics(hidden_NK, head, tokens_N),), head.contract)
    return head_backward(grad_N, hidden_NK, head, tokens_N, normal)


def head_backward(
    grad_N: torch.Tensor,
    hidden_NK: torch.Tensor,
    head: PackedHead,
    tokens_N: torch.Tensor,
    normal: Normaliser,
    carry_NK: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Like `linear_logprob_backward` for a shard, given the whole vocabulary's normaliser and the shards before."""
    logits_NV = _logits(hidden_NK, head)
    grad_NV = shard_backward(grad_N, logits_NV, head.first, head.vocabulary, tokens_N, normal, head.contract)
    ignored_N1 = check_tokens(tokens_N, hidden_NK.shape[0], head.vocabulary, head.contract)[:, None]
    counted_NK = hidden_NK.to(torch.float32).masked_fill(ignored_N1, 0.0)
    with exact_products(hidden_NK.device):
        wide_NV = grad_NV.to(torch.float32)
        grad_hidden_NK, grad_weight_VK = wide_NV @ head.weight_VK.to(torch.float32), wide_NV.T @ counted_NK
    if carry_NK is not None:
        grad_hidden_NK += carry_NK
    return grad_hidden_NK.masked_fill(ignored_N1, 0.0), grad_weight_VK


def _logits(hidden_NK: torch.Tensor, head: PackedHead) -> torch.Tensor:
    with exact_products(hidden_NK.device):
        return hidden_NK.to(torch.float32) @ head.weight_VK.to(torch.float32).T
