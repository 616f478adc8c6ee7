"""The shipper dies, or its bucket lies, between any two steps; afterwards every event is there exactly once."""

import mmap
import os
import random
import shutil
import signal
import struct
import sys
from collections import Counter
from pathlib import Path

import pytest

from rlk_ledger import ledger as ledgers
from rlk_ledger import segments
from rlk_ledger.shipper import Shipper
from rlk_ledger.store import open_store
from rlk_ledger.verify import verify
from rlk_ledger_schemas.findings import Exit

RUN = "r1"
_MODULES = ("spools.py", "outbox.py", "shipper.py", "chain.py", "contact.py", "store.py")


def scene(helpers, spool: Path, url: str) -> tuple[list, str]:
    """A closed writer, a writer that died inside a record, and one that lives; their events and the dead one's id."""
    closed, dead, live = (helpers.Writer(spool, url, dead=flag) for flag in (False, True, False))
    records = [*closed.many(3), closed.close(), *dead.many(2), *live.many(2)]
    at = dead.spool.at[0]
    dead.spool._map[at + 8 : at + 20] = b"z" * 12
    return records, dead.writer_id


def check(url: str, records: list, dead: str) -> None:
    """Every event once, the loss stated once with its exact size, nothing that looks like tampering."""
    run = ledgers.open_ledger(url).run(RUN)
    shippers = {r.shipper for r in run.receipts}
    found: Counter = Counter()
    for segment in run.segments():
        for record in segments.read_records(run.store.read(segment.path)):
            if record.writer_id not in shippers:
                found[record.writer_id, record.seq, record.leaf] += 1
    assert found == Counter((r.writer_id, r.seq, r.leaf) for r in records)
    lost = [(w.writer_id, w.lost_bytes, w.dead) for r in run.receipts for w in r.writers if w.dead or w.lost_bytes]
    assert lost == [(dead, 20, True)]
    result = verify(url, deep=True)
    assert result.exit_code == Exit.GAP
    assert {f.kind for f in result.findings} <= {"bytes.lost", "writer.killed", "writer.open", "segment.garbage"}


def finish(spool: Path) -> None:
    shipper = Shipper(spool)
    for _ in range(3):
        shipper.cycle(flush=True)
    shipper.close()
    assert shipper.errors() == []


def count_calls(helpers, tmp_path: Path) -> int:
    spool, url = tmp_path / "count", str(tmp_path / "count-ledger")
    scene(helpers, spool, url)
    store = helpers.FaultyStore(open_store(url), -1, "never", RuntimeError)
    Shipper(spool, lambda _: store).cycle(flush=True)
    return len(store.calls)


@pytest.mark.parametrize("when", ["before", "after"])
def test_killed_at_every_call_to_the_bucket(helpers, tmp_path: Path, when: str) -> None:
    calls = count_calls(helpers, tmp_path)
    assert calls >= 15
    for at in range(calls):
        spool, url = tmp_path / f"spool-{at}", str(tmp_path / f"ledger-{at}")
        records, dead = scene(helpers, spool, url)
        store = helpers.FaultyStore(open_store(url), at, when, helpers.Killed)
        with pytest.raises(helpers.Killed):
            Shipper(spool, lambda _, store=store: store).cycle(flush=True)
        finish(spool)
        check(url, records, dead)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_failed_call_or_a_lost_reply_at_every_call_is_retried_by_the_same_shipper(
    helpers, tmp_path: Path, when
) -> None:
    for at in range(count_calls(helpers, tmp_path)):
        spool, url = tmp_path / f"spool-{at}", str(tmp_path / f"ledger-{at}")
        records, dead = scene(helpers, spool, url)
        store = helpers.FaultyStore(open_store(url), at, when, helpers.lost_reply)
        shipper = Shipper(spool, lambda _, store=store: store)
        shipper.cycle(flush=True)
        shipper.cycle(flush=True)
        shipper.cycle(flush=True)
        assert shipper.errors() == [], store.calls[at]
        check(url, records, dead)
        chains = {r.shipper for r in ledgers.open_ledger(url).run(RUN).receipts}
        assert len(chains) == 1, "a retry is no new identity"


class _Moody:
    """Goes wrong at random: nothing happened, or it happened and the reply was lost, or the process dies."""

    def __init__(self, inner, seed: int, helpers) -> None:
        self._inner, self._random, self._helpers = inner, random.Random(seed), helpers
        self.url, self.locate = inner.url, inner.locate

    def __getattr__(self, name: str):
        def call(*args):
            mood = self._random.random()
            error = self._helpers.Killed if mood % 0.05 < 0.01 else self._helpers.lost_reply
            if mood < 0.06:
                raise error()
            value = getattr(self._inner, name)(*args)
            if mood > 0.94:
                raise error()
            return value

        return call


@pytest.mark.parametrize("seed", range(12))
def test_any_series_of_faults_and_deaths_while_writers_go_on(helpers, tmp_path: Path, seed: int) -> None:
    """A state machine by chance: record, close, die, fail, restart in any order; then every event is there once."""
    spool, url = tmp_path / "spool", str(tmp_path / "ledger")
    rng = random.Random(seed)
    writers = [helpers.Writer(spool, url) for _ in range(3)]
    records = []
    store = _Moody(open_store(url), seed, helpers)
    shipper = Shipper(spool, lambda _: store)
    for _ in range(40):
        writer = rng.choice(writers)
        records += writer.many(rng.randrange(1, 4))
        try:
            shipper.cycle(flush=rng.random() < 0.7)
        except helpers.Killed:
            shipper = Shipper(spool, lambda _: store)
    records += [writer.close() for writer in writers]
    finish(spool)
    run = ledgers.open_ledger(url).run(RUN)
    found = Counter(
        (record.writer_id, record.seq, record.leaf)
        for segment in run.segments()
        for record in segments.read_records(run.store.read(segment.path))
    )
    assert found == Counter((r.writer_id, r.seq, r.leaf) for r in records)
    result = verify(url, deep=True)
    assert result.exit_code == Exit.OK
    assert {f.kind for f in result.findings} <= {"segment.garbage"}
    assert len(run.receipts) > 3


class _Tracer:
    """Kills this process when line number `at` of the shipper's own code is about to run; counts the lines."""

    def __init__(self, at: int) -> None:
        self.at, self.count = at, 0

    def __call__(self, frame, event, arg):
        if "rlk_ledger/rlk_ledger" not in frame.f_code.co_filename or not frame.f_code.co_filename.endswith(_MODULES):
            return None
        return self.line

    def line(self, frame, event, arg):
        if event == "line":
            if self.count == self.at:
                os.kill(os.getpid(), signal.SIGKILL)
            self.count += 1
        return self.line


def _kill_at_line(helpers, where: Path, at: int) -> int:
    """One scene; its shipper is a forked process killed at traced line `at` (-1: never); then finished and checked.

    Returns the lines traced when it was not killed.
    """
    spool, url = where / "spool", str(where / "ledger")
    records, dead = scene(helpers, spool, url)
    count = mmap.mmap(-1, 8)
    child = os.fork()
    if child == 0:
        code = 3
        try:
            tracer = _Tracer(at)
            sys.settrace(tracer)
            Shipper(spool).cycle(flush=True)
            sys.settrace(None)
            struct.pack_into("<Q", count, 0, tracer.count)
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert status == (0 if at < 0 else signal.SIGKILL), f"line {at}: status {status}"
    finish(spool)
    check(url, records, dead)
    shutil.rmtree(where)
    return int(struct.unpack("<Q", count)[0])


def _sample(total: int, wanted: str) -> list[int]:
    """Line numbers spread over `total` lines: `wanted` of them, or "all"."""
    some = total if wanted == "all" else min(total, int(wanted))
    return sorted({round(i * (total - 1) / max(1, some - 1)) for i in range(some)})


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_killed_at_the_lines_of_the_shipper(helpers, tmp_path: Path) -> None:
    """RLK_TEST_LINES says at how many lines, spread evenly (100 by default), or `all`."""
    total = _kill_at_line(helpers, tmp_path / "count", -1)
    assert total > 500
    for at in _sample(total - 20, os.environ.get("RLK_TEST_LINES", "100")):  # the last few vary from run to run
        _kill_at_line(helpers, tmp_path / str(at), at)
