"""SIGKILL at every traced line of record, roll, flush, fork and close: nothing acknowledged is lost.

The claim: for every event whose record() had returned before the kill, the spool image holds it; the sequence numbers
of every writer are contiguous from 0; and no more events are there than were begun. A forked child runs up to its
n-th traced line and kills itself; n runs over every line the operation has.
"""

import contextlib
import mmap
import os
import random
import shutil
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rlk_ledger_schemas.errors import FlushTimeout
from rlk_ledger_sdk import api, spool
from rlk_ledger_sdk.recorder import Recorder
from rlk_ledger_sdk.testing import SpoolImage, read_spool, unaccounted

TRACED = ("rlk_ledger_sdk", "rlk_ledger_schemas")
UNTRACED = ("config", "environment", "fingerprints", "redaction")  # before the first byte of a spool exists
SLOTS = 4096
THREADS = 3
Operation = Callable[["Acks"], None]


class Acks:
    """Acknowledged (writer, seq) pairs in memory shared with the parent: written after record() returned."""

    def __init__(self, lanes: int) -> None:
        self._lanes = lanes
        self._memory = mmap.mmap(-1, lanes * SLOTS * 24)
        self._next = [0] * lanes

    def record(self, lane: int, value: int, blob: int = 0) -> None:
        """Records one event and, when record() has returned with a seq, acknowledges it."""
        reference = api.record("knob.applied", path="x" * (1 + blob), requested=value, status="applied")
        assert reference.writer_id is not None
        assert reference.seq is not None
        at = (lane * SLOTS + self._next[lane]) * 24
        self._memory[at + 8 : at + 24] = bytes.fromhex(reference.writer_id)
        struct.pack_into("<Q", self._memory, at, reference.seq + 1)
        self._next[lane] += 1

    def __iter__(self) -> Iterator[tuple[str, int]]:
        for at in range(0, self._lanes * SLOTS * 24, 24):
            (seq,) = struct.unpack_from("<Q", self._memory, at)
            if seq:
                yield self._memory[at + 8 : at + 24].hex(), seq - 1


def small_files() -> None:
    """Files small enough that a roll happens after a few events."""
    spool.FIRST_FILE, spool.LARGEST_FILE, spool.RESERVE = 8192, 16384, 2048


def start(where: Path) -> None:
    recorder = api.init(str(where / "ledger"), run_id="crash", spool=where / "spool", shipper="off", on_error="raise")
    assert isinstance(recorder, Recorder)


def op_init(acks: Acks) -> None:
    api.close(timeout=0)
    start(Path(os.environ["RLK_TEST_DIR"]))
    acks.record(0, 2)


def op_record(acks: Acks) -> None:
    for value in range(3):
        acks.record(0, value)


def op_roll(acks: Acks) -> None:
    acks.record(0, 3, blob=400)
    acks.record(0, 4)


def op_flush(acks: Acks) -> None:
    acks.record(0, 5)
    api.flush("spooled")
    with contextlib.suppress(FlushTimeout):
        api.flush("committed", timeout=0)
    acks.record(0, 6)


def op_rejected(acks: Acks) -> None:
    with contextlib.suppress(ValueError):
        api.record("knob.applied", path=1)
    acks.record(0, 7)


def op_fork(acks: Acks) -> None:
    acks.record(0, 8)
    child = os.fork()
    acks.record(1 if child == 0 else 0, 9)
    acks.record(1 if child == 0 else 0, 10)
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)


def op_close(acks: Acks) -> None:
    acks.record(0, 11)
    api.close(timeout=0)


OPERATIONS: list[Operation] = [op_init, op_record, op_roll, op_flush, op_rejected, op_fork, op_close]


def traced(operation: Operation, acks: Acks, kill_at: int) -> int:
    """Runs `operation`, killing the process at its `kill_at`-th traced line; returns how many lines there were."""
    lines = 0

    def trace(frame, event, arg):  # type: ignore[no-untyped-def]
        nonlocal lines
        where = Path(frame.f_code.co_filename)
        if where.parent.name not in TRACED or where.stem in UNTRACED:
            return None
        if event == "line":
            lines += 1
            if lines == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    sys.settrace(trace)
    try:
        operation(acks)
    finally:
        sys.settrace(None)
    return lines


def fill_first_file(acks: Acks) -> None:
    """Leaves less room in the current file than one more event of op_roll needs."""
    recorder = api.current()
    assert isinstance(recorder, Recorder)
    while recorder._spool._limit - recorder._spool.at[0] > 700:
        acks.record(0, 1, blob=100)


def background(acks: Acks, ready: list[threading.Event]) -> None:
    """Threads that record without pause until the process dies, one lane of acknowledgements each."""

    def work(lane: int) -> None:
        for value in range(SLOTS):
            acks.record(lane, value)
            ready[lane].set()
            time.sleep(0)

    for lane in range(2, 2 + THREADS):
        threading.Thread(target=work, args=(lane,), daemon=True).start()
        ready[lane].wait()


def victim(operation: Operation, where: Path, acks: Acks, kill_at: int, threads: bool) -> tuple[int, int]:
    """Runs the operation in a forked child; returns (wait status, lines traced when it was not killed)."""
    count = mmap.mmap(-1, 8)
    alive_read, alive_write = os.pipe()
    child = os.fork()
    if child == 0:
        code = 3
        try:
            os.close(alive_read)
            os.environ["RLK_TEST_DIR"] = str(where)
            small_files()
            start(where)
            fill_first_file(acks)
            if threads:
                background(acks, [threading.Event() for _ in range(2 + THREADS)])
            struct.pack_into("<Q", count, 0, traced(operation, acks, kill_at))
            code = 0
        finally:
            os._exit(code)
    os.close(alive_write)
    _, status = os.waitpid(child, 0)
    while os.read(alive_read, 1):  # end of file: grandchildren are gone too
        pass
    os.close(alive_read)
    return status, struct.unpack("<Q", count)[0]


def images(where: Path) -> list[SpoolImage]:
    directories = (where / "spool").glob("*/")
    return [read_spool(d) for d in directories if any(d.glob("*.spool"))]


def complaints(found: list[SpoolImage], acks: Acks, begun: int) -> list[str]:
    """What is wrong with the images left by a kill; `begun` bounds the events begun and not acknowledged."""
    wrong = []
    stored = {(image.header.writer_id, e.seq) for image in found for e in image.events}
    acked = set(acks)
    if lost := acked - stored:
        wrong.append(f"acknowledged and lost: {sorted(lost)}")
    for image in found:
        if missing := unaccounted(image.events):
            wrong.append(f"sequence numbers {missing} of {image.header.writer_id} are not contiguous")
    knobs = {(i.header.writer_id, e.seq) for i in found for e in i.events if e.type == "knob.applied"}
    if len(knobs - acked) > begun:
        wrong.append(f"{len(knobs - acked)} events more than were acknowledged, {begun} were begun")
    return wrong


def kill_everywhere(operation: Operation, tmp_path: Path, threads: bool, stride: int = 1) -> int:
    total = victim(operation, tmp_path / "count", Acks(2 + THREADS), -1, threads)[1]
    assert total > 10
    kills = 0
    for kill_at in range(1, total + 1, stride):
        where = tmp_path / str(kill_at)
        acks = Acks(2 + THREADS)
        status, _ = victim(operation, where, acks, kill_at, threads)
        killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        assert killed or status == 0, f"line {kill_at} of {total}: status {status}"
        kills += killed
        wrong = complaints(images(where), acks, begun=2 + (THREADS if threads else 0))
        assert not wrong, f"killed at line {kill_at} of {total} of {operation.__name__}: {wrong}"
    assert kills >= 0.9 * total / stride  # the last lines may move by a few between runs
    return kills


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda f: f.__name__)
def test_kill_at_every_line_loses_nothing_acknowledged(operation: Operation, tmp_path: Path) -> None:
    stride = 3 if operation is op_init else 1
    assert kill_everywhere(operation, tmp_path, threads=False, stride=stride) > 10


def test_the_roll_operation_rolls(tmp_path: Path) -> None:
    files = []
    for operation in (op_record, op_roll):
        where = tmp_path / operation.__name__
        victim(operation, where, Acks(2 + THREADS), -1, threads=False)
        files.append(len(list(where.glob("spool/*/*.spool"))))
    assert files == [1, 2]


@pytest.mark.parametrize("operation", [op_record, op_roll, op_flush, op_fork, op_close], ids=lambda f: f.__name__)
def test_kill_at_every_line_with_other_threads_recording(operation: Operation, tmp_path: Path) -> None:
    assert kill_everywhere(operation, tmp_path, threads=True) > 10


def broken_put(self: spool.SpoolWriter, payload: bytes) -> None:
    """The guarded mistake: acknowledges the event before its length word is stored."""
    if self._map is None or self.at[0] + len(payload) + 16 > self._limit:
        self._roll(len(payload) + 16)
    pending = getattr(self, "late", None)
    if pending is not None:
        struct.pack_into("<I", self._map, pending[0], pending[1])
    offset, seq = self.at
    crc = spool.extend(spool.extend(self._seed, struct.pack("<Q", offset)), payload)
    struct.pack_into("<I", self._map, offset + 4, crc)
    assert self._map is not None
    self._map[offset + 8 : offset + 8 + len(payload)] = payload
    self.late = (offset, len(payload))
    self.at = (offset + ((len(payload) + 15) & ~7), seq + 1)


def test_the_checker_notices_a_recorder_that_acknowledges_before_it_publishes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spool.SpoolWriter, "put", broken_put)
    acks = Acks(2 + THREADS)
    victim(op_record, tmp_path, acks, 60, threads=False)
    assert any("acknowledged and lost" in text for text in complaints(images(tmp_path), acks, begun=2))


def test_the_checker_notices_a_sequence_number_used_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = spool.SpoolWriter.put

    def put(self: spool.SpoolWriter, payload: bytes) -> None:
        original(self, payload)
        if self.at[1] == 4:
            self.at = (self.at[0], 3)

    monkeypatch.setattr(spool.SpoolWriter, "put", put)
    acks = Acks(2 + THREADS)
    victim(op_record, tmp_path, acks, -1, threads=False)
    assert any("not contiguous" in text for text in complaints(images(tmp_path), acks, begun=2))


def random_kills(tmp_path: Path, times: int) -> None:
    chance = random.Random(7)
    for n in range(times):
        where = tmp_path / str(n)
        acks = Acks(2 + THREADS)
        child = os.fork()
        if child == 0:
            try:
                small_files()
                start(where)
                background(acks, [threading.Event() for _ in range(2 + THREADS)])
                time.sleep(60)
            finally:
                os._exit(0)
        time.sleep(0.005 + chance.random() * 0.02)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        found = images(where) if (where / "spool").exists() else []
        wrong = complaints(found, acks, begun=THREADS)
        assert not wrong, f"random kill {n}: {wrong}"
        shutil.rmtree(where, ignore_errors=True)


def test_random_kills_lose_nothing_acknowledged(tmp_path: Path) -> None:
    random_kills(tmp_path, 40)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_random_kills_lose_nothing_acknowledged(tmp_path: Path) -> None:
    """RLK_TEST_KILLS says how many; 10,000 are the bar of a release."""
    random_kills(tmp_path, int(os.environ.get("RLK_TEST_KILLS", "1000")))
