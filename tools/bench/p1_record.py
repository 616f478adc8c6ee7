"""P1: record() of a small event beside OpenTelemetry's BatchLogRecordProcessor, in the same run.

    python tools/bench/p1_record.py [--events N] [--json FILE]

Both sides emit an event with the same four fields; each call is timed alone, rounds of both sides alternate, and the
percentiles are over all rounds. The timer's own cost is measured and subtracted. Nothing is asserted: the table shows
each number beside its bar.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from opentelemetry._logs import SeverityNumber
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import BatchLogRecordProcessor, InMemoryLogRecordExporter
from timing import timer_ns, times_ns

import rlk_ledger_sdk

BARS_US = {"p50": (3.0, 2.0), "p99": (20.0, 20.0), "p99.9": (100.0, 100.0)}
"""(bar of this step, final bar) in microseconds."""
RATIO_BAR = 5.0
ROUNDS = 10


def percentiles_us(samples: list[int], overhead_ns: int) -> dict[str, float]:
    """p50, p99, p99.9 in microseconds, the timer's cost subtracted."""
    ordered = sorted(samples)
    at = {"p50": 0.50, "p99": 0.99, "p99.9": 0.999}
    return {name: max(ordered[int(len(ordered) * q)] - overhead_ns, 0) / 1000 for name, q in at.items()}


def otel_emitter() -> tuple[Callable[[], Any], Callable[[], Any]]:
    """(emit one log record, shut down) of an OpenTelemetry logger that batches to memory."""
    provider = LoggerProvider()
    # A queue that holds the whole run: a full one drops records, and dropping is not what is compared.
    processor = BatchLogRecordProcessor(InMemoryLogRecordExporter(), max_queue_size=1 << 20)
    provider.add_log_record_processor(processor)
    logger = provider.get_logger("bench")

    def emit() -> None:
        logger.emit(
            timestamp=time.time_ns(),
            severity_number=SeverityNumber.INFO,
            body="knob.applied",
            attributes={"path": "engine.max_batch", "requested": 8, "status": "applied", "step": 3},
        )

    return emit, provider.shutdown


def measure(events: int) -> dict[str, dict[str, float]]:
    """Percentiles of both sides over `events` calls each."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as where:
        rlk_ledger_sdk.init(f"{where}/ledger", spool=f"{where}/spool", shipper="off", on_error="warn")

        def ours() -> None:
            rlk_ledger_sdk.record("knob.applied", path="engine.max_batch", requested=8, status="applied", step=3)

        theirs, shutdown = otel_emitter()
        timer = timer_ns()
        samples: dict[str, list[int]] = {"rlk_ledger record()": [], "OpenTelemetry emit()": []}
        for call in (ours, theirs):
            times_ns(call, 1000)
        for _ in range(ROUNDS):
            samples["rlk_ledger record()"] += times_ns(ours, events // ROUNDS)
            samples["OpenTelemetry emit()"] += times_ns(theirs, events // ROUNDS)
        shutdown()
        rlk_ledger_sdk.close()
    return {name: percentiles_us(values, timer) for name, values in samples.items()}


def main() -> None:
    """Prints the table and writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=100_000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = measure(options.events)
    ours, theirs = found["rlk_ledger record()"], found["OpenTelemetry emit()"]
    print(f"P1  small event, {options.events} calls a side, microseconds")
    print(f"{'':24}{'p50':>9}{'p99':>9}{'p99.9':>9}")
    for name, row in found.items():
        print(f"{name:24}" + "".join(f"{row[q]:9.2f}" for q in BARS_US))
    print(f"{'bar (final)':24}" + "".join(f"{f'{now:g} ({last:g})':>9}" for now, last in BARS_US.values()))
    ratio = theirs["p50"] / ours["p50"]
    print(f"OpenTelemetry / rlk_ledger at p50: {ratio:.1f}x (bar {RATIO_BAR:g}x)")
    if options.json:
        document = {"row": "P1", "us": found, "bars_us": BARS_US, "ratio_p50": ratio, "ratio_bar": RATIO_BAR}
        options.json.write_text(json.dumps({**document, "python": sys.version.split()[0]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
