"""Explicit split-KV plans: who reduces which logical blocks, as data that is checked, fingerprinted and recorded.

A cell is one (sequence, TP rank, CP rank, owner); it reduces the logical blocks first..end-1 of that sequence for the
heads of that TP rank. Every cell stands in the plan exactly once, perhaps with no block, and the cells of a (sequence,
TP rank) cover every block of the sequence exactly once. Since blocks are reduced alone and merged by global index, a
plan changes who computes and never a bit; a number of splits that follows the batch is refused all the same, because
an engine that merges running results does change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

import numpy as np
import torch

from rlk_ledger_kernels.errors import ContractError, OperandError
from rlk_ledger_kernels.ops.attention.cache import KVCache
from rlk_ledger_kernels.ops.attention.contract import AttentionContract
from rlk_ledger_kernels.ops.attention.partials import contiguous
from rlk_ledger_kernels.ops.attention.plan import AttentionPlan
from rlk_ledger_schemas.events.splits import ENTRY_FIELDS
from rlk_ledger_schemas.fingerprints import canonical_json, sha256

MergeOrder = Literal["global_block_index", "global_block_index_descending"]
_AUTO_BLOCKS = 8
"""Blocks to a split where `auto` is allowed."""


@dataclass(frozen=True, eq=False)
class SplitPlan:
    """A validated plan. blocks: logical blocks of each sequence. owners: splits of each CP rank.

    entries_E6: int32 rows of (sequence, TP rank, CP rank, owner, first block, end block), sorted by the first four.
    num_splits: what was asked for. Raises OperandError naming the first cell or block that is missing, given twice
    or out of range; checking takes time linear in entries and blocks.
    """

    kv_block: int
    blocks: tuple[int, ...]
    tp: int
    cp: int
    owners: int
    entries_E6: np.ndarray
    num_splits: int | Literal["auto"]
    merge_order: MergeOrder = "global_block_index"

    def __post_init__(self) -> None:
        """Index the cells, then count how often every block is covered."""
        if min(self.tp, self.cp, self.owners, self.kv_block) < 1 or min(self.blocks, default=0) < 1:
            raise OperandError(
                "split-KV plan: tp, cp, owners, kv_block and the blocks of every sequence are at least 1"
            )
        entries_E6 = np.asarray(self.entries_E6, dtype=np.int32).reshape(-1, len(ENTRY_FIELDS))
        cell_E = self._cells(entries_E6)
        object.__setattr__(self, "entries_E6", entries_E6[np.argsort(cell_E)])
        self._check_blocks()

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Sequences, TP ranks, CP ranks, owners."""
        return len(self.blocks), self.tp, self.cp, self.owners

    def _cells(self, entries_E6: np.ndarray) -> np.ndarray:
        for at, (field, size) in enumerate(zip(ENTRY_FIELDS, self.shape)):
            outside_E = np.flatnonzero((entries_E6[:, at] < 0) | (entries_E6[:, at] >= size))
            if len(outside_E):
                value = int(entries_E6[outside_E[0], at])
                raise OperandError(
                    f"split-KV plan: entry {int(outside_E[0])} has {field} {value}, outside 0..{size - 1}"
                )
        cell_E: np.ndarray = np.ravel_multi_index(tuple(entries_E6[:, :4].T.astype(np.int64)), self.shape)
        seen_C = np.bincount(cell_E, minlength=int(np.prod(self.shape)))
        for wrong, word in ((seen_C > 1, "given twice"), (seen_C == 0, "missing")):
            if wrong.any():
                raise OperandError(f"split-KV plan: {self._named(int(np.flatnonzero(wrong)[0]))} is {word}")
        return cell_E

    def _named(self, cell: int) -> str:
        sequence, tp_rank, cp_rank, owner = (int(i) for i in np.unravel_index(cell, self.shape))
        return f"sequence {sequence}, TP rank {tp_rank}, CP rank {cp_rank}, owner {owner}"

    def _check_blocks(self) -> None:
        first_E, end_E = self.entries_E6[:, 4].astype(np.int64), self.entries_E6[:, 5].astype(np.int64)
        limit_E = np.asarray(self.blocks)[self.entries_E6[:, 0]]
        bad_E = np.flatnonzero((first_E < 0) | (end_E < first_E) | (end_E > limit_E))
        if len(bad_E):
            e = int(bad_E[0])
            raise OperandError(
                f"split-KV plan: {self._named(e)} has blocks {int(first_E[e])}..{int(end_E[e])} (end exclusive), "
                f"the sequence has {int(limit_E[e])}"
            )
        # One difference array for all (sequence, TP rank): +1 where a range begins, -1 where it ends.
        offset_S = np.concatenate(([0], np.cumsum(np.asarray(self.blocks) + 1))) * self.tp
        start_E = offset_S[self.entries_E6[:, 0]] + self.entries_E6[:, 1] * (limit_E + 1)
        change_P = np.zeros(int(offset_S[-1]), dtype=np.int64)
        np.add.at(change_P, start_E + first_E, 1)
        np.subtract.at(change_P, start_E + end_E, 1)
        covered_P = np.cumsum(change_P)
        expected_P = np.ones_like(covered_P)
        lengths = np.repeat(np.asarray(self.blocks) + 1, self.tp)
        expected_P[np.cumsum(lengths) - 1] = 0
        wrong_P = np.flatnonzero(covered_P != expected_P)
        if len(wrong_P):
            at = int(wrong_P[0])
            group = int(np.searchsorted(np.cumsum(lengths), at, side="right"))
            block = at - int(np.cumsum(lengths)[group] - lengths[group])
            word = "covered by no owner" if covered_P[at] == 0 else f"covered by {int(covered_P[at])} owners"
            raise OperandError(
                f"split-KV plan: block {block} of sequence {group // self.tp}, TP rank {group % self.tp}, is {word}"
            )

    def owned(self, tp_rank: int, cp_rank: int, owner: int | None = None) -> list[list[int]]:
        """For each sequence, the logical blocks of one CP rank or of one of its owners, for `attention_partials`."""
        by_cell = self.entries_E6.reshape(*self.shape, len(ENTRY_FIELDS))[:, tp_rank, cp_rank]
        chosen = by_cell if owner is None else by_cell[:, owner : owner + 1]
        return [[block for row in rows for block in range(int(row[4]), int(row[5]))] for rows in chosen]

    def canonical(self) -> dict[str, Any]:
        """The plan as plain values, the same for the same plan whatever order its entries came in."""
        return {
            "kv_block": self.kv_block,
            "blocks": list(self.blocks),
            "tp": self.tp,
            "cp": self.cp,
            "owners": self.owners,
            "num_splits": self.num_splits,
            "merge_order": self.merge_order,
            "entries": self.entries_E6.tolist(),
        }

    @property
    def fingerprint(self) -> str:
        """`sha256:` of the canonical form."""
        return sha256(canonical_json(self.canonical()))

    def to_event(self, *, strict: bool = True) -> dict[str, Any]:
        """The fields of `splitkv.planned`."""
        fields = {**self.canonical(), "plan_id": self.fingerprint, "strict": strict}
        return {**fields, "entries": self.entries_E6.reshape(-1)}


def plan_splits(
    blocks: Sequence[int],
    kv_block: int,
    num_splits: int | Literal["auto"],
    *,
    tp: int = 1,
    cp: int = 1,
    ownership: Literal["contiguous", "zigzag"] = "contiguous",
    kv_order: Literal["forward", "reverse"] = "forward",
    strict: bool = True,
) -> SplitPlan:
    """Cut the blocks of every sequence over `cp` ranks and each rank's share into `num_splits` runs.

    blocks: logical blocks of each sequence. ownership: `zigzag` gives a rank an early and a late run of blocks, so that
    causal work is balanced; num_splits is then a multiple of 2. Raises ContractError for num_splits `auto` in strict
    use, where the longest sequence of a batch would choose the splits of all, and OperandError for numbers that fit
    nothing.
    """
    if num_splits == "auto":
        if strict:
            raise ContractError("split-KV plan: num_splits 'auto' lets the batch choose; give a number in strict use")
        count = 2 * max(1, -(-max(blocks, default=1) // (2 * cp * _AUTO_BLOCKS)))
    else:
        count = num_splits
    pieces = 2 if ownership == "zigzag" else 1
    if count < 1 or count % pieces:
        raise OperandError(f"split-KV plan: num_splits is {count}; {ownership} ownership needs a multiple of {pieces}")
    entries = []
    for sequence, total in enumerate(blocks):
        runs = contiguous(total, pieces * cp)
        for cp_rank in range(cp):
            mine = (cp_rank,) if pieces == 1 else (cp_rank, 2 * cp - 1 - cp_rank)
            spans = [span for run in mine for span in _spans(runs[run], count // pieces)]
            entries += [
                (sequence, tp_rank, cp_rank, owner, first, end)
                for tp_rank in range(tp)
                for owner, (first, end) in enumerate(spans)
            ]
    order: MergeOrder = "global_block_index" if kv_order == "forward" else "global_block_index_descending"
    rows = np.asarray(entries, dtype=np.int32).reshape(-1, len(ENTRY_FIELDS))
    return SplitPlan(kv_block, tuple(blocks), tp, cp, count, rows, num_splits, order)


def _spans(run: Sequence[int], count: int) -> list[tuple[int, int]]:
    """`run` of consecutive blocks in `count` spans, some of them perhaps empty."""
    start = run[0] if run else 0
    return [(start + part[0], start + part[-1] + 1) if part else (0, 0) for part in contiguous(len(run), count)]


def split_attention(
    module: ModuleType,
    q_NHD: torch.Tensor,
    cache: KVCache,
    plan: AttentionPlan,
    contract: AttentionContract,
    splits: SplitPlan,
    tp_rank: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention as `splits` lays it out, owner by owner on one device: the bits of `module.attention`.

    module: a backend. q_NHD, cache: the heads of this TP rank. Raises OperandError when the plans disagree.
    """
    last_C = [(chunk.first + chunk.count - 1) // plan.kv_block + 1 for chunk in plan.chunks]
    if splits.kv_block != plan.kv_block or list(splits.blocks) != last_C:
        raise OperandError(
            f"attention: the split-KV plan has blocks of {splits.kv_block} and {list(splits.blocks)} to a sequence, "
            f"the call has blocks of {plan.kv_block} and {last_C}"
        )
    descending = splits.merge_order == "global_block_index_descending"
    if descending != (contract.schedule.kv_order == "reverse"):
        raise OperandError(
            f"attention: the split-KV plan merges by {splits.merge_order}, the schedule's kv_order is "
            f"{contract.schedule.kv_order}"
        )
    parts = [
        module.attention_partials(q_NHD, cache, plan, contract, splits.owned(tp_rank, cp_rank, owner))
        for cp_rank in range(splits.cp)
        for owner in range(splits.owners)
    ]
    out_NHD, lse_NH = module.merge_partials(parts, plan, contract)
    return out_NHD, lse_NH
