"""flush(), the shipper's start and restart, and what close() leaves behind."""

import fcntl
import itertools
import json
import os
import threading
import time

import pytest

from rlk_ledger_schemas.errors import FlushTimeout, UsageError
from rlk_ledger_sdk import api, durability, flush, hooks, install, record
from rlk_ledger_sdk.status import lock_is_free, read_status
from rlk_ledger_sdk.testing import read_spool


def knob():
    return record("knob.applied", path="a", requested=1, status="applied")


def write_status(recorder, **fields):
    fresh = recorder.directory / "status.tmp"
    fresh.write_text(json.dumps({"shipped_bytes": 0, "shipper": "s", "wall_us": 1, "error": None, **fields}))
    fresh.replace(recorder.directory / "status.json")


class Shipper:
    """Hooks that count, and a stand-in for the shipper process: it holds the lock and answers flush requests."""

    def __init__(self, answers=True, error=None):
        self.started = 0
        self.inline = 0
        self.answers = answers
        self.error = error
        self.lock = None

    def start_shipper(self, config):
        self.started += 1
        if self.answers:
            self.lock = os.open(config.spool / "shipper.lock", os.O_RDWR | os.O_CREAT)
            fcntl.flock(self.lock, fcntl.LOCK_EX)

    def ship_inline(self, config):
        self.inline += 1
        for directory in config.spool.glob("*/"):
            last = read_spool(directory).events[-1].seq
            (directory / "status.json").write_text(json.dumps({"synced": last, "committed": last}))

    def die(self):
        if self.lock is not None:
            os.close(self.lock)
            self.lock = None


@pytest.fixture
def shipper():
    made = Shipper()
    install(made)
    yield made
    api.close(timeout=0)
    made.die()


def test_spooled_is_reached_when_record_returns(opened):
    opened()
    reference = knob()
    marks = {"spooled": reference.seq, "synced": -1, "committed": -1, "checkpointed": -1}
    assert flush("spooled", timeout=0) == marks


def test_an_unknown_level_is_refused(opened):
    opened()
    with pytest.raises(UsageError, match="'commited' is unknown; use one of spooled, synced, committed, checkpointed"):
        flush("commited")
    api.close()
    with pytest.raises(UsageError, match="unknown"):
        flush("commited")


def test_without_a_shipper_flush_says_at_once_who_has_to_ship(opened):
    opened()
    knob()
    with pytest.raises(FlushTimeout, match=r"3 events of writer .* nothing ships .* `rlk-ledger recover .*` ships"):
        flush("committed", timeout=3600)


def test_flush_waits_for_the_status_file(opened, shipper):
    recorder = opened(shipper="process")
    seq = knob().seq

    def ship():
        while not (recorder.directory / "flush").exists():
            time.sleep(0.001)
        assert int((recorder.directory / "flush").read_text()) == seq
        write_status(recorder, synced=seq, committed=-1)
        time.sleep(0.01)
        write_status(recorder, synced=seq, committed=seq)

    thread = threading.Thread(target=ship)
    thread.start()
    assert flush("synced", timeout=60)["synced"] == seq
    marks = {"spooled": seq, "synced": seq, "committed": seq, "checkpointed": -1}
    assert flush("committed", timeout=60) == marks
    thread.join()


def test_flush_asks_for_a_checkpoint_and_waits_until_one_covers_what_was_recorded(opened, shipper):
    recorder = opened(shipper="process")
    seq = knob().seq

    def cover():
        while not (recorder.directory / "checkpoint").exists():
            time.sleep(0.001)
        asked = int((recorder.directory / "checkpoint").read_text())
        write_status(recorder, synced=seq, committed=seq, checkpointed=asked - 1)
        time.sleep(0.01)
        write_status(recorder, synced=seq, committed=seq, checkpointed=asked)

    thread = threading.Thread(target=cover)
    thread.start()
    assert flush("checkpointed", timeout=60) == dict.fromkeys(("spooled", "synced", "committed", "checkpointed"), seq)
    thread.join()
    assert int((recorder.directory / "flush").read_text()) == seq, "what is to be covered is to be committed first"


def test_a_checkpoint_that_does_not_come_is_told_from_events_that_are_not_committed(opened, shipper):
    recorder = opened(shipper="process")
    seq = knob().seq
    write_status(recorder, synced=seq, committed=seq, checkpointed=-1, checkpoint_error="receipt 7 is damaged")
    with pytest.raises(
        FlushTimeout, match=rf"{seq + 1} events .* not checkpointed .*receipt 7 is damaged.* committed;"
    ):
        flush("checkpointed", timeout=0.01)
    write_status(recorder, synced=seq, committed=seq - 1, checkpointed=-1)
    with pytest.raises(FlushTimeout, match=r"not checkpointed after 0.01 s\. They are safe in the spool"):
        flush("checkpointed", timeout=0.01)


def test_a_timeout_says_what_is_outstanding_and_why(opened, shipper):
    recorder = opened(shipper="process")
    knob()
    write_status(recorder, synced=2, committed=0, error="bucket: 403 Forbidden")
    with pytest.raises(FlushTimeout, match=r"2 events of writer .* not committed after 0.01 s.*403 Forbidden.*safe in"):
        flush("committed", timeout=0.01)


def test_a_half_written_status_is_no_status(opened):
    recorder = opened()
    (recorder.directory / "status.json").write_text('{"synced": 1')
    assert read_status(recorder.directory).synced == -1


def test_inline_shipping_happens_inside_flush(opened, shipper):
    opened(shipper="inline")
    seq = knob().seq
    assert flush("committed", timeout=0)["committed"] == seq
    assert (shipper.inline, shipper.started) == (1, 0)
    api.close()
    assert shipper.inline == 2


def test_an_inline_failure_is_a_flush_timeout_and_close_swallows_it(opened, shipper, caplog):
    opened(shipper="inline")

    def fail(config):
        raise OSError("no route to bucket")

    shipper.ship_inline = fail
    with pytest.raises(FlushTimeout, match="no route to bucket"):
        flush("committed")
    api.close()
    assert "no route to bucket" in caplog.text


def test_the_shipper_is_started_at_init_when_nobody_holds_the_lock(opened, shipper):
    recorder = opened(shipper="process")
    assert shipper.started == 1
    assert not lock_is_free(recorder.config.spool)
    opened(shipper="process", run_id="again")
    assert shipper.started == 1


def test_shipper_off_starts_nothing(opened, shipper):
    opened(shipper="off")
    assert shipper.started == 0


def test_a_dead_shipper_is_restarted_with_backoff(opened, shipper, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(durability.time, "monotonic", lambda: clock[0])
    recorder = opened(shipper="process")
    shipper.die()
    shipper.answers = False
    for _ in range(10):
        recorder._durability.ensure_shipper()
    assert shipper.started == 1
    starts = []
    while clock[0] < 1000:
        clock[0] += 0.5
        before = shipper.started
        recorder._durability.ensure_shipper()
        if shipper.started > before:
            starts.append(clock[0])
    pauses = [b - a for a, b in itertools.pairwise(starts)]
    assert pauses == sorted(pauses)
    assert max(pauses) == durability.LONGEST_BACKOFF_S


def test_a_roll_looks_at_the_shipper(opened, shipper, monkeypatch):
    monkeypatch.setattr(durability.time, "monotonic", lambda: 1e9)
    recorder = opened(shipper="process")
    shipper.die()
    recorder._durability._start_at = 0.0
    knob()
    assert shipper.started == 1
    recorder._spool._limit = 0
    knob()
    assert shipper.started == 2


def test_a_shipper_that_cannot_start_is_one_warning(opened, shipper, caplog):
    def fail(config):
        raise OSError("exec format error")

    shipper.start_shipper = fail
    recorder = opened(shipper="process")
    recorder._durability._start_at = 0.0
    recorder._durability.ensure_shipper()
    assert knob().seq is not None
    assert caplog.text.count("exec format error") == 1


def test_close_waits_for_the_commit_and_returns_when_it_is_there(opened, shipper, caplog):
    recorder = opened(shipper="process")
    knob()
    write_status(recorder, synced=3, committed=3)
    api.close(timeout=3600)
    assert read_spool(recorder.directory).events[-1].type == "writer.closed"
    assert caplog.text == ""


def test_close_twice_writes_one_closing_event(opened):
    recorder = opened()
    recorder.close()
    recorder.close()
    assert [e.type for e in read_spool(recorder.directory).events].count("writer.closed") == 1


def test_hooks_can_be_taken_back():
    install(Shipper())
    install(None)
    assert hooks.installed() is None
