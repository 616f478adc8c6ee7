"""The shipper as a process: started by a writer, elected by lock, gone when idle, harmless to its parent."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from waiting import wait_for

from rlk_ledger import ledger as ledgers
from rlk_ledger import outbox
from rlk_ledger.service import serve
from rlk_ledger.shipper import Shipper
from rlk_ledger.spawn import start
from rlk_ledger.store import Store
from rlk_ledger.verify import verify
from rlk_ledger_schemas.errors import StoreError
from rlk_ledger_sdk.status import lock_is_free, read_status, request_flush


def test_a_started_shipper_serves_flushes_and_leaves_when_idle(new_writer, spool: Path, url: str) -> None:
    writer = new_writer()
    writer.many(3)
    before = _children()
    start(spool)
    assert _children() == before, "a shipper is no child of the writer: nobody would wait for it"
    wait_for(lambda: not lock_is_free(spool))
    request_flush(writer.directory, 2)
    wait_for(lambda: read_status(writer.directory).committed == 2)
    start(spool)  # a second one finds the lock taken and leaves
    writer.many(2)
    writer.close()
    wait_for(lambda: read_status(writer.directory).committed == 5)
    wait_for(lambda: lock_is_free(spool))
    assert (spool / "shipper.log").read_text() == ""
    assert list(writer.directory.glob("*.spool")) == []
    result = verify(url, deep=True)
    assert (result.verdict, result.events) == ("intact", 6)


def _children() -> set[int]:
    """Process ids of this process's children, zombies too; other tests may have left some."""
    out = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text(errors="replace").rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == os.getpid():
            out.add(int(path.parent.name))
    return out


def _shippers(spool: Path) -> list[int]:
    out = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if b"rlk_ledger.shipper" in words and str(spool).encode() in words:
            out.append(int(path.parent.name))
    return out


def test_a_killed_shipper_is_replaced_and_nothing_is_lost_or_doubled(new_writer, spool: Path, url: str) -> None:
    writer = new_writer()
    for round_ in range(3):
        writer.many(4)
        start(spool)
        wait_for(lambda: not lock_is_free(spool))
        request_flush(writer.directory, 4 * round_ + 3)
        if round_ < 2:
            time.sleep(0.05 * round_)
            for pid in _shippers(spool):
                os.kill(pid, signal.SIGKILL)
            wait_for(lambda: not _shippers(spool))
    wait_for(lambda: read_status(writer.directory).committed == 11)
    writer.close()
    wait_for(lambda: read_status(writer.directory).committed == 12)
    for pid in _shippers(spool):
        os.kill(pid, signal.SIGTERM)
    wait_for(lambda: lock_is_free(spool))
    seen = [seq for _, seq, _, _ in ledgers.open_ledger(url).read_events("r1")]
    assert sorted(seen) == list(range(13))
    result = verify(url, deep=True)
    assert result.verdict == "intact"
    assert {f.kind for f in result.findings} <= {"segment.garbage"}


def test_a_shipper_told_to_stop_ships_what_it_has(new_writer, spool: Path, url: str) -> None:
    import threading

    stop = threading.Event()
    writer = new_writer()
    writer.many(2)
    thread = threading.Thread(target=serve, args=(spool, False, stop))
    thread.start()
    wait_for(lambda: not lock_is_free(spool))
    stop.set()
    thread.join(60)
    assert not thread.is_alive()
    assert read_status(writer.directory).committed == 1
    assert verify(url).events == 2


def test_the_shipper_imports_no_torch_and_the_starter_nothing_heavy() -> None:
    code = (
        "import sys, rlk_ledger.spawn, rlk_ledger.hooks\n"
        "heavy = {'numpy', 'pyarrow', 'duckdb', 'fsspec', 'torch', 'click', 'rich'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "import rlk_ledger.shipper, rlk_ledger.service\n"
        "assert not {'torch', 'duckdb', 'pandas'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_importing_the_package_loads_nothing_heavy_and_its_surface_is_pinned() -> None:
    code = (
        "import sys, rlk_ledger\n"
        "print(' '.join(rlk_ledger.__all__))\n"
        "[getattr(rlk_ledger, n) for n in ('init', 'record', 'scope', 'flush', 'close', 'contract_id', 'errors')]\n"
        "heavy = {'numpy', 'pyarrow', 'duckdb', 'fsspec', 'torch', 'click', 'rich'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "from rlk_ledger_sdk import hooks\n"
        "assert hooks.installed() is not None\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.split() == [
        *("admit", "close", "contract_id", "current", "diagnose", "errors", "events", "flush"),
        *("init", "mask_digest", "mode", "open", "record", "scope", "state_digest", "token_digest"),
    ]


def test_a_bucket_that_refuses_is_named_to_its_writers_and_is_not_asked_again_at_once(
    new_writer, spool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def refuse(url: str) -> Store:
        asked.append(url)
        raise StoreError(f"{url}: no such bucket.")

    monkeypatch.setattr(outbox, "_FIRST_BACKOFF_S", 3600.0)
    monkeypatch.setattr(outbox, "_LONGEST_BACKOFF_S", 3600.0)
    writer = new_writer()
    writer.many(2)
    writer.close()
    shipper = Shipper(spool, refuse, workers=1)
    for _ in range(1000):
        shipper.cycle(flush=True, patient=True)  # as the shipper process does once no writer lives
        if read_status(writer.directory).error:
            break
        time.sleep(0.01)
    assert "no such bucket" in str(read_status(writer.directory).error)
    for _ in range(20):
        shipper.cycle(flush=True, patient=True)
    assert len(asked) == 1
    shipper.cycle(flush=True)
    shipper.drain(60.0)
    assert len(asked) == 2
    shipper.close()


def test_a_shipper_whose_spool_directory_was_removed_leaves_it_to_the_next(new_writer, spool: Path) -> None:
    """Its lock is on a file that is no more: two shippers would serve the directory made anew."""
    new_writer().many(1)
    start(spool)
    wait_for(lambda: not lock_is_free(spool))
    wait_for(lambda: _shippers(spool) != [])
    shutil.rmtree(spool)
    spool.mkdir()
    wait_for(lambda: _shippers(spool) == [])
