"""Vocabulary shards of an embedding: which ids a rank owns, and ranks merged by copying.

A sum of shards would turn a stored -0 into +0 and a NaN into every other rank's; the owner's row is copied instead.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rlk_ledger_kernels.errors import OperandError


def check_ids(ids_N: torch.Tensor, first: int, end: int) -> None:
    """Raise OperandError naming the first id outside first..end-1, or ids that are no whole numbers."""
    if ids_N.dim() != 1 or ids_N.dtype not in (torch.int32, torch.int64):
        raise OperandError(f"embedding: ids are {ids_N.dtype} {tuple(ids_N.shape)}; pass int64 [N]")
    outside = (ids_N < first) | (ids_N >= end)
    if bool(outside.any()):
        at = int(outside.nonzero()[0, 0])
        raise OperandError(f"embedding: token id {int(ids_N[at])} at row {at} is outside {first}..{end - 1}")


def merge_embedding(parts: Sequence[torch.Tensor], ids_N: torch.Tensor, firsts: Sequence[int]) -> torch.Tensor:
    """The rows of the whole table from the ranks' shards: out[n] = parts[owner of id[n]][n].

    parts: `embedding_shard` of each rank in rank order, each [N, H]. ids_N: int64 [N]. firsts: the first id of each
    rank's shard, ascending, starting at 0. Returns [N, H], the same bits as `embedding` over the whole table.
    Raises OperandError when the counts differ, the shards do not start at 0 or do not ascend, or an id is below 0.
    """
    rising = list(firsts) == sorted(set(firsts))
    if not parts or len(parts) != len(firsts) or not rising or firsts[0] != 0:
        raise OperandError(
            f"merge_embedding: {len(parts)} parts of shards that start at {list(firsts)}; pass one part "
            "to a rank, the first starting at id 0 and each later than the one before"
        )
    if bool((ids_N < 0).any()):
        raise OperandError(f"merge_embedding: token id {int(ids_N.min())} is below 0")
    merged_NH = parts[0]
    for part_NH, first in zip(parts[1:], firsts[1:], strict=True):
        merged_NH = torch.where((ids_N >= first)[:, None], part_NH, merged_NH)
    return merged_NH
