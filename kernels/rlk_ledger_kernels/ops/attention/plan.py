"""The layout of one attention call: which queries form a tile and which cache blocks a tile visits.

A tile is a fixed run of absolute positions of one sequence, whether they arrive in one prefill, in chunks or
one at a time; rows that are not there are padding. A tile never straddles a KV block, so every row of it
visits the same blocks, and only the last of them needs a mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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

    blocks: cache block of each logical KV block of the sequence, covering at least first + count positions.
    """

    first: int
    count: int
    blocks: Sequence[int]


@dataclass(frozen=True)
class Step:
    """One logical KV block, visited by the `active` tiles before the end; the last `masked` of them end in it.

    Tiles are sorted so that those reaching farther come first; both groups are therefore contiguous.
    """

    active: int
    masked: int
    blocks_A: torch.Tensor
    hidden_MQB: torch.Tensor


@dataclass(frozen=True)
class AttentionPlan:
    """Index tensors shared by all layers of one forward pass.

    gather_R: packed row of each tile row, tiles x q_tile (padding repeats row 0). scatter_P: tile row of each
    packed row, then of padding rows up to a multiple of the smallest row tile (they repeat tile row 0).
    slot_block_N, slot_offset_N: where each packed row's key and value are stored.
    """

    q_tile: int
    tiles: int
    rows: int
    gather_R: torch.Tensor
    scatter_P: torch.Tensor
    slot_block_N: torch.Tensor
    slot_offset_N: torch.Tensor
    steps: tuple[Step, ...]


def plan_attention(chunks: Sequence[Chunk], schedule: Schedule, q_tile: int | None = None) -> AttentionPlan:
    """Lay out `chunks`, in the order of their packed rows.

    q_tile: rows per tile, a divisor of kv_block; by default 32 (or kv_block), and 8 when all chunks are short.
    Raises OperandError for an empty plan, an empty chunk or a block list that is too short.
    """
    block = schedule.kv_block
    if q_tile is None:
        short = all(chunk.count <= DECODE_TILE for chunk in chunks)
        q_tile = min(DECODE_TILE if short else PREFILL_TILE, block)
    _check(chunks, block, q_tile)
    last, source, of_chunk = _tiles(chunks, block, q_tile)
    order = np.argsort(-last, kind="stable")
    starts, source = source[order, 0], source[order, 1:]
    last, of_chunk = last[order], of_chunk[order]
    gather = source.reshape(-1)
    present = np.flatnonzero(gather >= 0)
    rows = sum(chunk.count for chunk in chunks)
    scatter = np.zeros(padded_rows(rows, schedule.row_tiles), dtype=np.int64)
    scatter[gather[present]] = present
    positions = np.concatenate([np.arange(c.first, c.first + c.count) for c in chunks])
    slot_block = np.concatenate(
        [np.asarray(c.blocks, dtype=np.int64)[np.arange(c.first, c.first + c.count) // block] for c in chunks]
    )
    return AttentionPlan(
        q_tile=q_tile,
        tiles=len(last),
        rows=rows,
        gather_R=torch.from_numpy(np.maximum(gather, 0)),
        scatter_P=torch.from_numpy(scatter),
        slot_block_N=torch.from_numpy(slot_block),
        slot_offset_N=torch.from_numpy(positions % block),
        steps=_steps(chunks, last, of_chunk, starts, schedule, q_tile),
    )


def _check(chunks: Sequence[Chunk], block: int, q_tile: int) -> None:
    if not chunks:
        raise OperandError("attention: a plan needs at least one chunk")
    if q_tile < 1 or block % q_tile:
        raise OperandError(f"attention: q_tile {q_tile} must divide kv_block {block}")
    for index, chunk in enumerate(chunks):
        if chunk.count < 1 or chunk.first < 0:
            raise OperandError(f"attention: chunk {index} is empty or starts before 0")
        if len(chunk.blocks) * block < chunk.first + chunk.count:
            raise OperandError(
                f"attention: chunk {index} ends at position {chunk.first + chunk.count}, "
                f"its {len(chunk.blocks)} cache blocks end at {len(chunk.blocks) * block}"
            )


def _tiles(chunks: Sequence[Chunk], block: int, q_tile: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For every tile: its last KV block; its start position followed by the packed row of each row or -1; its chunk."""
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
    source = np.concatenate(sources)
    return source[:, 0] // block, source, np.concatenate(of_chunk)


def _steps(
    chunks: Sequence[Chunk],
    last_T: np.ndarray,
    of_chunk_T: np.ndarray,
    start_T: np.ndarray,
    schedule: Schedule,
    q_tile: int,
) -> tuple[Step, ...]:
    block = schedule.kv_block
    table = np.zeros((len(chunks), int(last_T[0]) + 1), dtype=np.int64)
    for index, chunk in enumerate(chunks):
        used = min(len(chunk.blocks), table.shape[1])
        table[index, :used] = chunk.blocks[:used]
    key_B = np.arange(block)
    hidden_LQB = key_B[None, None, :] > (np.arange(0, block, q_tile)[:, None] + np.arange(q_tile))[:, :, None]
    steps = []
    for j in range(table.shape[1]):
        active = int(np.count_nonzero(last_T >= j))
        ending = np.flatnonzero(last_T == j)
        hidden_MQB = hidden_LQB[(start_T[ending] % block) // q_tile]
        steps.append(
            Step(
                active=active,
                masked=len(ending),
                blocks_A=torch.from_numpy(table[of_chunk_T[:active], j]),
                hidden_MQB=torch.from_numpy(hidden_MQB),
            )
        )
    return tuple(reversed(steps)) if schedule.kv_order == "reverse" else tuple(steps)
