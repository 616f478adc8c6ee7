"""P11: replay scoring over 1, 2, 4 workers: efficiency per core, identical bits, and memory against samples.

    python tools/bench/p11_workers.py [--samples 256] [--workers 1 2] [--executor local]

Every worker runs one thread. Worker start and checkpoint reading are inside the time. Efficiency is
time(1) / (workers x time(workers)) for workers up to the number of cores; medians of alternating rounds.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time
from pathlib import Path

import numpy as np

import rlk_ledger_replay
from rlk_ledger_replay.build import scorer_fingerprint
from rlk_ledger_replay.checkpoint import load_checkpoint
from rlk_ledger_replay.decoder import Decoder
from rlk_ledger_replay.executors import Plan, chosen
from rlk_ledger_replay.executors.choice import Kind
from rlk_ledger_replay.executors.lanes import deal
from rlk_ledger_replay.numerics import Numerics
from rlk_ledger_replay.scores import BATCH
from rlk_ledger_replay.weights import live_digest
from rlk_ledger_replay.work import Entry, Model, Outcome, Scored, Unit

PASSES = (Numerics(), Numerics(compute="bfloat16"))


def measured(plan: Plan, samples: int, length: int) -> tuple[float, dict[str, bytes], int]:
    """(seconds, bits by sample and numerics, largest worker or process memory in MiB) of scoring every sample."""
    model = _model()
    lanes: list[list[Unit]] = [[] for _ in range(plan.workers)]
    rng = np.random.default_rng(0)
    entries = [Entry(f"s{i}", rng.integers(0, 256, length, dtype=np.int32), 16) for i in range(samples)]
    for numerics in PASSES:
        bound = Decoder(load_checkpoint(model.folder), numerics).operators.provenance
        unit = Unit(model, numerics, "prefill", (), scorer_fingerprint(bound))
        for lane, hand in zip(lanes, deal(entries, plan.workers, BATCH), strict=True):
            lane.extend(Unit(unit.model, numerics, unit.path, batch, unit.scorer) for batch in hand)
    bits: dict[str, bytes] = {}

    def take(unit: Unit, outcome: Outcome) -> None:
        assert isinstance(outcome, Scored), outcome
        for entry, values in zip(unit.entries, outcome.values, strict=True):
            bits[f"{entry.sample} {unit.numerics.compute}"] = values.tobytes()

    started = time.perf_counter()
    chosen(plan, 1).run(lanes, take)
    return time.perf_counter() - started, bits, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss >> 10


def _model() -> Model:
    folder = Path(rlk_ledger_replay.__path__[0]) / "model"
    return Model(folder, live_digest(load_checkpoint(folder).tensors))


def main() -> None:
    """Measures and prints one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--executor", choices=["local", "ray"], default="local")
    asked = parser.parse_args()
    kind: Kind = asked.executor
    seconds: dict[int, list[float]] = {workers: [] for workers in asked.workers}
    first: dict[str, bytes] | None = None
    memory = {}
    small = measured(Plan(kind, 1, isolate=True), max(1, asked.samples // 8), asked.length)[2]
    for _ in range(asked.rounds):
        for workers in asked.workers:
            took, bits, memory[workers] = measured(Plan(kind, workers, isolate=True), asked.samples, asked.length)
            first = first or bits
            if bits != first:
                raise SystemExit(f"{workers} workers gave other bits")
            seconds[workers].append(took)
    middle = {workers: statistics.median(found) for workers, found in seconds.items()}
    base = middle[min(middle)] * min(middle)
    told = {
        "samples": asked.samples,
        "executor": kind,
        "seconds": middle,
        "efficiency": {workers: base / (workers * found) for workers, found in middle.items()},
        "bits": "identical",
        "worker_mib": {"an eighth of the samples": small, "all": max(memory.values())},
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main()
