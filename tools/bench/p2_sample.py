"""P2: record() of a 2,048-token sample beside torch.save and json.dumps of the same sample, in the same run.

    python tools/bench/p2_sample.py [--events N] [--json FILE]

The sample holds response ids (int32) and a loss mask, and comes as numpy arrays, torch CPU tensors or Python lists;
its log-probabilities (float32) are a row of their own. `torch.save` writes the dict to memory, which is what RL
frameworks dump per rollout; `json.dumps` writes the same lists as text. Rounds of all rows alternate.
"""

import argparse
import io
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from timing import timer_ns, times_ns

import rlk_ledger_sdk

TOKENS = 2048
ROUNDS = 10
BARS_US = {
    "sample, numpy": (10.0, 6.0),
    "sample, torch": (None, 8.0),
    "sample, lists": (None, 80.0),
}
"""(bar of this step, final bar) for p50 in microseconds."""


def made() -> dict[str, dict[str, Any]]:
    """The sample's arrays as numpy arrays, torch tensors and lists."""
    rng = np.random.default_rng(5)
    mask = np.ones(TOKENS, np.uint8)
    mask[200:400] = 0
    arrays = {"ids": rng.integers(0, 151936, TOKENS, dtype=np.int32), "mask": mask}
    arrays["values"] = -rng.exponential(0.3, TOKENS).astype(np.float32)
    return {
        "numpy": arrays,
        "torch": {name: torch.from_numpy(array) for name, array in arrays.items()},
        "lists": {name: array.tolist() for name, array in arrays.items()},
    }


def saved_by_torch(sample: dict[str, Any]) -> Callable[[], None]:
    """torch.save of the sample dict into memory."""

    def call() -> None:
        torch.save({"sample_id": "s", "step": 3, **sample}, io.BytesIO())

    return call


def rows() -> dict[str, Callable[[], Any]]:
    """Every row's call."""
    record, kinds = rlk_ledger_sdk.record, made()
    calls: dict[str, Callable[[], Any]] = {}
    for kind, a in kinds.items():
        calls[f"sample, {kind}"] = lambda a=a: record(
            "rollout.sample", sample_id="s", response_token_ids=a["ids"], loss_mask=a["mask"], step=3
        )
        calls[f"logprobs, {kind}"] = lambda a=a: record(
            "logprobs", sample_id="s", source="rollout", contract_id="c", values=a["values"], step=3
        )
    plain = {kind: {"ids": a["ids"], "mask": a["mask"]} for kind, a in kinds.items()}
    calls["torch.save of the sample"] = saved_by_torch(plain["torch"])
    calls["json.dumps of the sample"] = lambda: json.dumps({"sample_id": "s", "step": 3, **plain["lists"]})
    return calls


def measure(events: int) -> dict[str, float]:
    """p50 in microseconds of every row."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as where:
        rlk_ledger_sdk.init(
            f"{where}/ledger", spool=f"{where}/spool", shipper="off", on_error="warn", budget_bytes=16 << 30
        )
        calls = rows()
        timer = timer_ns()
        samples: dict[str, list[int]] = {name: [] for name in calls}
        for call in calls.values():
            times_ns(call, 100)
        for _ in range(ROUNDS):
            for name, call in calls.items():
                samples[name] += times_ns(call, events // ROUNDS)
        rlk_ledger_sdk.close()
    return {name: (sorted(values)[len(values) // 2] - timer) / 1000 for name, values in samples.items()}


def main() -> None:
    """Prints the table and writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=5_000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = measure(options.events)
    print(f"P2  {TOKENS} tokens, {options.events} calls a row, p50 in microseconds")
    print(f"{'':28}{'us':>9}{'bar':>7}{'final':>7}{'torch.save /':>14}{'json.dumps /':>14}")
    for name, value in found.items():
        now, last = BARS_US.get(name, (None, None))
        ratios = [found[f"{other} of the sample"] / value for other in ("torch.save", "json.dumps")]
        bars = "".join(f"{bar:7g}" if bar else f"{'':7}" for bar in (now, last))
        print(f"{name:28}{value:9.2f}{bars}" + "".join(f"{ratio:13.1f}x" for ratio in ratios))
    if options.json:
        document = {"row": "P2", "tokens": TOKENS, "p50_us": found, "bars_us": BARS_US}
        options.json.write_text(json.dumps({**document, "python": sys.version.split()[0]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
