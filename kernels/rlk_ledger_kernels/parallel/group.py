"""A group of ranks that exchange tensors: all of them in this process, or one of them in each of several.

A computation is written once, for the ranks that this process holds: a simulated group holds all of them, a
distributed one holds one. Both give every process the parts of all ranks in rank order, bytes unchanged, so a merge
in that order gives the same bits in either.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist

from rlk_ledger_kernels.errors import ContractError, OperandError

Axis = Literal["tp", "sp", "cp", "ep"]
Order = Literal["global_rank_index", "global_block_index", "global_vocab_shard_index"]


class Group(Protocol):
    """Ranks 0..size-1 along one axis of a layout.

    size: how many there are. ranks: those this process holds, ascending. observed: one entry per kind of exchange that
    took place, with the fields of the event `collective.observed`.
    """

    axis: Axis
    size: int
    ranks: tuple[int, ...]

    def all_gather(self, parts: Sequence[torch.Tensor], rows: Sequence[int], order: Order) -> list[torch.Tensor]:
        """Every rank's part, in rank order.

        parts: one per rank of `ranks`. rows: leading length of the part of every rank of the group; all else about
        shape and dtype is equal. order: in which the caller merges what it gets.
        Raises OperandError when a part is not as long as `rows` says.
        """
        ...

    def observed(self) -> tuple[dict[str, Any], ...]:
        """What was exchanged so far, for the caller to record."""
        ...


class _Observed:
    """Kinds of exchange seen by one group. Owned by the group, in order of first use."""

    def __init__(self, axis: Axis, size: int, backend: str) -> None:
        self._fixed = {"group": axis, "group_size": size, "backend": backend, "determinism": "topology_stable"}
        self._orders: dict[Order, None] = {}

    def note(self, order: Order) -> None:
        self._orders.setdefault(order)

    def facts(self) -> tuple[dict[str, Any], ...]:
        return tuple(
            {"op": "all_gather", "reduction_order": order, "accumulate_dtype": "float32", **self._fixed}
            for order in self._orders
        )


class SimulatedGroup:
    """All ranks of an axis in this process: nothing is moved."""

    def __init__(self, size: int, axis: Axis = "tp") -> None:
        """A group of `size` ranks; raises ContractError for a size below 1."""
        if size < 1:
            raise ContractError(f"parallel: a {axis} group of {size} ranks does not exist; choose at least 1")
        self.axis: Axis = axis
        self.size = size
        self.ranks: tuple[int, ...] = tuple(range(size))
        self._seen = _Observed(axis, size, "one_process")

    def all_gather(self, parts: Sequence[torch.Tensor], rows: Sequence[int], order: Order) -> list[torch.Tensor]:
        """The parts as they are."""
        _check(self, parts, rows)
        self._seen.note(order)
        return list(parts)

    def observed(self) -> tuple[dict[str, Any], ...]:
        """What was exchanged so far."""
        return self._seen.facts()


class DistributedGroup:
    """One rank of an axis, the others in other processes of a torch.distributed group."""

    def __init__(self, process_group: dist.ProcessGroup | None = None, axis: Axis = "tp") -> None:
        """Bind to a process group (None: the default one) that this process is a member of."""
        rank = dist.get_rank(process_group)
        if rank < 0:
            raise ContractError(f"parallel: this process is no member of the {axis} group it was given")
        self.axis: Axis = axis
        self.size = dist.get_world_size(process_group)
        self.ranks: tuple[int, ...] = (rank,)
        self._group = process_group
        self._seen = _Observed(axis, self.size, dist.get_backend(process_group))

    def all_gather(self, parts: Sequence[torch.Tensor], rows: Sequence[int], order: Order) -> list[torch.Tensor]:
        """Send this rank's part to all, as bytes, and place what arrives by rank."""
        _check(self, parts, rows)
        self._seen.note(order)
        part, longest = parts[0], max(rows)
        if part[:1].numel() == 0 and longest == 0:
            return [part for _ in rows]
        padded = part.new_zeros((longest, *part.shape[1:]))
        padded[: len(part)] = part
        sent = padded.view(-1).view(torch.uint8)
        arrived = [torch.empty_like(sent) for _ in rows]
        dist.all_gather(arrived, sent, group=self._group)
        return [whole.view(part.dtype).view(padded.shape)[:count] for whole, count in zip(arrived, rows, strict=True)]

    def observed(self) -> tuple[dict[str, Any], ...]:
        """What was exchanged so far."""
        return self._seen.facts()


def _check(group: Group, parts: Sequence[torch.Tensor], rows: Sequence[int]) -> None:
    if len(parts) != len(group.ranks) or len(rows) != group.size:
        raise OperandError(
            f"parallel: {len(parts)} parts and {len(rows)} lengths for {len(group.ranks)} of {group.size} "
            f"{group.axis} ranks; pass one part per rank held here and one length per rank of the group"
        )
    for rank, part in zip(group.ranks, parts):
        if len(part) != rows[rank]:
            raise OperandError(
                f"parallel: the part of {group.axis} rank {rank} has {len(part)} rows, announced are {rows[rank]}"
            )
