"""Tombstones of a run: which segments were pruned on purpose, and what of their events outlives them.

A tombstone is an event, `segments.pruned`, committed before the first of its segments is deleted. It counts where it
describes a segment as the segment's receipt does. A segment it names and that is still there is read like any other:
a prune that was cut short, or stopped by a hold, has deleted nothing else.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from rlk_ledger import layout
from rlk_ledger.chain import held_ranges
from rlk_ledger.records import Record, make_record
from rlk_ledger.spans import Spans, merged, subtract, total
from rlk_ledger.store import Store
from rlk_ledger_schemas.codec import decode_envelope
from rlk_ledger_schemas.errors import FormatError
from rlk_ledger_schemas.events.retention import PrunedSegment
from rlk_ledger_schemas.objects import Receipt

TYPE = "segments.pruned"
NEEDED = frozenset({"run.opened", "writer.opened", "writer.closed", "writer.lost", "gap"})
"""Types by which verify judges writers and the roster: a tombstone states every one, or it does not count."""
STATED = NEEDED | {"contract.declared", "knob.applied", "operator.decided", "collective.observed", "verdict.reached"}
"""Types whose every event outlives its segment: they speak of the run, and what is left is read by them."""
STATED_LAST = {"weights.published": 8, "weights.loaded": 8}
"""Types of which only the last so many of each writer in a segment outlive it: later samples may name those."""


class Tombstone(NamedTuple):
    """One `segments.pruned` event: the receipt and number under which it stands, what it says."""

    receipt: Receipt
    writer_id: str
    seq: int
    wall_ns: int
    by: str
    reason: str | None
    policy: dict[str, Any]
    segments: tuple[PrunedSegment, ...]
    repeated: tuple[tuple[str, int, int], ...]


class Grave(NamedTuple):
    """A pruned segment: its receipt, the first tombstone that names it, and the events that outlive it."""

    receipt: Receipt
    tombstone: Tombstone
    statements: tuple[Record, ...]


class Graves(NamedTuple):
    """Every segment of a run that tombstones name, by name relative to the run; `refused` says what was not accepted.

    `refused` holds (tombstone, segment name, what is wrong).
    """

    tombstones: tuple[Tombstone, ...]
    by_name: dict[str, Grave]
    refused: tuple[tuple[Tombstone, str, str], ...]


Read = Callable[[Receipt, set[str]], Iterable[Record]]
"""Reads the records of some types out of the segment of a receipt; nothing where it cannot be read."""


def read_graves(receipts: Sequence[Receipt], read: Read) -> Graves:
    """What the tombstones of a run say; only segments that hold one are read."""
    tombstones = []
    for receipt in receipts:
        if any(t.type == TYPE for t in receipt.types):
            tombstones += [_tombstone(receipt, record) for record in read(receipt, {TYPE})]
    found = [one for one in tombstones if one is not None]
    if not found:
        return Graves((), {}, ())
    by_segment = {receipt.segment.name: receipt for receipt in receipts}
    graves: dict[str, Grave] = {}
    refused = []
    for tombstone in found:
        for segment in tombstone.segments:
            try:
                grave = _grave(by_segment.get(segment.name), tombstone, segment)
            except FormatError as error:
                refused.append((tombstone, segment.name, str(error)))
                continue
            before = graves.setdefault(segment.name, grave)
            if _needed(before) != _needed(grave):
                refused.append((tombstone, segment.name, "another tombstone says otherwise what the segment held."))
    return Graves(tuple(found), graves, tuple(refused))


def _tombstone(receipt: Receipt, record: Record) -> Tombstone | None:
    """The tombstone in `record`, None for fields of other types than its own."""
    fields = decode_envelope(record.envelope)
    try:
        segments = msgspec.convert(fields.get("segments"), tuple[PrunedSegment, ...])
        repeated = msgspec.convert(fields.get("repeated") or (), tuple[tuple[str, int, int], ...])
        wall_ns, by, policy = msgspec.convert(
            (fields.get("wall_ns"), fields.get("by"), fields.get("policy")), tuple[int, str, dict[str, Any]]
        )
        reason = msgspec.convert(fields.get("reason"), str | None)
    except msgspec.ValidationError:
        return None
    return Tombstone(receipt, record.writer_id, record.seq, wall_ns, by, reason, policy, segments, repeated)


def _grave(receipt: Receipt | None, tombstone: Tombstone, segment: PrunedSegment) -> Grave:
    """The grave of one entry; raises FormatError where the entry and the segment's receipt disagree."""
    if receipt is None:
        raise FormatError("no receipt names this segment.")
    described = (receipt.segment.sha256, receipt.segment.rows, receipt.segment.bytes)
    if (segment.sha256, segment.rows, segment.bytes) != described:
        raise FormatError("its size, rows or SHA-256 are not those of its receipt.")
    records = tuple(make_record(envelope, {}) for envelope in segment.statements)
    held = {w.writer_id: merged(held_ranges(w)) for w in receipt.writers}
    counts = {t.type: t.count for t in receipt.types}
    stated: dict[str, int] = {}
    for record in records:
        name = decode_envelope(record.envelope)["type"]
        stated[name] = stated.get(name, 0) + 1
        if subtract([(record.seq, record.seq)], held.get(record.writer_id, [])):
            raise FormatError(f"it states event {record.seq} of {record.writer_id}, which the segment did not hold.")
    if len({(r.writer_id, r.seq) for r in records}) != len(records):
        raise FormatError("it states one event twice.")
    for name in sorted(counts.keys() | stated.keys()):
        if name in NEEDED and stated.get(name, 0) != counts.get(name, 0):
            raise FormatError(f"it states {stated.get(name, 0)} of the {counts.get(name, 0)} {name} events.")
        if stated.get(name, 0) > counts.get(name, 0):
            raise FormatError(f"it states {stated[name]} {name} events, the segment held {counts.get(name, 0)}.")
    return Grave(receipt, tombstone, records)


def _needed(grave: Grave) -> list[bytes]:
    return [r.envelope for r in grave.statements if decode_envelope(r.envelope)["type"] in NEEDED]


def statements(records: Iterable[Record]) -> tuple[bytes, ...]:
    """The envelopes of a segment's events that outlive it, in (writer, seq) order."""
    kept: dict[tuple[str, int], bytes] = {}
    last: dict[tuple[str, str], list[Record]] = {}
    for record in sorted(records, key=lambda r: (r.writer_id, r.seq)):
        if record.arrays:
            continue
        name = decode_envelope(record.envelope)["type"]
        if name in STATED:
            kept[record.writer_id, record.seq] = record.envelope
        elif name in STATED_LAST:
            last.setdefault((record.writer_id, name), []).append(record)
    for (_, name), found in last.items():
        kept |= {(r.writer_id, r.seq): r.envelope for r in found[-STATED_LAST[name] :]}
    return tuple(kept[key] for key in sorted(kept))


def absent(store: Store, run_id: str, names: Collection[str]) -> set[str]:
    """Those of the segments `names` (relative to the run) that are not there; one listing a shipper."""
    gone = set()
    by_folder: dict[str, set[str]] = {}
    for name in names:
        folder, _, file = name.rpartition("/")
        by_folder.setdefault(folder, set()).add(file)
    for folder, files in by_folder.items():
        there = set(store.children(layout.segment_path(run_id, folder)))
        gone |= {f"{folder}/{file}" for file in files - there}
    return gone


class Pruned(NamedTuple):
    """How much of a run is gone on purpose: counts, the steps it spans, and who did it why and when (ns).

    `events` counts numbers no other segment holds, less the `stated` ones, which tombstones kept.
    """

    segments: int
    bytes: int
    events: int
    stated: int
    types: dict[str, int]
    first_step: int | None
    last_step: int | None
    by: tuple[str, ...]
    reasons: tuple[str, ...]
    first_wall_ns: int
    last_wall_ns: int

    @property
    def text(self) -> str:
        """`3 segments (120 events, steps 0-4) were pruned by WHO: WHY`."""
        steps = "" if self.first_step is None else f", steps {self.first_step}-{self.last_step}"
        steps = f", step {self.first_step}" if self.first_step == self.last_step is not None else steps
        why = f": {'; '.join(self.reasons)}" if self.reasons else ""
        what = "1 segment" if self.segments == 1 else f"{self.segments} segments"
        were = "was" if self.segments == 1 else "were"
        return f"{what} ({self.events} events{steps}) {were} pruned by {', '.join(self.by)}{why}"


def summary(graves: Sequence[Grave], held: Mapping[str, Sequence[tuple[Receipt, Spans]]]) -> Pruned | None:
    """What the pruned segments of `graves` took with them; None for no grave.

    `held` is what `chain.holders` says of all the run's receipts.
    """
    if not graves:
        return None
    gone = {grave.receipt.segment.name for grave in graves}
    lost = 0
    for writer_id in {writer.writer_id for grave in graves for writer in grave.receipt.writers}:
        spans: dict[bool, Spans] = {True: [], False: []}
        for receipt, numbers in held.get(writer_id, ()):
            spans[receipt.segment.name in gone] += numbers
        lost += total(subtract(merged(spans[True]), merged(spans[False])))
    stated = len({(r.writer_id, r.seq) for grave in graves for r in grave.statements})
    types: dict[str, int] = {}
    for grave in graves:
        for item in grave.receipt.types:
            types[item.type] = types.get(item.type, 0) + item.count
    steps = [s for g in graves for t in g.receipt.types for s in (t.min_step, t.max_step) if s is not None]
    distinct = {(g.tombstone.writer_id, g.tombstone.seq): g.tombstone for g in graves}
    said = sorted(distinct.values(), key=lambda t: t.wall_ns)
    return Pruned(
        segments=len(graves),
        bytes=sum(grave.receipt.segment.bytes for grave in graves),
        events=max(0, lost - stated),
        stated=stated,
        types=dict(sorted(types.items())),
        first_step=min(steps, default=None),
        last_step=max(steps, default=None),
        by=tuple(dict.fromkeys(t.by for t in said)),
        reasons=tuple(dict.fromkeys(t.reason for t in said if t.reason)),
        first_wall_ns=said[0].wall_ns,
        last_wall_ns=said[-1].wall_ns,
    )
