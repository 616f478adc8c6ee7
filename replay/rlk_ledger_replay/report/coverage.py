"""What was recorded, what was compared, what is missing: not measured and measured clean are different answers."""

import datetime
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlk_ledger.history import History
from rlk_ledger.metrics import Drift
from rlk_ledger.pairs import Pairing
from rlk_ledger_replay.report.text import percent, plural
from rlk_ledger_schemas.objects import Receipt

_OWN = frozenset({"report.written", "writer.opened", "writer.closed", "run.opened"})
"""Types of a writer that did nothing but write a report; such receipts are not evidence."""


@dataclass(frozen=True)
class Writer:
    """One recording process: how many events of it are in the ledger and how it ended."""

    writer_id: str
    role: str
    rank: str
    engine: str
    host: str
    events: int
    ended: str
    dropped: int
    lost_bytes: int


@dataclass(frozen=True)
class Line:
    """One count with the sentence that says what it means; `concern` marks what limits an answer."""

    label: str
    value: str
    note: str
    concern: bool = False


@dataclass(frozen=True)
class Gap:
    """Events a writer could not record, and why."""

    writer_id: str
    kind: str
    first: int
    last: int
    reason: str


@dataclass(frozen=True)
class Segments:
    """What of the ledger was read: receipts, rows, bytes, the newest receipt's time, and every chain's head."""

    receipts: int
    rows: int
    bytes: int
    until: str
    heads: tuple[tuple[str, int, str], ...]


def evidence_receipts(receipts: Sequence[Receipt]) -> list[Receipt]:
    """The receipts a report rests on: all but those of writers that only wrote reports, so it can be rebuilt."""
    return [r for r in receipts if any(t.type not in _OWN for t in r.types) or not _reports(r)]


def _reports(receipt: Receipt) -> bool:
    return any(t.type == "report.written" for t in receipt.types)


def segments(receipts: Sequence[Receipt]) -> Segments:
    """The summary of the receipts read."""
    heads: dict[str, Receipt] = {}
    for receipt in receipts:
        if receipt.shipper not in heads or heads[receipt.shipper].n < receipt.n:
            heads[receipt.shipper] = receipt
    return Segments(
        receipts=len(receipts),
        rows=sum(r.segment.rows for r in receipts),
        bytes=sum(r.segment.bytes for r in receipts),
        until=moment(max((r.wall_us for r in receipts), default=0)),
        heads=tuple((name, head.n, head.self_ or "") for name, head in sorted(heads.items())),
    )


def moment(wall_us: int) -> str:
    """Microseconds since 1970 as UTC to the second; empty for none."""
    if wall_us <= 0:
        return ""
    try:
        when = datetime.datetime.fromtimestamp(wall_us // 1_000_000, datetime.UTC)
    except (OverflowError, ValueError, OSError):
        return ""
    return when.strftime("%Y-%m-%d %H:%M:%S UTC")


def writers(history: History, receipts: Sequence[Receipt]) -> list[Writer]:
    """Every writer a receipt names, by role."""
    held: Counter[str] = Counter()
    dropped: Counter[str] = Counter()
    lost: Counter[str] = Counter()
    ended: dict[str, str] = {}
    for receipt in receipts:
        for one in receipt.writers:
            spans = one.ranges if one.ranges is not None else ((one.first, one.last),)
            held[one.writer_id] += sum(last - first + 1 for first, last in spans)
            dropped[one.writer_id] += one.gaps or 0
            lost[one.writer_id] += one.lost_bytes or 0
            if one.dead:
                ended[one.writer_id] = "its process died"
            elif one.closed:
                ended.setdefault(one.writer_id, "closed")
    rows = [_writer(history, name, held[name], ended.get(name, "open"), dropped[name], lost[name]) for name in held]
    return sorted(rows, key=lambda w: (w.role, w.rank, w.writer_id))


def _writer(history: History, name: str, events: int, ended: str, dropped: int, lost: int) -> Writer:
    opened = history.writers.get(name, {})
    engine = opened.get("engine") or {}
    rank, size = opened.get("rank"), opened.get("world_size")
    return Writer(
        writer_id=name,
        role=str(opened.get("role") or "unknown"),
        rank="" if rank is None else f"{rank} of {size}",
        engine=" ".join(str(engine[key]) for key in ("name", "version") if engine.get(key)),
        host=str(opened.get("host") or ""),
        events=events,
        ended=ended,
        dropped=dropped,
        lost_bytes=lost,
    )


def gaps(history: History) -> list[Gap]:
    """The gaps writers recorded about themselves."""
    return [
        Gap(
            writer_id=fact.writer_id,
            kind=str(fact.fields.get("kind")),
            first=int(fact.fields.get("first") or 0),
            last=int(fact.fields.get("last") or 0),
            reason=str(fact.fields.get("reason") or ""),
        )
        for fact in history.of("gap")
    ]


def lines(history: History, pairing: Pairing, drift: Drift) -> list[Line]:
    """What was compared and what was not, with reasons."""
    active = sum(int(sample.loss_mask.sum()) for sample in pairing.samples)
    total = sum(len(sample) for sample in pairing.samples)
    share = "" if not active else f"{percent(drift.tokens / active)} of the active ones"
    out = [
        Line("Samples", f"{len(pairing.samples):,}", f"{plural(_groups(pairing), 'group')} in {_steps(pairing)}"),
        Line("Response tokens", f"{total:,}", f"{active:,} active, {total - active:,} masked"),
        Line("Tokens compared", f"{drift.tokens:,}", share or "no active token", drift.tokens < active or not active),
    ]
    for name, count in drift.excluded.items():
        if count:
            out.append(Line(f"Values: {name}", f"{count:,}", "active tokens kept out of every metric", True))
    out += _missing(pairing)
    gap_events = sum(1 for _ in history.of("gap"))
    out.append(Line("Gap events", f"{gap_events:,}", "recorded by writers about what they dropped", gap_events > 0))
    return out


def _missing(pairing: Pairing) -> list[Line]:
    lost: Counter[str] = Counter()
    for one in pairing.unobserved:
        lost[one.source] += one.tokens
    out = [
        Line(f"Never scored by {side}", f"{count:,}", "active tokens without a value: not observed is not clean", True)
        for side, count in sorted(lost.items())
    ]
    counted: list[tuple[str, int, str]] = [
        (
            "Off-policy tokens",
            sum(len(o.positions) for o in pairing.off_policy),
            "of another weight version, not drift",
        ),
        ("Later training passes", len(pairing.passes), "their own series, never pooled with the first"),
        ("Passes over other tokens or masks", len(pairing.disagreeing), "kept out: their digests do not agree"),
        ("Ambiguous sample ids", len(pairing.ambiguous), "one id, two token lists: left out"),
        ("Incomplete sharded scores", len(pairing.missing_shards), "ranks that never recorded"),
        ("Replicas that differ", len(pairing.replicas), "ranks that must agree and do not"),
        ("Samples without a weight version", len(pairing.unversioned), "paired with the first training pass"),
        ("Scores without a sample", len(pairing.orphans), "their sample was never recorded"),
    ]
    out += [Line(label, f"{n:,}", note, label != "Later training passes") for label, n, note in counted if n]
    return out


def _groups(pairing: Pairing) -> int:
    named: set[Any] = {(s.step, s.group_id) for s in pairing.samples if s.group_id is not None}
    return len(named) + sum(s.group_id is None for s in pairing.samples)


def _steps(pairing: Pairing) -> str:
    return plural(len({s.step for s in pairing.samples if s.step is not None}), "step")
