"""The rows of one pass through the network, as the ranks of a layout hold them.

A context-parallel rank holds the packed rows whose positions lie in KV blocks it owns, padded to a row tile. All of it
follows from positions, so every process derives the same picture of every rank without asking.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rlk_ledger_kernels.ops.attention.partials import Owned, entries, owned_rows, restored_order
from rlk_ledger_kernels.ops.attention.plan import AttentionPlan, Chunk, plan_attention
from rlk_ledger_kernels.schedule import Schedule
from rlk_ledger_kernels.tiles import padded_rows
from rlk_ledger_replay.layout import Layout, even_pieces

Windows = Sequence[int | None]


@dataclass(frozen=True)
class Pages:
    """Cache blocks of one sequence. owned: per cp rank, the logical blocks it owns. held: per cp rank of this process,
    the cache block of each logical block (any number where another rank owns it)."""

    owned: tuple[tuple[int, ...], ...]
    held: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class RankRows:
    """What one cp rank of this process runs: `count` rows and padding up to a row tile.

    ids_P, positions_P: int64. rows_W: the packed rows it holds, rows_P: the same with padding (repeats of row 0).
    plans: one per window, with this rank's cache blocks. pieces: the rows of each tp rank under sequence parallelism.
    """

    count: int
    ids_P: torch.Tensor
    positions_P: torch.Tensor
    rows_W: torch.Tensor
    rows_P: torch.Tensor
    plans: Mapping[int | None, AttentionPlan]
    pieces: tuple[tuple[int, int], ...]

    @property
    def padded(self) -> int:
        """Rows with padding."""
        return int(self.ids_P.numel())


@dataclass(frozen=True)
class Feed:
    """One pass: the cp ranks of this process, and what all processes know of all of them.

    counts: rows of each cp rank. owned: per cp rank and chunk, the logical blocks it owns. entries: per window, the
    visits of each cp rank. order_N: where each packed row stands in the concatenation of all ranks' rows.
    holder_N, place_N: cp rank of each packed row, and its place there.
    """

    rows: int
    ranks: tuple[RankRows, ...]
    counts: tuple[int, ...]
    owned: tuple[Owned, ...]
    entries: Mapping[int | None, tuple[int, ...]]
    order_N: torch.Tensor
    holder_N: torch.Tensor
    place_N: torch.Tensor


@dataclass(frozen=True)
class Piece:
    """Consecutive positions of one sequence: their token ids, the first position, the sequence's pages."""

    ids_T: torch.Tensor
    first: int
    pages: Pages


def plan_feed(
    pieces: Sequence[Piece],
    layout: Layout,
    held: Sequence[int],
    windows: Windows,
    schedule: Schedule,
    q_tile: int,
    device: str,
) -> Feed:
    """Lay out one pass.

    pieces: in packed order. held: the cp ranks of this process. windows: the distinct windows of the network's layers.
    """
    ids_N = torch.cat([piece.ids_T for piece in pieces])
    positions_N = torch.cat([torch.arange(p.first, p.first + p.ids_T.numel()) for p in pieces])
    plans = [
        {window: plan_attention(_chunks(pieces, local), schedule, q_tile, window) for window in dict.fromkeys(windows)}
        for local in range(len(held))
    ]
    owned = tuple(tuple(piece.pages.owned[rank] for piece in pieces) for rank in range(layout.cp))
    plan = next(iter(plans[0].values()))
    held_rows = [np.arange(plan.rows)] if layout.cp == 1 else [owned_rows(plan, blocks) for blocks in owned]
    holder_N, place_N = np.empty(plan.rows, dtype=np.int64), np.empty(plan.rows, dtype=np.int64)
    for rank, rows in enumerate(held_rows):
        holder_N[rows], place_N[rows] = rank, np.arange(len(rows))
    ranks = tuple(
        _rank(ids_N, positions_N, held_rows[rank], plans[local], layout, schedule, device)
        for local, rank in enumerate(held)
    )
    visited = {
        window: tuple(len(entries(one, blocks)[0]) for blocks in owned) if layout.cp > 1 else ()
        for window, one in plans[0].items()
    }
    return Feed(
        rows=plan.rows,
        ranks=ranks,
        counts=tuple(len(rows) for rows in held_rows),
        owned=owned,
        entries=visited,
        order_N=torch.from_numpy(restored_order(held_rows)).to(device),
        holder_N=torch.from_numpy(holder_N),
        place_N=torch.from_numpy(place_N),
    )


def _chunks(pieces: Sequence[Piece], local: int) -> list[Chunk]:
    return [Chunk(piece.first, int(piece.ids_T.numel()), piece.pages.held[local]) for piece in pieces]


def _rank(
    ids_N: torch.Tensor,
    positions_N: torch.Tensor,
    rows: np.ndarray,
    plans: Mapping[int | None, AttentionPlan],
    layout: Layout,
    schedule: Schedule,
    device: str,
) -> RankRows:
    rows_W = torch.from_numpy(rows)
    padding = torch.zeros(padded_rows(len(rows), schedule.row_tiles) - len(rows), dtype=torch.int64)
    rows_P = torch.cat((rows_W, padding))
    return RankRows(
        count=len(rows),
        ids_P=torch.cat((ids_N[rows_W], padding)).to(device),
        positions_P=torch.cat((positions_N[rows_W], padding)).to(device),
        rows_W=rows_W.to(device),
        rows_P=rows_P.to(device),
        plans={window: plan.to(device) for window, plan in plans.items()},
        pieces=even_pieces(len(rows_P), layout.tp),
    )
