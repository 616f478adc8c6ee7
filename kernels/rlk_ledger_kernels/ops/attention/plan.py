"""The layout of one attention call: which queries form a tile and which cache blocks a tile visits.

A tile is a fixed run of absolute positions of one sequence, whether they arrive in one prefill, in chunks or
one at a time; rows that are not there are padding. A tile never straddles a KV block, so every row of it ends in
the same block: the last one needs the causal mask, those at the far edge of a window need the window's.
Plans are built on the host, in time linear in tiles and visits, and moved to a device once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch

from rlk_ledger_kernels.errors import OperandError
from rlk_ledger_kernels.schedule import Schedule
from rlk_ledger_kernels.tiles import padded_rows

PREFILL_TILE = 32
DECODE_TILE = 8


@dataclass(frozen=True)
class Chunk:
    """Queries of one sequence: `count` consecutive positions from `first`, next to each other in the packed rows.

    blocks: cache block of each logical KV block of the sequence, covering at least first + count positions. Blocks
    that are never visited (outside the window, or owned by another rank) may hold any number.
    """

    first: int
    count: int
    blocks: Sequence[int]


@dataclass(frozen=True)
class Step:
    """One logical KV block, visited by the tiles begin..end-1.

    Tiles are sorted by start position, farthest first, so those that see a block are contiguous. The first `edged`
    of them have the far edge of the window in it, the last `ending` have their own positions in it. blocks_A: cache
    block per visiting tile. edge_EQB, hidden_MQB: True where a key is invisible, for those two groups.
    """

    block: int
    begin: int
    end: int
    edged: int
    ending: int
    blocks_A: torch.Tensor
    edge_EQB: torch.Tensor
    hidden_MQB: torch.Tensor

    def subset(self, kept_S: np.ndarray) -> Step:
        """The step of some of its tiles, given as rising positions among them; begin and end do not change."""
        edged_S, own_S = kept_S[kept_S < self.edged], kept_S[kept_S >= self.end - self.begin - self.ending]
        device = self.blocks_A.device
        own_S = own_S - (self.end - self.begin - self.ending)
        return replace(
            self,
            edged=len(edged_S),
            ending=len(own_S),
            blocks_A=self.blocks_A[torch.from_numpy(kept_S).to(device)],
            edge_EQB=self.edge_EQB[torch.from_numpy(edged_S).to(device)],
            hidden_MQB=self.hidden_MQB[torch.from_numpy(own_S).to(device)],
        )

    def to(self, device: torch.device | str) -> Step:
        """The same step with its tensors on `device`."""
        return replace(
            self,
            blocks_A=self.blocks_A.to(device),
            edge_EQB=self.edge_EQB.to(device),
            hidden_MQB=self.hidden_MQB.to(device),
        )


@dataclass(frozen=True, eq=False)
class AttentionPlan:
    """Index tensors shared by all layers of one forward pass that have the same window.

    gather_R: packed row of each tile row, tiles x q_tile (padding repeats row 0). scatter_P: tile row of each
    packed row, then of padding rows up to a multiple of the smallest row tile (they repeat tile row 0).
    slot_block_N, slot_offset_N: where each packed row's key and value are stored. chunks, chunk_T, start_T: the
    chunks as given, each tile's chunk and its first absolute position, on the host.
    """

    q_tile: int
    kv_block: int
    window: int | None
    tiles: int
    rows: int
    gather_R: torch.Tensor
    scatter_P: torch.Tensor
    slot_block_N: torch.Tensor
    slot_offset_N: torch.Tensor
    steps: tuple[Step, ...]
    chunks: tuple[Chunk, ...]
    chunk_T: np.ndarray
    start_T: np.ndarray

    @cached_property
    def pairs(self) -> tuple[Pairs, ...]:
        """The visits again, as the backward pass takes them; built on first use."""
        return plan_pairs(self)

    def to(self, device: torch.device | str) -> AttentionPlan:
        """The same plan with its tensors on `device`."""
        return replace(
            self,
            gather_R=self.gather_R.to(device),
            scatter_P=self.scatter_P.to(device),
            slot_block_N=self.slot_block_N.to(device),
            slot_offset_N=self.slot_offset_N.to(device),
            steps=tuple(step.to(device) for step in self.steps),
        )


@dataclass(frozen=True)
class Pairs:
    """Visits at one distance: each tile and each key block occurs in at most one of them.

    tile_A: tiles. page_A: cache block. key_A: place of the logical block among all blocks of all chunks.
    hidden_AQB: True where the key is invisible to the row or the row is padding; None where nothing is.
    """

    tile_A: torch.Tensor
    page_A: torch.Tensor
    key_A: torch.Tensor
    hidden_AQB: torch.Tensor | None


def plan_pairs(plan: AttentionPlan) -> tuple[Pairs, ...]:
    """All visits by distance, nearest first: d is the number of tiles between a tile and the start of the block.

    So a key block sums its query tiles forward, and a query tile its key blocks from its own back to the first.
    """
    per_block, device = plan.kv_block // plan.q_tile, plan.gather_R.device
    offset_C = np.cumsum([0, *(len(chunk.blocks) for chunk in plan.chunks)])
    pages_P = np.concatenate([np.asarray(chunk.blocks, dtype=np.int64) for chunk in plan.chunks])
    bounds_C2 = np.asarray([(chunk.first, chunk.first + chunk.count) for chunk in plan.chunks])
    number_T, first_T = plan.start_T // plan.q_tile, first_block(plan.start_T, plan.kv_block, plan.window)
    pairs = []
    for distance in range(int(number_T[0]) + 1):
        reaching = number_T[: int(np.searchsorted(-number_T, -distance, side="right"))] - distance
        tile_A = np.flatnonzero((reaching % per_block == 0) & (reaching // per_block >= first_T[: len(reaching)]))
        if not len(tile_A):
            continue
        block_A, chunk_A = reaching[tile_A] // per_block, plan.chunk_T[tile_A]
        position_AQ = plan.start_T[tile_A, None] + np.arange(plan.q_tile)
        behind_AQB = position_AQ[:, :, None] - (block_A[:, None] * plan.kv_block + np.arange(plan.kv_block))[:, None]
        padding_AQ = (position_AQ < bounds_C2[chunk_A, :1]) | (position_AQ >= bounds_C2[chunk_A, 1:])
        hidden_AQB = (behind_AQB < 0) | padding_AQ[:, :, None]
        if plan.window is not None:
            hidden_AQB |= behind_AQB >= plan.window
        key_A = offset_C[chunk_A] + block_A
        pairs.append(
            Pairs(
                tile_A=torch.from_numpy(tile_A).to(device),
                page_A=torch.from_numpy(pages_P[key_A]).to(device),
                key_A=torch.from_numpy(key_A).to(device),
                hidden_AQB=torch.from_numpy(hidden_AQB).to(device) if hidden_AQB.any() else None,
            )
        )
    return tuple(pairs)


def plan_attention(
    chunks: Sequence[Chunk], schedule: Schedule, q_tile: int | None = None, window: int | None = None
) -> AttentionPlan:
    """Lay out `chunks`, in the order of their packed rows.

    q_tile: rows per tile, a divisor of kv_block; by default 32 (or kv_block), and 8 when all chunks are short.
    window: the contract's; blocks wholly outside it are not visited.
    Raises OperandError for an empty plan, an empty chunk, an empty window or a block list that is too short.
    """
    block = schedule.kv_block
    if q_tile is None:
        short = all(chunk.count <= DECODE_TILE for chunk in chunks)
        q_tile = min(DECODE_TILE if short else PREFILL_TILE, block)
    _check(chunks, block, q_tile, window)
    source, chunk_T = _tiles(chunks, q_tile)
    order = np.argsort(-source[:, 0], kind="stable")
    start_T, source, chunk_T = source[order, 0], source[order, 1:], chunk_T[order]
    gather = source.reshape(-1)
    present = np.flatnonzero(gather >= 0)
    rows = sum(chunk.count for chunk in chunks)
    scatter = np.zeros(padded_rows(rows, schedule.row_tiles), dtype=np.int64)
    scatter[gather[present]] = present
    positions = np.concatenate([np.arange(c.first, c.first + c.count) for c in chunks])
    slot_block = np.concatenate(
        [np.asarray(c.blocks, dtype=np.int64)[np.arange(c.first, c.first + c.count) // block] for c in chunks]
    )
    steps = _steps(chunks, chunk_T, start_T, block, q_tile, window)
    return AttentionPlan(
        q_tile=q_tile,
        kv_block=block,
        window=window,
        tiles=len(start_T),
        rows=rows,
        gather_R=torch.from_numpy(np.maximum(gather, 0)),
        scatter_P=torch.from_numpy(scatter),
        slot_block_N=torch.from_numpy(slot_block),
        slot_offset_N=torch.from_numpy(positions % block),
        steps=tuple(reversed(steps)) if schedule.kv_order == "reverse" else tuple(steps),
        chunks=tuple(chunks),
        chunk_T=chunk_T,
        start_T=start_T,
    )


def _check(chunks: Sequence[Chunk], block: int, q_tile: int, window: int | None) -> None:
    if not chunks:
        raise OperandError("attention: a plan needs at least one chunk")
    if q_tile < 1 or block % q_tile:
        raise OperandError(f"attention: q_tile {q_tile} must divide kv_block {block}")
    if window is not None and window < 1:
        raise OperandError(f"attention: the window is {window}; choose at least 1, or None for full attention")
    for index, chunk in enumerate(chunks):
        if chunk.count < 1 or chunk.first < 0:
            raise OperandError(f"attention: chunk {index} is empty or starts before 0")
        if len(chunk.blocks) * block < chunk.first + chunk.count:
            raise OperandError(
                f"attention: chunk {index} ends at position {chunk.first + chunk.count}, "
                f"its {len(chunk.blocks)} cache blocks end at {len(chunk.blocks) * block}"
            )


def _tiles(chunks: Sequence[Chunk], q_tile: int) -> tuple[np.ndarray, np.ndarray]:
    """For every tile: its start position followed by the packed row of each row or -1; its chunk."""
    sources, of_chunk = [], []
    row = 0
    for index, chunk in enumerate(chunks):
        end = chunk.first + chunk.count
        start_T = np.arange(chunk.first // q_tile, (end - 1) // q_tile + 1) * q_tile
        position_TQ = start_T[:, None] + np.arange(q_tile)[None, :]
        inside = (position_TQ >= chunk.first) & (position_TQ < end)
        packed_TQ = np.where(inside, position_TQ - chunk.first + row, -1)
        sources.append(np.concatenate((start_T[:, None], packed_TQ), axis=1))
        of_chunk.append(np.full(len(start_T), index))
        row += chunk.count
    return np.concatenate(sources), np.concatenate(of_chunk)


def first_block(start_T: np.ndarray, block: int, window: int | None) -> np.ndarray:
    """The first logical block that a tile starting at each position can see."""
    if window is None:
        return np.zeros_like(start_T)
    return np.asarray(np.maximum(start_T - window + 1, 0) // block)


def _steps(
    chunks: Sequence[Chunk], chunk_T: np.ndarray, start_T: np.ndarray, block: int, q_tile: int, window: int | None
) -> list[Step]:
    """Every logical block that some tile sees, ascending; both bounds fall with the start, so tiles are contiguous."""
    pages = np.concatenate([np.asarray(chunk.blocks, dtype=np.int64) for chunk in chunks])
    offset_C = np.cumsum([0, *(len(chunk.blocks) for chunk in chunks)])
    page_T = offset_C[chunk_T]
    falling_last_T, falling_first_T = -(start_T // block), -first_block(start_T, block, window)
    full_T = -np.maximum(start_T + q_tile - (window or 0), 0) if window is not None else np.zeros_like(start_T)
    key_B, row_Q = np.arange(block), np.arange(q_tile)
    steps = []
    for j in range(int(-falling_first_T.max()), int(-falling_last_T.min()) + 1):
        begin = int(np.searchsorted(falling_first_T, -j, side="left"))
        end = int(np.searchsorted(falling_last_T, -j, side="right"))
        if begin >= end:
            continue
        ending = end - max(begin, int(np.searchsorted(falling_last_T, -j, side="left")))
        edged = max(0, min(end, int(np.searchsorted(full_T, -j * block, side="left"))) - begin)
        far_EQ = start_T[begin : begin + edged, None] + row_Q - (window or 0) - j * block
        own_MQ = start_T[end - ending : end, None] + row_Q - j * block
        steps.append(
            Step(
                block=j,
                begin=begin,
                end=end,
                edged=edged,
                ending=ending,
                blocks_A=torch.from_numpy(pages[page_T[begin:end] + j]),
                edge_EQB=torch.from_numpy(key_B <= far_EQ[:, :, None]),
                hidden_MQB=torch.from_numpy(key_B > own_MQ[:, :, None]),
            )
        )
    return steps


def tiled_for_backward(plan: AttentionPlan, schedule: Schedule) -> AttentionPlan:
    """The plan with the one query tile that sums over queries are taken in, so that no batch chooses their order."""
    tile = min(PREFILL_TILE, plan.kv_block)
    if plan.q_tile == tile:
        return plan
    return plan_attention(plan.chunks, schedule, tile, plan.window).to(plan.gather_R.device)


def key_places(plan: AttentionPlan) -> tuple[torch.Tensor, torch.Tensor]:
    """For each packed row, its logical block among all blocks of all chunks and its place inside."""
    offset_C = np.cumsum([0, *(len(chunk.blocks) for chunk in plan.chunks)])
    block_N = np.concatenate(
        [offset_C[i] + np.arange(c.first, c.first + c.count) // plan.kv_block for i, c in enumerate(plan.chunks)]
    )
    return torch.from_numpy(block_N).to(plan.slot_offset_N.device), plan.slot_offset_N
