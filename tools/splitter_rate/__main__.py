"""How often clean runs raise a finding, and how often faults are found.

    python -m splitter_rate [--runs 200] [--first SEED] [--kinds mixed,heavy] [--power] [--json FILE]

Run it from `tools`. Beside the made kinds, `--kinds demo` records runs from the demo's model (torch, 6 s a run). The
bound is the exact 95 % upper bound (Clopper-Pearson) of the rate; the promise is 2 of 200.
"""

import argparse
import json
import sys
from math import comb
from pathlib import Path
from typing import Any

from rlk_ledger.audit import audit
from rlk_ledger.history import History
from splitter_rate.faults import FAULTS
from splitter_rate.runs import KINDS, draw_plan, events

PROMISED = 2 / 200


def upper_bound(hits: int, runs: int, level: float = 0.95) -> float:
    """The largest rate under which `hits` or fewer of `runs` still has probability 1 - level (bisection)."""
    if hits >= runs:
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(60):
        p = (low + high) / 2
        below = sum(comb(runs, k) * p**k * (1 - p) ** (runs - k) for k in range(hits + 1))
        low, high = (p, high) if below > 1 - level else (low, p)
    return high


def raised(kind: str, seed: int) -> list[str]:
    """The errors and gaps of the clean run `seed` of a kind, as text."""
    if kind == "demo":
        from splitter_rate.recorded import demo_events

        rows = demo_events(seed)
    else:
        rows = events(draw_plan(kind, seed))
    found = audit(History.from_events(rows)).findings
    return [f"{f.finding_id} {f.where}" for f in found if f.severity != "info"]


def named(kind: str, seed: int, fault: str, effect: float, samples: int) -> bool:
    """Whether the fault in one run is named by its dimension, alone or as an alias."""
    make, dimension = FAULTS[fault]
    plan = draw_plan(kind, seed)
    plan.steps, plan.groups, plan.per_group = 4, 4, 6
    make(plan, effect, samples)
    for finding in audit(History.from_events(events(plan))).findings:
        names = [finding.where.get("dimension"), *finding.where.get("aliases", [])]
        if finding.finding_id == "drift.split" and dimension in names:
            return True
    return False


def rates(kinds: list[str], runs: int, first: int) -> list[dict[str, Any]]:
    """Per kind: clean runs, those that raised something, and what."""
    rows = []
    for kind in kinds:
        found = {seed: raised(kind, seed) for seed in range(first, first + runs)}
        bad = {seed: texts for seed, texts in found.items() if texts}
        rows.append({"kind": kind, "runs": runs, "raised": len(bad), "bound": upper_bound(len(bad), runs), "what": bad})
        print(f"{kind:<12} {len(bad):>4} of {runs}, 95 % upper bound {rows[-1]['bound']:.4f}", flush=True)
        for seed, texts in bad.items():
            print(f"    seed {seed}: {'; '.join(texts)[:300]}", flush=True)
    return rows


def power(kinds: list[str], runs: int, first: int) -> list[dict[str, Any]]:
    """Per fault, effect and number of samples: how many runs name it."""
    rows = []
    for fault in FAULTS:
        for effect in (2.0, 3.0):
            for samples in (8, 16, 30):
                seeds = [(kinds[i % len(kinds)], first + i) for i in range(runs)]
                hits = sum(named(kind, seed, fault, effect, samples) for kind, seed in seeds)
                rows.append({"fault": fault, "effect": effect, "samples": samples, "runs": runs, "named": hits})
                print(f"{fault:<6} x{effect:g} in {samples:>2} samples: {hits:>3} of {runs}", flush=True)
    return rows


def main() -> int:
    """Measures, prints a line a row, and exits with 1 when the clean runs raise more than was promised."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200, help="runs of each kind, or of each fault")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--power", action="store_true", help="faults instead of clean runs")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    kinds = options.kinds.split(",")
    rows = (power if options.power else rates)(kinds, options.runs, options.first)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    if options.power:
        return 0
    total, bad = sum(row["runs"] for row in rows), sum(row["raised"] for row in rows)
    print(f"in all       {bad:>4} of {total}, 95 % upper bound {upper_bound(bad, total):.4f}; promised {PROMISED:.4f}")
    return int(bad > PROMISED * total)


if __name__ == "__main__":
    sys.exit(main())
