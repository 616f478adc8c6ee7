"""Partial results of attention, one per (query tile, logical KV block), and who owns which block.

Context parallelism cuts a sequence into whole logical blocks. Each rank computes the partials of the blocks it owns
for every query; the partials of all ranks are merged in global block order, exactly as one rank would.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from rlk_ledger_kernels.errors import OperandError
from rlk_ledger_kernels.ops.attention.plan import AttentionPlan

Owned = Sequence[Sequence[int]]
"""For each chunk of a plan, the logical KV blocks that one rank owns."""


@dataclass(frozen=True)
class BlockPartials:
    """What each visit of a tile to a block left: float32 maximum m, denominator l and numerator o, all block-local.

    tile_E, block_E: the visit of each entry, on the host. m_EKM, l_EKM: [E, kv heads, group x q_tile]; m is minus
    infinity and l zero where the row sees no key of the block. o_EKMD: [E, kv heads, group x q_tile, D], under m.
    rows: rows of the query the partials came from.
    """

    rows: int
    tile_E: np.ndarray
    block_E: np.ndarray
    m_EKM: torch.Tensor
    l_EKM: torch.Tensor
    o_EKMD: torch.Tensor

    def packed(self, size: int) -> torch.Tensor:
        """One float32 tensor [size, kv heads, M, D + 2] to send: o, m, l; zero after this rank's own entries."""
        e, kv_heads, rows, head_dim = self.o_EKMD.shape
        packed = torch.zeros((size, kv_heads, rows, head_dim + 2), dtype=torch.float32, device=self.o_EKMD.device)
        packed[:e, ..., :head_dim] = self.o_EKMD
        packed[:e, ..., head_dim] = self.m_EKM
        packed[:e, ..., head_dim + 1] = self.l_EKM
        return packed


def unpacked(packed: torch.Tensor, plan: AttentionPlan, owned: Owned, rows: int) -> BlockPartials:
    """The partials another rank sent with `packed`; owned: that rank's blocks; rows: of the query."""
    tile_E, block_E = entries(plan, owned)
    mine = packed[: len(tile_E)]
    return BlockPartials(rows, tile_E, block_E, mine[..., -2], mine[..., -1], mine[..., :-2])


def visits(plan: AttentionPlan, owned: Owned) -> list[np.ndarray]:
    """For each step of the plan, in its order, the tiles that visit the step's block and whose block is owned.

    Raises OperandError when `owned` does not name the plan's chunks or a block lies outside its chunk.
    """
    owned_P, offset_C = _ownership(plan, owned)
    offset_T = offset_C[plan.chunk_T]
    return [step.begin + np.flatnonzero(owned_P[offset_T[step.begin : step.end] + step.block]) for step in plan.steps]


def entries(plan: AttentionPlan, owned: Owned) -> tuple[np.ndarray, np.ndarray]:
    """(tile, logical block) of every partial of a rank, in the plan's block order, then by tile."""
    tiles = visits(plan, owned)
    blocks = [np.full(len(tile_S), step.block) for tile_S, step in zip(tiles, plan.steps)]
    return np.concatenate(tiles), np.concatenate(blocks)


def collected(parts: Sequence[BlockPartials], plan: AttentionPlan) -> torch.Tensor:
    """Where each visit of the plan, in the plan's order, stands in the concatenation of `parts`.

    Raises OperandError naming the first visit that is missing, given twice or not in the plan.
    """
    tile_E = np.concatenate([part.tile_E for part in parts])
    block_E = np.concatenate([part.block_E for part in parts])
    wanted_V = np.concatenate([step.block * plan.tiles + np.arange(step.begin, step.end) for step in plan.steps])
    key_E = block_E * plan.tiles + tile_E
    order_E = np.argsort(key_E, kind="stable")
    sorted_E = key_E[order_E]
    twice = np.flatnonzero(sorted_E[1:] == sorted_E[:-1])
    if len(twice):
        raise OperandError(f"attention: {_visit(int(sorted_E[twice[0]]), plan)} is given by two ranks")
    at_V = np.searchsorted(sorted_E, wanted_V)
    found_V = sorted_E[np.minimum(at_V, len(sorted_E) - 1)] == wanted_V if len(sorted_E) else np.zeros(len(at_V), bool)
    if not found_V.all():
        raise OperandError(f"attention: {_visit(int(wanted_V[~found_V][0]), plan)} is given by no rank")
    if len(sorted_E) != len(wanted_V):
        extra = np.setdiff1d(sorted_E, wanted_V)
        raise OperandError(f"attention: {_visit(int(extra[0]), plan)} is given, but the plan does not visit it")
    return torch.from_numpy(order_E[at_V])


def _visit(key: int, plan: AttentionPlan) -> str:
    block, tile = divmod(key, plan.tiles)
    return f"logical block {block} for chunk {int(plan.chunk_T[tile])}, positions from {int(plan.start_T[tile])},"


def owned_rows(plan: AttentionPlan, owned: Owned) -> np.ndarray:
    """The packed rows whose keys and values one rank owns, ascending."""
    owned_P, offset_C = _ownership(plan, owned)
    at_N = [offset_C[i] + np.arange(c.first, c.first + c.count) // plan.kv_block for i, c in enumerate(plan.chunks)]
    return np.flatnonzero(owned_P[np.concatenate(at_N)])


def restored_order(rows_of_ranks: Sequence[np.ndarray]) -> np.ndarray:
    """Where each packed row stands in the concatenation of what the ranks hold: the index that restores token order.

    Raises OperandError when a row is held by no rank or by several.
    """
    held = np.concatenate(rows_of_ranks)
    order = np.argsort(held, kind="stable")
    wrong = np.flatnonzero(held[order] != np.arange(len(held)))
    if len(wrong):
        raise OperandError(f"attention: packed row {int(wrong[0])} is not held by exactly one rank")
    return order


def _ownership(plan: AttentionPlan, owned: Owned) -> tuple[np.ndarray, np.ndarray]:
    """A flag per (chunk, logical block), concatenated, and where each chunk's flags start."""
    if len(owned) != len(plan.chunks):
        raise OperandError(
            f"attention: owned blocks are given for {len(owned)} chunks, the plan has {len(plan.chunks)}"
        )
    offset_C = np.cumsum([0, *(len(chunk.blocks) for chunk in plan.chunks)])
    owned_P = np.zeros(int(offset_C[-1]), dtype=bool)
    for index, blocks in enumerate(owned):
        block_B = np.asarray(blocks, dtype=np.int64)
        outside = block_B[(block_B < 0) | (block_B >= len(plan.chunks[index].blocks))]
        if len(outside):
            raise OperandError(
                f"attention: chunk {index} has {len(plan.chunks[index].blocks)} logical blocks; "
                f"block {int(outside[0])} cannot be owned"
            )
        owned_P[offset_C[index] + block_B] = True
    return owned_P, offset_C[:-1]


def contiguous(blocks: int, ranks: int) -> tuple[tuple[int, ...], ...]:
    """Blocks of each rank when a sequence of `blocks` is cut into `ranks` runs."""
    cut = [blocks * rank // ranks for rank in range(ranks + 1)]
    return tuple(tuple(range(a, b)) for a, b in pairwise(cut))


def zigzag(blocks: int, ranks: int) -> tuple[tuple[int, ...], ...]:
    """Blocks of each rank when causal work is balanced: of 2 ranks runs, rank r owns run r and run 2 ranks - 1 - r."""
    runs = contiguous(blocks, 2 * ranks)
    return tuple(runs[rank] + runs[2 * ranks - 1 - rank] for rank in range(ranks))
