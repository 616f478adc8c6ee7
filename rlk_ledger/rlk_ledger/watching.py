"""A run while it is being recorded: each look reads what was shipped since the last, and nothing twice.

Receipts are followed by name from the last one seen. A segment that is not there yet, or not whole, is asked for again
at the next looks. Samples and scores of the newest `window` samples are held and audited; everything else a run says
is held throughout. A sample training has not reached is waiting, not missing.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from rlk_ledger.audit import AuditResult, Finding, audit
from rlk_ledger.history import Event, History
from rlk_ledger.index import Source
from rlk_ledger.layout import run_json, segment_path
from rlk_ledger.ledger import Ledger
from rlk_ledger.seals import read_seal
from rlk_ledger.segments import read_records
from rlk_ledger.store import Missing, Store
from rlk_ledger_schemas.codec import decode_envelope
from rlk_ledger_schemas.errors import FormatError, LedgerError, StoreError
from rlk_ledger_schemas.fingerprints import sha256
from rlk_ledger_schemas.objects import Receipt

UNREAD = frozenset({"segment.timed", "boundary.captured", "finding.raised", "verdict.reached"})
"""Types a watch has no use for: segments that hold nothing else are not opened."""
WINDOW = 20_000
_PATIENCE = 20
_GROWTH = 1.1
_IDLE = 3


@dataclass(slots=True)
class State:
    """What the last look showed; times are seconds, lags are steps, `None` is not known yet."""

    run_id: str
    looks: int = 0
    there: bool = False
    sealed: bool = False
    trouble: str | None = None
    samples: int = 0
    held: int = 0
    tokens: int = 0
    waiting: int = 0
    rollout_step: int | None = None
    training_step: int | None = None
    shipped_us: int | None = None
    writers: int = 0
    open: int = 0
    gaps: int = 0
    unread: int = 0
    lost: int = 0
    coverage: float | None = None
    drift: dict[str, float | None] = field(default_factory=dict)
    compared: int = 0
    findings: list[Finding] = field(default_factory=list)

    @property
    def lag(self) -> int | None:
        """How many steps training is behind rollout."""
        if self.rollout_step is None or self.training_step is None:
            return None
        return self.rollout_step - self.training_step

    def to_dict(self, now_us: int) -> dict[str, Any]:
        """Plain values with stable keys."""
        return {
            "run_id": self.run_id,
            "look": self.looks,
            "there": self.there,
            "sealed": self.sealed,
            "trouble": self.trouble,
            "samples": self.samples,
            "samples_held": self.held,
            "tokens": self.tokens,
            "samples_waiting_for_training": self.waiting,
            "rollout_step": self.rollout_step,
            "training_step": self.training_step,
            "training_lag_steps": self.lag,
            "seconds_since_last_segment": None if self.shipped_us is None else (now_us - self.shipped_us) / 1e6,
            "writers": self.writers,
            "writers_open": self.open,
            "events_lost": self.gaps,
            "segments_not_yet_whole": self.unread,
            "segments_given_up": self.lost,
            "coverage": self.coverage,
            "compared_tokens": self.compared,
            "drift": self.drift,
            "findings": [f.to_dict() for f in self.findings],
        }


class Watch:
    """One run under watch. `look()` reads what is new and returns whether anything was; `state` is what is known."""

    def __init__(self, ledger: Ledger, run_id: str, window: int = WINDOW) -> None:
        self.state = State(run_id)
        self._store: Store = ledger.store
        self._ledger_id = ledger.info.ledger_id
        self._window = window
        self._marks: dict[str, int] = {}
        self._late: dict[str, tuple[Receipt, int]] = {}
        self._facts: dict[tuple[str, int], Event] = {}
        self._of_sample: dict[str, dict[tuple[str, int], Event]] = {}
        self._dropped: dict[str, None] = {}
        self._steps: dict[str, int] = {}
        self._writers: dict[str, dict[str, int]] = {}
        self._audited, self._idle, self._dirty = 0, 0, False

    def look(self) -> bool:
        """Reads what was shipped since the last look; trouble with the store is noted in `state`, never raised."""
        self.state.looks += 1
        self.state.trouble = None
        before = self.state.samples, len(self._facts), sum(map(len, self._of_sample.values()))
        try:
            if not self.state.there:
                self.state.there = self._store.stat(run_json(self.state.run_id)) is not None
            if self.state.there:
                self._read()
                seal = read_seal(self._store, self.state.run_id)
                self.state.sealed = seal is not None
        except (StoreError, LedgerError, FormatError) as error:
            self.state.trouble = str(error)
        self._count()
        new = before != (self.state.samples, len(self._facts), sum(map(len, self._of_sample.values())))
        self._dirty |= new
        self._idle = 0 if new else self._idle + 1
        return new

    def judge(self, force: bool = False) -> list[Finding]:
        """Audits what is held when it has grown by a tenth, or stands still, or when forced; returns new findings.

        A look at every sample would raise by chance what one look would not.
        """
        held = sum(map(len, self._of_sample.values()))
        due = held >= _GROWTH * self._audited or self._idle >= _IDLE or force
        if not self._dirty or not due or not (held or self._facts):
            return []
        self._audited, self._dirty = held, False
        result = audit(self.history())
        known = {_key(f) for f in self.state.findings}
        new = [f for f in result.findings if _key(f) not in known]
        self._note(result)
        self.state.findings += new
        return new

    def history(self) -> History:
        """What is held, without the samples training has still to reach."""
        waiting = set(self._waiting())
        events = [e for name, held in self._of_sample.items() if name not in waiting for e in held.values()]
        return History.from_events([*self._facts.values(), *events], self.state.run_id)

    # -- reading ---------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        source = Source(self._store, self._ledger_id, self.state.run_id, lambda path, error: None)
        arrived: dict[str, dict[int, Receipt]] = {}
        for receipt in source.tail(self._marks):
            arrived.setdefault(receipt.shipper, {})[receipt.n] = receipt
        late = self._late
        self._late = {}
        for receipt, tries in late.values():
            self._open(receipt, tries)
        for shipper, receipts in arrived.items():
            at = self._marks.get(shipper, -1) + 1
            while at in receipts:  # a receipt that could not be read holds the chain up until it can
                self._open(receipts[at], 0)
                self._marks[shipper] = at
                at += 1

    def _open(self, receipt: Receipt, tries: int) -> None:
        """Takes in the events of a segment, or keeps it for the next look."""
        if not tries:
            self._receipt(receipt)
        wanted = {t.type for t in receipt.types} - UNREAD
        if not wanted:
            return
        try:
            data = self._store.read(segment_path(self.state.run_id, receipt.segment.name))
            if sha256(data) != receipt.segment.sha256:
                raise FormatError("its bytes are not those its receipt describes.")
            self._take(data, wanted)
        except (StoreError, FormatError) as error:
            patient = tries + 1 < _PATIENCE or not isinstance(error, Missing | FormatError)
            if patient:
                self._late[receipt.segment.name] = receipt, tries + 1
            else:
                self.state.lost += 1
            if not isinstance(error, Missing | FormatError):
                self.state.trouble = str(error)

    def _receipt(self, receipt: Receipt) -> None:
        self.state.shipped_us = max(self.state.shipped_us or 0, receipt.wall_us)
        for writer in receipt.writers:
            if writer.writer_id == receipt.shipper:
                continue
            held = self._writers.setdefault(writer.writer_id, {"gaps": 0, "ended": 0})
            held["gaps"] += writer.gaps or 0
            held["ended"] |= bool(writer.closed or writer.dead)

    def _take(self, data: bytes, types: Collection[str]) -> None:
        for record in read_records(data, types):
            fields = decode_envelope(record.envelope)
            kind, key = fields["type"], (record.writer_id, record.seq)
            event: Event = (record.writer_id, record.seq, fields, record.arrays)
            if kind not in ("rollout.sample", "logprobs"):
                self._facts[key] = event
                continue
            name = fields["sample_id"]
            if name in self._dropped:
                continue
            if name not in self._of_sample:
                self.state.samples += 1
            self._of_sample.setdefault(name, {})[key] = event
            self._step(kind, name, fields, event)
        self._forget()

    def _step(self, kind: str, name: str, fields: dict[str, Any], event: Event) -> None:
        step = fields.get("step")
        if kind == "rollout.sample":
            mask = event[3].get("loss_mask")
            self.state.tokens += 0 if mask is None else len(mask)
            if step is not None:
                self._steps[name] = step
                self.state.rollout_step = max(step, self.state.rollout_step or 0)
        elif fields.get("source") == "training":
            step = self._steps.get(name, step)
            if step is not None:
                self.state.training_step = max(step, self.state.training_step or 0)

    def _forget(self) -> None:
        """Lets go of the oldest samples beyond the window."""
        while len(self._of_sample) > self._window:
            oldest = next(iter(self._of_sample))
            del self._of_sample[oldest]
            self._steps.pop(oldest, None)
            self._dropped[oldest] = None
            if len(self._dropped) > 4 * self._window:
                del self._dropped[next(iter(self._dropped))]

    # -- counting --------------------------------------------------------------------------------------------------

    def _waiting(self) -> list[str]:
        """Samples without a training score that training may still reach: of its newest step, or beyond it."""
        edge = self.state.training_step
        return [
            name
            for name, held in self._of_sample.items()
            if not any(e[2]["type"] == "logprobs" and e[2].get("source") == "training" for e in held.values())
            and (edge is None or self._steps.get(name, edge) >= edge)
        ]

    def _count(self) -> None:
        state = self.state
        state.held = len(self._of_sample)
        state.waiting = len(self._waiting())
        state.writers = len(self._writers)
        state.open = sum(not w["ended"] for w in self._writers.values())
        state.gaps = sum(w["gaps"] for w in self._writers.values())
        state.unread = len(self._late)

    def _note(self, result: AuditResult) -> None:
        summary = result.summary
        self.state.coverage, self.state.compared = summary["coverage"], summary["compared_tokens"]
        metrics = summary["drift"]["metrics"]
        names = ("abs_dlogp_mean", "abs_dlogp_p99", "abs_dlogp_max", "kl_k3", "clip_fraction")
        self.state.drift = {name: metrics[name] for name in names if name in metrics}


def _key(finding: Finding) -> tuple[Any, ...]:
    """What makes a finding the same one as it grows: its id and where it is, without counts."""
    where = {k: str(v) for k, v in finding.where.items() if not isinstance(v, int | float)}
    return finding.finding_id, *sorted(where.items())
