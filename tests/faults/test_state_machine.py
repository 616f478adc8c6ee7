"""Recorder, shipper and ledger as one state machine over a bucket that lies: any steps, crashes between any two.

What is real: the recorders and their spool files, the shippers and their locks, the store client, checkpoints, seals,
`verify`. What stands in: the bucket (`faulty_bucket`), the process table (who is dead is what a rule says), the clock.

After every step nothing acknowledged is in neither spool nor ledger, and the bucket as it stands does not look tampered
with. At the end everything is shipped by new processes and counted: every acknowledged event once, losses exactly.

RLK_TEST_MACHINE=N runs N examples of up to 60 steps with fresh seeds; the default is a small number of fixed ones.
"""

import contextlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from faulty_bucket import OUTCOMES, Call, FaultyBucket, Killed
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from rlk_ledger import segments, spools
from rlk_ledger.checkpoints import make
from rlk_ledger.outbox import Outbox
from rlk_ledger.seals import seal
from rlk_ledger.service import claim, elected
from rlk_ledger.shipper import Shipper
from rlk_ledger.store import open_store
from rlk_ledger.verify import verify
from rlk_ledger_schemas.codec import decode_envelope
from rlk_ledger_schemas.errors import FlushTimeout, FormatError, RlkError
from rlk_ledger_schemas.findings import Exit
from rlk_ledger_schemas.objects import decode_receipt
from rlk_ledger_sdk import budget, recorder, spool
from rlk_ledger_sdk.config import load_config
from rlk_ledger_sdk.recorder import Recorder
from rlk_ledger_sdk.testing import Recorded, SpoolImage, read_spool, unaccounted

RUN = "machine"
NODES = 2
ROOMY, TIGHT = 1 << 30, 20_000
_TRACED = ("/rlk_ledger_sdk/", "/rlk_ledger/rlk_ledger/")
_WHO = st.integers(0, 7)
_FAULTS = [(verb, outcome) for verb in sorted(OUTCOMES) for outcome in OUTCOMES[verb] if outcome != "overtaken"]


class Writer:
    """One recorder and what it said of each event: `acked` by number, `maybe` while a crash left it open."""

    def __init__(self, recorder_: Recorder, node: int) -> None:
        self.recorder = recorder_
        self.node = node
        self.id = recorder_.writer_id
        self.acked: dict[int, str] = {}
        self.maybe: set[str] = set()
        self.lost = 0
        self.alive = True
        self.closed = False

    @property
    def directory(self) -> Path:
        return self.recorder.directory


def die_at_line(at: int, operation: Callable[[], Any]) -> bool:
    """Runs `operation`, which ends with Killed before its `at`-th line of the project's code; whether it did."""
    lines = 0

    def trace(frame: Any, event: str, arg: Any) -> Any:
        nonlocal lines
        if not any(part in frame.f_code.co_filename for part in _TRACED):
            return None
        if event == "line":
            lines += 1
            if lines == at:
                raise Killed
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        operation()
    except Killed:
        return True
    finally:
        sys.settrace(before)
    return False


class LedgerMachine(RuleBasedStateMachine):
    """The rules. Writers and shippers are picked by number, modulo how many there are."""

    def __init__(self) -> None:
        super().__init__()
        self.where = Path(tempfile.mkdtemp(prefix="rlk-machine-"))
        self.bucket = FaultyBucket(self.where.name).__enter__()
        self.writers: list[Writer] = []
        self.children: dict[str, list[str]] = {}
        self.shippers: list[Shipper | None] = [None] * (NODES + 1)
        self.markers = 0
        self.torn = self.sealed = self.behind = self.unguarded = False
        self.careless = False  # the bucket said 200 to creates that it did not keep, which a probe may tell of
        self.exact = True  # in an exact example nothing happens that may leave an event in the ledger twice
        self.copies = 0
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(spools, "is_alive", self._lives)
        for name, value in (("FIRST_FILE", 8192), ("LARGEST_FILE", 16384), ("RESERVE", 2048)):
            self.patch.setattr(spool, name, value)
        self.patch.setattr(budget, "RETRY_S", 0.0)

    def _lives(self, header: Any) -> bool:
        return any(w.id == header.writer_id and w.alive for w in self.writers)

    # -- writers -------------------------------------------------------------------------------------------------------

    @initialize(node=st.integers(0, NODES - 1), exact=st.sampled_from([True, True, False]), tight=st.booleans())
    def first_writer(self, node: int, exact: bool, tight: bool) -> None:
        self.exact = exact
        self.open(node, tight)

    @rule(node=st.integers(0, NODES - 1), tight=st.booleans())
    def open(self, node: int, tight: bool) -> None:
        if len(self.writers) >= 4:
            return
        config = load_config(
            self.bucket.url,
            run_id=RUN,
            role="rollout",
            rank=len(self.writers),
            world_size=4,
            spool=self.where / f"node-{node}",
            shipper="off",
            on_error="raise",
            block_ms=0,
        )
        assert config is not None
        writer = Writer(Recorder(config), node)
        self.writers.append(writer)
        writer.recorder._spool._budget._limit = TIGHT if tight else ROOMY

    def _pick(self, who: int) -> Writer | None:
        alive = [w for w in self.writers if w.alive and not w.closed]
        return alive[who % len(alive)] if alive else None

    def _record(self, writer: Writer, size: int) -> None:
        marker = f"m{self.markers}"
        self.markers += 1
        writer.maybe.add(marker)
        if size < 0:
            reference = writer.recorder.record(
                "weights.published", weight_version=marker, digest="sha256:00", tensor_count=1
            )
        else:
            reference = writer.recorder.record(
                "logprobs", sample_id=marker, source="rollout", contract_id="c", values=[-0.5] * size
            )
        writer.maybe.discard(marker)
        if reference.seq is None:
            writer.lost += 1
        else:
            writer.acked[reference.seq] = marker

    @rule(who=_WHO, size=st.sampled_from([-1, 0, 3, 300, 1500, 5000]), times=st.integers(1, 5))
    def record(self, who: int, size: int, times: int) -> None:
        writer = self._pick(who)
        for _ in range(times if writer else 0):
            assert writer is not None
            self._record(writer, size)

    @rule(who=_WHO, events=st.integers(1, 12))
    def outage(self, who: int, events: int) -> None:
        """The budget ends, and events are lost."""
        writer = self._pick(who)
        if writer is not None:
            writer.recorder._spool._budget._limit = 0
            for _ in range(events):
                self._record(writer, 1500)

    @rule(who=_WHO)
    def room_again(self, who: int) -> None:
        writer = self._pick(who)
        if writer is not None:
            writer.recorder._spool._budget._limit = ROOMY

    @rule(who=_WHO, level=st.sampled_from(["spooled", "synced", "committed"]))
    def flush(self, who: int, level: str) -> None:
        """What flush() returns for is true: what it calls committed is in the bucket now."""
        writer = self._pick(who)
        if writer is None:
            return
        with contextlib.suppress(FlushTimeout):
            marks = writer.recorder.flush(level, timeout=0.0)
            there = {seq for w, seq in self._ledger() if w == writer.id}
            assert {seq for seq in writer.acked if seq <= marks["committed"]} <= there

    @rule(who=_WHO)
    def close(self, who: int) -> None:
        writer = self._pick(who)
        if writer is not None:
            writer.recorder.close(timeout=0.0)
            writer.closed = True

    @rule(who=_WHO, tail=st.binary(max_size=48))
    def kill_writer(self, who: int, tail: bytes) -> None:
        """SIGKILL, inside a record that had copied any part of its frame."""
        writer = self._pick(who)
        if writer is None:
            return
        file = writer.recorder._spool._file
        if file is not None and tail:
            with file.path.open("r+b") as handle:
                handle.seek(writer.recorder._spool.at[0])
                handle.write(tail[: max(0, file.size - writer.recorder._spool.at[0])])
            self.torn = self.torn or bool(tail.strip(b"\0"))
        self._dead(writer)

    def _dead(self, writer: Writer) -> None:
        writer.alive = False
        writer.recorder._spool.close()

    @rule(who=_WHO, line=st.integers(1, 250), size=st.sampled_from([-1, 300, 1500]))
    def writer_dies_at_a_line(self, who: int, line: int, size: int) -> None:
        writer = self._pick(who)
        if writer is not None and die_at_line(line, lambda: self._record(writer, size)):
            self.torn = True
            self._dead(writer)

    @rule(who=_WHO, events=st.integers(0, 3), closes=st.booleans())
    def fork(self, who: int, events: int, closes: bool) -> None:
        """A forked child is a writer of its own; what it acknowledged it says through a pipe."""
        writer = self._pick(who)
        if writer is None or len(self.children) >= 3:
            return
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                for n in range(events):
                    reference = writer.recorder.record("knob.applied", path=f"c{n}", requested=n, status="applied")
                    os.write(write, f"{reference.writer_id} {reference.seq}\n".encode())
                if closes and events:
                    writer.recorder.close(timeout=0.0)
            os._exit(0)
        os.close(write)
        with os.fdopen(read) as said:
            acked = [line.split() for line in said]
        os.waitpid(child, 0)
        if acked:
            self.children[acked[0][0]] = [seq for _, seq in acked]

    # -- shippers ------------------------------------------------------------------------------------------------------

    def _spool(self, node: int) -> Path:
        return self.where / f"node-{node}"

    def _turn(self, node: int, flush: bool, fresh: bool) -> None:
        """One cycle of the node's shipper, or of a second one that takes turns with it by the lock."""
        with elected(self._spool(node), wait_s=0.0) as lock:
            if lock is None:  # of a shipper "killed" at a line: this process still has its descriptor
                return
            shipper = None if fresh else self.shippers[node]
            shipper = shipper or Shipper(self._spool(node))
            if not fresh:
                self.shippers[node] = shipper
            if os.pread(lock, 256, 0) != shipper.holder:
                shipper.forget_receipts()
            claim(lock, shipper)
            shipper.cycle(flush=flush)
            if fresh:
                shipper.close()

    @rule(node=st.integers(0, NODES), flush=st.booleans(), fresh=st.booleans())
    def ship(self, node: int, flush: bool, fresh: bool) -> None:
        with contextlib.suppress(Killed):
            self._turn(node, flush, fresh)
            return
        self.shippers[node] = None

    @rule(node=st.integers(0, NODES - 1), flush=st.booleans())
    def new_shipper(self, node: int, flush: bool) -> None:
        """The shipper is killed between two cycles, and another begins."""
        self.shippers[node] = None
        self.ship(node, flush, fresh=False)

    @rule(node=st.integers(0, NODES - 1))
    def ship_all(self, node: int) -> None:
        self.ship(node, flush=True, fresh=False)

    @rule(node=st.integers(0, NODES), line=st.integers(1, 4000))
    def shipper_dies_at_a_line(self, node: int, line: int) -> None:
        if die_at_line(line, lambda: self.ship(node, True, False)):
            self.shippers[node] = None

    @precondition(lambda self: not self.exact)
    @rule(node=st.integers(0, NODES))
    def unguarded_shipper(self, node: int) -> None:
        """Two shippers at once, on a file system whose locks lock nothing: events twice, and never a fork."""
        self.unguarded = True
        with contextlib.suppress(Killed):
            shipper = Shipper(self._spool(node))
            shipper.cycle(flush=True)
            shipper.close()

    @precondition(lambda self: not self.exact)
    @rule(who=_WHO)
    def restore_a_backup(self, who: int) -> None:
        """A copy of a writer's directory, as it is now, appears in another spool and is shipped from there too."""
        if not self.writers or self.copies >= 3:
            return
        writer = self.writers[who % len(self.writers)]
        target = self._spool(NODES) / writer.id
        if writer.directory.exists() and not target.exists():
            self.copies += 1
            shutil.copytree(writer.directory, target)

    # -- the bucket, the ledger and the world --------------------------------------------------------------------------

    @rule(after=st.integers(0, 20), fault=st.sampled_from(_FAULTS), times=st.sampled_from([1, 1, 1, 2, 50]))
    def bucket_fails(self, after: int, fault: tuple[str, str], times: int) -> None:
        """From the call after so many on, the next `times` calls of a verb have one outcome."""
        start, left = len(self.bucket.calls) + after, [times]

        def plan(call: Call) -> str | None:
            if call.number < start or call.verb != fault[0] or not left[0]:
                return None
            if self.exact and fault[1] in ("stale", "missing", "cut"):
                return None
            left[0] -= 1
            self.behind = self.behind or fault[1] in ("stale", "missing", "cut")
            self.careless = self.careless or fault[1] == "ignored"
            return fault[1]

        self.bucket.ghost = f"{self.bucket.name}/ledger/runs/{RUN}/receipt/{'0' * 32}/00000000.json"
        self.bucket.plan = plan

    @rule()
    def bucket_heals(self) -> None:
        self.bucket.plan = lambda call: None

    @rule()
    def checkpoint(self) -> None:
        with contextlib.suppress(RlkError, Killed):
            make(open_store(self.bucket.url), RUN)

    @precondition(lambda self: not self.sealed)
    @rule()
    def seal(self) -> None:
        with contextlib.suppress(RlkError, Killed):
            seal(open_store(self.bucket.url), RUN, incomplete=True)
        self.sealed = any(path.endswith("/seal.json") for path in self.bucket.objects)

    @rule(which=st.integers(0, 20))
    def delete_an_index(self, which: int) -> None:
        there = [path for path in self.bucket.objects if "/index/" in path]
        if there:
            del self.bucket.objects[there[which % len(there)]]

    @rule(seconds=st.sampled_from([-86_400, -3600, -1, 1, 3600, 7200, 400_000]))
    def clock_jumps(self, seconds: int) -> None:
        real_ns, real = _TIME_NS, _TIME
        self.patch.setattr(time, "time_ns", lambda: real_ns() + seconds * 1_000_000_000)
        self.patch.setattr(time, "time", lambda: real() + seconds)
        self.patch.setattr(recorder, "_wall", time.time_ns)

    # -- what must hold ------------------------------------------------------------------------------------------------

    def _ledger(self) -> dict[tuple[str, int], list[Recorded]]:
        """Every event a receipt names, by (writer, number), read without the code under test."""
        out: dict[tuple[str, int], list[Recorded]] = {}
        for path, data in list(self.bucket.objects.items()):
            if "/receipt/" not in path:
                continue
            name = decode_receipt(data, path).segment.name
            segment = self.bucket.objects[f"{self.bucket.name}/ledger/runs/{RUN}/{name}"]
            for record in segments.read_records(segment):
                fields = decode_envelope(record.envelope)
                event = Recorded(fields["type"], record.seq, fields, {})
                out.setdefault((record.writer_id, record.seq), []).append(event)
        return out

    def _image(self, directory: Path) -> SpoolImage | None:
        with contextlib.suppress(FormatError):
            return read_spool(directory) if any(directory.glob("*.spool")) else None
        return None

    @invariant()
    def nothing_acknowledged_is_lost(self) -> None:
        ledger = self._ledger()
        for writer in self.writers:
            there = {seq for w, seq in ledger if w == writer.id}
            image = self._image(writer.directory)
            there |= {event.seq for event in image.events} if image is not None else set()
            assert set(writer.acked) <= there, f"{writer.id}: {sorted(set(writer.acked) - there)}"

    @invariant()
    def no_crash_looks_like_an_attack(self) -> None:
        if f"{self.bucket.name}/ledger/ledger.json" not in self.bucket.objects:
            return
        with self.bucket.healthy():
            result = verify(self.bucket.url)
        assert result.exit_code != Exit.ERROR, result.findings

    def teardown(self) -> None:
        try:
            self._finish()
        finally:
            self.patch.undo()
            for writer in self.writers:
                writer.recorder._spool.close()
                writer.recorder._closed = True
            self.bucket.__exit__()
            shutil.rmtree(self.where, ignore_errors=True)

    def _finish(self) -> None:
        """The faults end, living writers close, new shippers and a new maker carry on; then all is counted."""
        self.bucket.plan = lambda call: None
        for writer in self.writers:
            if writer.alive and not writer.closed:
                writer.recorder.close(timeout=0.0)
                writer.closed = True
        for writer in self.writers:
            writer.alive = False
        for node in range(NODES + 1):
            with contextlib.closing(Shipper(self._spool(node))) as shipper:
                for _ in range(4):
                    shipper.cycle(flush=True)
                assert shipper.errors() == []
            left = list(self._spool(node).glob("*/*.spool"))
            assert left == [], "what is committed is released"
        while make(open_store(self.bucket.url), RUN) is not None:
            pass
        self._count()

    def _count(self) -> None:
        ledger = self._ledger()
        twice = self.behind or self.unguarded or self.copies
        assert twice or {len(copies) for copies in ledger.values()} <= {1}
        for writer in self.writers:
            events = [copies[0] for (w, _), copies in sorted(ledger.items()) if w == writer.id]
            self._count_writer(writer, events)
        for child, seqs in self.children.items():
            assert {int(seq) for seq in seqs} <= {seq for w, seq in ledger if w == child}
        result = verify(self.bucket.url, deep=True)
        kinds = {f.kind for f in result.findings}
        lossy = any(e.type == "gap" for copies in ledger.values() for e in copies)
        allowed = {"segment.garbage", "writer.killed", "run.redeclared", "rank.missing", "signature.unchecked"}
        allowed |= {"seqs.dropped"} if lossy else set()
        allowed |= {"bytes.lost"} if self.torn else set()
        allowed |= {"duplicates"} if twice else set()
        allowed |= {"store.overwrites"} if self.careless else set()
        allowed |= {"seal.late", "seal.added", "seal.incomplete"} if self.sealed else set()
        assert kinds <= allowed, result.findings
        assert result.exit_code in (Exit.OK, Exit.GAP)
        assert (result.exit_code == Exit.GAP) == any(f.severity == "gap" for f in result.findings)

    def _count_writer(self, writer: Writer, events: list[Recorded]) -> None:
        """Each acknowledged event under its number, nobody else's, and gap events over exactly what was lost."""
        found = {e.seq: e.fields.get("weight_version") or e.fields.get("sample_id") for e in events}
        mine = {seq: marker for seq, marker in found.items() if marker is not None}
        for seq, marker in writer.acked.items():
            assert mine.pop(seq, None) == marker, f"event {seq} of {writer.id}"
        assert set(mine.values()) <= writer.maybe, "an event that nobody recorded"
        gaps = [Recorded("gap", e.seq, _span(e), {}) for e in events if e.type == "gap"]
        others = [e for e in events if e.type != "gap"]
        if self.copies:  # a copy made in an outage states some losses a second time: none is unstated
            claimed = {e.seq for e in events} | {n for gap in gaps for n in range(gap.fields["first"], gap.seq)}
            assert claimed == set(range(max(claimed, default=-1) + 1)), writer.id
            return
        assert unaccounted(others + gaps) == [], writer.id
        stated = sum(gap.fields["last"] - gap.fields["first"] + 1 for gap in gaps)
        assert writer.lost <= stated <= writer.lost + len(writer.maybe) + 1, (writer.lost, stated)


def _span(gap: Recorded) -> dict[str, Any]:
    return {"first": gap.fields["first"], "last": gap.fields["last"]}


_TIME_NS, _TIME = time.time_ns, time.time


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_any_steps_of_recorders_shippers_and_ledger() -> None:
    by_hand = os.environ.get("RLK_TEST_MACHINE")
    run_state_machine_as_test(
        LedgerMachine,
        settings=settings(
            max_examples=int(by_hand or 50),
            stateful_step_count=60 if by_hand else 25,
            deadline=None,
            derandomize=not by_hand,
            database=None,
            suppress_health_check=list(HealthCheck),
            print_blob=True,
        ),
    )


# -- the checks can fail -----------------------------------------------------------------------------------------------


def _released_too_early(patch: pytest.MonkeyPatch) -> None:
    release = spools.WriterSpool.release
    patch.setattr(spools.WriterSpool, "release", lambda self, committed: release(self, 1 << 40))


def _losses_not_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(spool.SpoolWriter, "keep", lambda self, payload: None)


def _receipts_not_read(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Outbox, "_adopt_receipts", lambda self, store, contact: None)


def _large_then_ship(machine: LedgerMachine) -> None:
    machine.record(0, 5000, 3)
    machine.ship(0, flush=False, fresh=False)


def _outage_then_kill(machine: LedgerMachine) -> None:
    machine.record(0, -1, 2)
    machine.outage(0, 11)
    machine.kill_writer(0, b"")


def _two_shippers(machine: LedgerMachine) -> None:
    machine.record(0, 3, 3)
    machine.ship_all(0)
    machine.new_shipper(0, flush=True)


SCRIPTS: list[tuple[Callable[[pytest.MonkeyPatch], None], Callable[[LedgerMachine], None]]] = [
    (_released_too_early, _large_then_ship),
    (_losses_not_kept, _outage_then_kill),
    (_receipts_not_read, _two_shippers),
]


def _play(script: Callable[[LedgerMachine], None]) -> None:
    machine = LedgerMachine()
    try:
        machine.first_writer(0, exact=True, tight=False)
        script(machine)
        machine.nothing_acknowledged_is_lost()
        machine.no_crash_looks_like_an_attack()
    finally:
        machine.teardown()


@pytest.mark.parametrize(("defect", "script"), SCRIPTS, ids=lambda f: f.__name__)
def test_the_machine_notices_what_it_guards_against(
    defect: Callable[[pytest.MonkeyPatch], None],
    script: Callable[[LedgerMachine], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _play(script)
    defect(monkeypatch)
    with pytest.raises(AssertionError):
        _play(script)
