"""The tree along which a contraction is summed, and what its shards compute of it.

K is halved until every part is at most `k_leaf` long; leaves are summed, sibling halves meet in one addition. The tree
depends on K and `k_leaf` alone, so a shard of K/2, K/4 or K/8 is a node of it and shards merge to the same bits.
Sums over tokens (weight gradients) have leaves of a fixed length instead: one more token moves no boundary.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from rlk_ledger_kernels.errors import ContractError, OperandError


def leaf_spans(k: int, leaf: int) -> tuple[tuple[int, int], ...]:
    """Cut 0..k by halving until every part is at most `leaf` long."""
    parts: list[tuple[int, int]] = []

    def cut(start: int, end: int) -> None:
        if end - start <= leaf:
            parts.append((start, end))
            return
        middle = start + (end - start) // 2
        cut(start, middle)
        cut(middle, end)

    cut(0, k)
    return tuple(parts)


def shard_span(k: int, leaf: int, ranks: int, rank: int) -> tuple[int, int]:
    """The first element and the end of K that `rank` of `ranks` owns, which is a node of the tree.

    Raises ContractError when the shards are not nodes: ranks no power of two, K not divisible by them, or a leaf that
    would straddle a boundary between shards.
    """
    if ranks < 1 or ranks & (ranks - 1) or not 0 <= rank < ranks:
        raise ContractError(
            f"linear: rank {rank} of {ranks} has no node in a tree of halves; use 1, 2, 4, 8, ... ranks"
        )
    if k % ranks:
        raise ContractError(f"linear: K = {k} does not divide into {ranks} row-parallel shards; use fewer ranks")
    if ranks > 1 and 2 * k // ranks <= leaf:
        raise ContractError(
            f"linear: leaves of K = {k} straddle the boundaries of {ranks} shards; choose schedule.k_leaf below "
            f"{2 * k // ranks}"
        )
    width = k // ranks
    return rank * width, (rank + 1) * width


def merge_tree(parts_NO: list[torch.Tensor]) -> torch.Tensor:
    """Add float32 shards pairwise, neighbours first; a fresh tensor, the shards are left as they are.

    Raises OperandError for a number of shards that is no power of two, or shards of different shape or dtype.
    """
    count = len(parts_NO)
    if count < 1 or count & (count - 1):
        raise OperandError(f"linear: {count} shards make no tree of halves; pass 1, 2, 4, 8, ... in rank order")
    shape = parts_NO[0].shape
    if any(part.shape != shape or part.dtype != torch.float32 for part in parts_NO):
        told = ", ".join(f"{part.dtype} {tuple(part.shape)}" for part in parts_NO)
        raise OperandError(f"linear: shards are float32 partial results of one shape, got {told}")
    level = parts_NO
    while len(level) > 1:
        level = [level[index] + level[index + 1] for index in range(0, len(level), 2)]
    return level[0].clone() if count == 1 else level[0]


def sum_blocks(blocks: Iterable[torch.Tensor]) -> torch.Tensor | None:
    """Add blocks, taken in index order, along the binary tree over their indices; None of no block.

    Blocks 2i and 2i + 1 meet first, then pairs of pairs; a node without a right half is its left half. At most
    log2(blocks) + 1 tensors live at once.
    """
    stack: list[torch.Tensor] = []
    for index, block in enumerate(blocks):
        carried = block
        while index & 1:
            carried = stack.pop() + carried
            index >>= 1
        stack.append(carried)
    if not stack:
        return None
    total = stack.pop()
    while stack:
        total = stack.pop() + total
    return total
