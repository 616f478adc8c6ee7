"""linear_logprob, torch: the head's product one vocabulary tile at a time, each reduced before the next is made.

Legend: N rows, K hidden size, V rows of the head held here, W rows of one vocabulary tile.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from rlk_ledger_kernels.dtypes import torch_dtype
from rlk_ledger_kernels.errors import OperandError
from rlk_ledger_kernels.ops.linear.contract import LinearContract
from rlk_ledger_kernels.ops.linear.torch import PackedLinear, linear, pack_linear
from rlk_ledger_kernels.ops.selected_logprob.contract import LogprobContract
from rlk_ledger_kernels.ops.selected_logprob.statistics import Statistics, check_tokens, part_end, part_tiles
from rlk_ledger_kernels.ops.selected_logprob.torch import (
    Tile,
    merge_statistics,
    normaliser,
    tile_backward,
    tile_statistics,
)

Normaliser = tuple[torch.Tensor, torch.Tensor]
"""(largest logit, sum of exp((z - largest) / temperature)) of each row over the whole vocabulary."""

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
    """The rows first..end-1 of a language-model head, cut into vocabulary tiles.

    tiles: (first token, packed weight), ascending.
    """

    tiles: tuple[tuple[int, PackedLinear], ...]
    weight_VK: torch.Tensor
    first: int
    end: int
    vocabulary: int
    contract: LogprobContract


def pack_head(
    weight_VK: torch.Tensor, contract: LogprobContract, first: int = 0, vocabulary: int | None = None
) -> PackedHead:
    """Cut and widen a head's weight once.

    weight_VK: [V, K], the rows of tokens first..first+V-1; those from `vocabulary` on are padding. vocabulary: the
    declared size, by default where these rows end. Raises OperandError for a cut inside a vocabulary tile.
    """
    if weight_VK.dim() != 2:
        raise OperandError(f"linear_logprob: a head is [vocabulary, hidden], got shape {tuple(weight_VK.shape)}")
    size = first + weight_VK.shape[0] if vocabulary is None else vocabulary
    end = part_end(first, weight_VK.shape[0], size, contract)
    inner = LinearContract(output=contract.logits, operands=contract.head, schedule=contract.schedule)
    tiles = tuple(
        (a, pack_linear(weight_VK[a - first : b - first], inner)) for a, b in part_tiles(first, end, contract)
    )
    return PackedHead(tiles, weight_VK, first, end, size, contract)


def linear_logprob(hidden_NK: torch.Tensor, head: PackedHead, tokens_N: torch.Tensor) -> torch.Tensor:
    """Score one token per row from hidden states: log softmax(hidden @ weight^T / temperature)[token].

    hidden_NK: [N, K]. tokens_N: int64 [N]. head: of the whole vocabulary. Returns float32 [N] (nats).
    Raises OperandError naming the first token outside the vocabulary, and when the head is but a shard.
    """
    return merge_statistics((head_statistics(hidden_NK, head, tokens_N),), head.contract)


def head_statistics(hidden_NK: torch.Tensor, head: PackedHead, tokens_N: torch.Tensor) -> Statistics:
    """The statistics of a head or of a shard of one, to be merged with those of the other shards."""
    return tile_statistics(_tiles(hidden_NK, head), head.first, head.end, head.vocabulary, tokens_N, head.contract)


def linear_logprob_backward(
    grad_N: torch.Tensor, hidden_NK: torch.Tensor, head: PackedHead, tokens_N: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of the hidden states [N, K] and of the weight [V, K], float32, logits recomputed tile by tile.

    grad_hidden = sum over tiles in tile order of d @ weight, d = grad / temperature * (onehot - softmax): row-local.
    grad_weight = d^T @ hidden, tokens summed in blocks of `k_leaf`, blocks in order; rows of padding are exactly 0.
    """
    return head_backward(
        grad_N, hidden_NK, head, tokens_N, normaliser((head_statistics(hidden_NK, head, tokens_N),), head.contract)
    )


def head_backward(
    grad_N: torch.Tensor,
    hidden_NK: torch.Tensor,
    head: PackedHead,
    tokens_N: torch.Tensor,
    normal: Normaliser,
    carry_NK: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Like `linear_logprob_backward` for a shard of a head.

    normal: what `normaliser` says of the whole vocabulary. carry_NK: the hidden gradient of the shards before this one,
    which is continued, so that shards taken in order give the bits of one.
    """
    grad_weight_VK = torch.zeros(head.weight_VK.shape, dtype=torch.float32, device=hidden_NK.device)
    if carry_NK is None:
        grad_hidden_NK = torch.zeros(hidden_NK.shape, dtype=torch.float32, device=hidden_NK.device)
    else:
        grad_hidden_NK = carry_NK.clone()
    ignored_N = check_tokens(tokens_N, hidden_NK.shape[0], head.vocabulary, head.contract)
    # What an ignored row holds, NaN included, must not meet its zeros.
    counted_NK = hidden_NK.masked_fill(ignored_N[:, None], 0.0)
    for start, d_NW in _row_gradients(grad_N, hidden_NK, head, tokens_N, normal):
        rows = slice(start - head.first, start - head.first + d_NW.shape[1])
        grad_hidden_NK += _times_weight(d_NW, head.weight_VK[rows], head.contract)
        grad_weight_VK[rows] = _over_tokens(d_NW, counted_NK, head.contract)
    return grad_hidden_NK.masked_fill_(ignored_N[:, None], 0.0), grad_weight_VK


def _row_gradients(
    grad_N: torch.Tensor, hidden_NK: torch.Tensor, head: PackedHead, tokens_N: torch.Tensor, normal: Normaliser
) -> Iterator[Tile]:
    tiles = _tiles(hidden_NK, head)
    return ((tile[0], tile_backward(grad_N, tile, tokens_N, normal, head.contract)) for tile in tiles)


def _times_weight(d_NW: torch.Tensor, weight_WK: torch.Tensor, contract: LogprobContract) -> torch.Tensor:
    rounded_WK = weight_WK if contract.head is None else weight_WK.to(torch_dtype(contract.head))
    return linear(d_NW, pack_linear(rounded_WK.T, LinearContract(schedule=contract.schedule)))


def _over_tokens(d_NW: torch.Tensor, hidden_NK: torch.Tensor, contract: LogprobContract) -> torch.Tensor:
    """d^T @ hidden, float32 [W, K]: every block of tokens is one product of one shape, so padding adds exact zeros."""
    wide_NK = (hidden_NK if contract.head is None else hidden_NK.to(torch_dtype(contract.head))).to(torch.float32)
    total_WK = torch.zeros((d_NW.shape[1], hidden_NK.shape[1]), dtype=torch.float32, device=d_NW.device)
    block = contract.schedule.k_leaf
    inner = LinearContract(schedule=contract.schedule)
    for start in range(0, d_NW.shape[0], block):
        short = max(0, start + block - d_NW.shape[0])
        d_BW = torch.nn.functional.pad(d_NW[start : start + block], (0, 0, 0, short))
        x_BK = torch.nn.functional.pad(wide_NK[start : start + block], (0, 0, 0, short))
        total_WK += linear(d_BW.T.contiguous(), pack_linear(x_BK.T, inner))
    return total_WK


def _tiles(hidden_NK: torch.Tensor, head: PackedHead) -> Iterator[Tile]:
    return ((start, linear(hidden_NK, packed)) for start, packed in head.tiles)
