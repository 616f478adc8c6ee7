"""Sealing a run: who was to take part, who did, and the checkpoint that closes it.

A seal is one object, put only if nothing is there. Of two sealers one wins and the other adopts its seal; a sealer that
dies after its checkpoint has made a checkpoint, and the next one goes on from there. A seal stops nobody: what a
shipper still holds is shipped after it, and `verify` says what came late.
"""

import base64
import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import NamedTuple

import msgspec

from rlk_ledger import checkpoints, layout
from rlk_ledger.ledger import Run, SegmentFile
from rlk_ledger.signing import Signer, text_of
from rlk_ledger.spans import merged, subtract, total
from rlk_ledger.store import AlreadyThere, Missing, Store
from rlk_ledger_schemas.checkpoints import Checkpoint
from rlk_ledger_schemas.codec import decode_envelope
from rlk_ledger_schemas.errors import FormatError, LedgerError
from rlk_ledger_schemas.objects import FORMAT, Receipt, RunInfo
from rlk_ledger_schemas.seals import (
    RoleCount,
    Seal,
    SealedCheckpoint,
    Span,
    decode_seal,
    encode_seal,
    seal_message,
)

_SHOWN = 4
_LOOKS = 8
"""Looks for receipts before a run that goes on is sealed as it stands."""


class Unfinished(LedgerError):
    """Ranks have not reported, or writers are open: the run is not sealed unless that is asked for."""


class Census(NamedTuple):
    """Roles, writers still open and ranks that never opened, as `Seal` holds them."""

    roster: dict[str, RoleCount]
    open: tuple[str, ...]
    missing: dict[str, tuple[Span, ...]]

    @property
    def complete(self) -> bool:
        """Whether nothing is open or missing."""
        return not self.open and not any(self.missing.values())

    @property
    def text(self) -> str:
        """What is open or missing, in words."""
        parts = [
            f"of {self.roster[role].expected} {role} ranks these never reported: rank {spans_text(spans)}"
            for role, spans in self.missing.items()
        ]
        if self.open:
            names = ", ".join(writer[:8] for writer in self.open[:_SHOWN])
            more = f" and {len(self.open) - _SHOWN} more" if len(self.open) > _SHOWN else ""
            have = "writer has" if len(self.open) == 1 else "writers have"
            parts.append(f"{len(self.open)} {have} not closed: {names}{more}")
        return "; ".join(parts)


class Sealed(NamedTuple):
    """The run's seal, and whether this call put it there."""

    seal: Seal
    mine: bool


def read_seal(store: Store, run_id: str) -> Seal | None:
    """The run's seal, None without one; raises LedgerError when what is there is none of this run, StoreError."""
    path = layout.seal_path(run_id)
    try:
        found = decode_seal(store.read(path), path)
    except Missing:
        return None
    except FormatError as error:
        raise LedgerError(f"{error} `rlk-ledger verify {run_id}` says what else is damaged.") from None
    if found.run_id != run_id:
        raise LedgerError(f"{path} is the seal of run {found.run_id!r}. `rlk-ledger verify {run_id}` says more.")
    return found


def seal(
    store: Store,
    run_id: str,
    *,
    incomplete: bool = False,
    signer: Signer | None = None,
    wall_us: Callable[[], int] = lambda: time.time_ns() // 1000,
) -> Sealed:
    """Covers the run with a checkpoint and seals what that covers; returns the seal in force.

    Raises Unfinished when ranks are missing or writers open and `incomplete` is not given, LedgerError for a run that
    is damaged or has no receipts, StoreError when the outcome is open: trying again is safe.
    """
    before = read_seal(store, run_id)
    if before is not None:
        return Sealed(before, False)
    info = Run(store, run_id).info
    made = _cover(store, run_id, signer)
    newest = checkpoints.latest(store, run_id, made)
    if newest is None:
        raise LedgerError(f"run {run_id!r} has no receipts yet: there is nothing to seal.")
    run = Run(store, run_id)
    receipts = covered(run.receipts, newest)
    census = take_census(info, receipts, openings(run, receipts))
    if not census.complete and not incomplete:
        raise Unfinished(f"run {run_id!r} is not finished: {census.text}.")
    data = encode_seal(_signed(_compose(info, newest, census, wall_us()), signer))
    path = layout.seal_path(run_id)
    with contextlib.suppress(AlreadyThere):
        store.create(path, data)
    there = read_seal(store, run_id)
    if there is None:
        raise LedgerError(f"{store.locate(path)} was removed right after it was written; seal the run again.")
    return Sealed(there, encode_seal(there) == data)


def _cover(store: Store, run_id: str, signer: Signer | None) -> Checkpoint | None:
    """Covers the run until a second look finds nothing new: a seal cannot be made again when a listing was behind."""
    made = checkpoints.make(store, run_id, signer)
    for _ in range(_LOOKS):
        more = checkpoints.make(store, run_id, signer, made)
        if more is None:
            break
        made = more
    return made


def _compose(info: RunInfo, newest: Checkpoint, census: Census, wall_us: int) -> Seal:
    return Seal(
        format=FORMAT,
        ledger_id=info.ledger_id,
        run_id=info.run_id,
        checkpoint=sealed_checkpoint(newest),
        roster=census.roster,
        open=census.open,
        missing=census.missing,
        complete=census.complete,
        wall_us=wall_us,
    )


def _signed(unsigned: Seal, signer: Signer | None) -> Seal:
    if signer is None:
        return unsigned
    named = msgspec.structs.replace(unsigned, public_key=text_of(signer.public_key))
    return msgspec.structs.replace(named, signature=base64.b64encode(signer.sign(seal_message(named))).decode())


def sealed_checkpoint(checkpoint: Checkpoint) -> SealedCheckpoint:
    """What a seal says of the checkpoint it stands on."""
    root = base64.b64encode(checkpoint.root).decode()
    return SealedCheckpoint(k=checkpoint.k, size=checkpoint.size, root=root, digest=checkpoint.digest)


def covered(receipts: Iterable[Receipt], checkpoint: Checkpoint) -> list[Receipt]:
    """Those of `receipts` that are under `checkpoint`."""
    marks = checkpoint.info.marks
    return [receipt for receipt in receipts if receipt.n <= marks.get(receipt.shipper, -1)]


def openings(run: Run, receipts: Iterable[Receipt]) -> Iterator[Mapping[str, object]]:
    """The fields of every `writer.opened` event under `receipts`, of pruned segments too; raises LedgerError."""
    for receipt in receipts:
        if any(t.type == "writer.opened" for t in receipt.types):
            segment = SegmentFile(layout.segment_path(run.run_id, receipt.segment.name), receipt)
            for record in run.records_of(segment, {"writer.opened"}):
                yield decode_envelope(record.envelope)


def take_census(info: RunInfo, receipts: Iterable[Receipt], opened: Iterable[Mapping[str, object]]) -> Census:
    """Who took part, as `receipts` and the `writer.opened` events under them say it.

    A writer that closed is closed whatever else is said of it; shippers and child processes are no members of a role.
    """
    listed = list(receipts)
    shippers = {receipt.shipper for receipt in listed}
    writers = [w for receipt in listed for w in receipt.writers if w.writer_id not in shippers]
    closed = {w.writer_id for w in writers if w.closed}
    dead = {w.writer_id for w in writers if w.dead} - closed
    members: dict[str, dict[str, int | None]] = {role: {} for role in info.roles}
    for fields in opened:
        if not fields.get("parent_writer"):
            rank = fields.get("rank")
            found = members.setdefault(str(fields.get("role")), {})
            found[str(fields.get("writer_id"))] = rank if type(rank) is int else None
    roster = {role: _count(info.roles.get(role, 0), found.keys(), closed, dead) for role, found in members.items()}
    missing = {}
    for role, size in sorted(info.roles.items()):
        ranks = merged((rank, rank) for rank in members[role].values() if rank is not None)
        absent = subtract([(0, size - 1)] if size > 0 else [], ranks)
        if absent:
            missing[role] = tuple(absent)
    still = {w.writer_id for w in writers} - closed - dead
    return Census(dict(sorted(roster.items())), tuple(sorted(still)), missing)


def _count(expected: int, members: Set[str], closed: Set[str], dead: Set[str]) -> RoleCount:
    return RoleCount(
        expected=max(0, expected), opened=len(members), closed=len(members & closed), dead=len(members & dead)
    )


def spans_text(spans: Sequence[Span]) -> str:
    """`0, 2, 4-7`, of many ranges the first few."""
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans[:_SHOWN])
    return text + (f" and {total(list(spans[_SHOWN:]))} more" if len(spans) > _SHOWN else "")
