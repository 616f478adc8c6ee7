"""P5 and P7: spool to committed segments beside pyarrow writing the same tables, and verify beside hashlib.

    python tools/bench/p5_shipper.py [--samples N] [--json FILE]

Processor time of one process, both sides in the same run; wall time depends on the disk's fsync and is printed beside.
"""

import argparse
import hashlib
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rlk_ledger.ledger import open_ledger
from rlk_ledger.segments import read_segment
from rlk_ledger.service import ship_once
from rlk_ledger.verify import verify
from rlk_ledger_sdk.config import load_config
from rlk_ledger_sdk.recorder import Recorder

TOKENS = 2048
SHIP_BAR_MB_S = 150.0
VERIFY_BAR = 0.9


def timed(call: Callable[[], Any], rounds: int = 1) -> tuple[float, float]:
    """(processor seconds, wall seconds) of the fastest of `rounds` calls."""
    best = (float("inf"), float("inf"))
    for _ in range(rounds):
        cpu, wall = time.process_time(), time.perf_counter()
        call()
        best = min(best, (time.process_time() - cpu, time.perf_counter() - wall))
    return best


def record(url: str, spool: Path, samples: int) -> int:
    """Spools `samples` samples with both sides' log-probabilities; returns the bytes of their arrays."""
    rng = np.random.default_rng(0)
    config = load_config(url, run_id="bench", role="rollout", spool=spool, shipper="off", on_error="raise")
    assert config is not None
    recorder = Recorder(config)
    mask = np.ones(TOKENS, np.uint8)
    size = 0
    for i in range(samples):
        ids = rng.zipf(1.3, TOKENS).clip(0, 150_000).astype(np.int32)
        values = -rng.exponential(0.5, TOKENS).astype(np.float32)
        recorder.record("rollout.sample", step=i // 64, sample_id=f"s{i}", response_token_ids=ids, loss_mask=mask)
        for source in ("rollout", "training"):
            recorder.record("logprobs", sample_id=f"s{i}", source=source, contract_id="c", values=values, step=i // 64)
        size += ids.nbytes + mask.nbytes + 2 * values.nbytes
    recorder.close("bench", timeout=0.0)
    return size


def ship_all(spool: Path) -> None:
    """Ships until the spool is empty; leaves with the error when it cannot."""
    errors = []
    while not errors and any(spool.glob("*/*.spool")):
        errors = ship_once(spool)
    if errors:
        sys.exit(errors[0])


def plain_parquet(tables: list[pa.Table]) -> None:
    """What pyarrow needs for the same tables with the same codec and encodings, and nothing else."""
    for table in tables:
        arrays = {f"{f.name}.list.element" for f in table.schema if pa.types.is_list(f.type)}
        split = {name: "BYTE_STREAM_SPLIT" for name in arrays if not name.endswith("int8.list.element")}
        coded = [f.name for f in table.schema if not pa.types.is_list(f.type) and f.name not in ("body", "leaf")]
        options: dict[str, Any] = {"compression": "zstd", "use_dictionary": coded, "column_encoding": split}
        pq.write_table(table, pa.BufferOutputStream(), **options)


def main() -> None:
    """Measures, prints a table, and writes JSON when asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=4000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        url, spool = f"{folder}/ledger", Path(folder, "spool")
        record(f"{folder}/first", Path(folder, "spool-1"), 16)
        start = timed(lambda: ship_all(Path(folder, "spool-1")))  # a shipper imports its libraries once
        raw = record(url, spool, options.samples) / 1e6
        ship = timed(lambda: ship_all(spool))
        files = sorted(Path(url).rglob("*.parquet"))
        stored = sum(path.stat().st_size for path in files) / 1e6
        tables = [read_segment(path.read_bytes()) for path in files]
        parquet = timed(lambda: plain_parquet(tables), 2)
        tables.clear()
        blobs = [path.read_bytes() for path in files]
        hashed = timed(lambda: [hashlib.sha256(blob).digest() for blob in blobs], 5)
        blobs.clear()
        checked = timed(lambda: verify(open_ledger(url)), 5)
        deep = timed(lambda: verify(open_ledger(url), deep=True))
    result = {
        "raw_mb": round(raw, 1),
        "bytes_per_raw_byte": round(stored / raw, 3),
        "ship_mb_s": round(raw / ship[0], 1),
        "ship_first_cpu_s": round(start[0], 2),
        "ship_wall_mb_s": round(raw / ship[1], 1),
        "pyarrow_mb_s": round(raw / parquet[0], 1),
        "ship_of_pyarrow": round(parquet[0] / ship[0], 2),
        "verify_of_sha256": round(hashed[0] / checked[0], 2),
        "verify_mb_s": round(stored / checked[0], 1),
        "deep_raw_mb_s": round(raw / deep[0], 1),
    }
    print(f"{'what':<34}{'measured':>12}{'bar':>10}")
    for name, bar in (("ship_mb_s", SHIP_BAR_MB_S), ("verify_of_sha256", VERIFY_BAR)):
        print(f"{name:<34}{result[name]:>12}{bar:>10}")
    for name in sorted(result.keys() - {"ship_mb_s", "verify_of_sha256"}):
        print(f"{name:<34}{result[name]:>12}{'':>10}")
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
