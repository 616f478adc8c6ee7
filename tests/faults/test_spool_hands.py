"""What people and machines do to a spool: two shippers, copies, backups, a reboot, a reused pid, a removed folder.

The claim each time: every event that can still be read is in the ledger once for a reader, what is there twice is
counted as a duplicate and never as a fork, and what is gone is stated.
"""

import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from waiting import wait_for

import rlk_ledger
from rlk_ledger.recover import recover
from rlk_ledger.service import serve, ship_once
from rlk_ledger.shipper import Shipper
from rlk_ledger.verify import verify
from rlk_ledger_sdk.process import identity
from rlk_ledger_sdk.status import read_status

RUN = "r1"


def found(url: str) -> Counter:
    """(writer, seq) of what writers recorded, as a reader sees it."""
    ledger = rlk_ledger.open(url)
    shippers = {receipt.shipper for receipt in ledger.run(RUN).receipts}
    return Counter((w, seq) for w, seq, _, _ in ledger.read_events(RUN) if w not in shippers)


def kinds(url: str) -> tuple[int, set[str]]:
    result = verify(url, deep=True)
    return int(result.exit_code), {f.kind for f in result.findings} - {"receipt.uncovered", "segment.garbage"}


def numbers(*records: list) -> Counter:
    return Counter((r.writer_id, r.seq) for many in records for r in many)


def in_process(work: Callable[..., None], *arguments: object) -> multiprocessing.Process:
    process = multiprocessing.get_context("fork").Process(target=work, args=arguments)
    process.start()
    return process


def test_two_shippers_started_at_once_on_one_spool_are_one(helpers, tmp_path: Path) -> None:
    spool, url = tmp_path / "spool", str(tmp_path / "ledger")
    writers = [helpers.Writer(spool, url) for _ in range(3)]
    records = [[*writer.many(20), writer.close()] for writer in writers]
    shippers = [in_process(serve, spool, True, None, 0.2) for _ in range(4)]
    for shipper in shippers:
        shipper.join()
        assert shipper.exitcode == 0
    assert found(url) == numbers(*records)
    assert kinds(url) == (0, set())
    assert len({receipt.shipper for receipt in rlk_ledger.open(url).run(RUN).receipts}) == 1


def test_the_lock_holds_between_mount_namespaces(helpers, tmp_path: Path) -> None:
    """Containers that share a spool directory through different mounts share its lock."""
    if shutil.which("unshare") is None or os.getuid() != 0:
        pytest.skip("a private mount namespace needs unshare and root")
    spool, url, other = tmp_path / "spool", str(tmp_path / "ledger"), tmp_path / "elsewhere"
    other.mkdir()
    writer = helpers.Writer(spool, url)
    records = [*writer.many(5), writer.close()]
    script = (
        "import sys; from pathlib import Path; from rlk_ledger.service import elected\n"
        "with elected(Path(sys.argv[1]), 0.2) as lock: print('taken' if lock is None else 'free')\n"
    )
    command = ["unshare", "-m", "sh", "-c", 'mount --bind "$1" "$2" && exec "$3" -c "$4" "$2"', "sh"]
    command += [str(spool), str(other), sys.executable, script]
    from rlk_ledger.service import elected

    with elected(spool) as lock:
        assert lock is not None
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode and "mount" in done.stderr:
            pytest.skip(f"no mount here: {done.stderr}")
        assert done.stdout == "taken\n", done.stderr
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "free\n"
    assert not ship_once(spool)
    assert found(url) == numbers(records)


def test_a_spool_copied_to_another_node_gives_duplicates_and_no_fork(helpers, tmp_path: Path) -> None:
    """Both shippers read the run before either wrote, then both commit the same events: the worst order there is."""
    spool, copy, url = tmp_path / "spool", tmp_path / "copy", str(tmp_path / "ledger")
    writers = [helpers.Writer(spool, url, dead=dead) for dead in (False, True)]
    records = [[*writers[0].many(9), writers[0].close()], writers[1].many(7)]
    shutil.copytree(spool, copy)
    early = helpers.Writer(spool, url)
    opening = early.many(1)
    shippers = [Shipper(spool), Shipper(copy)]
    early_copy = copy / early.writer_id
    shutil.copytree(early.directory, early_copy)
    for shipper in shippers:
        shipper._scan()
        for outbox in shipper.outboxes.values():
            outbox.take()
            assert outbox.inflight is not None
            outbox._connect(outbox.inflight)
    for shipper in shippers:
        for _ in range(3):
            shipper.cycle(flush=True)
        assert shipper.errors() == []
        shipper.close()
    assert found(url) == numbers(*records, opening), "a reader sees each once"
    code, seen = kinds(url)
    assert code == 0
    assert "duplicates" in seen, "the second copy was committed too"
    assert seen <= {"duplicates", "writer.killed", "writer.open"}


def test_a_spool_restored_from_a_backup_after_it_was_shipped_adds_nothing(helpers, tmp_path: Path) -> None:
    spool, backup, url = tmp_path / "spool", tmp_path / "backup", str(tmp_path / "ledger")
    closed, dead = helpers.Writer(spool, url), helpers.Writer(spool, url, dead=True)
    records = [[*closed.many(5), closed.close()], dead.many(5)]
    shutil.copytree(spool, backup)
    first = {w.writer_id: w for w in recover(spool)}
    before = len(rlk_ledger.open(url).run(RUN).receipts)
    shutil.rmtree(spool)
    shutil.copytree(backup, spool)
    again = {w.writer_id: w for w in recover(spool)}
    for writer_id, saved in again.items():
        assert (saved.shipped, saved.known) == (0, first[writer_id].events)
        assert saved.lost_bytes == 0
    assert len(rlk_ledger.open(url).run(RUN).receipts) == before, "nothing new, so no receipt"
    assert found(url) == numbers(*records)
    assert kinds(url) == (0, {"writer.killed"})
    assert not list(spool.glob("*/*.spool"))


def test_a_backup_older_than_the_ledger_costs_nothing(helpers, tmp_path: Path) -> None:
    """The restored file is a prefix of what was shipped: known events, no second end, no fork."""
    spool, backup, url = tmp_path / "spool", tmp_path / "backup", str(tmp_path / "ledger")
    writer = helpers.Writer(spool, url, dead=True)
    records = writer.many(4)
    shutil.copytree(spool, backup)
    records += writer.many(4)
    recover(spool)
    shutil.rmtree(spool)
    shutil.copytree(backup, spool)
    (saved,) = recover(spool)
    assert (saved.events, saved.shipped, saved.known, saved.waiting) == (4, 0, 4, 0)
    assert found(url) == numbers(records)
    assert kinds(url)[0] == 0


@pytest.mark.parametrize(
    ("name", "header"),
    [
        ("a node that was rebooted", {"boot_id": "11111111-2222-3333-4444-555555555555"}),
        ("a pid that another process has now", {"pid": 1}),
        ("a pid that is this process, begun at another time", {"process_start": "7:" + "0"}),
    ],
)
def test_a_writer_of_a_process_that_is_no_more_is_known_to_be_dead(helpers, tmp_path, name: str, header: dict) -> None:
    spool, url = tmp_path / "spool", str(tmp_path / "ledger")
    if "process_start" in header:
        header = {"process_start": "7:" + identity().process_start.partition(":")[2]}
    writer = helpers.Writer(spool, url, **header)
    records = writer.many(3)
    (saved,) = recover(spool)
    assert (saved.state, saved.events, saved.shipped) == ("dead", 3, 3), name
    assert found(url) == numbers(records)
    assert kinds(url) == (0, {"writer.killed"})


def test_a_node_known_under_another_name_is_not_believed_dead(helpers, tmp_path: Path) -> None:
    """Its newest file is left alone until somebody says that the machine is gone."""
    spool, url = tmp_path / "spool", str(tmp_path / "ledger")
    writer = helpers.Writer(spool, url, host="node-7", boot_id="11111111-2222-3333-4444-555555555555")
    records = writer.many(3)
    (saved,) = recover(spool)
    assert (saved.state, saved.shipped) == ("unknown", 3)
    assert list(spool.glob("*/*.spool"))
    records += writer.many(2)
    (saved,) = recover(spool, assume_dead=True)
    assert (saved.state, saved.shipped, saved.known) == ("dead", 2, 3)
    assert found(url) == numbers(records)


RESUMED = """
import sys, rlk_ledger
rlk_ledger.init(sys.argv[1], run_id="r1", spool=sys.argv[2], role="training", roles={"training": int(sys.argv[4])})
for n in range(5):
    rlk_ledger.record("knob.applied", path=sys.argv[3], requested=n, status="applied")
rlk_ledger.close(timeout=60)
"""


def test_a_resumed_run_is_new_writers_of_the_same_run(tmp_path: Path) -> None:
    """The first declaration of run.json stands, the later one is an event, and both lives are complete."""
    spool, url = tmp_path / "spool", str(tmp_path / "ledger")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("RLK_", "PYTEST_"))}
    for life in ("first", "second"):
        folder = spool if life == "first" else tmp_path / "spool2"
        command = [sys.executable, "-c", RESUMED, url, str(folder), life, "1" if life == "first" else "2"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
    events = [e for _, _, e, _ in rlk_ledger.open(url).read_events(RUN)]
    assert Counter(e["path"] for e in events if e["type"] == "knob.applied") == {"first": 5, "second": 5}
    assert [e["roles"] for e in events if e["type"] == "run.opened"].count({"training": 2}) == 1
    assert rlk_ledger.open(url).run(RUN).info.roles == {"training": 1}
    code, seen = kinds(url)
    assert code == 0
    assert "run.redeclared" in seen


LONG = """
import sys, time, rlk_ledger
recorder = rlk_ledger.init(sys.argv[1], run_id="r1", spool=sys.argv[2], on_error="raise")
print(recorder.writer_id, flush=True)
for line in sys.stdin:
    count, wait = map(int, line.split())
    for n in range(count):
        reference = rlk_ledger.record("knob.applied", path="p", requested=n, status="applied")
    said = "committed"
    try:
        rlk_ledger.flush("committed" if wait else "spooled", timeout=120)
    except rlk_ledger.errors.FlushTimeout as error:
        said = str(error)
    print(reference.seq, said, flush=True)
rlk_ledger.close(timeout=120)
"""


def test_a_spool_removed_under_a_running_job_costs_what_was_in_it_and_nothing_after(tmp_path: Path) -> None:
    spool, url = tmp_path / "spool", str(tmp_path / "ledger")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("RLK_", "PYTEST_"))}
    command = [sys.executable, "-c", LONG, url, str(spool)]
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as job:
        assert job.stdin is not None
        assert job.stdout is not None
        assert job.stderr is not None
        writer = job.stdout.readline().strip()

        def ask(count: int, wait: int) -> tuple[int, str]:
            print(count, wait, file=job.stdin, flush=True)
            seq, _, said = job.stdout.readline().strip().partition(" ")
            return int(seq), said

        safe, said = ask(20, 1)
        assert said == "committed"
        wait_for(lambda: read_status(spool / writer).committed >= safe)
        shutil.rmtree(spool)
        gone, said = ask(3, 1)
        assert "somebody removed spool files" in said, "at once, and not after 120 s"
        last, said = ask(5, 1)
        assert said == "committed"
        job.stdin.close()
        said = job.stderr.read()
        assert job.wait() == 0, said
    own = {seq for w, seq in found(url) if w == writer}
    assert set(range(safe + 1)) <= own, "what was committed stays"
    assert last in own, "what came after the first flush is there"
    code, seen = kinds(url)
    missing = set(range(last + 2)) - own
    assert (code == 3) == ("seqs.missing" in seen) == bool(missing), "what is gone is stated, and nothing else"
    assert missing <= set(range(safe + 1, gone + 1))


def test_a_shipper_killed_while_its_spool_is_moved_away_and_back_loses_nothing(helpers, tmp_path: Path) -> None:
    spool, url = tmp_path / "spool", str(tmp_path / "ledger")
    writer = helpers.Writer(spool, url)
    records = writer.many(5)
    shipper = in_process(serve, spool, False)
    wait_for(lambda: (spool / "shipper.lock").exists() and (spool / "shipper.lock").stat().st_size > 0)
    spool.rename(tmp_path / "moved")
    assert shipper.pid is not None
    os.kill(shipper.pid, signal.SIGKILL)
    shipper.join()
    (tmp_path / "moved").rename(spool)
    records += [*writer.many(2), writer.close()]
    recover(spool)
    assert found(url) == numbers(records)
    assert kinds(url)[0] == 0
