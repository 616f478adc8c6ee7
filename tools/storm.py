"""A storm of SIGKILLs against real recorders, shippers, `recover`, checkpoints and an S3 server: nothing is lost.

    python tools/storm.py 300 [--s3] [--seed 7] [--a-round 40] [--dir DIR]

Every round starts producers (one and several threads, forks, bodies of several sizes) that note each acknowledged
(writer, seq) in a shared mapping. At random instants a producer, the shipper, both, a running `recover`, a maker of
checkpoints and, with --s3, the object store itself are killed; what a network loses in between is up to a chaos proxy.
Then `recover` runs until the bucket has everything, and the ledger must hold: every acknowledged event, each exactly
once for a reader, the numbers of every writer contiguous from 0; `verify --deep` must call it a crash (0, or 3 when
bytes were lost) and never an attack (1). Ends with 1 at the first broken promise and keeps its folder.
"""

import argparse
import contextlib
import json
import mmap
import os
import random
import shutil
import signal
import socket
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

RUN = "storm"
LANES, SLOTS, SLOT = 4, 20_000, 24
PRODUCERS = 3
A_ROUND = 40
_SAFE = ("RLK_", "PYTEST_", "AWS_")


class Scene(NamedTuple):
    """One round's folder, the ledger it writes to and what a process needs in its environment to reach that."""

    where: Path
    url: str
    environ: dict[str, str]

    @property
    def spool(self) -> Path:
        return self.where / "spool"


# -- the processes that are killed; each is forked by the nursery ----------------------------------------------------


def produce(scene: Scene, name: str, seed: int) -> None:
    """Records until it is killed."""
    import numpy as np

    import rlk_ledger

    chance = random.Random(seed)
    path = scene.where / f"{name}.acks"
    path.write_bytes(bytes(LANES * SLOTS * SLOT))
    with path.open("r+b") as file:
        acks = mmap.mmap(file.fileno(), 0)
    rlk_ledger.init(scene.url, run_id=RUN, spool=scene.spool, role="rollout", rank=0)

    def work(lane: int, count: int) -> None:
        for i in range(count):
            if chance.random() < 0.05:
                values = np.full(chance.choice((0, 1, 300, 40_000)), -0.5, np.float32)
                reference = rlk_ledger.record("logprobs", sample_id=f"s{i}", source="rollout", values=values,
                                              contract_id="sha256:" + "0" * 64)  # fmt: skip
            else:
                reference = rlk_ledger.record("knob.applied", path="p" * chance.randrange(1, 200), requested=i,
                                              status="applied")  # fmt: skip
            if reference.writer_id is None or reference.seq is None:
                continue
            at = (lane * SLOTS + i) * SLOT
            acks[at + 8 : at + 24] = bytes.fromhex(reference.writer_id)
            struct.pack_into("<Q", acks, at, reference.seq + 1)
            if chance.random() < 0.7:
                time.sleep(0.002)
            if chance.random() < 0.005:
                with contextlib.suppress(Exception):
                    rlk_ledger.flush("committed", timeout=0.2)

    threads = [threading.Thread(target=work, args=(lane, SLOTS)) for lane in range(chance.choice((1, 2)))]
    for thread in threads:
        thread.start()
    if chance.random() < 0.4:
        time.sleep(chance.random() * 0.3)
        if os.fork() == 0:
            work(LANES - 1, SLOTS)
            os._exit(0)
    for thread in threads:
        thread.join()


def recover_for_a_while(scene: Scene, name: str, seed: int) -> None:
    """Recovers the spool again and again, where no shipper serves it."""
    from rlk_ledger.recover import recover
    from rlk_ledger_schemas.errors import RlkError

    for _ in range(100):
        with contextlib.suppress(RlkError):
            recover(scene.spool)
        time.sleep(0.02)


def checkpoint_for_a_while(scene: Scene, name: str, seed: int) -> None:
    """Makes checkpoints again and again, as fast as there is something to cover."""
    from rlk_ledger.checkpoints import make
    from rlk_ledger.store import open_store
    from rlk_ledger_schemas.errors import RlkError

    store = open_store(scene.url)
    for _ in range(100):
        with contextlib.suppress(RlkError):
            make(store, RUN)
        time.sleep(0.02)


_ROLES = {"producer": produce, "recover": recover_for_a_while, "checkpoint": checkpoint_for_a_while}


class Nursery:
    """A process without threads that has imported everything once and forks the victims: an exec each is too slow."""

    def __init__(self) -> None:
        self._here, there = socket.socketpair()
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                self._here.close()
                _nurse(there)
                code = 0
            finally:
                os._exit(code)
        there.close()
        self._answers = self._here.makefile("r")

    def start(self, role: str, scene: Scene, name: str, seed: int) -> int:
        """Forks a victim in a session of its own; returns its pid."""
        request = [role, str(scene.where), scene.url, scene.environ, name, seed]
        self._here.sendall((json.dumps(request) + "\n").encode())
        return int(self._answers.readline())

    def close(self) -> None:
        self._answers.close()
        self._here.close()
        os.waitpid(self.pid, 0)


def _nurse(requests: socket.socket) -> None:
    import numpy  # noqa: F401

    import rlk_ledger.checkpoints
    import rlk_ledger.recover  # noqa: F401

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a victim, and none stays a zombie
    for name in [name for name in os.environ if name.startswith(_SAFE)]:
        del os.environ[name]
    for line in requests.makefile("r"):
        role, where, url, environ, name, seed = json.loads(line)
        pid = os.fork()
        if pid == 0:
            try:
                requests.close()
                os.setsid()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                os.environ.update(environ)
                _ROLES[role](Scene(Path(where), url, environ), name, seed)
            finally:
                os._exit(0)
        requests.sendall(f"{pid}\n".encode())


# -- the storm -------------------------------------------------------------------------------------------------------


def acknowledged(where: Path) -> Iterator[tuple[str, int]]:
    """(writer, seq) of every event some record() returned for."""
    for path in where.glob("*.acks"):
        data = path.read_bytes()
        for at in range(0, len(data), SLOT):
            (seq,) = struct.unpack_from("<Q", data, at)
            if seq:
                yield data[at + 8 : at + SLOT].hex(), seq - 1


def shipper_of(where: Path) -> int | None:
    """The pid of the shipper that serves this round's spool."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        pid = int((where / "spool" / "shipper.lock").read_text().split()[0])
        if str(where).encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
            return pid
    return None


def kill_group(leader: int) -> None:
    """Kills a victim and the children it forked, at one instant each, and waits until its pid is gone."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)
    while Path(f"/proc/{leader}").exists():
        time.sleep(0.002)


def kill_shipper(where: Path) -> int:
    """Kills the shipper; returns how many were."""
    pid = shipper_of(where)
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            return 1
    return 0


class Storm:
    """One round: producers that are replaced as they are killed, and everything that is killed beside them."""

    def __init__(self, scene: Scene, nursery: Nursery, chance: random.Random, server: SeaweedFS | None) -> None:
        self.scene, self.nursery, self.chance, self.server = scene, nursery, chance, server
        self.done: Counter[str] = Counter()
        self.names = iter(range(1_000_000))
        self.alive = [self.start("producer") for _ in range(PRODUCERS)]

    def start(self, role: str) -> int:
        return self.nursery.start(role, self.scene, f"p{next(self.names)}", self.chance.randrange(1 << 30))

    def blow(self, kills: int) -> Counter[str]:
        """Kills until `kills` processes were killed, and the producers that are left; returns what was killed."""
        whats = ["producer", "producer", "shipper", "both", "recover", "checkpoint"]
        if self.server is not None:
            whats.append("server")
        time.sleep(0.3)
        while self.done.total() < kills:
            time.sleep(self.chance.random() * 0.2)
            what = self.chance.choice(whats)
            if what in ("shipper", "both", "recover"):
                self.done["shipper"] += kill_shipper(self.scene.where)
            if what in ("producer", "both"):
                self._kill_producer()
            if what in ("recover", "checkpoint"):
                self._kill_soon(what)
            if what == "server" and self.chance.random() < 0.3:
                self._kill_server()
        for leader in self.alive:
            kill_group(leader)
            self.done["producer"] += 1
        return self.done

    def _kill_producer(self) -> None:
        kill_group(self.alive.pop(self.chance.randrange(len(self.alive))))
        self.done["producer"] += 1
        self.alive.append(self.start("producer"))

    def _kill_soon(self, role: str) -> None:
        leader = self.start(role)
        time.sleep(self.chance.random() * 0.4)
        kill_group(leader)
        self.done[role] += 1

    def _kill_server(self) -> None:
        assert self.server is not None
        self.server.kill()
        self.done["server"] += 1
        time.sleep(self.chance.random() * 2)
        self.server.restart()


# -- afterwards ------------------------------------------------------------------------------------------------------


def recover(scene: Scene) -> tuple[int, str]:
    """Runs `recover` until nothing waits; returns its exit code (0, or 3 when bytes were lost) and its output."""
    lost, shown = False, ""
    for _ in range(40):
        out = _command(scene, "recover", str(scene.spool), "--json")
        shown = out.stdout + out.stderr
        lost = lost or out.returncode == 3
        if out.returncode in (0, 3) and not list(scene.spool.glob("*/*.spool")):
            return (3 if lost else 0), shown
        kill_shipper(scene.where)
        time.sleep(0.3)
    raise AssertionError(f"recover does not come to an end: {shown}")


def _command(scene: Scene, *arguments: str) -> "subprocess.CompletedProcess[str]":
    environment = {k: v for k, v in os.environ.items() if not k.startswith(_SAFE)} | scene.environ
    command = [sys.executable, "-m", "rlk_ledger", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def check(scene: Scene) -> str:
    """Raises AssertionError at a broken promise; returns one line about the round."""
    code, shown = recover(scene)
    made = _command(scene, "checkpoint", RUN, "--ledger", scene.url)
    assert made.returncode == 0, f"checkpoint exits with {made.returncode}: {made.stdout}{made.stderr}"
    verified = _command(scene, "verify", "--deep", "--json", "--ledger", scene.url)
    assert verified.returncode in (0, 3), f"verify exits with {verified.returncode}: {verified.stdout}{verified.stderr}"
    found = json.loads(verified.stdout)["findings"]
    lost = [f for f in found if f["kind"] == "bytes.lost"]
    missing = [f for f in found if f["kind"] == "seqs.missing"]
    assert not missing, missing
    assert (verified.returncode == 3) == bool(lost), verified.stdout
    assert code == 0 or lost, f"recover says bytes were lost, verify does not: {shown}"
    numbers = read_numbers(scene)
    acked = Counter(acknowledged(scene.where))
    assert max(acked.values(), default=1) == 1, "record() returned one number twice"
    assert not acked.keys() - numbers.keys(), f"acknowledged and lost: {sorted(acked.keys() - numbers.keys())[:5]}"
    assert max(numbers.values(), default=1) == 1, "an event is in the ledger twice"
    writers: dict[str, list[int]] = {}
    for writer, seq in numbers:
        writers.setdefault(writer, []).append(seq)
    for writer, held in writers.items():
        assert sorted(held) == list(range(len(held))), f"the numbers of {writer} are not contiguous"
    twice = sum(f["kind"] == "duplicates" for f in found)
    kept = f"{len(acked)} acknowledged, {len(numbers)} in the ledger"
    return f"{kept}, {len(writers)} writers, {len(lost)} torn, {twice} duplicates"


def read_numbers(scene: Scene) -> "Counter[tuple[str, int]]":
    """(writer, seq) of every event of the run, as a reader of its own process finds them."""
    code = (
        "import sys, rlk_ledger\n"
        "for writer, seq, _, _ in rlk_ledger.open(sys.argv[1]).read_events(sys.argv[2]): print(writer, seq)\n"
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith(_SAFE)} | scene.environ
    command = [sys.executable, "-c", code, scene.url, RUN]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return Counter((writer, int(seq)) for writer, seq in map(str.split, done.stdout.splitlines()))


def rounds(
    top: Path, kills: int, seed: int, a_round: int, nursery: Nursery, bucket: "Bucket | None" = None
) -> Counter[str]:
    """Rounds in folders of `top` until `kills` processes were killed; returns what was. Raises AssertionError."""
    chance, total = random.Random(seed), Counter[str]()
    while total.total() < kills:
        where = top / f"round{total.total()}"
        where.mkdir(parents=True)
        scene = Scene(where, str(where / "ledger"), {})
        if bucket is not None:
            scene = Scene(where, bucket.server.url(f"storm-{os.getpid()}-{seed}-{total.total()}"), bucket.environ)
            bucket.proxy.mood = "chaos"
        done = Storm(scene, nursery, chance, bucket.server if bucket else None).blow(min(a_round, kills))
        total += done
        if bucket is not None:
            bucket.proxy.mood = "calm"
        try:
            print(f"{where.name}: {check(scene)}", flush=True)
        except AssertionError as error:
            raise AssertionError(f"in {where}: {error}") from None
        finally:
            kill_shipper(where)
        shutil.rmtree(where)
    return total


class Bucket(NamedTuple):
    """An S3 server behind a chaos proxy."""

    server: Any
    proxy: Any

    @property
    def environ(self) -> dict[str, str]:
        return {**self.server.environ, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.proxy.port}"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kills", type=int, nargs="?", default=300, help="how many processes are killed at least")
    parser.add_argument("--s3", action="store_true", help="into an S3 server that is killed as well")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--a-round", type=int, default=A_ROUND, help="kills before the ledger is checked")
    parser.add_argument("--dir", type=Path, help="where the rounds are kept (a temporary folder)")
    options = parser.parse_args()
    top = options.dir or Path(tempfile.mkdtemp(prefix="storm-"))
    nursery = Nursery()  # first of all: it must not inherit a thread
    with contextlib.ExitStack() as stack:
        bucket = None
        if options.s3:
            server = stack.enter_context(SeaweedFS(top / "server"))
            bucket = Bucket(server, stack.enter_context(ChaosProxy(server.port, options.seed)))
        try:
            total = rounds(top, options.kills, options.seed, options.a_round, nursery, bucket)
        except AssertionError as error:
            print(f"BROKEN {error}")
            return 1
    nursery.close()
    kinds = ", ".join(f"{count} {name}" for name, count in sorted(total.items()))
    print(f"{total.total()} kills ({kinds}): nothing was lost")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
