"""Every outcome of every call to a bucket; then a healthy process finishes, and every event is there exactly once.

A procedure is what one process does with a bucket: a first contact, a publication, a take-over, a replay's writer, a
checkpoint. It runs with one outcome at its k-th call (see `faulty_bucket`), for every k and every outcome of that verb;
with two at random; and with one outcome at all of its calls. Then the fault is over, new objects stand for a new
process, and the ledger is counted by hand: each (writer, number, leaf) once, a dead writer stated once, and `verify
--deep` finds nothing but what is truly missing. RLK_TEST_OUTCOMES=all visits every pair of call and outcome (the
default is a spread), RLK_TEST_PAIRS says how many pairs of faults.
"""

import contextlib
import itertools
import os
import random
import tempfile
import threading
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from faulty_bucket import OUTCOMES, Call, FaultyBucket, Killed, Plan

from rlk_ledger import index, segments
from rlk_ledger.anchors import anchor
from rlk_ledger.checkpoints import make, read_checkpoints
from rlk_ledger.importers import read
from rlk_ledger.importers.declared import Declared
from rlk_ledger.importers.writing import write
from rlk_ledger.ledger import open_ledger
from rlk_ledger.recover import recover
from rlk_ledger.retention import Policy, prune
from rlk_ledger.seals import read_seal, seal
from rlk_ledger.shipper import Shipper
from rlk_ledger.store import open_store
from rlk_ledger.verify import verify
from rlk_ledger_schemas.errors import RlkError
from rlk_ledger_schemas.findings import Exit
from rlk_ledger_schemas.objects import Receipt, decode_receipt

RUN = "r1"
_DUMPS = Path(__file__).parents[1] / "imports" / "data"
Events = Counter[tuple[str, int, bytes]]
FINE = {"segment.garbage", "receipt.uncovered"}
"""Findings that any crash may leave: a segment whose receipt was never written; what no checkpoint covers yet."""


# -- counting, without the code under test -----------------------------------------------------------------------------


def receipts(bucket: FaultyBucket) -> list[Receipt]:
    """Every receipt in the bucket, by path."""
    return [decode_receipt(data, path) for path, data in sorted(bucket.objects.items()) if "/receipt/" in path]


def held(bucket: FaultyBucket) -> tuple[Events, Counter[str]]:
    """How often each event stands in a segment a receipt names, shippers' own left out; and writers stated as dead."""
    events: Events = Counter()
    stated: Counter[str] = Counter()
    shippers = {receipt.shipper for receipt in receipts(bucket)}
    for receipt in receipts(bucket):
        data = bucket.objects[f"{bucket.name}/ledger/runs/{RUN}/{receipt.segment.name}"]
        for record in segments.read_records(data):
            if record.writer_id not in shippers:
                events[record.writer_id, record.seq, record.leaf] += 1
        stated.update(writer.writer_id for writer in receipt.writers if writer.dead)
    return events, stated


def expected(records: list[Any]) -> Events:
    return Counter((r.writer_id, r.seq, r.leaf) for r in records)


# -- procedures --------------------------------------------------------------------------------------------------------


class Procedure:
    """What one process does with a bucket. `prepare` and `finish` meet a healthy one, `act` the faults."""

    kinds: frozenset[str] = frozenset()
    """Findings that may stand at the end."""
    code = Exit.OK

    def __init__(self, helpers: Any, where: Path, bucket: FaultyBucket) -> None:
        self.helpers, self.where, self.bucket = helpers, where, bucket
        self.spool = where / "spool"
        self.records: list[Any] = []
        self.dead: list[str] = []
        self.rivals = 0
        self.stale: set[str] = set()  # what else may stand there when a listing was behind
        bucket.rival = self.rival

    def writer(self, spool: Path | None = None, dead: bool = False) -> Any:
        return self.helpers.Writer(spool or self.spool, self.bucket.url, dead=dead)

    def rival(self) -> None:
        """Another node of the same run ships a writer of its own, from first contact to last receipt."""
        spool = self.where / f"rival-{self.rivals}"
        self.rivals += 1
        writer = self.writer(spool)
        self.records += [*writer.many(2), writer.close()]
        ship(spool)

    def prepare(self) -> None:
        """What there was before."""

    def act(self) -> None:
        """The calls that go wrong."""

    def finish(self) -> None:
        """A new process, when the faults are over."""

    def check(self) -> None:
        events, stated = held(self.bucket)
        assert set(events) == set(expected(self.records))
        assert set(stated) == set(self.dead)
        if not self.stale:
            assert set(events.values()) == {1}
            assert not self.dead or set(stated.values()) == {1}
        result = verify(self.bucket.url, deep=True)
        assert result.exit_code == self.code, result.findings
        assert {f.kind for f in result.findings} <= self.kinds | FINE | self.stale, result.findings
        read = Counter((w, seq) for w, seq, _, _ in open_ledger(self.bucket.url).read_events(RUN))
        shippers = {receipt.shipper for receipt in receipts(self.bucket)}
        assert {key: n for key, n in read.items() if key[0] not in shippers} == {(w, s): 1 for w, s, _ in events}


def ship(spool: Path, cycles: int = 3) -> list[str]:
    """A shipper process from start to end; what it complained of last."""
    shipper = Shipper(spool)
    try:
        for _ in range(cycles):
            shipper.cycle(flush=True)
        return shipper.errors()
    finally:
        shipper.close()


class FirstContact(Procedure):
    """Three writers of a new ledger: one closed, one died inside a record, one lives."""

    kinds = frozenset({"bytes.lost", "writer.killed", "writer.open"})
    code = Exit.GAP

    def prepare(self) -> None:
        closed, dead, live = self.writer(), self.writer(dead=True), self.writer()
        self.records = [*closed.many(3), closed.close(), *dead.many(2), *live.many(2)]
        at = dead.spool.at[0]
        dead.spool._map[at + 8 : at + 20] = b"z" * 12
        self.dead = [dead.writer_id]

    def act(self) -> None:
        ship(self.spool)

    def finish(self) -> None:
        assert ship(self.spool) == []


class LaterReceipts(FirstContact):
    """The same shipper goes on: its second and third receipt."""

    def prepare(self) -> None:
        super().prepare()
        self.shipper = Shipper(self.spool)
        self.shipper.cycle(flush=True)
        writer = self.writer()
        self.records += [*writer.many(2), writer.close()]

    def act(self) -> None:
        self.shipper.cycle(flush=True)
        again = self.writer(dead=True)
        self.records += again.many(1)
        self.dead.append(again.writer_id)
        for _ in range(3):
            self.shipper.cycle(flush=True)


class TakeOver(FirstContact):
    """A shipper that committed and died before it released anything is followed by another on the same spool."""

    def prepare(self) -> None:
        super().prepare()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Shipper, "_settle", lambda self: None)
            ship(self.spool, cycles=1)
        writer = self.writer()
        self.records += [*writer.many(2), writer.close()]


class ReplayWriter(Procedure):
    """`ledger.writer`: a private spool, shipped when the block ends; what stays behind is recovered."""

    kinds = frozenset({"run.redeclared"})
    options: dict[str, Any] = {}  # noqa: RUF012

    def prepare(self) -> None:
        writer = self.writer()
        self.records = [*writer.many(2), writer.close()]
        ship(self.spool)
        self.temporary = self.where / "tmp"
        self.temporary.mkdir()

    def act(self) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tempfile, "tempdir", str(self.temporary))
            with open_ledger(self.bucket.url).writer(RUN, **self.options) as recorder:
                for size in range(3):
                    recorder.record("report.written", digest="sha256:00", bytes=size)

    def finish(self) -> None:
        for left in self.temporary.glob("*/"):
            recover(left)
        if not self.reports():
            self.act()

    def reports(self) -> list[int]:
        return sorted(e["bytes"] for _, _, e, _ in open_ledger(self.bucket.url).read_events(RUN, {"report.written"}))

    def check(self) -> None:
        events, stated = held(self.bucket)
        assert set(events.values()) == {1}
        assert not stated
        assert not expected(self.records) - events
        assert self.reports() == [0, 1, 2]
        result = verify(self.bucket.url, deep=True)
        assert {f.kind for f in result.findings} <= self.kinds | FINE, result.findings
        assert result.exit_code in (Exit.OK, Exit.GAP)


class WholeReplayWriter(ReplayWriter):
    """The same, all or nothing: a block that ends well is committed like any other."""

    options = {"all_or_nothing": True}  # noqa: RUF012


class Checkpoints(Procedure):
    """A checkpoint over two chains, and the index beside it; every receipt is in exactly one checkpoint."""

    def prepare(self) -> None:
        for name in ("spool", "second"):
            writer = self.writer(self.where / name)
            self.records += [*writer.many(2), writer.close()]
            ship(self.where / name)

    def rival(self) -> None:
        """Another maker, after another shipper."""
        super().rival()
        make(open_store(self.bucket.url), RUN)

    def act(self) -> None:
        make(open_store(self.bucket.url), RUN)

    def finish(self) -> None:
        store = open_store(self.bucket.url)
        while make(store, RUN) is not None:
            pass

    def check(self) -> None:
        found = read_checkpoints(open_store(self.bucket.url), RUN)
        covered = [(s, n) for c in found for s, first, last in c.info.appended for n in range(first, last + 1)]
        assert sorted(covered) == sorted((r.shipper, r.n) for r in receipts(self.bucket))
        super().check()


class LaterCheckpoint(Checkpoints):
    """The third checkpoint of a run whose chains went on."""

    def prepare(self) -> None:
        for _ in range(2):
            super().prepare()
            make(open_store(self.bucket.url), RUN)
        super().prepare()


class Seal(Checkpoints):
    """The seal of a run that was not covered yet; somebody else may seal it first."""

    def rival(self) -> None:
        seal(open_store(self.bucket.url), RUN, incomplete=True)

    def act(self) -> None:
        seal(open_store(self.bucket.url), RUN, incomplete=True)

    def finish(self) -> None:
        self.act()

    def check(self) -> None:
        found = read_seal(open_store(self.bucket.url), RUN)
        assert found is not None
        assert found.complete
        super().check()


class Anchor(Checkpoints):
    """A checkpoint put at a second URL, in the same lying bucket."""

    def prepare(self) -> None:
        super().prepare()
        make(open_store(self.bucket.url), RUN)
        self.anchor = f"oss://{self.bucket.name}/anchor"

    def rival(self) -> None:
        anchor(open_store(self.bucket.url), RUN, self.anchor)

    def act(self) -> None:
        anchor(open_store(self.bucket.url), RUN, self.anchor)

    def finish(self) -> None:
        self.act()

    def check(self) -> None:
        super().check()
        anchored = [data for path, data in self.bucket.objects.items() if "/anchor/" in path]
        covered = [data for path, data in self.bucket.objects.items() if "/checkpoint/" in path]
        assert anchored == covered[-1:]
        assert verify(self.bucket.url, anchor=self.anchor).exit_code == Exit.OK


class IndexWrite(Checkpoints):
    """The index alone, of a checkpoint whose own one is gone: deletable, and made again from the receipts."""

    def prepare(self) -> None:
        super().prepare()
        made = make(open_store(self.bucket.url), RUN)
        assert made is not None
        self.made = made
        for path in [path for path in self.bucket.objects if "/index/" in path]:
            del self.bucket.objects[path]

    def rival(self) -> None:
        index.write(open_store(self.bucket.url), RUN, self.made)

    def act(self) -> None:
        self.rival()

    def finish(self) -> None:
        self.rival()

    def check(self) -> None:
        super().check()
        assert len([path for path in self.bucket.objects if "/index/" in path]) == 1


class Prune(Checkpoints):
    """Every segment pruned: first the tombstone, then the segments, each of them gone or still there and named."""

    def prepare(self) -> None:
        super().prepare()
        self.pruned = {path for path in self.bucket.objects if "/segment/" in path}
        self.temporary = self.where / "tmp"
        self.temporary.mkdir()

    def act(self) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tempfile, "tempdir", str(self.temporary))
            prune(open_ledger(self.bucket.url), RUN, Policy(everything=True), by="a test")

    def finish(self) -> None:
        for left in self.temporary.glob("*/"):
            recover(left)
        self.act()
        while make(open_store(self.bucket.url), RUN) is not None:
            pass

    def check(self) -> None:
        assert not self.pruned & set(self.bucket.objects)
        result = verify(self.bucket.url, deep=True)
        kinds = {f.kind for f in result.findings}
        assert result.exit_code == Exit.OK, result.findings
        assert "segment.pruned" in kinds
        assert kinds <= {"segment.pruned", "run.redeclared", "prune.unfinished", "writer.open"} | FINE, result.findings


class Import(ReplayWriter):
    """An import of a dump; what stays behind is recovered, else the same files are imported again."""

    def act(self) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tempfile, "tempdir", str(self.temporary))
            patch.setenv("RLK_SPOOL", str(self.where / "import-spool"))
            batch = read("nemo-rl", _DUMPS / "nemo-rl", lambda done, total: None)
            write(self.bucket.url, RUN, batch, Declared.parse(()), lambda done, total: None)

    def finish(self) -> None:
        for left in self.temporary.glob("*/"):
            recover(left)
        self.act()

    def reports(self) -> list[int]:
        events = open_ledger(self.bucket.url).read_events(RUN, {"rollout.sample", "logprobs"})
        named = Counter((e["type"], e["sample_id"], e.get("source"), e.get("pass_id")) for _, _, e, _ in events)
        return [0, 1, 2] if named and set(named.values()) == {1} else []


PROCEDURES: list[type[Procedure]] = [
    FirstContact,
    LaterReceipts,
    TakeOver,
    ReplayWriter,
    WholeReplayWriter,
    Import,
    Checkpoints,
    LaterCheckpoint,
    IndexWrite,
    Seal,
    Anchor,
    Prune,
]
_numbers = itertools.count()


@contextlib.contextmanager
def scene(kind: type[Procedure], helpers: Any, tmp_path: Path) -> Iterator[Procedure]:
    """A prepared procedure in a bucket and a directory of its own."""
    number = next(_numbers)
    where = tmp_path / str(number)
    where.mkdir()
    with FaultyBucket(f"b{number}") as bucket:
        procedure = kind(helpers, where, bucket)
        procedure.prepare()
        bucket.calls.clear()
        bucket.ghost = f"{bucket.name}/ledger/runs/{RUN}/receipt/{'0' * 32}/00000000.json"
        yield procedure


def run(procedure: Procedure, plan: Plan) -> None:
    """Acts under the plan, then finishes and checks without it."""
    bucket = procedure.bucket

    looked: Counter[str] = Counter()

    def watched(call: Call) -> str | None:
        outcome = plan(call)
        looked[call.path] += outcome in ("cut", "missing")
        # A receipt that nobody can see, not even at a second look, is made again: twice, and never a fork.
        if outcome == "stale" or looked[call.path] > 1:
            procedure.stale = {"duplicates"}
        return outcome

    bucket.plan = watched
    with contextlib.suppress(RlkError, Killed):
        procedure.act()
    bucket.plan = lambda call: None
    procedure.finish()
    procedure.check()


def calls(kind: type[Procedure], helpers: Any, tmp_path: Path) -> list[Call]:
    """The calls of the procedure when all is well."""
    with scene(kind, helpers, tmp_path) as procedure:
        procedure.act()
        found = list(procedure.bucket.calls)
        procedure.finish()
        procedure.check()
    return found


def at(number: int, outcome: str) -> Plan:
    return lambda call: outcome if call.number == number and outcome in OUTCOMES[call.verb] else None


def spread(pairs: list[tuple[Call, str]], name: str, most: int) -> list[tuple[Call, str]]:
    """At most `most` of the pairs, the same ones each time; all of them where RLK_TEST_OUTCOMES says so."""
    if os.environ.get("RLK_TEST_OUTCOMES") == "all" or len(pairs) <= most:
        return pairs
    return random.Random(zlib.crc32(name.encode())).sample(pairs, most)


@pytest.mark.slow
@pytest.mark.parametrize("kind", PROCEDURES, ids=lambda k: k.__name__)
@pytest.mark.timeout(1800)
def test_every_outcome_of_every_call(kind: type[Procedure], helpers: Any, tmp_path: Path) -> None:
    found = calls(kind, helpers, tmp_path)
    pairs = [(call, outcome) for call in found for outcome in OUTCOMES[call.verb]]
    assert len(found) >= 3
    wrong = []
    for call, outcome in spread(pairs, kind.__name__, 20):
        with scene(kind, helpers, tmp_path) as procedure:
            try:
                run(procedure, at(call.number, outcome))
            except (AssertionError, RlkError) as error:
                wrong.append(f"{outcome} at {call}: {type(error).__name__} {error}"[:1500])
    assert not wrong, f"{len(wrong)} of {len(pairs)}:\n" + "\n".join(wrong[:5])


@pytest.mark.slow
@pytest.mark.parametrize("kind", PROCEDURES, ids=lambda k: k.__name__)
@pytest.mark.timeout(1800)
def test_two_faults_at_random(kind: type[Procedure], helpers: Any, tmp_path: Path) -> None:
    total = len(calls(kind, helpers, tmp_path))
    for seed in range(int(os.environ.get("RLK_TEST_PAIRS", "5"))):
        chance = random.Random(f"{kind.__name__} {seed}")
        places = set(chance.sample(range(total + 4), 2))
        chosen: list[str] = []

        def plan(call: Call, chance: random.Random = chance, places: set[int] = places, chosen: Any = chosen) -> Any:
            if call.number not in places:
                return None
            chosen.append(f"{chance.choice(OUTCOMES[call.verb])} {call}")
            return chosen[-1].partition(" ")[0]

        with scene(kind, helpers, tmp_path) as procedure:
            try:
                run(procedure, plan)
            except (AssertionError, RlkError) as error:
                raise AssertionError(f"seed {seed}, {chosen}: {error}") from error


FOREVER = [
    ("create", "fails"),
    ("create", "lands"),
    ("create", "twice"),
    ("create", "conflict"),
    ("create", "refused"),
    ("create", "ignored"),
    ("read", "unavailable"),
    ("read", "cut"),
    ("read", "missing"),
    ("list", "fails"),
    ("list", "ghost"),
    ("stat", "fails"),
]


@pytest.mark.parametrize("kind", PROCEDURES, ids=lambda k: k.__name__)
def test_an_outcome_that_never_ends_and_then_does(kind: type[Procedure], helpers: Any, tmp_path: Path) -> None:
    """A dead bucket, and one that is wrong in one way for as long as the process lives."""
    for verb, outcome in FOREVER:
        with scene(kind, helpers, tmp_path) as procedure:
            try:
                run(procedure, lambda call, verb=verb, outcome=outcome: outcome if call.verb == verb else None)
            except (AssertionError, RlkError) as error:
                raise AssertionError(f"every {verb} {outcome}: {error}") from error


# -- a client that lives on --------------------------------------------------------------------------------------------


def creates(kind: type[Procedure], helpers: Any, tmp_path: Path) -> list[Call]:
    return [call for call in calls(kind, helpers, tmp_path) if call.verb == "create"]


@pytest.mark.parametrize("lands", [True, False])
def test_a_call_slower_than_anybodys_patience_lands_after_the_work_was_done_by_another(
    helpers: Any, tmp_path: Path, lands: bool
) -> None:
    """The k-th create hangs; its process is given up and another finishes; then the hanging call arrives, or never.

    What arrives late is a segment without a receipt, or a receipt whose events are there already: the same bytes
    twice, never two answers to one number.
    """
    for call in creates(FirstContact, helpers, tmp_path):
        with scene(FirstContact, helpers, tmp_path) as procedure:
            bucket, hanging, arrive = procedure.bucket, threading.Event(), threading.Event()

            def hang(hanging: threading.Event = hanging, arrive: threading.Event = arrive) -> None:
                hanging.set()
                arrive.wait(60)
                if not lands:
                    raise Killed

            bucket.slow = hang
            bucket.plan = lambda c, k=call.number: "slow" if c.number == k else None
            zombie = threading.Thread(target=given_up, args=(procedure,))
            zombie.start()
            assert hanging.wait(60)
            bucket.plan = lambda call: None
            procedure.finish()
            arrive.set()
            zombie.join(60)
            assert not zombie.is_alive()
            procedure.stale = {"duplicates"} if lands else set()
            procedure.check()


def given_up(procedure: Procedure) -> None:
    """A process that nobody waits for any more, as far as it comes."""
    with contextlib.suppress(Killed, RlkError):
        procedure.act()


@pytest.mark.parametrize("part", ["segment", "receipt"])
def test_a_store_that_says_200_and_keeps_half(helpers: Any, tmp_path: Path, part: str) -> None:
    """Read back and not believed: the events go under another identity. Half a segment is garbage; half a receipt is a
    corrupt object that verify names, and nothing is lost with it."""
    for call in creates(LaterReceipts, helpers, tmp_path):
        if f"/{part}/" not in call.path:
            continue
        with scene(LaterReceipts, helpers, tmp_path) as procedure:
            bucket = procedure.bucket
            bucket.plan = lambda c, k=call.number: "short" if c.number == k else None
            procedure.act()
            bucket.plan = lambda c: None
            procedure.finish()
            if part == "segment":
                procedure.check()
                continue
            result = verify(bucket.url, deep=True)
            assert result.exit_code == Exit.ERROR
            (damaged,) = [f for f in result.findings if f.severity == "error"]
            assert damaged.kind == "receipt.unreadable"
            assert damaged.byte is not None
            assert bucket.objects.pop(f"{bucket.name}/ledger/{damaged.object}")
            procedure.check()
