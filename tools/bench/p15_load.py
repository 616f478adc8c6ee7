"""P15: many writer processes into one S3 server on loopback: every event counted, memory of each writer watched.

    python tools/bench/p15_load.py [--writers 64] [--events N] [--limit SECONDS] [--json FILE]

The server is SeaweedFS; the full size is `--events 100000`. Every writer raises whatever goes wrong, records its events
as fast as it can, waits until they are committed and closes. Then the ledger is opened, counted writer by writer, and
verified.
"""

import argparse
import contextlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

OWN = 3
"""Events of a writer beside those it is told to record: run.opened, writer.opened, writer.closed."""
SAMPLES = 10


def anonymous_mb() -> float:
    """Memory of this process that no file backs: what it holds of its own."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) / 1024
    return 0.0


def write(url: str, spool: str, rank: int, writers: int, events: int, limit: float) -> None:
    """The work of one writer process; prints what it saw as JSON."""
    import rlk_ledger

    rlk_ledger.init(
        url,
        run_id="load",
        role="rollout",
        rank=rank,
        roles={"rollout": writers},
        spool=spool,
        budget_bytes=64 << 30,
        on_error="raise",
    )
    print("ready", flush=True)
    sys.stdin.readline()
    start, memory = time.perf_counter(), []
    for i in range(events):
        rlk_ledger.record("knob.applied", path="optim.lr", requested=i, actual=i, status="applied", step=i // 100)
        if i % max(1, events // SAMPLES) == 0:
            memory.append(round(anonymous_mb(), 2))
    recorded = time.perf_counter() - start
    rlk_ledger.flush("committed", timeout=limit)
    committed = time.perf_counter() - start
    memory.append(round(anonymous_mb(), 2))
    rlk_ledger.close(timeout=limit)
    print(json.dumps({"recorded_s": recorded, "committed_s": committed, "anon_mb": memory}), flush=True)


class Sampler(threading.Thread):
    """Looks at the shipper now and then: its memory and processor time, from /proc."""

    def __init__(self, spool: Path) -> None:
        super().__init__(daemon=True)
        self.spool, self.done = spool, threading.Event()
        self.most_mb = self.cpu_s = 0.0

    def run(self) -> None:
        """Until `done`."""
        while not self.done.wait(0.5):
            for folder in Path("/proc").glob("[0-9]*"):
                try:
                    words = (folder / "cmdline").read_bytes().split(b"\0")
                    if str(self.spool).encode() not in words or b"rlk_ledger.shipper" not in words:
                        continue
                    fields = (folder / "stat").read_text().rpartition(")")[2].split()
                    self.cpu_s = max(self.cpu_s, (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"))
                    self.most_mb = max(self.most_mb, int(fields[21]) * resource.getpagesize() / 1e6)
                except (OSError, IndexError):
                    continue


def load(url: str, spool: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Starts the writers, lets them go at once, returns what each said; leaves with the first one's error."""
    command = [sys.executable, __file__, "--write", url, "--spool", str(spool), "--limit", str(options.limit)]
    command += ["--writers", str(options.writers), "--events", str(options.events)]
    pipes: dict[str, Any] = {
        "stdin": subprocess.PIPE,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
    }
    started = [subprocess.Popen([*command, "--rank", str(rank)], **pipes) for rank in range(options.writers)]
    for process in started:
        process.stdout.readline()  # type: ignore[union-attr]
    for process in started:
        with contextlib.suppress(BrokenPipeError):  # it is dead, and says why below
            process.stdin.write("go\n")  # type: ignore[union-attr]
            process.stdin.flush()  # type: ignore[union-attr]
    said = []
    for rank, process in enumerate(started):
        out, err = process.communicate()
        if process.returncode or err.strip():
            for other in started:
                other.kill()
            sys.exit(f"writer {rank} ended with {process.returncode}: {err.strip()[-2000:]}")
        said.append(json.loads(out.splitlines()[-1]))
    return said


def check(url: str, options: argparse.Namespace) -> dict[str, Any]:
    """Counts every writer's events and verifies the ledger."""
    from rlk_ledger.ledger import open_ledger
    from rlk_ledger.spans import total
    from rlk_ledger.verify import verify

    held = open_ledger(url).run("load").held
    counts = [total(said.ranges) for said in held.writers.values()]
    start = time.perf_counter()
    result = verify(url)
    return {
        "events": sum(counts),
        "writers": len(counts),
        "exact": sorted(counts) == [options.events + OWN] * options.writers
        and not any(said.shared or said.gaps for said in held.writers.values()),
        "receipts": len(held),
        "stored_mb": round(held.total("bytes") / 1e6, 1),
        "verify_exit": int(result.exit_code),
        "verify_s": round(time.perf_counter() - start, 1),
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """One run of the whole."""
    from store_servers import SeaweedFS

    with tempfile.TemporaryDirectory(prefix="rlk-p15-") as folder, SeaweedFS(Path(folder, "s3")) as server:
        os.environ.update(server.environ)
        spool, url = Path(folder, "spool"), server.url("load")
        spool.mkdir()
        sampler = Sampler(spool)
        sampler.start()
        start = time.perf_counter()
        said = load(url, spool, options)
        wall = time.perf_counter() - start
        sampler.done.set()
        sampler.join()
        events = options.events * options.writers
        memory = [item["anon_mb"] for item in said]
        slowest = max(item["committed_s"] for item in said)
        return {
            "wanted": (options.events + OWN) * options.writers,
            **check(url, options),
            "wall_s": round(wall, 1),
            "recorded_s": round(max(item["recorded_s"] for item in said), 1),
            "committed_s": round(slowest, 1),
            "events_per_s": round(events / slowest),
            "writer_mb_first": max(m[0] for m in memory),
            "writer_mb_last": max(m[-1] for m in memory),
            "writer_mb_grew": round(max(max(m[2:]) - m[1] for m in memory), 2),
            "shipper_cpu_s": round(sampler.cpu_s, 1),
            "shipper_us_per_event": round(sampler.cpu_s / events * 1e6, 1),
            "shipper_mb": round(sampler.most_mb),
        }


def main() -> None:
    """Measures, prints a table, and writes JSON when asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--writers", type=int, default=64)
    parser.add_argument("--events", type=int, default=1000)
    parser.add_argument("--limit", type=float, default=3600.0, help="Seconds a writer waits for its events.")
    parser.add_argument("--json", type=Path)
    for hidden, kind in (("--write", str), ("--spool", str), ("--rank", int)):
        parser.add_argument(hidden, type=kind, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.write:
        write(options.write, options.spool, options.rank, options.writers, options.events, options.limit)
        return
    result = measure(options)
    print(f"P15  {options.writers} writers x {options.events} events, one S3 server on loopback")
    for name, value in result.items():
        print(f"  {name:<22}{value!s:>14}")
    if options.json:
        options.json.write_text(json.dumps({"row": "P15", **result}, indent=1) + "\n")
    if not result["exact"] or result["verify_exit"]:
        sys.exit("the count or the ledger is not what it must be")


if __name__ == "__main__":
    main()
