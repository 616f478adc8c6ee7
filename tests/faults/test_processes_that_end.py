"""Processes that end in every way: a thousand forked children, workers killed hard, a whole group signalled at once.

The claim each time: exactly the acknowledged events are in the ledger, each once, numbers contiguous in every writer,
and `verify` says 0.
"""

import mmap
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import waiting
from waiting import wait_for

import rlk_ledger
from rlk_ledger.recover import recover
from rlk_ledger.verify import verify
from rlk_ledger_sdk import api

RUN = "ends"
_SLOT = 24


class Acks:
    """Acknowledged (writer, seq) in a file that processes share: one slot a lane, lanes of `size` slots."""

    def __init__(self, path: Path, slots: int) -> None:
        if not path.exists():
            path.write_bytes(bytes(slots * _SLOT))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)

    def put(self, slot: int, reference: object) -> None:
        writer, seq = reference.writer_id, reference.seq  # type: ignore[attr-defined]
        assert writer is not None
        assert seq is not None
        self._memory[slot * _SLOT + 8 : (slot + 1) * _SLOT] = bytes.fromhex(writer)
        struct.pack_into("<Q", self._memory, slot * _SLOT, seq + 1)

    def __iter__(self) -> Iterator[tuple[str, int]]:
        for at in range(0, len(self._memory), _SLOT):
            (seq,) = struct.unpack_from("<Q", self._memory, at)
            if seq:
                yield self._memory[at + 8 : at + _SLOT].hex(), seq - 1


def knobs(url: str) -> Counter:
    return Counter((w, seq) for w, seq, _, _ in rlk_ledger.open(url).read_events(RUN, {"knob.applied"}))


def exact(url: str, acks: Acks, begun: int = 0) -> None:
    """The ledger holds what was acknowledged, once, and at most `begun` events more that a kill cut short."""
    acknowledged, found = Counter(acks), knobs(url)
    assert max(acknowledged.values(), default=1) == 1
    assert not acknowledged - found, "acknowledged and lost"
    assert max(found.values(), default=1) == 1, "there twice"
    assert (found - acknowledged).total() <= begun
    result = verify(url, deep=True)
    torn = [f for f in result.findings if f.kind == "bytes.lost"]
    assert int(result.exit_code) == (3 if torn else 0), result.findings
    assert not [f for f in result.findings if f.kind == "seqs.missing"]


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in list(os.environ):
        if name.startswith("RLK_"):
            monkeypatch.delenv(name)
    api.close(timeout=0)
    yield
    api.close(timeout=0)


# -- a thousand children ---------------------------------------------------------------------------------------------


def leave(child: int) -> None:
    """Ends this process in one of five ways."""
    way = child % 5
    if way == 0:
        os._exit(0)
    if way == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if way == 2:
        os.kill(os.getpid(), signal.SIGTERM)
    if way == 3:
        os.execv("/bin/true", ["true"])
    api.close(timeout=0)
    os._exit(0)


@pytest.mark.slow
def test_a_thousand_children_forked_from_hot_threads_record_one_event_each(tmp_path: Path) -> None:
    """No lock of the parent is held in a child, no child writes into its parent's file, every event is there once."""
    children, threads = int(os.environ.get("RLK_TEST_CHILDREN", "1000")), 3
    url, acks = str(tmp_path / "ledger"), Acks(tmp_path / "acks", 200_000)
    api.init(url, run_id=RUN, spool=tmp_path / "spool", shipper="off", on_error="raise", budget_bytes=8 << 30)
    over, ready = threading.Event(), threading.Barrier(threads + 1)

    def work(lane: int) -> None:
        ready.wait()
        for n in range(60_000):
            if over.is_set():
                return
            acks.put(children + lane * 60_000 + n, api.record("knob.applied", path="t", requested=n, status="applied"))
            time.sleep(0.0005)

    hot = [threading.Thread(target=work, args=(lane,)) for lane in range(threads)]
    for thread in hot:
        thread.start()
    ready.wait()
    statuses: Counter[int] = Counter()
    waiting: list[int] = []
    for child in range(children):
        pid = os.fork()
        if pid == 0:
            try:
                acks.put(child, api.record("knob.applied", path="c", requested=child, status="applied"))
                leave(child)
            finally:
                os._exit(99)
        waiting.append(pid)
        if len(waiting) == 20 or child == children - 1:
            for pid in waiting:
                status = os.waitpid(pid, 0)[1]
                statuses[os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)] += 1
            waiting = []
    over.set()
    for thread in hot:
        thread.join()
    api.close(timeout=0)
    assert statuses == {
        0: children * 3 // 5,
        signal.SIGKILL: children // 5,
        signal.SIGTERM: children // 5,
    }
    saved = recover(tmp_path / "spool")
    assert len(saved) == children + 1
    assert not any(w.lost_bytes or w.waiting for w in saved)
    assert Counter(w.state for w in saved) == {"closed": children // 5 + 1, "dead": children * 4 // 5}
    exact(url, acks)
    assert sum(1 for _ in acks) == sum(knobs(url).values()) > children


FEW = 64

CHILDREN = """
import os, resource, sys
from pathlib import Path
import rlk_ledger
from rlk_ledger_sdk import api
api.init(sys.argv[1] + "/ledger", run_id="ends", spool=sys.argv[1] + "/spool", shipper="off")
for n in range(int(sys.argv[2])):
    if os.fork() == 0:
        rlk_ledger.record("knob.applied", path="c", requested=n, status="applied")
        os._exit(0)
    os.wait()
api.close(timeout=0)
from rlk_ledger.recover import recover
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[3]), resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
saved = recover(Path(sys.argv[1]) / "spool")
print(len(saved), sum(w.waiting for w in saved), sum(w.lost_bytes for w in saved), sum(w.shipped for w in saved))
"""


def test_more_dead_writers_than_descriptors_are_recovered(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("RLK_", "PYTEST_"))}
    command = [sys.executable, "-c", CHILDREN, str(tmp_path), str(2 * FEW), str(FEW)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(2 * FEW + 1), "0", "0", str(4 * FEW + 3)]


# -- jobs of several processes ---------------------------------------------------------------------------------------

JOB = """
import multiprocessing, os, sys, time
from pathlib import Path
sys.path[:0] = [{tests!r}, {support!r}]
from test_processes_that_end import Acks


def work(lane, folder, seconds):
    import rlk_ledger
    acks = Acks(Path(folder) / "acks", 0)
    end = time.monotonic() + seconds
    for n in range(2000):
        if time.monotonic() > end:
            break
        acks.put(lane * 2000 + n, rlk_ledger.record("knob.applied", path="w", requested=n, status="applied"))
        time.sleep(0.002)
    if lane % 3 == 1:
        os._exit(0)


if __name__ == "__main__":
    import rlk_ledger
    folder, method, seconds = sys.argv[1], sys.argv[2], float(sys.argv[3])
    rlk_ledger.init(folder + "/ledger", run_id="ends", spool=folder + "/spool", role="rollout")
    context = multiprocessing.get_context(method)
    workers = [context.Process(target=work, args=(lane, folder, seconds)) for lane in range(1, 4)]
    for worker in workers:
        worker.start()
    print("running", *[worker.pid for worker in workers], flush=True)
    work(0, folder, seconds)
    for worker in workers:
        worker.join()
    rlk_ledger.close(timeout=60)
"""


class Job:
    """A process with three workers, in a session of its own as a launcher makes one."""

    def __init__(self, folder: Path, method: str, seconds: float) -> None:
        self.url, self.spool = str(folder / "ledger"), folder / "spool"
        self.acks = Acks(folder / "acks", 4 * 2000)
        script = folder / "job.py"
        script.write_text(JOB.format(tests=str(Path(__file__).parent), support=waiting.__file__.rpartition("/")[0]))
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("RLK_", "PYTEST_"))}
        command = [sys.executable, str(script), str(folder), method, str(seconds)]
        self.process = subprocess.Popen(
            command, env=environment, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.workers = [int(word) for word in self.process.stdout.readline().split()[1:]]
        assert len(self.workers) == 3

    def hot(self) -> None:
        """Waits until every process has recorded."""
        wait_for(lambda: len({writer for writer, _ in self.acks}) == 4)

    def end(self) -> str:
        """Waits for the job's end; returns what it said on stderr."""
        return self.process.communicate()[1]

    def shippers(self) -> list[int]:
        """Process ids of shippers of this job's spool."""
        out = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = path.read_bytes().split(b"\0")
            except OSError:
                continue
            if b"rlk_ledger.shipper" in words and str(self.spool).encode() in words:
                out.append(int(path.parent.name))
        return out

    def shipped(self) -> None:
        """Waits until the shipper has emptied the spool by itself, then tells it to leave."""
        wait_for(lambda: not list(self.spool.glob("*/*.spool")))
        for pid in self.shippers():
            os.kill(pid, signal.SIGTERM)
        wait_for(lambda: not self.shippers())


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_workers_that_exit_and_os_exit_lose_nothing(tmp_path: Path, method: str) -> None:
    job = Job(tmp_path, method, 0.5)
    assert job.end() == ""
    assert job.process.returncode == 0
    job.shipped()
    exact(job.url, job.acks)
    assert len({writer for writer, _ in knobs(job.url)}) == 4


def test_a_worker_killed_hard_loses_nothing_and_the_others_go_on(tmp_path: Path) -> None:
    """As Ray ends an actor: SIGKILL, no hook, no exit handler, its parent goes on."""
    job = Job(tmp_path, "spawn", 2.0)
    job.hot()
    os.kill(job.workers[1], signal.SIGKILL)
    job.end()
    assert job.process.returncode == 0
    job.shipped()
    exact(job.url, job.acks, begun=1)
    kinds = {f.kind for f in verify(job.url).findings}
    assert "writer.killed" in kinds


@pytest.mark.parametrize("then_kill", [False, True], ids=["sigterm", "sigterm then sigkill"])
def test_a_signal_to_the_whole_group_at_once_leaves_a_shipper_that_finishes(tmp_path: Path, then_kill: bool) -> None:
    """What a scheduler does at the end of its time: the shipper is in a session of its own and outlives the job."""
    job = Job(tmp_path, "fork", 60.0)
    job.hot()
    wait_for(job.shippers)
    os.killpg(job.process.pid, signal.SIGTERM)
    if then_kill:
        time.sleep(0.3)
        with_kill(job)
    job.end()
    assert job.process.returncode != 0
    job.shipped()
    exact(job.url, job.acks, begun=4)


def with_kill(job: Job) -> None:
    try:
        os.killpg(job.process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # SIGTERM was enough


def test_a_kill_of_everything_on_the_node_leaves_a_spool_that_recover_ships(tmp_path: Path) -> None:
    """As a cgroup's end: job, workers and shipper at one instant. The spool alone is enough."""
    job = Job(tmp_path, "fork", 60.0)
    job.hot()
    wait_for(job.shippers)
    for pid in (*job.shippers(), job.process.pid, *job.workers):
        os.kill(pid, signal.SIGKILL)
    job.end()
    wait_for(lambda: not job.shippers())
    saved = recover(job.spool)
    assert {w.state for w in saved} == {"dead"}
    assert not any(w.waiting for w in saved)
    exact(job.url, job.acks, begun=4)


def test_a_signal_to_job_and_shipper_at_once_loses_nothing(tmp_path: Path) -> None:
    """SIGTERM to everything: the shipper ships what there is and leaves; what came later stays for `recover`."""
    job = Job(tmp_path, "fork", 60.0)
    job.hot()
    wait_for(job.shippers)
    for pid in (*job.shippers(), job.process.pid, *job.workers):
        os.kill(pid, signal.SIGTERM)
    job.end()
    wait_for(lambda: not job.shippers())
    recover(job.spool)
    exact(job.url, job.acks, begun=4)
