"""Spool files: growth, rolls, large events, both write methods, budget, gaps, full disks and recovery."""

import contextlib
import errno
import json
import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlk_ledger_schemas.errors import SpoolError
from rlk_ledger_sdk import budget, record, recorder, spool
from rlk_ledger_sdk.guard import guarded
from rlk_ledger_sdk.testing import read_spool, unaccounted

MIB = 1 << 20


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(spool, "FIRST_FILE", 16384)
    monkeypatch.setattr(spool, "LARGEST_FILE", 65536)
    monkeypatch.setattr(spool, "RESERVE", 8192)
    monkeypatch.setattr(budget, "RETRY_S", 0.0)


def knob(size=0, **fields):
    return record("knob.applied", path="p", requested=1, status="applied", evidence="x" * size, **fields)


def bulk(n=400):
    return record("logprobs", sample_id="s", source="rollout", contract_id="c", values=[-1.0] * n)


def gaps(events):
    return [e.fields for e in events if e.type == "gap"]


def commit(recorder_, seq):
    """What a shipper that has shipped everything up to `seq` leaves behind."""
    (recorder_.directory / "status.json").write_text(json.dumps({"synced": seq, "committed": seq, "shipped_bytes": 1}))


def test_files_start_at_one_mib_and_double_to_sixty_four(opened):
    recorder_ = opened(budget_bytes=1 << 33)
    for _ in range(9):
        writer = recorder_._spool
        writer._limit = 0
        knob()
    sizes = [p.stat().st_size for p in sorted(recorder_.directory.glob("*.spool"))]
    assert sizes == [MIB, 2 * MIB, 4 * MIB, 8 * MIB, 16 * MIB, 32 * MIB, 64 * MIB, 64 * MIB, 64 * MIB, 64 * MIB]


@pytest.mark.parametrize("method", ["mmap", "pwrite"])
def test_rolls_keep_the_sequence_and_name_the_first_seq_of_each_file(opened, image, small, monkeypatch, method):
    monkeypatch.setattr(recorder, "method_for", lambda name: method)
    recorder_ = opened()
    assert (recorder_._spool._map is not None) == (method == "mmap")
    stored = [knob(size=n % 700).seq for n in range(200)]
    assert stored == list(range(2, 202))
    files = sorted(recorder_.directory.glob("*.spool"))
    assert len(files) > 2
    assert [f.name for f in files] == [f"{n:08d}.spool" for n in range(len(files))]
    found = image(recorder_)
    assert unaccounted(found.events) == []
    assert found.bytes_left == [0] * len(files)
    assert not list(recorder_.directory.glob(".*.tmp"))


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(sizes=st.lists(st.integers(0, 30000), max_size=12), method=st.sampled_from(["mmap", "pwrite"]))
def test_events_of_any_size_come_back_in_order(opened, image, small, monkeypatch, sizes, method):
    monkeypatch.setattr(recorder, "method_for", lambda name: method)
    recorder_ = opened()
    for size in sizes:
        bulk(size)
    found = image(recorder_)
    assert [len(e.arrays["values"]) for e in found.events[2:]] == sizes
    assert unaccounted(found.events) == []


def test_an_event_larger_than_a_file_gets_its_own(opened, image):
    recorder_ = opened()
    knob()
    record("rollout.sample", sample_id="s", response_token_ids=[7] * MIB, loss_mask=[1] * MIB)
    knob()
    found = image(recorder_)
    assert [e.seq for e in found.events] == [0, 1, 2, 3, 4]
    assert len(found.events[3].arrays["loss_mask"]) == MIB
    sizes = [p.stat().st_size for p in sorted(recorder_.directory.glob("*.spool"))]
    assert sizes[0] == MIB
    assert sizes[1] > 5 * MIB


def test_a_reader_never_sees_a_file_without_its_header(opened, small, monkeypatch):
    seen = []
    rename = spool.Path.rename

    def watched(self, target):
        seen.append(read_spool(self.parent) if any(self.parent.glob("*.spool")) else None)
        assert self.read_bytes()[:8] == b"RLKSPOOL"
        return rename(self, target)

    monkeypatch.setattr(spool.Path, "rename", watched)
    opened()
    for _ in range(100):
        knob(200)
    assert len(seen) > 2


def test_over_budget_both_classes_become_counted_gaps(opened, image, small, caplog, monkeypatch):
    monkeypatch.setattr("rlk_ledger_sdk.config.SMALLEST_BUDGET", 0)
    recorder_ = opened(budget_bytes=30000, block_ms=0)
    while bulk().seq is not None:
        pass
    for _ in range(20):
        assert bulk().seq is None
    assert recorder_.auditable
    assert knob(8000).seq is None
    assert not recorder_.auditable
    events = image(recorder_).events
    assert gaps(events)[0]["kind"] == "bulk"
    assert gaps(events)[0]["event_type"] == "logprobs"
    assert gaps(events)[0]["bytes"] > 1600
    assert "budget" in gaps(events)[0]["reason"]
    assert unaccounted(events) == []
    assert len(caplog.records) == 1
    commit(recorder_, recorder_._spool.at[1])
    assert bulk().seq is not None
    events = image(recorder_).events
    assert unaccounted(events) == []
    lost = sum(g["last"] - g["first"] + 1 for g in gaps(events))
    assert lost == 22
    assert [g["kind"] for g in gaps(events)].count("audit") >= 1


def test_a_long_outage_states_its_losses_in_few_gap_events(opened, image, small, monkeypatch):
    monkeypatch.setattr("rlk_ledger_sdk.config.SMALLEST_BUDGET", 0)
    recorder_ = opened(budget_bytes=20000, block_ms=0)
    while bulk().seq is not None:
        pass
    for _ in range(500):
        bulk()
    assert len(gaps(image(recorder_).events)) <= 12
    commit(recorder_, recorder_._spool.at[1])
    bulk()
    events = image(recorder_).events
    assert unaccounted(events) == []
    assert sum(g["last"] - g["first"] + 1 for g in gaps(events)) == 501


def test_strict_raises_for_audit_events_and_drops_bulk(opened, image, small, monkeypatch):
    monkeypatch.setattr("rlk_ledger_sdk.config.SMALLEST_BUDGET", 0)
    recorder_ = opened(budget_bytes=20000, block_ms=0, mode={"consistency": "strict"}, on_error="warn")
    while bulk().seq is not None:
        pass
    with pytest.raises(SpoolError, match=r"knob\.applied was not recorded and consistency is strict"):
        knob(8000)
    assert bulk().seq is None
    assert unaccounted(image(recorder_).events) == []


@pytest.mark.parametrize("consistency", ["audit", "strict"])
def test_an_integrations_guard_hides_a_lost_audit_event_from_audit_only(opened, small, monkeypatch, consistency):
    monkeypatch.setattr("rlk_ledger_sdk.config.SMALLEST_BUDGET", 0)
    opened(budget_bytes=20000, block_ms=0, mode={"consistency": consistency}, on_error="warn")
    while bulk().seq is not None:
        pass
    expected = pytest.raises(SpoolError) if consistency == "strict" else contextlib.nullcontext()
    with expected, guarded("an integration"):
        knob(8000)


def test_small_events_still_fit_where_large_ones_do_not(opened, image, small, monkeypatch):
    """An exhausted budget is per event: the end of the last file is used before anything small is dropped."""
    monkeypatch.setattr("rlk_ledger_sdk.config.SMALLEST_BUDGET", 0)
    recorder_ = opened(budget_bytes=16384, block_ms=0)
    assert bulk(4000).seq is None
    assert knob().seq is not None
    events = image(recorder_).events
    assert [e.type for e in events[2:]] == ["gap", "knob.applied"]
    assert unaccounted(events) == []


def test_close_states_the_losses_before_it_says_that_the_writer_closed(opened, image, small, monkeypatch):
    monkeypatch.setattr("rlk_ledger_sdk.config.SMALLEST_BUDGET", 0)
    recorder_ = opened(budget_bytes=20000, block_ms=0)
    while bulk().seq is not None:
        pass
    for _ in range(5):
        bulk()
    recorder_.close()
    events = image(recorder_).events
    assert [e.type for e in events[-2:]] == ["gap", "writer.closed"]
    assert unaccounted(events) == []


def test_a_full_disk_costs_a_gap_and_recovers(opened, image, small, monkeypatch, caplog):
    recorder_ = opened()
    real = os.posix_fallocate

    def full(fd, offset, size):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    while bulk().seq is not None:
        pass
    bulk()
    monkeypatch.setattr(os, "posix_fallocate", real)
    assert bulk().seq is not None
    events = image(recorder_).events
    assert "No space left" in gaps(events)[0]["reason"]
    assert unaccounted(events) == []
    assert sum(g["last"] - g["first"] + 1 for g in gaps(events)) == 2
    assert len(caplog.records) == 1
    assert not list(recorder_.directory.glob(".*.tmp"))


def test_a_nearly_full_disk_gets_a_smaller_file(opened, image, small, monkeypatch):
    recorder_ = opened()
    real = os.posix_fallocate

    def nearly_full(fd, offset, size):
        if size > 20000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(fd, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", nearly_full)
    assert all(bulk().seq is not None for _ in range(20))
    assert {p.stat().st_size for p in recorder_.directory.glob("*.spool")} == {16384}
    assert gaps(image(recorder_).events) == []


def test_a_disk_full_from_the_start_still_states_who_writes_when_it_recovers(opened, image, small, monkeypatch):
    real = os.posix_fallocate

    def full(fd, offset, size):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    recorder_ = opened()
    assert bulk().seq is None
    assert bulk().seq is None
    monkeypatch.setattr(os, "posix_fallocate", real)
    bulk()
    events = image(recorder_).events
    assert [e.type for e in events] == ["gap", "run.opened", "writer.opened", "logprobs"]
    assert unaccounted(events) == []


def test_a_disk_that_fills_during_pwrite_ends_the_file_where_it_is_valid(opened, image, small, monkeypatch):
    monkeypatch.setattr(recorder, "method_for", lambda name: "pwrite")
    recorder_ = opened()
    knob()
    real = os.pwrite
    left = [100]

    def filling(fd, data, offset):
        if left[0] <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken = bytes(data)[: left[0]]
        left[0] -= len(taken)
        return real(fd, taken, offset)

    monkeypatch.setattr(os, "pwrite", filling)
    assert bulk().seq is None
    monkeypatch.setattr(os, "pwrite", real)
    assert knob().seq is not None
    found = image(recorder_)
    assert [e.type for e in found.events[2:]] == ["knob.applied", "gap", "knob.applied"]
    assert unaccounted(found.events) == []
    assert found.bytes_left == [0, 0]


def test_a_spool_directory_that_vanishes_never_reaches_the_job(opened, small, monkeypatch):
    recorder_ = opened(on_error="warn")
    directory = recorder_.directory
    directory.rename(directory.with_name("gone"))
    directory.parent.chmod(0o700)
    monkeypatch.setattr(spool.Path, "mkdir", lambda *a, **k: (_ for _ in ()).throw(OSError(errno.EACCES, "no")))
    for _ in range(100):
        knob(300)
    assert recorder_._losses


def test_a_blocked_writer_waits_at_most_once_a_second(opened, small, monkeypatch):
    monkeypatch.setattr("rlk_ledger_sdk.config.SMALLEST_BUDGET", 0)
    naps = []
    clock = [1000.0]

    def sleep(seconds):
        naps.append(seconds)
        clock[0] += seconds

    monkeypatch.setattr(budget.time, "sleep", sleep)
    monkeypatch.setattr(budget.time, "monotonic", lambda: clock[0])
    opened(budget_bytes=20000, block_ms=5)
    for _ in range(200):
        bulk()
    assert 0 < sum(naps) <= 0.006


def test_past_half_the_budget_the_shipper_is_told_to_hurry(opened, small, monkeypatch):
    monkeypatch.setattr("rlk_ledger_sdk.config.SMALLEST_BUDGET", 0)
    recorder_ = opened(budget_bytes=100_000)
    for _ in range(60):
        bulk()
    assert int((recorder_.directory / "flush").read_text()) > 0


def test_a_record_that_was_waiting_while_the_recorder_closed_opens_no_file(opened, image, caplog):
    recorder_ = opened()
    knob()
    close = recorder_._spool.close

    def close_before_the_waiting_thread_enters():
        close()
        recorder_._mark = b"\1"  # it looked before close() did

    recorder_._spool.close = close_before_the_waiting_thread_enters
    recorder_.close()
    assert recorder_.record("knob.applied", path="a", requested=1, status="applied").seq is None
    assert [event.type for event in image(recorder_).events[-2:]] == ["knob.applied", "writer.closed"]
    assert len(list(recorder_.directory.glob("*.spool"))) == 1
    assert "record() after close()" in caplog.text
