"""What the device check found: rows of one shape in one document, as JSON and as a table."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

import msgspec

State = Literal["passed", "failed", "met", "missed", "measured", "not measured"]
WORSE = ("failed", "missed", "not measured")
FORMAT = 1


class Row(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One thing that was checked or measured.

    state: passed or failed for a check, met or missed for a measurement with a bar, measured for one without, not
    measured for what there was no time for or what is not installed. detail: why, where it is not plain. value: in
    `unit`. ratio: against `against`, judged by `bar` where there is one (met when the ratio is at least the bar).
    """

    section: str
    name: str
    state: State
    detail: str = ""
    value: float | None = None
    unit: str = ""
    against: str = ""
    ratio: float | None = None
    bar: float | None = None
    seconds: float = 0.0


class Report(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One run. device: `cuda` or `cpu`. interpreted: kernels ran in Triton's interpreter, so no time means anything.

    environment: card, driver, clocks and versions, as text. budget_s: what the run was allowed. seconds: what it took.
    """

    format: int
    device: str
    interpreted: bool
    environment: dict[str, str]
    budget_s: float
    seconds: float
    rows: tuple[Row, ...]


def judged(section: str, name: str, ratio: float, bar: float, timed: bool, **rest: object) -> Row:
    """A measurement with a bar: met when the ratio reaches it. timed: False where times mean nothing (interpreter)."""
    state = "measured" if not timed else "met" if ratio >= bar else "missed"
    values = {"section": section, "name": name, "state": state, "ratio": ratio, "bar": bar}
    return msgspec.convert(values | rest, Row)


def unmeasured(section: str, name: str, problem: Exception) -> Row:
    """A row for what raised instead of being measured: not measured when it is not installed, failed otherwise."""
    absent = isinstance(problem, ModuleNotFoundError) and not (problem.name or "").startswith("rlk_ledger")
    told = " ".join(f"{type(problem).__name__}: {problem}".split())[:400]
    return Row(section=section, name=name, state="not measured" if absent else "failed", detail=told)


def file_name(environment: dict[str, str]) -> str:
    """`<card>-<driver>.json`, in letters any file system takes."""
    both = f"{environment.get('card', 'cpu')}-{environment.get('driver', 'none')}"
    return re.sub(r"[^a-z0-9.]+", "-", both.lower()).strip("-") + ".json"


def table(report: Report) -> str:
    """The report for a reader: environment, then one line for each row, then the counts."""
    lines = [f"{name:20} {value}" for name, value in report.environment.items()]
    section = ""
    for row in report.rows:
        if row.section != section:
            section = row.section
            lines += ["", section]
        lines.append(line(row))
    lines += ["", f"{counts(report.rows)} in {report.seconds:.0f} of {report.budget_s:.0f} s"]
    return "\n".join(lines)


def counts(rows: Sequence[Row]) -> str:
    """How many rows are in each state, in words."""
    found = {state: sum(row.state == state for row in rows) for state in State.__args__}
    return ", ".join(f"{count} {state}" for state, count in found.items() if count) or "nothing"


def line(row: Row) -> str:
    """One row for a reader."""
    parts = [f"  {row.state:12} {row.name:58}"]
    if row.value is not None:
        parts.append(f"{row.value:10.4g} {row.unit}")
    if row.ratio is not None:
        parts.append(f"ratio {row.ratio:.2f}" + (f" (bar {row.bar:.2f})" if row.bar is not None else ""))
    if row.against:
        parts.append(f"against {row.against}")
    if row.detail:
        parts.append(row.detail)
    return "  ".join(parts).rstrip()
