"""P8: drift statistics by step over a whole run, beside torch dumps and JSONL of the same numbers.

    python tools/bench/p8_drift.py [--pairs N] [--growth] [--json FILE]

At full size N is 100,000,000 in 2,000 segments (50,000 pairs each). All three sides give count, mean, p99, max and clip
fraction of |d| by step, and must agree. Each side is a fresh process with its caches warm; `--growth` adds N / 10.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

BAR_S, TORCH_BAR, JSONL_BAR = 4.0, 20.0, 50.0
TOKENS, PER_SEGMENT, STEPS = 1000, 50, 20
RUN = "p8"
CLIP = 0.2


def numbers(step: int, sample: int) -> tuple[Any, Any, Any]:
    """(token ids, rollout, training) of one sample, from its place alone."""
    rng = np.random.default_rng((step, sample))
    rollout = -rng.exponential(0.5, TOKENS).astype(np.float32)
    noise = rng.standard_normal(TOKENS).astype(np.float32) * np.float32(0.05)
    return rng.integers(0, 150_000, TOKENS).astype(np.int32), rollout, np.minimum(rollout + noise, np.float32(-1e-6))


def make(folder: Path, pairs: int) -> int:
    """Writes the ledger, the dumps and the JSONL; returns the number of segments."""
    import torch

    from rlk_ledger.build import build, event

    samples = max(STEPS, pairs // TOKENS)
    url, writer, seq, records, segments = str(folder / "ledger"), "a" * 32, 0, [], 0
    mask = np.ones(TOKENS, np.uint8)
    (folder / "torch").mkdir()
    with (folder / "run.jsonl").open("w") as lines:
        for step in range(STEPS):
            dump = []
            for i in range(samples // STEPS):
                ids, rollout, training = numbers(step, i)
                key = {"sample_id": f"{step}-{i}", "step": step}
                one = event(RUN, writer, seq, "rollout.sample", response_token_ids=ids, loss_mask=mask, **key)
                sides = [
                    event(RUN, writer, seq + 1 + k, "logprobs", source=source, contract_id="c", values=values, **key)
                    for k, (source, values) in enumerate((("rollout", rollout), ("training", training)))
                ]
                records += [one, *sides]
                seq += 3
                both = {"tokens": ids, "rollout_log_probs": rollout, "log_probs": training, "loss_mask": mask}
                dump.append({name: torch.from_numpy(value.copy()) for name, value in both.items()})
                lines.write(json.dumps({"step": step, **{name: value.tolist() for name, value in both.items()}}) + "\n")
            torch.save({"rollout_id": step, "samples": dump}, folder / "torch" / f"{step}.pt")
            build(url, RUN, records, per_segment=3 * PER_SEGMENT)
            segments += -(-len(records) // (3 * PER_SEGMENT))
            records = []
    return segments


def stats(d: Any) -> list[float]:
    """count, mean, p99, max and clip fraction of |d|."""
    size = np.abs(d)
    clipped = np.abs(np.expm1(d)) > CLIP
    return [len(d), float(size.mean()), float(np.quantile(size, 0.99)), float(size.max()), float(clipped.mean())]


def by_ledger(folder: Path) -> dict[int, list[float]]:
    """The statistics as SQL over the ledger."""
    from rlk_ledger.ledger import open_ledger

    rows = open_ledger(str(folder / "ledger")).sql(
        f"select step, count(*), avg(abs_dlogp), quantile_cont(abs_dlogp, 0.99), max(abs_dlogp), "
        f"avg((abs(exp(dlogp) - 1) > {CLIP})::int) from drift where run_id = '{RUN}' group by step"
    )
    return {row[0]: list(row[1:]) for row in zip(*(c.to_pylist() for c in rows.arrow().columns), strict=True)}


def by_torch(folder: Path) -> dict[int, list[float]]:
    """The statistics of slime-like dumps, one a step, loaded with torch."""
    import torch

    out = {}
    for path in sorted((folder / "torch").iterdir()):
        dump = torch.load(path, weights_only=False)
        sides = [
            np.concatenate([s[name].numpy() for s in dump["samples"]]) for name in ("log_probs", "rollout_log_probs")
        ]
        out[dump["rollout_id"]] = stats(sides[0].astype(np.float64) - sides[1])
    return out


def by_jsonl(folder: Path) -> dict[int, list[float]]:
    """The statistics of JSON lines, one a sample, parsed with json."""
    found: dict[int, list[Any]] = {}
    with (folder / "run.jsonl").open() as lines:
        for line in lines:
            row = json.loads(line)
            d = np.asarray(row["log_probs"], np.float64) - np.asarray(row["rollout_log_probs"], np.float64)
            found.setdefault(row["step"], []).append(d)
    return {step: stats(np.concatenate(parts)) for step, parts in found.items()}


SIDES = {"ledger": by_ledger, "torch": by_torch, "jsonl": by_jsonl}


def fresh(side: str, folder: Path) -> tuple[float, float, dict[str, list[float]]]:
    """(wall seconds, processor seconds, statistics) of one side in a fresh process, its imports not counted."""
    command = [sys.executable, __file__, "--side", side, "--folder", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    answer = json.loads(done.stdout)
    return answer["wall"], answer["cpu"], answer["stats"]


def measure(pairs: int) -> dict[str, Any]:
    """One size: every side's time, and that they agree."""
    with tempfile.TemporaryDirectory(prefix="rlk-p8-") as name:
        segments = make(Path(name), pairs)
        row: dict[str, Any] = {"pairs": pairs, "segments": segments}
        answers = {}
        for side in SIDES:
            row[f"{side}_s"], row[f"{side}_cpu_s"], answers[side] = (
                round(v, 3) if not isinstance(v, dict) else v for v in fresh(side, Path(name))
            )
        for step, want in answers["torch"].items():
            for side in ("ledger", "jsonl"):
                if not np.allclose(answers[side][step], want, rtol=1e-6):
                    sys.exit(f"{side} says {answers[side][step]} of step {step}, torch dumps {want}")
    row["torch_over_ledger"] = round(row["torch_cpu_s"] / row["ledger_cpu_s"], 2)
    row["jsonl_over_ledger"] = round(row["jsonl_cpu_s"] / row["ledger_cpu_s"], 2)
    return row


def main() -> None:
    """Measures, prints a table, and writes JSON when asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=1_000_000)
    parser.add_argument("--growth", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--side", choices=sorted(SIDES), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        import rlk_ledger.views  # noqa: F401

        if options.side == "torch":
            import torch  # noqa: F401
        wall, cpu = time.perf_counter(), time.process_time()
        found = SIDES[options.side](options.folder)
        took = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
        print(json.dumps({**took, "stats": found}))
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    rows = [measure(n) for n in ([options.pairs // 10] if options.growth else []) + [options.pairs]]
    print(f"P8  bars at 100,000,000 pairs: {BAR_S} s, {TORCH_BAR}x torch, {JSONL_BAR}x JSONL")
    for name in rows[0]:
        print(f"  {name:<20}" + "".join(f"{row[name]:>16}" for row in rows))
    if options.json:
        options.json.write_text(json.dumps({"row": "P8", "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
