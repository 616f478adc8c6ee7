"""A storm of SIGKILLs against real recorders and shippers: nothing acknowledged is lost, nothing is doubled.

    python tools/storm.py 150 [--seed 7] [--dir DIR]

Every round starts producers (one and several threads, forks, bodies of several sizes) that note each acknowledged
(writer, seq) in a shared mapping. At random instants a producer, the shipper, or both are killed. Then `recover` runs
until the bucket has everything, and the ledger must hold: every acknowledged event, each exactly once, the numbers of
every writer contiguous from 0, at most one unacknowledged event a thread; `verify --deep` must call it a crash (0, or
3 when bytes were lost) and never an attack (1). Ends with 1 at the first broken promise and keeps its folder.
"""

import argparse
import contextlib
import json
import mmap
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

LANES, SLOTS, SLOT = 4, 50_000, 24
PRODUCERS = 3
KILLS_A_ROUND = 6


# -- the producer ----------------------------------------------------------------------------------------------------


def produce(where: Path, name: str, seed: int) -> None:
    """Records until it is killed."""
    import numpy as np

    import rlk_ledger

    chance = random.Random(seed)
    path = where / f"{name}.acks"
    path.write_bytes(bytes(LANES * SLOTS * SLOT))
    file = os.open(path, os.O_RDWR)
    acks = mmap.mmap(file, LANES * SLOTS * SLOT)
    rlk_ledger.init(str(where / "ledger"), run_id="storm", spool=where / "spool", role="rollout", rank=0)

    def work(lane: int, count: int) -> None:
        for i in range(count):
            if chance.random() < 0.1:
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
            if chance.random() < 0.02:
                time.sleep(0.002)
            if chance.random() < 0.001:
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


def start(where: Path, name: str, seed: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, __file__, "--produce", name, "--seed", str(seed), "--dir", str(where)]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RLK_")}
    return subprocess.Popen(command, start_new_session=True, env=environment)


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kills the producer and the children it forked, at one instant each."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def storm(where: Path, chance: random.Random, kills: int) -> Counter[str]:
    """Runs producers and kills until `kills` processes were killed; returns what was killed."""
    done: Counter[str] = Counter()
    names = iter(range(10_000))
    alive = [start(where, f"p{next(names)}", chance.randrange(1 << 30)) for _ in range(PRODUCERS)]
    time.sleep(0.6)
    while sum(done.values()) < kills:
        time.sleep(chance.random() * 0.6)
        what = chance.choice(("producer", "shipper", "both"))
        if what != "producer" and (pid := shipper_of(where)) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                done["shipper"] += 1
        if what != "shipper":
            kill_group(alive.pop(chance.randrange(len(alive))))
            done["producer"] += 1
            alive.append(start(where, f"p{next(names)}", chance.randrange(1 << 30)))
    for process in alive:
        kill_group(process)
        done["producer"] += 1
    return done


def recover(where: Path) -> tuple[int, str]:
    """Runs `recover` until nothing waits; returns its exit code (0, or 3 when bytes were lost) and its output."""
    lost, shown = False, ""
    for _ in range(20):
        out = _command("recover", str(where / "spool"), "--json")
        shown = out.stdout + out.stderr
        lost = lost or out.returncode == 3
        if out.returncode in (0, 3) and not list((where / "spool").glob("*/*.spool")):
            return (3 if lost else 0), shown
        if (pid := shipper_of(where)) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.3)
    raise AssertionError(f"recover does not come to an end: {shown}")


def _command(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-m", "rlk_ledger", *arguments], capture_output=True, text=True, check=False)


def check(where: Path) -> str:
    """Raises AssertionError at a broken promise; returns one line about the round."""
    code, shown = recover(where)
    verified = _command("verify", "--deep", "--json", "--ledger", str(where / "ledger"))
    assert verified.returncode in (0, 3), f"verify exits with {verified.returncode}: {verified.stdout}{verified.stderr}"
    found = json.loads(verified.stdout)
    lost = [f for f in found["findings"] if f["kind"] == "bytes.lost"]
    missing = [f for f in found["findings"] if f["kind"] == "seqs.missing"]
    assert not missing, missing
    assert (verified.returncode == 3) == bool(lost), verified.stdout
    assert code == 0 or lost, f"recover says bytes were lost, verify does not: {shown}"
    numbers = read_numbers(where)
    acked = Counter(acknowledged(where))
    assert max(acked.values(), default=1) == 1, "record() returned one number twice"
    assert not acked.keys() - numbers.keys(), f"acknowledged and lost: {sorted(acked.keys() - numbers.keys())[:5]}"
    assert max(numbers.values(), default=1) == 1, "an event is in the ledger twice"
    writers: dict[str, list[int]] = {}
    for writer, seq in numbers:
        writers.setdefault(writer, []).append(seq)
    for writer, held in writers.items():
        assert sorted(held) == list(range(len(held))), f"the numbers of {writer} are not contiguous"
    twice = sum(f["kind"] == "duplicates" for f in found["findings"])
    kept = f"{len(acked)} acknowledged, {len(numbers)} in the ledger"
    return f"{kept}, {len(writers)} writers, {len(lost)} torn, {twice} duplicates"


def read_numbers(where: Path) -> "Counter[tuple[str, int]]":
    import rlk_ledger

    events = rlk_ledger.open(str(where / "ledger")).read_events("storm")
    return Counter((writer, seq) for writer, seq, _, _ in events)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kills", type=int, nargs="?", default=150, help="how many processes are killed at least")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--dir", type=Path, help="where the rounds are kept (a temporary folder)")
    parser.add_argument("--produce", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.produce:
        produce(options.dir, options.produce, options.seed)
        return 0
    top = options.dir or Path(tempfile.mkdtemp(prefix="storm-"))
    chance, total = random.Random(options.seed), Counter[str]()
    while sum(total.values()) < options.kills:
        where = top / f"round{sum(total.values())}"
        where.mkdir(parents=True)
        total += storm(where, chance, min(KILLS_A_ROUND, options.kills))
        try:
            print(f"{where.name}: {check(where)}", flush=True)
        except AssertionError as error:
            print(f"BROKEN in {where}: {error}")
            return 1
        shutil.rmtree(where)
    print(f"{sum(total.values())} kills ({total['producer']} producers, {total['shipper']} shippers): nothing was lost")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
