"""What a kernel launch reads about a plan: small integer tensors on the plan's device, made once per plan.

A launch tile is a run of consecutive queries of one chunk, cut from the chunk's first query on. Its size changes no
bit: a row visits the blocks it sees in the schedule's order, and a block it does not see leaves it as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import torch

from rlk_ledger_kernels.ops.attention.plan import AttentionPlan


@dataclass(frozen=True)
class Launch:
    """tiles_T4: packed row of the first query, its position, queries, and where the chunk's pages start; longest first.

    pages_P: cache block of every logical block of every chunk.
    """

    tiles_T4: torch.Tensor
    pages_P: torch.Tensor


_launches: WeakKeyDictionary[AttentionPlan, dict[int, Launch]] = WeakKeyDictionary()
_key_tiles: WeakKeyDictionary[AttentionPlan, torch.Tensor] = WeakKeyDictionary()
_places: WeakKeyDictionary[AttentionPlan, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = WeakKeyDictionary()


def launch(plan: AttentionPlan, queries: int) -> Launch:
    """The launch of a plan at this many queries to a tile."""
    known = _launches.setdefault(plan, {})
    if queries not in known:
        known[queries] = _build(plan, queries)
    return known[queries]


def _build(plan: AttentionPlan, queries: int) -> Launch:
    tiles, row, page = [], 0, 0
    for chunk in plan.chunks:
        start_T = np.arange(0, chunk.count, queries)
        count_T = np.minimum(queries, chunk.count - start_T)
        tiles.append(np.stack((row + start_T, chunk.first + start_T, count_T, np.full(len(start_T), page)), axis=1))
        row, page = row + chunk.count, page + len(chunk.blocks)
    tile_T4 = np.concatenate(tiles)
    tile_T4 = tile_T4[np.argsort(-tile_T4[:, 1], kind="stable")]
    pages_P = np.concatenate([np.asarray(chunk.blocks, dtype=np.int64) for chunk in plan.chunks])
    device = plan.gather_R.device
    return Launch(
        torch.from_numpy(tile_T4.astype(np.int32)).to(device), torch.from_numpy(pages_P.astype(np.int32)).to(device)
    )


def key_tiles(plan: AttentionPlan) -> torch.Tensor:
    """Rows of (packed row of the sequence's start, its length, logical block, cache block) for every written block."""
    if plan not in _key_tiles:
        tiles, row = [], 0
        for chunk in plan.chunks:
            count = (chunk.count - 1) // plan.kv_block + 1
            page_B = np.asarray(chunk.blocks, dtype=np.int64)[:count]
            tiles.append(np.stack((np.full(count, row), np.full(count, chunk.count), np.arange(count), page_B), axis=1))
            row += chunk.count
        _key_tiles[plan] = torch.from_numpy(np.concatenate(tiles).astype(np.int32)).to(plan.gather_R.device)
    return _key_tiles[plan]


def places(plan: AttentionPlan) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(packed row of every row of the plan's tiles or -1, first position of every tile, where its pages start)."""
    if plan not in _places:
        device = plan.gather_R.device
        packed_R = torch.full((plan.tiles * plan.q_tile,), -1, dtype=torch.int32, device=device)
        packed_R[plan.scatter_P[: plan.rows]] = torch.arange(plan.rows, dtype=torch.int32, device=device)
        offset_C = np.cumsum([0, *(len(chunk.blocks) for chunk in plan.chunks)])
        start_T, page_T = (
            torch.from_numpy(x.astype(np.int32)).to(device) for x in (plan.start_T, offset_C[plan.chunk_T])
        )
        _places[plan] = packed_R, start_T, page_T
    return _places[plan]


def visit_lists(plan: AttentionPlan) -> tuple[np.ndarray, np.ndarray]:
    """Offsets [T + 1] of each tile into the list of its visits (places among the plan's), in the plan's order."""
    tile_V = np.concatenate([np.arange(step.begin, step.end) for step in plan.steps])
    offset_T = np.concatenate(([0], np.cumsum(np.bincount(tile_V, minlength=plan.tiles))))
    return offset_T, np.argsort(tile_V, kind="stable")
