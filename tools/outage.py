"""A host whose object store goes away: many writers record while an S3 server dies, returns and answers badly.

    python tools/outage.py [--writers 16] [--seconds 30] [--rate 100] [--plan kill,chaos,hole] [--seed 7] [--dir DIR]

A SeaweedFS server stands behind a chaos proxy. Every writer is a process that records `--rate` events a second into
one spool, notes each acknowledged (writer, seq) in a shared mapping, and measures itself. Meanwhile the plan runs, one
misfortune after another over the whole time:

    kill    SIGKILL of the server, started again later on the same disk
    stop    SIGSTOP of the server, continued later
    chaos   drops, lost replies, resets, truncations and delays at random
    hole    connections are taken and never answered
    slow    every exchange is delayed

Afterwards the shipper has to finish by itself, and: the ledger holds every acknowledged event exactly once and no
other; `verify --deep` exits with 0; no writer ended with an error or said a word; no record() took longer than
`LIMIT_S` allows; the anonymous memory of the writers and the descriptors of all are flat. Prints one JSON object and
ends with 1 at the first broken promise.
"""

import argparse
import contextlib
import json
import mmap
import os
import random
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from chaos_proxy import ChaosProxy
from store_servers import SeaweedFS

RUN = "outage"
LIMIT_S = 2.0
"""What no record() may take beyond four times the longest that the machine kept a sleeping writer waiting for a core:
far above block_ms, far below any misfortune."""
ASKS = 0.5
"""How often a second a writer asks for its events to be committed, so that the shipper meets every misfortune."""
FLAT_BYTES = 24 << 20
FLAT_FILES = 64
_HEAD, _SLOT, _SLOTS = 64, 24, 200_000
_FIELDS = (
    "acknowledged",
    "slowest_ns",
    "noise_ns",
    "memory_before",
    "memory_after",
    "files_before",
    "files_after",
    "done",
)


# -- a writer --------------------------------------------------------------------------------------------------------


class Notes:
    """What a writer says about itself, in a file that both sides map: `_FIELDS`, then the acknowledged events."""

    def __init__(self, path: Path, new: bool = False) -> None:
        if new:
            with path.open("xb") as file:
                file.truncate(_HEAD + _SLOTS * _SLOT)
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)

    def get(self, name: str) -> int:
        return int(struct.unpack_from("<q", self._memory, _FIELDS.index(name) * 8)[0])

    def put(self, name: str, value: int) -> None:
        struct.pack_into("<q", self._memory, _FIELDS.index(name) * 8, value)

    def acknowledge(self, writer: str, seq: int) -> None:
        at = self.get("acknowledged")
        where = _HEAD + at * _SLOT
        self._memory[where : where + _SLOT] = struct.pack("<Q", seq) + bytes.fromhex(writer)
        self.put("acknowledged", at + 1)

    def __iter__(self) -> Iterator[tuple[str, int]]:
        for n in range(self.get("acknowledged")):
            where = _HEAD + n * _SLOT
            (seq,) = struct.unpack_from("<Q", self._memory, where)
            yield self._memory[where + 8 : where + _SLOT].hex(), seq


def anonymous_bytes(pid: int | str = "self") -> int:
    """Memory of a process that no file backs: spool files it maps are not its own."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


def open_files(pid: int | str = "self") -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))  # noqa: PTH208


def write(where: Path, url: str, rank: int, seconds: float, rate: float) -> None:
    """Records for `seconds`; what went wrong is in the exit status and on stderr."""
    import numpy as np

    import rlk_ledger

    notes = Notes(where / f"{rank}.notes", new=True)
    chance = random.Random(rank)
    values = np.full(400, -0.5, np.float32)
    contract = "sha256:" + "0" * 64
    rlk_ledger.init(url, run_id=RUN, spool=where / "spool", role="rollout", rank=rank, on_error="raise")
    begin = time.monotonic()
    settled, slowest = begin + seconds / 4, 0
    while (now := time.monotonic()) < begin + seconds and notes.get("acknowledged") < _SLOTS:
        bulk = chance.random() < 0.3
        before = time.monotonic_ns()
        if bulk:
            reference = rlk_ledger.record(
                "logprobs", sample_id="s", source="rollout", values=values, contract_id=contract
            )
        else:
            reference = rlk_ledger.record("knob.applied", path="p", requested=rank, status="applied")
        slowest = max(slowest, time.monotonic_ns() - before)
        assert reference.writer_id is not None
        assert reference.seq is not None, "an event was dropped although the budget is not used up"
        notes.acknowledge(reference.writer_id, reference.seq)
        notes.put("slowest_ns", slowest)
        if now >= settled and not notes.get("memory_before"):
            notes.put("memory_before", anonymous_bytes())
            notes.put("files_before", open_files())
        if chance.random() < ASKS / rate:
            with contextlib.suppress(rlk_ledger.errors.FlushTimeout):
                rlk_ledger.flush("committed", timeout=0)
        pause, before = chance.expovariate(rate), time.monotonic_ns()
        time.sleep(pause)
        notes.put("noise_ns", max(notes.get("noise_ns"), time.monotonic_ns() - before - int(pause * 1e9)))
    notes.put("memory_after", anonymous_bytes())
    notes.put("files_after", open_files())
    rlk_ledger.close()
    notes.put("done", 1)


# -- the host --------------------------------------------------------------------------------------------------------


class Options(NamedTuple):
    """How large the run is and what happens to the server during it, over how many seconds."""

    writers: int = 16
    seconds: float = 30.0
    rate: float = 100.0
    plan: tuple[str, ...] = ("kill", "chaos", "hole")
    seed: int = 7
    settle_s: float = 240.0
    """How long the shipper may take to finish after the last misfortune."""


class Watch(threading.Thread):
    """Samples the shipper: its anonymous memory, its descriptors, and how many processes it has been."""

    def __init__(self, where: Path) -> None:
        super().__init__(daemon=True)
        self.where = where
        self.pids: set[int] = set()
        self.memory: list[int] = []
        self.files: list[int] = []
        self.over = threading.Event()

    def run(self) -> None:
        while not self.over.wait(0.5):
            pid = shipper_of(self.where)
            if pid is None:
                continue
            with contextlib.suppress(OSError):
                self.memory.append(anonymous_bytes(pid))
                self.files.append(open_files(pid))
                self.pids.add(pid)


def shipper_of(where: Path) -> int | None:
    """The pid of the shipper that serves the spool."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        pid = int((where / "spool" / "shipper.lock").read_text().split()[0])
        if str(where).encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
            return pid
    return None


def start_writer(where: Path, url: str, environ: dict[str, str], rank: int, options: Options) -> subprocess.Popen[str]:
    """A writer process of its own session, as a launcher starts one."""
    command = [sys.executable, __file__, "--write", str(rank), "--url", url, "--dir", str(where)]
    command += ["--seconds", str(options.seconds), "--rate", str(options.rate)]
    return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def misfortune(what: str, server: SeaweedFS, proxy: ChaosProxy, seconds: float) -> None:
    """Lets one thing go wrong for about `seconds`, then puts it right."""
    if what == "kill":
        server.kill()
        time.sleep(seconds)
        server.restart()
        return
    if what == "stop":
        server.stop()
        time.sleep(seconds)
        server.go_on()
        return
    proxy.mood = {"hole": "black-hole"}.get(what, what)
    time.sleep(seconds)
    proxy.mood = "calm"


def play(where: Path, options: Options) -> dict[str, Any]:
    """Runs the host in `where`; returns what was measured, raises AssertionError at a broken promise."""
    with SeaweedFS(where / "server") as server, ChaosProxy(server.port, options.seed) as proxy:
        url, direct = server.url(f"host-{os.getpid()}-{options.seed}"), server.environ
        environ = {k: v for k, v in os.environ.items() if not k.startswith(("RLK_", "PYTEST_", "AWS_"))}
        environ |= direct | {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{proxy.port}",
            "RLK_EXIT_S": "1",
            "OMP_NUM_THREADS": "1",
        }
        watch = Watch(where)
        watch.start()
        jobs = [start_writer(where, url, environ, rank, options) for rank in range(options.writers)]
        share = options.seconds / (len(options.plan) + 0.5)
        time.sleep(share / 2)
        for what in options.plan:
            misfortune(what, server, proxy, share * 0.7)
            time.sleep(share * 0.3)
        said = [job.communicate(timeout=options.settle_s)[0] for job in jobs]
        waited = wait_until_shipped(where, options.settle_s)
        watch.over.set()
        watch.join()
        measured = check(where, url, environ | direct, said, [job.returncode for job in jobs], watch)
        return {**measured, "seconds_to_finish": round(waited, 1), "fates": dict(proxy.fates)}


def wait_until_shipped(where: Path, settle_s: float) -> float:
    """Waits until the spool is empty; nobody helps the shipper, nothing restarts it once the writers left."""
    begin = time.monotonic()
    while list((where / "spool").glob("*/*.spool")):
        statuses = [path.read_text() for path in (where / "spool").glob("*/status.json")]
        assert time.monotonic() < begin + settle_s, f"the shipper does not finish: {statuses[:2]}"
        time.sleep(0.2)
    return time.monotonic() - begin


def check(
    where: Path, url: str, environ: dict[str, str], said: list[str], codes: list[int], watch: Watch
) -> dict[str, Any]:
    """Raises AssertionError unless every promise of this file's first lines was kept."""
    for rank, (text, code) in enumerate(zip(said, codes)):
        words = [line for line in text.splitlines() if "safe in the spool" not in line]
        assert code == 0 and not words, f"writer {rank} ended with {code}: {text}"  # noqa: PT018
    notes = [Notes(path) for path in sorted(where.glob("*.notes"))]
    assert all(note.get("done") for note in notes)
    verified = subprocess.run(
        [sys.executable, "-m", "rlk_ledger", "verify", "--deep", "--json", "--ledger", url],
        env=environ, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert verified.returncode == 0, f"verify exits with {verified.returncode}: {verified.stdout}{verified.stderr}"
    acknowledged = Counter(pair for note in notes for pair in note)
    found = numbers(url, environ)
    assert max(acknowledged.values()) == 1, "record() returned one number twice"
    assert found == acknowledged, f"lost {acknowledged - found}, doubled or never acknowledged {found - acknowledged}"
    slowest = max(note.get("slowest_ns") for note in notes) / 1e9
    noise = max(note.get("noise_ns") for note in notes) / 1e9
    assert slowest < LIMIT_S + 4 * noise, f"a record() took {slowest:.3f} s, a sleep at most {noise:.3f} s too long"
    grown = max(note.get("memory_after") - note.get("memory_before") for note in notes)
    assert grown < FLAT_BYTES, f"a writer grew by {grown} bytes"
    leaked = max(note.get("files_after") - note.get("files_before") for note in notes)
    assert leaked < 8, f"a writer has {leaked} more open files"
    assert watch.files, "no shipper was seen"
    most = max(watch.files)
    assert most < FLAT_FILES + 4 * len(notes), f"the shipper had {most} open files"
    return {
        "acknowledged": len(acknowledged),
        "in_the_ledger": sum(found.values()),
        "slowest_record_ms": round(slowest * 1e3, 2),
        "slowest_wake_ms": round(noise * 1e3, 2),
        "writer_growth_bytes": grown,
        "shipper_processes": len(watch.pids),
        "shipper_memory_bytes": [watch.memory[0], max(watch.memory)],
        "shipper_files": [watch.files[0], most],
        "findings": sorted({f["kind"] for f in json.loads(verified.stdout)["findings"]}),
    }


def numbers(url: str, environ: dict[str, str]) -> "Counter[tuple[str, int]]":
    """(writer, seq) of every event that writers recorded by hand, as a reader of its own process finds them."""
    code = (
        "import sys, rlk_ledger\n"
        f"for w, n, _, _ in rlk_ledger.open({url!r}).read_events({RUN!r}, {{'knob.applied', 'logprobs'}}):\n"
        "    print(w, n)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return Counter((w, int(n)) for w, n in map(str.split, done.stdout.splitlines()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--writers", type=int, default=Options().writers)
    parser.add_argument("--seconds", type=float, default=Options().seconds)
    parser.add_argument("--rate", type=float, default=Options().rate)
    parser.add_argument("--plan", default=",".join(Options().plan))
    parser.add_argument("--seed", type=int, default=Options().seed)
    parser.add_argument("--dir", type=Path)
    parser.add_argument("--write", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.write is not None:
        write(options.dir, options.url, options.write, options.seconds, options.rate)
        return 0
    where = options.dir or Path(tempfile.mkdtemp(prefix="outage-"))
    plan = tuple(filter(None, options.plan.split(",")))
    wanted = Options(options.writers, options.seconds, options.rate, plan, options.seed)
    try:
        print(json.dumps(play(where, wanted)))
    except AssertionError as error:
        print(f"BROKEN in {where}: {error}")
        return 1
    shutil.rmtree(where)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
