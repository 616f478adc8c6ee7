"""How much memory and processor time a shipper process takes for what a spool may hold.

    python tools/bench/shipper_memory.py [SHAPE ...] [--mb N] [--json FILE]

A real `python -m rlk_ledger.shipper` at its default settings; the peak is VmHWM of its process. Shapes:

    small     one writer, events of 250 bytes
    large     one writer, samples of 2,048 tokens with both sides' log-probabilities
    huge      one writer, arrays of 32 MB an event
    writers   64 writers of one run, both kinds of event
    runs      4 runs at once, samples
    many      32 runs at once, small events
    dead      4 runs whose bucket refuses everything, 20 s of it
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from rlk_ledger.spawn import FRUGAL
from rlk_ledger_sdk.config import load_config
from rlk_ledger_sdk.recorder import Recorder

TOKENS = 2048
BAR_MB = 300.0
DEAD_S = 20.0
SHAPES: dict[str, tuple[int, int, tuple[str, ...]]] = {
    "small": (1, 1, ("small",)),
    "large": (1, 1, ("large",)),
    "huge": (1, 1, ("huge",)),
    "writers": (1, 64, ("small", "large")),
    "runs": (4, 1, ("large",)),
    "many": (32, 1, ("small",)),
    "dead": (4, 1, ("large",)),
}
"""Runs, writers a run, kinds of event."""


def events(kind: str, seed: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Events without end."""
    rng = np.random.default_rng(seed)
    number = 0
    while True:
        ids = {"step": number // 64, "sample_id": f"{seed}-{number}"}
        if kind == "small":
            knob = {"path": f"engine.option_{number % 50}", "requested": number, "status": "applied"}
            yield "knob.applied", {**knob, "step": number // 64, "actual": number}
        elif kind == "huge":
            yield (
                "logprobs",
                {**ids, "source": "rollout", "contract_id": "c", "values": rng.random(8 << 20, np.float32)},
            )
        else:
            tokens = rng.zipf(1.3, TOKENS).clip(0, 150_000).astype(np.int32)
            values = -rng.exponential(0.5, TOKENS).astype(np.float32)
            yield "rollout.sample", {**ids, "response_token_ids": tokens, "loss_mask": np.ones(TOKENS, np.uint8)}
            for source in ("rollout", "training"):
                yield "logprobs", {**ids, "source": source, "contract_id": "c", "values": values}
        number += 1


def spool_up(shape: str, url: str, spool: Path, size: int) -> float:
    """Spools about `size` bytes of a shape; returns the MB of its spool files."""
    runs, writers, kinds = SHAPES[shape]
    each = size // (runs * writers)
    for number in range(runs * writers):
        config = load_config(
            url,
            run_id=f"bench-{number % runs}",
            role="rollout",
            rank=number // runs,
            spool=spool,
            shipper="off",
            on_error="raise",
        )
        assert config is not None
        recorder = Recorder(config)
        before = _bytes(spool)
        for kind in kinds:
            for count, (name, fields) in enumerate(events(kind, number)):
                recorder.record(name, **fields)
                if (kind == "huge" or count % 64 == 0) and _bytes(spool) - before >= each / len(kinds):
                    break
            before = _bytes(spool)
        recorder.close("bench", timeout=0.0)
    return _bytes(spool) / 1e6


def _bytes(spool: Path) -> int:
    """Bytes the spool's files take on disk, holes left out."""
    return sum(path.stat().st_blocks * 512 for path in spool.glob("*/*.spool"))


def served(spool: Path, limit_s: float) -> tuple[float, float]:
    """(peak MB, processor seconds) of a shipper that serves `spool` until it is empty, at most `limit_s` seconds."""
    command = [sys.executable, "-m", "rlk_ledger.shipper", "--spool", str(spool), "--until-idle"]
    process = subprocess.Popen(command, env=FRUGAL | os.environ)
    peak, cpu, began = 0.0, 0.0, time.monotonic()
    while process.poll() is None and any(spool.glob("*/*.spool")) and time.monotonic() - began < limit_s:
        for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                peak = int(line.split()[1]) / 1e3
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        cpu = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        time.sleep(0.05)
    process.terminate()
    process.wait()
    return peak, cpu


def main() -> None:
    """Measures each shape in a spool of its own, prints a table, and writes JSON when asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*", metavar="SHAPE", help="all when none is given")
    parser.add_argument("--mb", type=int, default=300)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = []
    print(f"{'shape':<10}{'spool MB':>10}{'peak MB':>10}{'bar':>8}{'CPU s':>8}{'segments':>10}")
    for shape in options.shapes or SHAPES:
        with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
            ledger, spool = Path(folder, "ledger"), Path(folder, "spool")
            if shape == "dead":
                ledger.write_text("no folder: every call to this bucket fails")
            size = spool_up(shape, f"{ledger}/here", spool, options.mb << 20)
            peak, cpu = served(spool, DEAD_S if shape == "dead" else 600.0)
            segments = len(list(ledger.rglob("*.parquet")))
        print(f"{shape:<10}{size:>10.0f}{peak:>10.0f}{BAR_MB:>8.0f}{cpu:>8.1f}{segments:>10}", flush=True)
        found.append({"shape": shape, "spool_mb": size, "peak_mb": peak, "cpu_s": cpu, "segments": segments})
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
