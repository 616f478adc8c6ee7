"""Check this machine's card: build, accuracy and invariance of every kernel, and rows P12 and P13, in four minutes.

Usage: python tools/device_check [--interpret | --compile 90] [--operators NAME ...] [--sections NAME ...] [--json FILE]

Without a card, `--interpret` runs every line of it on the CPU: kernels in Triton's interpreter, small shapes, and its
times mean nothing; `--compile 90` builds every kernel for that compute capability and launches none. Exit code 0
when nothing failed, 1 when something did, 2 when there is nothing to run on.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

TOOLS = Path(__file__).resolve().parents[1]
RESULTS = TOOLS / "bench" / "results"
BUDGET_S = 225.0
UNTIMED_BUDGET_S = 900.0
"""Of a run without a card, whose interpreter or compiler nobody waits for at a card's price."""

sys.path[0] = str(TOOLS)  # `device_check` is a package of this folder, and the folder's own modules are not top level


def main() -> int:
    """Run the check, or serve as its worker."""
    if sys.argv[1:2] == ["--worker"]:
        from device_check.worker import serve

        serve(sys.argv[2])
        return 0
    return _check(_arguments())


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python tools/device_check", description=__doc__.partition("\n")[0])
    parser.add_argument("--interpret", action="store_true", help="run on the CPU in Triton's interpreter, small shapes")
    parser.add_argument("--compile", type=int, metavar="SM", help="build for this compute capability, launch nothing")
    parser.add_argument("--operators", nargs="*", default=[], help="only these operators")
    parser.add_argument("--sections", nargs="*", default=[], help="only these sections")
    told = f"seconds for everything (default: {BUDGET_S:.0f}, without a card {UNTIMED_BUDGET_S:.0f})"
    parser.add_argument("--budget", type=float, help=told)
    parser.add_argument("--json", type=Path, help="where the result goes (default on a card: tools/bench/results)")
    parser.add_argument("--quiet", action="store_true", help="the table at the end only")
    args = parser.parse_args()
    if args.budget is None:
        args.budget = UNTIMED_BUDGET_S if args.interpret or args.compile else BUDGET_S
    return args


def _check(args: argparse.Namespace) -> int:
    started = time.monotonic()
    if args.compile:
        os.environ.pop("TRITON_INTERPRET", None)
    elif args.interpret:
        os.environ["TRITON_INTERPRET"] = "1"
    import msgspec
    import torch

    from device_check import report
    from device_check.card import environment
    from device_check.supervisor import ITEM_LIMIT_S, check
    from rlk_ledger_kernels.triton_device import unavailable

    device = "cpu" if args.interpret or args.compile else "cuda"
    reason = None if args.compile else unavailable(device)
    if reason is not None:
        print(f"device_check: {reason}; or run it here with --interpret, or build with --compile 90", file=sys.stderr)
        return 2
    facts = environment(device)
    sections = tuple(args.sections)
    if args.compile:
        facts["triton runs"], sections = f"compiled for sm_{args.compile}, not launched", ("build",)

    def tell(row: report.Row) -> None:
        if not args.quiet:
            print(f"{time.monotonic() - started:6.1f} s  {row.section}: {row.state}: {row.name}", file=sys.stderr)

    torch.set_num_threads(max(1, min(4, os.cpu_count() or 1)))
    left = args.budget - (time.monotonic() - started)
    size = "small" if args.interpret else "large"
    target = f"sm_{args.compile}" if args.compile else device
    limit_s = left if args.compile else ITEM_LIMIT_S
    rows = check(target, size, tuple(args.operators), sections, left, tell, limit_s)
    result = report.Report(
        format=report.FORMAT,
        device=device,
        interpreted=args.interpret,
        environment=facts,
        budget_s=args.budget,
        seconds=round(time.monotonic() - started, 1),
        rows=tuple(rows),
    )
    print(report.table(result))
    place = args.json or (None if device == "cpu" else RESULTS / report.file_name(facts))
    if place is not None:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
        print(f"written to {place}")
    return 1 if any(row.state == "failed" for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
