"""P4: what `import rlk_ledger` costs over a bare Python, in fresh processes.

    python tools/bench/p4_import.py [--rounds N] [--json FILE]

Interleaved with an interpreter that imports nothing; user and system time of the whole process, the median over rounds.
"""

import argparse
import json
import os
import statistics
import sys
from pathlib import Path

BAR_MS = 60.0
PROGRAMS = {
    "bare": "pass",
    "rlk_ledger": "import rlk_ledger",
    "rlk_ledger_sdk": "import rlk_ledger_sdk",
    "rlk_ledger, first event": "import rlk_ledger; rlk_ledger.record('knob.applied', path='a', status='applied')",
}


def cpu_ms(program: str) -> float:
    """Processor milliseconds of one interpreter that runs `program`."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RLK_")}
    pid = os.posix_spawn(sys.executable, [sys.executable, "-c", program], environment)
    _, status, used = os.wait4(pid, 0)
    if status:
        sys.exit(f"`{program}` ended with status {status}")
    return (used.ru_utime + used.ru_stime) * 1e3


def main() -> None:
    """Prints the table and writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    taken: dict[str, list[float]] = {name: [] for name in PROGRAMS}
    for _ in range(options.rounds):
        for name, program in PROGRAMS.items():
            taken[name].append(cpu_ms(program))
    found = {name: statistics.median(values) for name, values in taken.items()}
    print(f"P4  {options.rounds} fresh interpreters a row, CPU milliseconds")
    for name, value in found.items():
        over = value - found["bare"]
        bar = f"   bar {BAR_MS:g} ms" if name == "rlk_ledger" else ""
        print(f"  {name:<26}{value:8.1f}{over:+9.1f} over bare{bar}")
    if options.json:
        options.json.write_text(json.dumps({"row": "P4", "cpu_ms": found, "bar_ms": BAR_MS}, indent=1) + "\n")


if __name__ == "__main__":
    main()
