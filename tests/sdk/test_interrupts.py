"""Asynchronous exceptions and re-entrant calls at every line of record(): no deadlock, no corruption, no lost event."""

import contextlib
import linecache
import os
import random
import signal
import sys
import threading
import time

import pytest

from rlk_ledger_sdk import api, record, spool
from rlk_ledger_sdk.testing import read_spool, unaccounted


class Interrupt(BaseException):
    """Stands for KeyboardInterrupt, which pytest would take for its own."""


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(spool, "FIRST_FILE", 8192)
    monkeypatch.setattr(spool, "LARGEST_FILE", 16384)
    monkeypatch.setattr(spool, "RESERVE", 2048)


def knob(value):
    return record("knob.applied", path="x", requested=value, status="applied", evidence="e" * 1500)


def bulk(n=250):
    return record("logprobs", sample_id="s", source="rollout", contract_id="c", values=[-1.0] * n)


def at_line(n, action, operation):
    """Runs `operation`, calling `action` before the n-th traced line of the recorder; returns the lines there were.

    Two kinds of line are skipped, because no signal can strike there: the interpreter looks for signals after calls
    only. `try:` is no instruction at all, and a `with self._lock` that comes again in its frame is the call that
    releases the lock.
    """
    lines = 0
    entered = set()

    def trace(frame, event, arg):
        nonlocal lines
        if "/rlk_ledger_sdk/" not in frame.f_code.co_filename:
            return None
        if event == "line":
            text = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
            key = (id(frame), frame.f_lineno)
            if text == "try:" or (text.startswith("with self._lock") and key in entered):
                return trace
            entered.add(key)
            lines += 1
            if lines == n:
                action()
        return trace

    sys.settrace(trace)
    try:
        operation()
    finally:
        sys.settrace(None)
    return lines


def interrupt():
    raise Interrupt


def operations():
    def roll():
        for n in range(4):
            knob(n)

    return {"small": lambda: knob(1), "arrays": bulk, "roll": roll}


@pytest.mark.parametrize("name", list(operations()))
@pytest.mark.parametrize("method", ["mmap", "pwrite"])
def test_an_exception_at_every_line_leaves_a_consistent_spool(opened, small, monkeypatch, name, method):
    monkeypatch.setattr("rlk_ledger_sdk.recorder.method_for", lambda kind: method)
    operation = operations()[name]
    opened()
    total = at_line(-1, interrupt, operation)
    for n in range(1, total + 1):
        recorder = opened()
        before = [knob(0), bulk()]
        with contextlib.suppress(Interrupt):
            at_line(n, interrupt, operation)
        seen = read_spool(recorder.directory).events
        after = [record("knob.applied", path="tiny", requested=0, status="applied")]
        assert sum(read_spool(recorder.directory).bytes_left) == 0, f"garbage after line {n} of {total}"
        after += [bulk(), knob(9)]
        found = read_spool(recorder.directory)
        where = f"interrupted at line {n} of {total}"
        assert unaccounted(found.events) == [], where
        assert {r.seq for r in before + after} <= {e.seq for e in found.events}, where
        assert found.events[: len(seen)] == seen, f"{where}: a frame that a shipper may have read was changed"
        assert [e for e in found.events if e.type == "gap"] == [], where
        assert sum(found.bytes_left) == 0, where


def test_the_checks_notice_a_recorder_that_does_not_resync(opened, small, monkeypatch):
    """The guard of the test above, broken on purpose."""
    monkeypatch.setattr(spool.SpoolWriter, "resync", lambda self: None)
    with pytest.raises(AssertionError, match=r"garbage after line|a frame that a shipper may have read was changed"):
        test_an_exception_at_every_line_leaves_a_consistent_spool(opened, small, monkeypatch, "arrays", "mmap")


def test_a_record_from_a_handler_at_every_line_is_stored(opened, small):
    """What a signal handler or __del__ records while record() runs is stored when the interrupted call ends."""
    opened()
    operation = operations()["roll"]
    total = at_line(-1, interrupt, operation)
    for n in range(1, total + 1):
        recorder = opened()
        nested = []
        at_line(
            n,
            lambda nested=nested: nested.append(record("knob.applied", path="n", requested=0, status="error")),
            operation,
        )
        found = read_spool(recorder.directory)
        assert len(nested) == 1
        assert unaccounted(found.events) == [], f"line {n} of {total}"
        assert [e.seq for e in found.events if e.fields.get("status") == "error"] == [nested[0].seq], f"line {n}"
        assert sum(e.fields.get("status") == "applied" for e in found.events) == 4


def test_real_signals_at_random_instants(opened, small):
    """A thread sends the main thread 400 signals; the handler raises wherever it finds the recorder at work."""
    recorder = opened()
    acked, hits = [], []
    main = threading.main_thread().ident
    stop = threading.Event()

    def handler(number, frame):
        if "/rlk_ledger_s" in frame.f_code.co_filename:
            hits.append(frame.f_lineno)
            raise Interrupt

    def pester():
        chance = random.Random(3)
        for _ in range(400):
            time.sleep(chance.random() * 0.001)
            signal.pthread_kill(main, signal.SIGUSR1)
        stop.set()

    previous = signal.signal(signal.SIGUSR1, handler)
    thread = threading.Thread(target=pester)
    thread.start()
    while not stop.is_set():
        with contextlib.suppress(Interrupt):
            acked.append(bulk(20).seq)
    thread.join()
    signal.signal(signal.SIGUSR1, previous)
    last = knob(1)
    events = read_spool(recorder.directory).events
    assert len(set(hits)) > 3
    assert unaccounted(events) == []
    assert set(acked) | {last.seq} <= {e.seq for e in events}
    assert recorder._lock.acquire(blocking=False)
    recorder._lock.release()


def test_other_threads_go_on_after_an_interrupted_record(opened, small):
    recorder = opened()
    for n in (20, 25, 30, 35, 40):
        with pytest.raises(Interrupt):
            at_line(n, interrupt, lambda: knob(1))
        seen = []
        thread = threading.Thread(target=lambda seen=seen: seen.append(knob(2).seq))
        thread.start()
        thread.join(timeout=60)
        assert seen
        assert seen[0] is not None
    assert unaccounted(read_spool(recorder.directory).events) == []
    assert api.current() is recorder


def fork_at(n, operation, records_at_once):
    """Runs `operation`, forking before its n-th traced line; the child goes on too, records once more and exits.

    Returns the child's exit status: 0 when its own event has a number.
    """
    child = None

    def fork():
        nonlocal child
        child = os.fork()
        if child == 0:
            sys.settrace(None)
            if records_at_once:
                record("knob.applied", path="in the handler", requested=1, status="applied")

    try:
        at_line(n, fork, operation)
        if child == 0:
            stored = record("knob.applied", path="late", requested=1, status="applied").seq is not None
            os._exit(0 if stored else 1)
    finally:
        if child == 0:
            os._exit(2)
    return os.waitpid(child, 0)[1]


def complaints_about_forks(opened, spool_, records_at_once, stride=1):
    """What is wrong with the spools after a fork at every `stride`-th line of four records, one of which rolls."""
    operation = operations()["roll"]

    opened(on_error="warn")
    wrong = []
    for n in range(1, at_line(-1, interrupt, operation) + 1, stride):
        parent = opened(on_error="warn", spool=spool_ / str(n))
        status = fork_at(n, operation, records_at_once)
        images = {d.name: read_spool(d) for d in (spool_ / str(n)).glob("*/")}
        events = {name: image.events for name, image in images.items()}
        mine = [e.fields["requested"] for e in events.pop(parent.writer_id) if e.type == "knob.applied"]
        assert len(images[parent.writer_id].bytes_left) > 1, "nothing rolled"
        if status or mine != [0, 1, 2, 3] or len(events) != 1:
            wrong.append(f"line {n}: status {status}, the parent stored {mine}, {len(events)} other writers")
        if any(unaccounted(image.events) or sum(image.bytes_left) for image in images.values()):
            wrong.append(f"line {n}: a number is missing, doubled or torn")
        if any("late" not in [e.fields.get("path") for e in theirs] for theirs in events.values()):
            wrong.append(f"line {n}: what the child recorded is not there")
    return wrong


@pytest.mark.parametrize(("records_at_once", "stride"), [(False, 1), (True, 3)])
@pytest.mark.parametrize("method", ["mmap", "pwrite"])
def test_a_fork_at_every_line_gives_each_process_its_own_events(
    opened, small, monkeypatch, tmp_path, method, records_at_once, stride
):
    """A handler may fork while record() runs; the child must not go on writing into its parent's spool."""
    monkeypatch.setattr("rlk_ledger_sdk.recorder.method_for", lambda kind: method)
    assert complaints_about_forks(opened, tmp_path / "s", records_at_once, stride) == []


def test_the_check_notices_a_child_that_goes_on_in_its_parents_spool(opened, small, monkeypatch, tmp_path):
    """The guard of the test above, broken on purpose."""
    close = spool.SpoolWriter.close

    def forgetful(self):
        close(self)
        self.closed = False

    monkeypatch.setattr(spool.SpoolWriter, "close", forgetful)
    assert any("the parent stored" in text for text in complaints_about_forks(opened, tmp_path / "s", False, 7))
