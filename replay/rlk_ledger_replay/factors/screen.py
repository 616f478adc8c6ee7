"""The verdicts on factors, for people: causes first, then what is undecided, then what is ruled out."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from rlk_ledger_replay.factors.factor import Judged


def show_factors(found: Sequence[Judged], console: Console) -> None:
    """Prints a line a factor."""
    console.print("")
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("factor", "verdict", "reason or next step"):
        table.add_column(name)
    for one in sorted(found, key=_rank):
        caused = one.verdict.startswith(("caused", "coupled"))
        text = one.factor.intervention if caused else one.reason
        table.add_row(one.factor.factor, one.verdict, text)
    console.print(table)


def _rank(one: Judged) -> tuple[int, str]:
    order = 0 if one.verdict.startswith(("caused", "coupled")) else 2 if one.verdict == "not_this_factor" else 1
    return order, one.factor.factor
