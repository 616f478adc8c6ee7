"""A shipper holds what its bounds say, of any number of runs, whatever their buckets do."""

import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from rlk_ledger import ledger as ledgers
from rlk_ledger import outbox as outboxes
from rlk_ledger.records import EVENT_BYTES
from rlk_ledger.segments import SEGMENT_BYTES
from rlk_ledger.shipper import Shipper
from rlk_ledger.spawn import FRUGAL
from rlk_ledger.store import FileStore, open_store
from rlk_ledger.verify import verify
from rlk_ledger_schemas.errors import StoreError
from rlk_ledger_sdk.config import load_config
from rlk_ledger_sdk.recorder import Recorder

SMALL = 64_000
"""Bytes of a segment here."""


class Deaf(FileStore):
    """A bucket that fails every create of what `refused` says."""

    refused = "/"

    def create(self, path: str, data: bytes) -> None:
        if self.refused in path:
            raise StoreError("no.")
        super().create(path, data)


class DeafToReceipts(Deaf):
    refused = "/receipt/"


@pytest.fixture(autouse=True)
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outboxes, "SEGMENT_BYTES", SMALL)


def _held(shipper: Shipper) -> int:
    return sum(outbox.held() for outbox in shipper.outboxes.values())


def _counted(url: str, run_id: str = "r1") -> Counter:
    run = ledgers.open_ledger(url).run(run_id)
    own = {r.shipper for r in run.receipts}
    events = ledgers.open_ledger(url).read_events(run_id)
    return Counter((writer_id, seq) for writer_id, seq, _, _ in events if writer_id not in own)


def test_small_events_roll_by_what_they_cost_and_not_by_their_bytes(new_writer, spool, url) -> None:
    writer = new_writer()
    records = writer.many(400)
    assert sum(len(r.envelope) for r in records) < 2 * SMALL, "by bytes alone they would be two segments"
    shipper = Shipper(spool)
    while shipper.cycle():
        pass
    shipper.cycle(flush=True)
    rows = [r.segment.rows for r in ledgers.open_ledger(url).run("r1").receipts]
    assert sum(rows) == 400
    assert max(rows) <= SMALL // EVENT_BYTES


@pytest.mark.parametrize("runs", [1, 3, 40])
def test_what_runs_hold_together_is_bounded_while_no_bucket_answers(new_writer, spool, url, runs: int) -> None:
    for number in range(runs):
        new_writer(run_id=f"r{number}", dead=True).many(4000 // runs)
    shipper = Shipper(spool, lambda where: Deaf(Path(where)))
    for _ in range(6):
        shipper.cycle(flush=True)
        one = EVENT_BYTES + 400  # at most, each here
        assert 0 < _held(shipper) <= SMALL * 5 // 4 + runs * (SMALL // 64 + 2 * one)
    assert all(outbox.pending or outbox.inflight for outbox in shipper.outboxes.values()), "each has its share"


def test_a_dead_bucket_costs_another_run_the_size_of_its_segments_only(new_writer, spool, url, tmp_path) -> None:
    """Rolling goes on by itself, without a flush, in what the dead one left."""
    bad = str(tmp_path / "bad")
    new_writer(url=bad, run_id="r2").many(300)
    shipper = Shipper(spool, lambda where: Deaf(Path(where)) if where == bad else open_store(where))
    for _ in range(5):
        shipper.cycle(flush=True)
    live = new_writer()
    live.many(120)
    while shipper.cycle():
        pass
    assert sum(_counted(url).values()) > 60
    shipper.cycle(flush=True)
    assert _counted(url) == Counter((live.writer_id, i) for i in range(120))
    assert verify(url, deep=True).exit_code == 0


def test_a_frozen_draft_is_all_that_is_held_and_its_events_come_back_when_another_is_needed(
    new_writer, spool, url
) -> None:
    writer = new_writer()
    writer.many(30)
    shipper = Shipper(spool, lambda where: DeafToReceipts(Path(where)))
    shipper.cycle(flush=True)
    (box,) = shipper.outboxes.values()
    assert box.inflight is not None
    assert (box.inflight.records, box.pending) == ([], [])
    assert 0 < _held(shipper) < 30 * EVENT_BYTES
    assert box.waiting(writer.writer_id) == 30
    box._open = open_store
    box.forget()
    assert len(box.inflight.records) == box.waiting(writer.writer_id) == 30
    shipper.cycle(flush=True)
    assert _counted(url) == Counter((writer.writer_id, i) for i in range(30))
    assert box.waiting(writer.writer_id) == 0
    assert verify(url, deep=True).exit_code == 0


def test_the_real_process_ships_small_events_in_300_mb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than one segment of them, so that the next is read while one is made."""
    monkeypatch.setattr(outboxes, "SEGMENT_BYTES", SEGMENT_BYTES)
    spool = tmp_path / "spool"
    config = load_config(
        str(tmp_path / "ledger"), run_id="r1", role="rollout", spool=spool, shipper="off", on_error="raise"
    )
    assert config is not None
    recorder = Recorder(config)
    for i in range(90_000):
        recorder.record("knob.applied", path=f"option_{i % 50}", requested=i, status="applied", step=i // 64)
    recorder.close("test", timeout=0.0)
    command = [sys.executable, "-m", "rlk_ledger.shipper", "--spool", str(spool), "--until-idle"]
    process = subprocess.Popen(command, env=FRUGAL | os.environ)
    peak = 0
    try:
        deadline = time.monotonic() + 300
        while any(spool.glob("*/*.spool")) and process.poll() is None and time.monotonic() < deadline:
            lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
            peak = max([peak, *(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))])
            time.sleep(0.02)
    finally:
        process.terminate()
        process.wait()
    receipts = ledgers.open_ledger(str(tmp_path / "ledger")).run("r1").receipts
    assert sum(receipt.segment.rows for receipt in receipts) >= 90_000
    assert 50_000 < peak < 300_000, f"{peak} KB"
