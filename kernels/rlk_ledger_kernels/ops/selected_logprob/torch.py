"""selected_logprob, torch: (max, sum of exponentials) per vocabulary tile, merged in tile order.

The chosen token's logit is copied from the one tile that holds it and never takes part in a sum, so a vocabulary
cut over ranks at tile boundaries gives the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from rlk_ledger_kernels.dtypes import torch_dtype
from rlk_ledger_kernels.errors import OperandError
from rlk_ledger_kernels.ops.linear.contract import LinearContract
from rlk_ledger_kernels.ops.linear.torch import PackedLinear, linear, pack_linear, row_sum
from rlk_ledger_kernels.ops.selected_logprob.contract import LogprobContract


@dataclass(frozen=True)
class PackedHead:
    """A language-model head cut into vocabulary tiles: (first token, packed weight) in ascending order."""

    tiles: tuple[tuple[int, PackedLinear], ...]
    vocabulary: int
    contract: LogprobContract


def vocabulary_tiles(vocabulary: int, contract: LogprobContract) -> list[tuple[int, int]]:
    """[start, end) of each tile, in the order in which they are merged."""
    width = contract.schedule.vocab_tile
    spans = [(start, min(start + width, vocabulary)) for start in range(0, vocabulary, width)]
    return spans[::-1] if contract.schedule.vocab_order == "reverse" else spans


def pack_head(weight_VK: torch.Tensor, contract: LogprobContract) -> PackedHead:
    """Cut and widen a head's weight [V, K] once, in merge order."""
    inner = LinearContract(output=contract.logits, operands=contract.head, schedule=contract.schedule)
    tiles = tuple(
        (start, pack_linear(weight_VK[start:end], inner))
        for start, end in vocabulary_tiles(weight_VK.shape[0], contract)
    )
    return PackedHead(tiles=tiles, vocabulary=weight_VK.shape[0], contract=contract)


def linear_logprob(hidden_NK: torch.Tensor, head: PackedHead, tokens_N: torch.Tensor) -> torch.Tensor:
    """Score one token per row from hidden states, one vocabulary tile at a time.

    hidden_NK: [N, K]. tokens_N: int64 [N]. Returns float32 [N] (nats).
    Raises OperandError naming the first token outside the vocabulary.
    """
    tiles = ((start, linear(hidden_NK, packed)) for start, packed in head.tiles)
    return _merge(tiles, tokens_N, head.vocabulary, head.contract)


def selected_logprob(logits_NV: torch.Tensor, tokens_N: torch.Tensor, contract: LogprobContract) -> torch.Tensor:
    """Score one token per row from logits that already exist.

    logits_NV: [N, V], rounded to `contract.logits` first. tokens_N: int64 [N]. Returns float32 [N] (nats).
    Raises OperandError naming the first token outside the vocabulary.
    """
    dtype = torch_dtype(contract.logits)
    vocabulary = logits_NV.shape[1]
    tiles = ((start, logits_NV[:, start:end].to(dtype)) for start, end in vocabulary_tiles(vocabulary, contract))
    return _merge(tiles, tokens_N, vocabulary, contract)


def _merge(
    tiles: Iterator[tuple[int, torch.Tensor]], tokens_N: torch.Tensor, vocabulary: int, contract: LogprobContract
) -> torch.Tensor:
    outside = (tokens_N < 0) | (tokens_N >= vocabulary)
    if bool(outside.any()):
        at = int(outside.nonzero()[0, 0])
        raise OperandError(f"selected_logprob: token id {int(tokens_N[at])} at row {at} is outside 0..{vocabulary - 1}")
    rows = tokens_N.shape[0]
    top_N = torch.full((rows,), float("-inf"))
    sum_N = torch.zeros(rows)
    chosen_N = torch.zeros(rows)
    for start, logits_NT in tiles:
        scaled_NT = logits_NT.to(torch.float32)
        if contract.temperature != 1.0:
            scaled_NT = scaled_NT / contract.temperature
        local_N = tokens_N - start
        inside_N = (local_N >= 0) & (local_N < scaled_NT.shape[1])
        found_N = scaled_NT.gather(1, local_N.clamp(0, scaled_NT.shape[1] - 1)[:, None])[:, 0]
        chosen_N = torch.where(inside_N, found_N, chosen_N)
        tile_top_N = scaled_NT.amax(-1)
        tile_sum_N = row_sum((scaled_NT - _anchor(tile_top_N)[:, None]).exp_(), contract.schedule)
        new_top_N = torch.maximum(top_N, tile_top_N)
        anchor_N = _anchor(new_top_N)
        sum_N = sum_N * (top_N - anchor_N).exp() + tile_sum_N * (tile_top_N - anchor_N).exp()
        top_N = new_top_N
    return (chosen_N - top_N) - sum_N.log()


def _anchor(top_N: torch.Tensor) -> torch.Tensor:
    """The maximum to subtract: 0 for a row whose logits so far are all minus infinity (masked by the caller)."""
    return torch.where(top_N == float("-inf"), 0.0, top_N)
