"""Writers across a run's segments: numbers missing, dropped or held twice, forks, ends, and the roster."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rlk_ledger import layout
from rlk_ledger.chain import gap_size, holders
from rlk_ledger.records import Record
from rlk_ledger.segments import read_records
from rlk_ledger.spans import Spans, intersect, merged, repeated, subtract, total
from rlk_ledger.store import FileStore, Missing, Store
from rlk_ledger.tombstones import Graves
from rlk_ledger.verify.finding import Finding, finding
from rlk_ledger.writer import ABOUT
from rlk_ledger_schemas.codec import decode_envelope
from rlk_ledger_schemas.errors import FormatError
from rlk_ledger_schemas.objects import Receipt, RunInfo


def check_writers(
    store: Store, run_id: str, receipts: Sequence[Receipt], info: RunInfo | None, damaged: Iterable[str], graves: Graves
) -> list[Finding]:
    """What the receipts, the gap events and the writers' own words say about each writer and about the roster.

    `damaged` are paths of segments that cannot be read; what they held is not searched. Of a pruned segment, the events
    that its tombstone in `graves` states are taken. Raises StoreError.
    """
    held = holders(receipts)
    named = {writer.writer_id for receipt in receipts for writer in receipt.writers}
    events = _Reader(store, run_id, receipts, frozenset(damaged), graves)
    dropped = _dropped(events)
    shippers = {receipt.shipper for receipt in receipts}
    ends = _Ends(receipts)
    findings: list[Finding] = []
    for writer_id in sorted(named):
        mine = held.get(writer_id, [])
        numbers = merged(span for _, spans in mine for span in spans)
        findings += _missing(run_id, writer_id, numbers, dropped.get(writer_id, []))
        findings += _repeated(events, run_id, writer_id, mine)
        findings += ends.of(run_id, writer_id, shipper=writer_id in shippers)
    open_ = [w for w in named if w not in shippers and not ends.ended(w)]
    return findings + list(_redeclared(events, run_id, info)) + list(_roster(events, run_id, info, bool(open_)))


class _Reader:
    """Reads the events of the few types that writers are judged by, once, out of the segments that hold them."""

    TYPES = frozenset({"gap", "writer.opened", "run.opened"})

    def __init__(
        self, store: Store, run_id: str, receipts: Sequence[Receipt], damaged: frozenset[str], graves: Graves
    ) -> None:
        self.store = store
        self.run_id = run_id
        self.receipts = receipts
        self.damaged = damaged
        self.graves = graves
        self.found: dict[str, list[dict[str, Any]]] = {name: [] for name in self.TYPES}
        for receipt in receipts:
            wanted = {t.type for t in receipt.types} & self.TYPES
            for record in self.records(receipt, wanted) if wanted else ():
                fields = decode_envelope(record.envelope)
                if fields["type"] in wanted:
                    self.found[fields["type"]].append(fields)

    def events(self, type_name: str) -> list[dict[str, Any]]:
        """The envelopes of one of TYPES."""
        return self.found[type_name]

    def records(self, receipt: Receipt, types: set[str] | None) -> list[Record]:
        """The records of one segment, of `types` only when given; none when it cannot be read."""
        path = layout.segment_path(self.run_id, receipt.segment.name)
        if path in self.damaged:
            return []
        try:
            local = isinstance(self.store, FileStore)
            return list(read_records(Path(self.store.locate(path)) if local else self.store.read(path), types))
        except (Missing, FormatError):
            grave = self.graves.by_name.get(receipt.segment.name)
            return list(grave.statements) if grave is not None else []


def _dropped(events: _Reader) -> dict[str, Spans]:
    out: dict[str, Spans] = {}
    for fields in events.events("gap"):
        if gap_size(fields):
            out.setdefault(str(fields.get("writer_id")), []).append((fields["first"], fields["last"]))
    return {writer: merged(found) for writer, found in out.items()}


def _missing(run_id: str, writer_id: str, held: Spans, dropped: Spans) -> Iterator[Finding]:
    if not held:
        return
    run = layout.run_root(run_id)
    absent = subtract([(0, held[-1][1])], held)
    for first, last in subtract(absent, dropped):
        text = f"{last - first + 1} sequence numbers are in no segment and no gap event explains them"
        yield finding("seqs.missing", run, text, writer=writer_id, first=first, last=last)
    for first, last in intersect(absent, dropped):
        text = f"{last - first + 1} sequence numbers were dropped by the recorder; its gap event says why (view `gaps`)"
        yield finding("seqs.dropped", run, text, writer=writer_id, first=first, last=last)


def _repeated(events: _Reader, run_id: str, writer_id: str, held: Sequence[tuple[Receipt, Spans]]) -> Iterator[Finding]:
    """Numbers held by two receipts: the same leaf is a duplicate, another one is a fork."""
    twice = repeated(spans for _, spans in held)
    if not twice:
        return
    leaves: dict[int, tuple[bytes, str]] = {}
    forks = 0
    for receipt, spans in held:
        if not intersect(spans, twice):
            continue
        path = layout.segment_path(run_id, receipt.segment.name)
        for record in events.records(receipt, None):
            if record.writer_id != writer_id or not intersect([(record.seq, record.seq)], twice):
                continue
            before = leaves.setdefault(record.seq, (record.leaf, path))
            if before[0] != record.leaf:
                forks += 1
                where: dict[str, Any] = {"writer": writer_id, "first": record.seq, "last": record.seq}
                yield finding("fork", path, f"{before[1]} holds another event under this number", **where)
    if total(twice) > forks:
        text = f"{total(twice) - forks} events were committed twice with the same bytes"
        span: dict[str, Any] = {"writer": writer_id, "first": twice[0][0], "last": twice[-1][1]}
        yield finding("duplicates", layout.run_root(run_id), text, **span)


class _Ends:
    """How each writer ended, from the receipts."""

    def __init__(self, receipts: Sequence[Receipt]) -> None:
        self.closed: set[str] = set()
        self.dead: set[str] = set()
        self.lost: dict[str, int] = {}
        self.where: dict[str, str] = {}
        for receipt in receipts:
            for writer in receipt.writers:
                if writer.closed:
                    self.closed.add(writer.writer_id)
                if writer.dead:
                    self.dead.add(writer.writer_id)
                if writer.lost_bytes:
                    self.lost[writer.writer_id] = self.lost.get(writer.writer_id, 0) + writer.lost_bytes
                    path = layout.receipt_path(receipt.run_id, receipt.shipper, receipt.n)
                    self.where[writer.writer_id] = path

    def ended(self, writer_id: str) -> bool:
        """Whether the writer said it closed or was found dead."""
        return writer_id in self.closed or writer_id in self.dead

    def of(self, run_id: str, writer_id: str, shipper: bool) -> Iterator[Finding]:
        """The findings about one writer's end; a shipper's own statements need none."""
        run = layout.run_root(run_id)
        lost = self.lost.get(writer_id, 0)
        if lost:
            text = f"{lost} bytes of its spool were no event: an unfinished record, or damage on the node's disk"
            yield finding("bytes.lost", self.where[writer_id], text, writer=writer_id)
        if writer_id in self.dead and writer_id not in self.closed:
            text = "it was killed" + ("" if lost else "; everything it had recorded was recovered")
            yield finding("writer.killed", run, text, writer=writer_id)
        elif writer_id not in self.closed and not shipper:
            yield finding("writer.open", run, "it has not closed: more may come", writer=writer_id)


_CONSEQUENCE = {
    "roles": "only those are expected",
    "redaction": "its events are as it declared",
    "redaction_key_id": "its tokens do not compare with those of the others",
}


def _redeclared(events: _Reader, run_id: str, info: RunInfo | None) -> Iterator[Finding]:
    """Processes whose `run.opened` declares other roles, another redaction or another key than run.json holds."""
    said: dict[str, str] = {}
    roles = {str(fields.get("writer_id")): fields.get("role") for fields in events.events("writer.opened")}
    for fields in events.events("run.opened"):
        about = roles.get(str(fields.get("writer_id"))) in ABOUT and fields.get("redaction") == "drop"
        for name in ("roles",) if about else ("roles", "redaction", "redaction_key_id"):
            if info is not None and name in fields and fields[name] != getattr(info, name):
                consequence = _CONSEQUENCE[name]
                declared = f"it declared {name} {fields[name]!r}, run.json holds {getattr(info, name)!r}"
                said.setdefault(f"{declared}: {consequence}", str(fields.get("writer_id")))
    for text, writer_id in sorted(said.items()):
        yield finding("run.redeclared", layout.run_json(run_id), text, writer=writer_id)


def _roster(events: _Reader, run_id: str, info: RunInfo | None, open_: bool) -> Iterator[Finding]:
    """Roles and world sizes of run.json against the writers that opened; child processes are no members."""
    if info is None or not info.roles:
        return
    ranks: dict[str, set[int]] = {}
    for fields in events.events("writer.opened"):
        rank = fields.get("rank")
        if type(rank) is int and not fields.get("parent_writer"):
            ranks.setdefault(str(fields.get("role")), set()).add(rank)
    for role, size in sorted(info.roles.items()):
        absent = subtract([(0, size - 1)] if size > 0 else [], merged((r, r) for r in ranks.get(role, ())))
        if not absent:
            continue
        shown = _shown(absent)
        unheard = "are in no segment that can be read" if events.damaged else "never reported"
        text = f"of {size} {role} ranks these {unheard}: rank {shown}"
        kind = "run.open" if open_ else "rank.missing"
        yield finding(kind, layout.run_json(run_id), text)


def _shown(spans: Spans) -> str:
    """`0, 2, 4-7`, of many ranges the first eight."""
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans[:8])
    return text + (f" and {total(spans[8:])} more" if len(spans) > 8 else "")
