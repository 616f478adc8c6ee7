"""The last screen of a replay, for people: verdict first, how sure, the sides, the arms, what to do next."""

from __future__ import annotations

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from rlk_ledger.audit.finding import Finding
from rlk_ledger_replay.arms import Arm
from rlk_ledger_replay.floor import Floors
from rlk_ledger_replay.intervals import Interval
from rlk_ledger_replay.judgement import Judgement
from rlk_ledger_replay.result import ReplayResult
from rlk_ledger_replay.screen_live import live_parts
from rlk_ledger_replay.shares import Shares
from rlk_ledger_schemas.findings import FINDINGS

_STYLE = {"pass": "bold green", "fail": "bold red", "inconclusive": "bold yellow", "not_comparable": "bold red"}
_SEVERITY = {"error": "red", "gap": "yellow", "info": "dim"}
_MARK = "·"
WIDE = 80
"""Columns from which tables fit; below, the same numbers stand one under the other."""

UNMEASURED = Floors(None, None, None, None, None, None)


def render(result: ReplayResult, ledger_url: str, width: int = 80) -> RenderableType:
    """Everything the screen shows, laid out for `width` columns."""
    found = result.judgement
    led_by_audit = any(one.severity == "error" for one in result.audit.findings)
    reason = f"Replay: {found.decision.reason}" if led_by_audit else found.decision.reason
    parts: list[RenderableType] = [_headline(result), Text(reason), Text("")]
    if found.shares is not None and found.decision.decision != "not_comparable":
        layout = _sides if width >= WIDE else _sides_narrow
        parts += [layout(found.shares, found.floors or UNMEASURED), Text("")]
    if found.live is not None:
        parts += [*live_parts(found.live, found.floors), Text("")]
    if found.arms:
        parts += [_arms(found.arms) if width >= WIDE else _arms_narrow(found.arms), Text("")]
    parts += [_findings(result.findings), *_gates(found), Text("")]
    if result.not_recorded is not None:
        parts.append(Text(f"Not recorded in the ledger: {result.not_recorded}", style="yellow"))
    parts.append(_next(result, ledger_url))
    return Group(*parts)


def show(result: ReplayResult, ledger_url: str, console: Console | None = None) -> None:
    """Prints the screen; without a terminal there are no colour codes."""
    console = console or Console(highlight=False)
    console.print(render(result, ledger_url, console.width))


def _headline(result: ReplayResult) -> Text:
    counts = result.counts()
    style = _STYLE.get(result.verdict, "bold")
    text = Text.assemble((result.verdict.replace("_", " ").upper(), style), f" {_MARK} ")
    text.append(_title(result))
    text.append(
        f"\nRun {result.run_id}: {counts['tokens']:,} tokens of {counts['samples']} samples "
        f"({counts['available']} available) in {counts['groups']} groups, "
        f"{result.request.schedules} placebo schedules a side, {result.seconds:.0f} s.",
        style="dim",
    )
    return text


def _title(result: ReplayResult) -> str:
    """The first thing to know: an error the record alone shows, or the gap that keeps a clean drift from passing."""
    first = [one for one in result.audit.findings if one.severity == "error"]
    if result.verdict == "inconclusive" and result.decision.verdict == "pass":
        first = [one for one in result.findings if one.severity in ("error", "gap")]
    if first:
        return f"{first[0].finding_id}: {FINDINGS[first[0].finding_id].meaning}"
    return result.decision.decision.replace("_", " ")


def _sides(shares: Shares, floors: Floors) -> RenderableType:
    table = _table("95 % over groups", "rollout", "training", "drift")
    table.add_row("share of the drift", _percent(shares.rollout), _percent(shares.training), "")
    errors = shares.error_rollout, shares.error_training, shares.drift
    table.add_row("size (RMS, nats)", *map(_nats, errors))
    table.add_row("noise floor", *map(_nats, (floors.rollout, floors.training, floors.combined)))
    multiples = floors.multiple_rollout, floors.multiple_training, floors.multiple_drift
    table.add_row("times its floor", *map(_times, multiples))
    return table


def _sides_narrow(shares: Shares, floors: Floors) -> RenderableType:
    rows = (
        ("rollout", shares.rollout, shares.error_rollout, floors.rollout, floors.multiple_rollout),
        ("training", shares.training, shares.error_training, floors.training, floors.multiple_training),
        ("drift", None, shares.drift, floors.combined, floors.multiple_drift),
    )
    lines: list[RenderableType] = []
    for name, share, size, floor, multiple in rows:
        lines.append(Text.assemble((name, "bold"), f" {_nats(size)} nats, floor {_nats(floor)}"))
        lines.append(Text(f"  times its floor {_times(multiple)}"))
        if share is not None:
            lines.append(Text(f"  share of the drift {_percent(share)}"))
    return Group(*lines)


def _arms(arms: tuple[Arm, ...]) -> Table:
    table = _table("arm", "mean abs", "p99", "max", "clipped")
    for arm in arms:
        values = arm.drift.values
        cells = [_number(values.get(name)) for name in ("abs_dlogp_mean", "abs_dlogp_p99", "abs_dlogp_max")]
        clip = values.get("clip_fraction")
        table.add_row(arm.arm, *cells, "-" if clip is None else f"{clip:.2%}")
    return table


def _arms_narrow(arms: tuple[Arm, ...]) -> RenderableType:
    lines = []
    for arm in arms:
        clip = arm.drift.values.get("clip_fraction")
        clipped = "-" if clip is None else f"{clip:.2%}"
        lines.append(Text(f"{arm.arm}: mean {_number(arm.drift.values.get('abs_dlogp_mean'))}, clipped {clipped}"))
    return Group(*lines)


def _findings(findings: tuple[Finding, ...]) -> RenderableType:
    lines = []
    for finding in findings:
        place = ", ".join(f"{name} {value}" for name, value in finding.where.items() if not isinstance(value, dict))
        line = Text.assemble((f"{finding.severity:5} ", _SEVERITY[finding.severity]), (finding.finding_id, "bold"))
        line.append(f" {finding.meaning}" + (f" ({place})" if place else ""))
        lines.append(line)
    return Group(*lines)


def _gates(found: Judgement) -> list[RenderableType]:
    open_gates = [gate for gate in found.gates if gate.status != "passed"]
    passed = len(found.gates) - len(open_gates)
    lines: list[RenderableType] = [Text(f"{passed} of {len(found.gates)} gates passed.", style="dim")]
    for gate in open_gates:
        line = Text(f"{gate.status}: {gate.gate}: {gate.reason}", style="yellow")
        lines.append(Padding(line, (0, 0, 0, 2), expand=False))
    return lines if found.gates else []


def _next(result: ReplayResult, ledger_url: str) -> Text:
    telling = [one for one in result.findings if one.severity != "info"]
    telling = telling or sorted(result.findings, key=lambda one: not one.finding_id.startswith("drift."))
    step = telling[0].to_dict()["next_step"] if telling else "Nothing to fix."
    report = f"rlk-ledger report {result.run_id} --ledger {ledger_url}"
    return Text.assemble(("Next: ", "bold"), f"{step}\n      {report}")


def _table(*titles: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for index, title in enumerate(titles):
        table.add_column(title, justify="left" if index == 0 else "right", overflow="fold")
    return table


def _percent(interval: Interval | None) -> str:
    return "-" if interval is None else f"{interval.value:.0%} [{interval.low:.0%}, {interval.high:.0%}]"


def _nats(interval: Interval | None) -> str:
    return "-" if interval is None else _number(interval.value)


def _times(interval: Interval | None) -> str:
    return "-" if interval is None else f"{interval.value:.2f} [{interval.low:.2f}, {interval.high:.2f}]"


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return "0" if value == 0 else f"{value:.4f}" if abs(value) >= 1e-3 else f"{value:.1e}"


class Bar:
    """A progress line on a terminal's error stream; silent where there is no terminal."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._task: TaskID | None = None

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def stage(self, name: str, total: int | None = None) -> None:
        """Starts a new line's worth of work; without a total it only shows that something is going on."""
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._task = self._progress.add_task(name, total=total)

    def advance(self, units: int) -> None:
        """Moves the current stage."""
        if self._task is not None:
            self._progress.advance(self._task, units)
