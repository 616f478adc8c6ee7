"""One run's way out of the spool: events wait here, leave as segments, and count as committed after their receipt.

Ownership: `pending` and `endings` belong to the thread that scans; a `Batch` belongs to whoever ships it; `committed`
changes inside `ship` only, which one thread runs at a time.

Memory: an event is held once. As a record while it waits and while its segment is made; then as the frozen draft, from
which the records are read again in the rare case that another draft is needed. One segment is made at a time in a
process, and `room` counts what all its outboxes hold.
"""

import random
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from rlk_ledger.build import event
from rlk_ledger.chain import Chain, Draft, Ending, Forked, Uprooted, held_ranges
from rlk_ledger.checkpointing import Checkpointer, period
from rlk_ledger.contact import Contact, meet, overwrites
from rlk_ledger.ledger import Run
from rlk_ledger.records import Record, weight
from rlk_ledger.segments import SEGMENT_BYTES, read_records
from rlk_ledger.signing import shipper_signer
from rlk_ledger.spans import merged
from rlk_ledger.store import Store, open_store
from rlk_ledger_schemas.codec import decode_envelope
from rlk_ledger_schemas.errors import FingerprintError, RlkError, StoreError
from rlk_ledger_schemas.fingerprints import canonical_json
from rlk_ledger_schemas.frame import SpoolHeader
from rlk_ledger_schemas.objects import FORMAT, Receipt, RunInfo

ROLL_S = 600.0
"""Seconds after which waiting events leave although they do not fill a segment."""
_FIRST_BACKOFF_S = 0.5
_LONGEST_BACKOFF_S = 60.0
_SMALLEST_SHARE = 64  # an outbox among many still takes this part of a segment
_composing = threading.Lock()


class Batch(NamedTuple):
    """Events that leave together, and the writers found dead by the time their last event left.

    `weight` is what they take in memory. There are no records while a draft holds the events.
    """

    records: list[Record]
    endings: dict[str, Ending]
    weight: int = 0


class Outbox:
    """Ships the events of one run of one ledger; `url` replaces the ledger that the spool names."""

    def __init__(self, header: SpoolHeader, open_: Callable[[str], Store] = open_store, url: str | None = None) -> None:
        self.url = url or header.ledger_url
        self.run_id = header.run_id
        self.pending: list[Record] = []
        self.pending_bytes = 0  # by `weight`
        self.sharers = 1  # outboxes of this process that have events, this one included
        self.crowded = False  # nothing more is read before something leaves
        self.endings: dict[str, Ending] = {}
        self.committed: dict[str, list[tuple[int, int]]] = {}
        self.stated: set[str] = set()
        self.known: dict[str, int] = {}  # events found in the ledger already, by writer
        self.error: str | None = None
        self.failures = 0
        self.retry_at = 0.0
        self.chain: Chain | None = None
        self.key_error: str | None = None
        self.checkpoints = Checkpointer(header.run_id, period())
        self.inflight: Batch | None = None
        self._header = header
        self._open = open_
        self._draft: Draft | None = None
        self._since = 0.0
        self._said = 0  # events the shipper itself wrote in this chain and that are committed
        self._replaces: str | None = None

    # -- the scanning side -------------------------------------------------------------------------------------------

    def add(self, records: list[Record], size: int) -> None:
        """Appends events read from a spool."""
        if records and not self.pending:
            self._since = time.monotonic()
        self.pending += records
        self.pending_bytes += size

    def room(self, elsewhere: int = 0) -> int:
        """Bytes (by `weight`) of events this outbox takes now, while others of its process hold `elsewhere` bytes.

        A bucket that does not answer must not fill the memory, nor the share of another run.
        """
        share = SEGMENT_BYTES // min(self.sharers, _SMALLEST_SHARE)
        free = SEGMENT_BYTES * 5 // 4 - self.held() - elsewhere
        return max(0, SEGMENT_BYTES // _SMALLEST_SHARE - self.pending_bytes, min(share - self.pending_bytes, free))

    def held(self) -> int:
        """Bytes of memory that what waits and what is in flight take."""
        batch, draft = self.inflight, self._draft
        frozen = 0 if draft is None else len(draft.segment)
        return self.pending_bytes + frozen + (batch.weight if batch is not None else 0)

    def waiting(self, writer_id: str) -> int:
        """Events of a writer that were read and are not committed."""
        batch, draft = self.inflight, self._draft
        held = [*self.pending, *(batch.records if batch is not None else [])]
        count = sum(record.writer_id == writer_id for record in held)
        if batch is None or draft is None:
            return count
        spans = [span for w in draft.receipt.writers if w.writer_id == writer_id for span in held_ranges(w)]
        return count + sum(last - first + 1 for first, last in spans)

    def due(self, flush: bool) -> bool:
        """Whether something should leave now."""
        if self.inflight is not None:
            return True
        waiting = bool(self.pending or self.endings)
        old = bool(self.pending) and time.monotonic() - self._since >= ROLL_S
        return waiting and (flush or old or self.crowded or bool(self.endings) or self.pending_bytes >= SEGMENT_BYTES)

    def take(self) -> None:
        """Moves the next segment's worth of events into `inflight`, unless something is in flight already."""
        if self.inflight is not None:
            return
        size = count = 0
        for record in self.pending:
            more = weight(record)
            if count and size + more > SEGMENT_BYTES:
                break
            size, count = size + more, count + 1
        batch, self.pending = self.pending[:count], self.pending[count:]
        self.pending_bytes = self.pending_bytes - size if self.pending else 0
        endings = {} if self.pending else self.endings
        self.endings = self.endings if self.pending else {}
        self.inflight = Batch(batch, endings, size)

    def committed_up_to(self, writer_id: str) -> int:
        """The last committed number of a writer, -1 before the first."""
        held = self.committed.get(writer_id)
        return held[-1][1] if held else -1

    @property
    def warning(self) -> str | None:
        """What is wrong with the store although it takes everything."""
        chain = self.chain
        return overwrites(chain.store) if chain is not None and chain.contact.overwrites else None

    # -- the shipping side -------------------------------------------------------------------------------------------

    def ship(self) -> bool:
        """Tries to commit what is in flight; False leaves it there, with `error` and `retry_at` set."""
        try:
            self._ship()
        except RlkError as error:
            self.error = str(error).rstrip(".")
        except Exception as error:  # a defect here must not end the process that other runs depend on
            self.error = f"internal error while shipping run {self.run_id!r}: {type(error).__name__}: {error}"
        else:
            self.error, self.failures, self.retry_at = None, 0, 0.0
            return True
        self.failures += 1
        pause = min(_LONGEST_BACKOFF_S, _FIRST_BACKOFF_S * 2 ** min(self.failures - 1, 10))
        self.retry_at = time.monotonic() + pause * random.uniform(0.5, 1.5)
        return False

    def checkpoint(self, now: bool) -> bool:
        """Covers what is committed, see `Checkpointer.round`; whether it is covered."""
        chain, checkpoints = self.chain, self.checkpoints
        return chain is None or checkpoints.round(chain.store, now)

    def forget(self) -> None:
        """Drops what receipts said: another shipper may have written since, so the next `ship` reads them again."""
        self._thaw()
        self.chain = None

    def _ship(self) -> None:
        if self.inflight is None:
            return
        chain = self.chain or self._connect(self.inflight)
        for _ in range(8):
            draft = self._draft or self._compose(chain)
            if draft is None:
                break
            try:
                receipt = chain.publish(draft)
            except Forked:
                self._thaw()
                self._replaces, self._said = chain.renew(), 0
                continue
            except Uprooted:
                self.forget()
                chain = self._connect(self.inflight)
                continue
            self._commit(receipt)
            break
        else:
            raise StoreError(f"{self.url}: eight shipper identities of run {self.run_id!r} in a row were taken.")
        self.inflight, self._draft = None, None

    def _thaw(self) -> None:
        """Gives the batch in flight the records of its draft, so that another draft can be made of them."""
        batch, draft = self.inflight, self._draft
        if batch is None or draft is None:
            return
        records = [r for r in read_records(draft.segment) if r.writer_id != draft.receipt.shipper]
        self.inflight = batch._replace(records=records, weight=sum(map(weight, records)))
        self._draft = None

    def _connect(self, batch: Batch) -> Chain:
        store = self._open(self.url)
        header = self._header
        contact = meet(store, declared(header, batch.records), header.consistency == "strict", header.ledger_id)
        self._adopt_receipts(store, contact)
        signer, self.key_error = shipper_signer()
        self.chain = Chain(store, contact, signer=signer)
        self._said = 0
        return self.chain

    def _adopt_receipts(self, store: Store, contact: Contact) -> None:
        receipts = Run(store, contact.run.run_id).intact_receipts()
        held = receipts.writers
        self.committed = {writer_id: list(said.ranges) for writer_id, said in held.items()}
        self.stated |= {writer_id for writer_id, said in held.items() if said.dead}
        self.checkpoints = Checkpointer(self.run_id, period())  # what an earlier one knew may be of a removed ledger
        self.checkpoints.adopt(receipts.marks, {writer_id: self.committed_up_to(writer_id) for writer_id in held})

    def _compose(self, chain: Chain) -> Draft | None:
        """Freezes the batch in flight as a draft, which holds its events from then on; None when all are committed."""
        batch = self.inflight
        assert batch is not None
        records = []
        for record in batch.records:
            if self._has(record.writer_id, record.seq):
                self.known[record.writer_id] = self.known.get(record.writer_id, 0) + 1
            else:
                records.append(record)
        endings = {w: e for w, e in batch.endings.items() if w not in self.stated}
        records += self._statements(chain, endings)
        if not records:
            return None
        with _composing:
            self._draft = chain.draft(records, endings)
        self.inflight = batch._replace(records=[], weight=0)
        return self._draft

    def _has(self, writer_id: str, seq: int) -> bool:
        return any(first <= seq <= last for first, last in self.committed.get(writer_id, ()))

    def _statements(self, chain: Chain, endings: dict[str, Ending]) -> list[Record]:
        """What the shipper itself has to say, as events of a writer that bears the shipper's id."""
        events: list[tuple[str, dict[str, Any]]] = []
        if (endings or self._replaces) and self._said == 0:
            labels = {"replaces": self._replaces, "reason": "fork_detected"} if self._replaces else None
            opened = {"role": "shipper", "rank": 0, "world_size": 1, "host": socket.gethostname(), "labels": labels}
            events.append(("writer.opened", opened))
        for writer_id, ending in sorted(endings.items()):
            lost = {"writer": writer_id, "reason": ending.reason, "last_seq": ending.last_seq}
            events.append(("writer.lost", {**lost, "bytes_left": ending.lost_bytes}))
        wall, mono = time.time_ns(), time.monotonic_ns()
        return [
            event(self.run_id, chain.shipper, self._said + i, name, wall_ns=wall, mono_ns=mono, **fields)
            for i, (name, fields) in enumerate(events)
        ]

    def _commit(self, receipt: Receipt) -> None:
        self._note(receipt)
        own = [w for w in receipt.writers if w.writer_id == receipt.shipper]
        self._said = own[0].last + 1 if own else self._said
        self._replaces = None

    def _note(self, receipt: Receipt) -> None:
        for writer in receipt.writers:
            held = self.committed.setdefault(writer.writer_id, [])
            held.extend(held_ranges(writer))
            held[:] = merged(held)
            if writer.dead:
                self.stated.add(writer.writer_id)
        committed = {writer.writer_id: self.committed_up_to(writer.writer_id) for writer in receipt.writers}
        self.checkpoints.note(receipt.shipper, receipt.n, committed)


def declared(header: SpoolHeader, records: list[Record]) -> RunInfo:
    """What this writer knows of its run: its `run.opened` event where the batch holds one, else its spool header."""
    opened: dict[str, Any] = {}
    for record in records:
        fields = decode_envelope(record.envelope) if b"run.opened" in record.envelope else {"type": ""}
        if fields["type"] == "run.opened":
            opened = fields
            break
    mode = opened.get("mode") or ({} if header.consistency == "off" else {"consistency": header.consistency})
    return RunInfo(
        format=FORMAT,
        ledger_id="",
        run_id=header.run_id,
        roles=dict(_plain(opened.get("roles")) or header.roles or {}),
        mode=dict(mode),
        redaction=header.redaction,  # type: ignore[arg-type]
        redaction_key_id=header.redaction_key_id,
        created_us=header.opened_wall_us,
        lineage=_plain(opened.get("lineage")),
    )


def _plain(value: Any) -> Any:
    """`value` where run.json can hold it, else None: the event still says it in full."""
    try:
        canonical_json(value)
    except FingerprintError:
        return None
    return value
