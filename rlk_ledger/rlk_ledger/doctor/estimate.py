"""Bytes and requests of a run before it runs: a small run of its shape is really written, and scaled up.

Nothing is assumed that can be measured: events go through the encoder, segments and receipts through a chain,
checkpoints and indexes through their makers, into a local folder behind a store that counts. What is assumed is how
often things happen (roll, flush, checkpoint), and that is printed.
"""

import math
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec

from rlk_ledger import layout
from rlk_ledger.chain import Chain, new_shipper
from rlk_ledger.checkpoints import latest, make
from rlk_ledger.contact import meet
from rlk_ledger.doctor.workload import Maker, Workload
from rlk_ledger.outbox import ROLL_S
from rlk_ledger.records import EVENT_BYTES, Record
from rlk_ledger.segments import SEGMENT_BYTES, write_segment
from rlk_ledger.store import Entry, FileStore, Store
from rlk_ledger_schemas.codec import encode_payload
from rlk_ledger_schemas.frame import frame_size
from rlk_ledger_schemas.objects import FORMAT, RunInfo

REQUESTS = ("PUT", "GET", "HEAD", "LIST")
_SAMPLE_BYTES = 4 << 20
_RUN = "estimate"


class Amount(msgspec.Struct, frozen=True):
    """What lies in the bucket and how often it was asked. `bytes` counts objects, `requests` by HTTP verb."""

    bytes: float
    requests: dict[str, float]

    def __add__(self, other: "Amount") -> "Amount":
        both = {verb: self.requests.get(verb, 0) + other.requests.get(verb, 0) for verb in REQUESTS}
        return Amount(self.bytes + other.bytes, both)

    def times(self, count: float) -> "Amount":
        """So many of it."""
        return Amount(self.bytes * count, {verb: n * count for verb, n in self.requests.items()})


NOTHING = Amount(0.0, dict.fromkeys(REQUESTS, 0.0))


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """What a whole run writes. `spool_bytes` pass over the nodes' disks; `parts` is where the total comes from."""

    workload: Workload
    samples: int
    events: int
    spool_bytes: int
    segments: int
    checkpoints: int
    total: Amount
    parts: dict[str, Amount]

    def per_million(self) -> Amount:
        """The total for a million response tokens."""
        return self.total.times(1e6 / self.workload.tokens)


class CountingStore:
    """Counts requests and the bytes put, in front of another store. Not for several threads."""

    def __init__(self, inner: Store) -> None:
        self.inner = inner
        self.url = inner.url
        self.requests: Counter[str] = Counter()
        self.put_bytes = 0

    def amount(self) -> Amount:
        """What went through since the last call."""
        out = Amount(float(self.put_bytes), {verb: float(self.requests[verb]) for verb in REQUESTS})
        self.requests.clear()
        self.put_bytes = 0
        return out

    def create(self, path: str, data: bytes) -> None:
        self.requests["PUT"] += 1
        self.inner.create(path, data)
        self.put_bytes += len(data)

    def read(self, path: str) -> bytes:
        self.requests["GET"] += 1
        return self.inner.read(path)

    def list(self, prefix: str) -> Iterator[Entry]:
        self.requests["LIST"] += 1
        return self.inner.list(prefix)

    def children(self, prefix: str) -> tuple[str, ...]:
        self.requests["LIST"] += 1
        return self.inner.children(prefix)

    def stat(self, path: str) -> int | None:
        self.requests["HEAD"] += 1
        return self.inner.stat(path)

    def delete(self, path: str) -> None:
        self.inner.delete(path)

    def locate(self, path: str) -> str:
        return self.inner.locate(path)


def estimate(workload: Workload) -> Estimate:
    """Measures the costs of a run of this shape and scales them; takes a few seconds."""
    with tempfile.TemporaryDirectory(prefix="rlk-estimate-") as folder:
        measured = _Measured(workload, Path(folder))
    return measured.scaled()


class _Measured:
    """The unit costs of one workload."""

    def __init__(self, workload: Workload, folder: Path) -> None:
        self.workload = workload
        self.events_a_sample = self.payload_a_sample = 0.0
        self.segment_fixed, self.segment_a_sample = self._segments()
        self.begin, self.join, self.publish, self.look = NOTHING, NOTHING, NOTHING, NOTHING
        few, many = (self._chain(folder / str(receipts), receipts) for receipts in (1, 4))
        self.checkpoint_a_receipt = _slope(few, many, 3)
        self.checkpoint_fixed = few + self.checkpoint_a_receipt.times(-1)

    def _segments(self) -> tuple[float, float]:
        """(bytes of a segment whatever it holds, bytes a sample): the line through two real segments."""
        one = Maker(self.workload, _RUN, new_shipper()).samples(1)
        batch = max(8 * self.workload.group, 64)
        most = max(2, min(16, _SAMPLE_BYTES // (batch * max(1, sum(map(_payload, one))))))
        maker = Maker(self.workload, _RUN, new_shipper())
        small, large = maker.samples(batch), maker.samples(most * batch)
        self.events_a_sample = len(large) / (most * batch)
        self.payload_a_sample = sum(map(_payload, large)) / (most * batch)
        sizes = [len(write_segment(records).data) for records in (small, large)]
        a_sample = (sizes[1] - sizes[0]) / ((most - 1) * batch)
        return max(0.0, sizes[0] - a_sample * batch), a_sample

    def _chain(self, folder: Path, receipts: int) -> Amount:
        """Eight checkpoints over so many receipts each: what one checkpoint costs; notes what else costs on the way."""
        store = CountingStore(FileStore(folder))
        declared = RunInfo(format=FORMAT, ledger_id="", run_id=_RUN, roles={}, mode={}, redaction="none", created_us=0)
        meet(store, declared)
        self.begin = store.amount()
        contact = meet(store, declared)
        store.children(f"{layout.run_root(_RUN)}/receipt")
        self.join = store.amount()
        chain = Chain(store, contact)
        maker = Maker(self.workload, _RUN, new_shipper())
        spent, known = NOTHING, None
        for _ in range(8):
            for _ in range(receipts):
                draft = chain.draft(maker.samples(1))
                chain.publish(draft)
                cost = store.amount()
                self.publish = Amount(float(len(draft.receipt_bytes)), cost.requests)
            known = make(store, _RUN, None, known)
            spent += store.amount()
            latest(store, _RUN, known)
            self.look = store.amount()
        return spent.times(1 / 8)

    def scaled(self) -> Estimate:
        """The whole run."""
        work = self.workload
        seconds = 3600 * work.hours
        payload = self.payload_a_sample * work.samples
        weight = payload + EVENT_BYTES * self.events_a_sample * work.samples
        a_node = max(1, math.ceil(weight / work.nodes / SEGMENT_BYTES), math.ceil(seconds / ROLL_S))
        if work.flush:
            a_node = max(a_node, math.ceil(seconds / work.flush))
        segments = work.nodes * a_node + work.processes  # each process's end flushes once more
        rounds = math.ceil(seconds / work.checkpoint) if work.checkpoint else 0
        checkpoints = min(rounds + work.nodes, segments) if work.checkpoint else 0
        parts = {
            "segments": Amount(segments * self.segment_fixed + work.samples * self.segment_a_sample, NOTHING.requests),
            "receipts": self.publish.times(segments),
            "checkpoints and indexes": self._checkpoints(checkpoints, segments),
            "looking for checkpoints": self.look.times(rounds * max(0, work.nodes - 1)),
            "first contact": self.begin + self.join.times(work.nodes),
        }
        total = NOTHING
        for part in parts.values():
            total += part
        return Estimate(
            workload=work,
            samples=work.samples,
            events=round(self.events_a_sample * work.samples),
            spool_bytes=round(payload),
            segments=segments,
            checkpoints=checkpoints,
            total=total,
            parts=parts,
        )

    def _checkpoints(self, count: int, receipts: int) -> Amount:
        """`count` checkpoints over all receipts; index k covers lowbit(k), so that rows grow by log2(count) / 2."""
        if not count:
            return NOTHING
        plain = self.checkpoint_fixed.times(count) + self.checkpoint_a_receipt.times(receipts)
        growth = (math.log2(count) / 2 + 1) / (math.log2(8) / 2 + 1)
        more = self.checkpoint_a_receipt.bytes * receipts * max(0.0, growth - 1)
        return Amount(plain.bytes + more, plain.requests)


def _slope(few: Amount, many: Amount, steps: int) -> Amount:
    out = (many + few.times(-1)).times(1 / steps)
    return Amount(max(0.0, out.bytes), {verb: max(0.0, count) for verb, count in out.requests.items()})


def _payload(record: Record) -> int:
    """Bytes a record takes in a spool."""
    return frame_size(len(encode_payload(record.envelope, record.arrays)))
