"""A shipper in another container than the writers: pid namespaces apart, the spool directory shared.

The worst that could happen is that a living writer is thought dead: its newest file would be cut off and deleted.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_for

from rlk_ledger.leftovers import look
from rlk_ledger.recover import recover
from rlk_ledger.shipper import Shipper
from rlk_ledger.verify import verify
from rlk_ledger_schemas.frame import decode_header
from rlk_ledger_sdk import process as processes
from rlk_ledger_sdk.presence import Presence, held
from rlk_ledger_sdk.process import is_alive

OWN_PROC = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
FOREIGN_PROC = ("unshare", "--pid", "--fork", "--kill-child")
"""The second sees the processes of the namespace it left in /proc: numbers there mean other processes."""

pytestmark = pytest.mark.skipif(
    subprocess.run([*OWN_PROC, "true"], capture_output=True, check=False).returncode != 0,
    reason="this machine lets nobody make a pid namespace",
)

WRITER = """
import os, sys, time
import rlk_ledger

rlk_ledger.init(run_id="r1", role="training")
print("up", flush=True)
for line in sys.stdin:
    if line == "close\\n":
        break
    rlk_ledger.record("weights.published", weight_version=line.strip(), digest="sha256:00", tensor_count=1)
    print("recorded", flush=True)
"""
SHIP = [sys.executable, "-m", "rlk_ledger", "ship", "--until-idle"]


def told(found: Any) -> list[str]:
    """The kinds of what verify found, without that no checkpoint was made."""
    return [one.kind for one in found.findings if one.kind != "receipt.uncovered"]


class Job:
    """A writer in a namespace of its own, told over its stdin what to record."""

    def __init__(self, prefix: tuple[str, ...], environment: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-c", WRITER],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout.readline() == "up\n"

    def record(self, count: int) -> None:
        for i in range(count):
            self.process.stdin.write(f"v{i}\n")
            self.process.stdin.flush()
            assert self.process.stdout.readline() == "recorded\n"

    def close(self) -> None:
        self.process.stdin.write("close\n")
        self.process.stdin.flush()
        assert self.process.wait(60) == 0

    def kill(self) -> None:
        self.process.kill()  # and with unshare its child
        self.process.wait(60)


@pytest.fixture
def environment(spool: Path, url: str) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("RLK_", "PYTEST_"))}
    return clean | {"RLK_LEDGER": url, "RLK_SPOOL": str(spool), "RLK_EXIT_S": "0", "RLK_SHIPPER": "off"}


@pytest.fixture
def job(environment: dict[str, str]) -> Iterator[Callable[..., Job]]:
    made: list[Job] = []

    def make(prefix: tuple[str, ...] = ()) -> Job:
        made.append(Job(prefix, environment))
        return made[-1]

    yield make
    for one in made:
        one.kill()
        one.process.stdin.close()
        one.process.stdout.close()


def cycles(spool: Path, count: int = 3) -> Shipper:
    shipper = Shipper(spool)
    for _ in range(count):
        shipper.cycle(flush=True)
    return shipper


@pytest.mark.parametrize("prefix", [OWN_PROC, FOREIGN_PROC])
def test_a_live_writer_of_another_namespace_is_alive_and_loses_nothing(job, spool: Path, url: str, prefix) -> None:
    """Its bytes are committed as they come; what it records after that is there too, and so is its end."""
    writer = job(prefix)
    writer.record(5)
    shipper = cycles(spool)
    (seen,) = shipper.writers.values()
    assert (seen.alive, verify(url).events) == (True, 7)
    writer.record(5)
    shipper.cycle(flush=True)
    writer.close()
    shipper.cycle(flush=True)
    shipper.close()
    found = verify(url, deep=True)
    assert (found.exit_code, found.events, told(found)) == (0, 13, [])


@pytest.mark.parametrize("prefix", [OWN_PROC, FOREIGN_PROC])
def test_a_killed_writer_of_another_namespace_is_known_to_be_dead(job, spool: Path, url: str, prefix) -> None:
    writer = job(prefix)
    writer.record(5)
    writer.kill()
    cycles(spool).close()
    assert told(verify(url, deep=True)) == ["writer.killed"]
    assert look(spool) == []


@pytest.mark.parametrize("prefix", [OWN_PROC, FOREIGN_PROC])
def test_a_shipper_in_a_namespace_of_its_own_serves_writers_outside(
    job, spool: Path, url: str, environment: dict[str, str], prefix
) -> None:
    """And it stays while one of them lives, although it can see no process of it."""
    writer = job()
    writer.record(5)
    sidecar = subprocess.Popen([*prefix, *SHIP], env=environment, stderr=subprocess.PIPE, text=True)
    try:
        wait_for(lambda: (spool / "shipper.lock").exists() and (spool / "shipper.lock").stat().st_size)
        (header,) = _headers(spool)
        assert is_alive(header) is True
        writer.record(5)
        assert sidecar.poll() is None
        writer.close()
        _, err = sidecar.communicate(timeout=60)
    finally:
        sidecar.kill()
        sidecar.wait()
    assert (sidecar.returncode, err) == (0, "")
    found = verify(url, deep=True)
    assert (found.exit_code, found.events, told(found)) == (0, 13, [])


def _headers(spool: Path) -> list[Any]:
    return [decode_header(path.read_bytes()[:65536])[0] for path in spool.glob("*/*.spool")]


def test_a_shipper_and_a_writer_that_share_a_namespace_whose_proc_is_anothers(
    job, spool: Path, url: str, environment: dict[str, str]
) -> None:
    """Both inside one container without a /proc of its own: the numbers there are other processes."""
    code = (
        "import subprocess, sys, json\n"
        "from pathlib import Path\n"
        f"job = subprocess.Popen([sys.executable, '-c', {WRITER!r}], stdin=subprocess.PIPE, stdout=subprocess.PIPE,"
        " text=True)\n"
        "job.stdout.readline()\n"
        "def record():\n"
        "    job.stdin.write('v\\n'); job.stdin.flush(); job.stdout.readline()\n"
        "record()\n"
        "from rlk_ledger.shipper import Shipper\n"
        f"shipper = Shipper(Path({str(spool)!r}))\n"
        "shipper.cycle(flush=True)\n"
        "print([w.alive for w in shipper.writers.values()])\n"
        "record()\n"
        "job.stdin.write('close\\n'); job.stdin.close(); job.wait()\n"
        "shipper.cycle(flush=True)\n"
        "shipper.close()\n"
    )
    done = subprocess.run(
        [*FOREIGN_PROC, sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "[True]\n"), done.stderr
    found = verify(url, deep=True)
    assert (found.exit_code, found.events, told(found)) == (0, 5, [])


def test_a_stopped_sidecar_ships_what_writers_record_in_its_grace(
    job, spool: Path, url: str, environment: dict[str, str]
) -> None:
    """A pod stops all its containers at once: the sidecar must not leave before the job."""
    writer = job(OWN_PROC)
    sidecar = subprocess.Popen([*SHIP, "--grace", "300"], env=environment, stderr=subprocess.PIPE, text=True)
    try:
        wait_for(lambda: (spool / "shipper.lock").exists() and (spool / "shipper.lock").stat().st_size)
        sidecar.send_signal(signal.SIGTERM)
        writer.record(5)
        writer.close()
        _, err = sidecar.communicate(timeout=60)
    finally:
        sidecar.kill()
        sidecar.wait()
    assert (sidecar.returncode, err) == (0, "")
    found = verify(url, deep=True)
    assert (found.exit_code, found.events, told(found)) == (0, 8, [])


def test_a_second_signal_ends_a_sidecars_grace_and_it_says_what_is_left(
    job, spool: Path, environment: dict[str, str]
) -> None:
    writer = job()
    writer.record(5)
    words = [*SHIP, "--grace", "300"]
    sidecar = subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        wait_for(lambda: (spool / "shipper.lock").exists() and (spool / "shipper.lock").stat().st_size)
        sidecar.send_signal(signal.SIGTERM)
        wait_for(lambda: look(spool)[0].waiting == 0)
        assert sidecar.poll() is None, "a writer lives"
        sidecar.send_signal(signal.SIGTERM)
        sidecar.communicate(timeout=60)
    finally:
        sidecar.kill()
        sidecar.wait()
    assert sidecar.returncode == 0
    assert look(spool)[0].state == "alive"


def test_a_writer_of_unknown_fate_is_not_shipped_event_by_event(new_writer, spool: Path, url: str) -> None:
    """A file system without locks: while events come, they wait for a full segment as those of a live writer do."""
    from rlk_ledger import service

    writer = new_writer(host="elsewhere")
    shipper = Shipper(spool)
    for _ in range(3):
        writer.many(1)
        shipper.cycle(flush=not service._live(shipper))
    assert [one.alive for one in shipper.writers.values()] == [True]
    shipper.close()
    writer.spool._presence.close()
    other = new_writer(host="elsewhere", boot_id="other")
    shipper = Shipper(spool, only=lambda one: one.writer_id == other.writer_id)
    other.many(1)
    shipper.cycle()
    assert [one.alive for one in shipper.writers.values() if one.writer_id == other.writer_id] == [None]
    assert service._live(shipper)
    shipper.close()


def test_a_lock_is_held_until_its_process_ends_and_no_child_keeps_it(tmp_path: Path) -> None:
    folder = tmp_path / "w"
    folder.mkdir()
    assert held(folder) is False
    presence = Presence(folder)
    assert presence.hold()
    assert held(folder) is True
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write)
        presence.close()  # what a forked recorder does first
        os.read(read, 1)
        os._exit(0)
    try:
        wait_for(lambda: held(folder) is True)
        presence.close()
        wait_for(lambda: held(folder) is False)
    finally:
        os.close(write)
        os.waitpid(child, 0)
        os.close(read)
    assert held(tmp_path / "none") is None


def test_a_directory_made_anew_is_locked_anew(tmp_path: Path) -> None:
    folder = tmp_path / "w"
    folder.mkdir()
    presence = Presence(folder)
    presence.hold()
    folder.rmdir()
    folder.mkdir()
    assert held(folder) is False
    assert presence.hold()
    assert held(folder) is True
    presence.close()


def test_a_process_that_proc_hides_is_not_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """/proc mounted with hidepid shows other users' processes to nobody: kill(2) still knows them."""
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)

    def hidden(path: Path) -> bytes:
        raise FileNotFoundError(path)

    monkeypatch.setattr(processes.Path, "read_bytes", hidden)
    assert processes._start_time(str(os.getpid())) is None
    assert processes._start_time(str(child)) == ""


def test_what_recover_is_told_of_a_machine_that_is_gone_is_not_believed_of_one_that_is_here(job, spool: Path) -> None:
    """--assume-dead speaks of writers that cannot be looked at; a lock that is held can."""
    writer = job(OWN_PROC)
    writer.record(3)
    (found,) = recover(spool, assume_dead=True)
    assert (found.state, found.shipped, found.lost_bytes) == ("alive", 5, 0)
    writer.record(3)
    writer.close()
    (found,) = recover(spool, assume_dead=True)
    assert (found.state, found.shipped, found.lost_bytes) == ("closed", 4, 0)
