"""What one part of a vocabulary tells about each row, and when parts add up to a whole vocabulary.

Legend: N rows, T vocabulary tiles of a part. Tile t of a vocabulary holds ids t * vocab_tile up to the next tile or
the end, on whatever rank it lies; parts are cut at these boundaries and nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rlk_ledger_kernels.errors import OperandError
from rlk_ledger_kernels.ops.selected_logprob.contract import LogprobContract


@dataclass(frozen=True)
class Statistics:
    """Rows seen by the tokens first..end-1 of a vocabulary; every tensor lies on the operands' device.

    top_NT: float32, the largest logit of each tile in ascending order, not yet divided by the temperature.
    sum_NT: float32, the sum of exp((z - top) / temperature) over each tile. chosen_N: float32, the logit of the row's
    token where this part owns it, else 0. owned_N, ignored_N: bool.
    """

    first: int
    end: int
    vocabulary: int
    top_NT: torch.Tensor
    sum_NT: torch.Tensor
    chosen_N: torch.Tensor
    owned_N: torch.Tensor
    ignored_N: torch.Tensor


def vocabulary_tiles(vocabulary: int, contract: LogprobContract) -> list[tuple[int, int]]:
    """[start, end) of each tile, in the order in which they are merged."""
    spans = part_tiles(0, vocabulary, contract)
    return spans[::-1] if contract.schedule.vocab_order == "reverse" else spans


def part_tiles(first: int, end: int, contract: LogprobContract) -> list[tuple[int, int]]:
    """[start, end) of each tile of a part, ascending; empty for a part that is all padding."""
    width = contract.schedule.vocab_tile
    return [(start, min(start + width, end)) for start in range(first, end, width)]


def part_end(first: int, width: int, vocabulary: int, contract: LogprobContract) -> int:
    """Where a part of `width` columns from `first` ends once padding beyond the declared vocabulary is left out.

    Raises OperandError for a vocabulary below 1 and for a cut that is not a tile boundary.
    """
    tile = contract.schedule.vocab_tile
    if vocabulary < 1:
        raise OperandError(f"logprob: the declared vocabulary is {vocabulary}; declare at least 1 token")
    if first < 0 or width < 0:
        raise OperandError(f"logprob: a part of {width} columns from token {first} does not exist")
    end = max(first, min(first + width, vocabulary))
    if first < vocabulary and (first % tile or (end % tile and end != vocabulary)):
        raise OperandError(
            f"logprob: a shard holds tokens {first}..{end - 1}, which cuts a vocabulary tile of {tile}; "
            f"cut shards at multiples of {tile}, or set schedule.vocab_tile to a divisor of the shard width"
        )
    return end


def check_token_shape(tokens_N: torch.Tensor, rows: int) -> None:
    """Raise OperandError when tokens are not int64 or int32 [rows]; no question to a device."""
    if tokens_N.shape != (rows,) or tokens_N.dtype not in (torch.int64, torch.int32):
        raise OperandError(
            f"selected_logprob: tokens are {tokens_N.dtype} {tuple(tokens_N.shape)}; pass int64 ({rows},), one per row"
        )


def check_tokens(tokens_N: torch.Tensor, rows: int, vocabulary: int, contract: LogprobContract) -> torch.Tensor:
    """The rows to ignore, bool [N].

    Raises OperandError when tokens are not int64 [N], or, on a CPU, for the first id outside the vocabulary. On a GPU
    that question would wait for the device, so such a row scores NaN there.
    """
    check_token_shape(tokens_N, rows)
    if contract.ignore_index is None:
        ignored_N = torch.zeros_like(tokens_N, dtype=torch.bool)
    else:
        ignored_N = tokens_N == contract.ignore_index
    outside_N = ((tokens_N < 0) | (tokens_N >= vocabulary)) & ~ignored_N
    if tokens_N.device.type == "cpu" and bool(outside_N.any()):
        at = int(outside_N.nonzero()[0, 0])
        raise OperandError(f"selected_logprob: token id {int(tokens_N[at])} at row {at} is outside 0..{vocabulary - 1}")
    return ignored_N


def whole(parts: Sequence[Statistics]) -> list[Statistics]:
    """The parts in vocabulary order, when together they are the vocabulary.

    Raises OperandError naming the gap, the overlap or the disagreement.
    """
    if not parts:
        raise OperandError("merge_statistics: no parts; pass one per rank")
    vocabulary, rows = parts[0].vocabulary, parts[0].chosen_N.shape[0]
    for index, part in enumerate(parts):
        if part.vocabulary != vocabulary or part.chosen_N.shape[0] != rows:
            raise OperandError(
                f"merge_statistics: part {index} has {part.chosen_N.shape[0]} rows of a vocabulary of "
                f"{part.vocabulary}, part 0 has {rows} rows of {vocabulary}"
            )
    reached, ordered = 0, sorted((part for part in parts if part.end > part.first), key=lambda part: part.first)
    for part in ordered:
        if part.first != reached:
            kind = "a gap" if part.first > reached else "an overlap"
            low, high = sorted((part.first, reached))
            raise OperandError(f"merge_statistics: {kind} between the shards at tokens {low}..{high - 1}")
        reached = part.end
    if reached != vocabulary:
        raise OperandError(f"merge_statistics: a gap between the shards at tokens {reached}..{vocabulary - 1}")
    return ordered
