"""The part of a replay's screen that live engines fill: what ran, what can be had again, the chain, the floors."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from rlk_ledger_replay.floor import Floors
from rlk_ledger_replay.intervals import Interval
from rlk_ledger_replay.live import Difference, LiveFindings, Stood


def live_parts(found: LiveFindings, floors: Floors | None) -> list[RenderableType]:
    """Lines and tables, in reading order: per engine, per chain, then floors and shares measured a second way."""
    parts: list[RenderableType] = []
    for one in found.stood:
        parts += _engine(one, found)
    for name, links in found.chains.items():
        parts += [Text(""), _chain(name, links)]
    parts += _floors(floors)
    if found.shares32 is not None:
        told = "agree with" if found.agree32 else "differ from"
        line = Text(f"Shares by float32 runs of the live {' and '.join(found.sides32)} engine {told} the reference's: ")
        line.append(f"rollout {_percent(found.shares32.rollout)}, training {_percent(found.shares32.training)}.")
        parts.append(line)
    return parts


def _engine(one: Stood, found: LiveFindings) -> list[RenderableType]:
    told = next(iter(one.statements.values()), None)
    head = Text.assemble((one.wanted.label, "bold"), f" for the {one.wanted.side} side")
    if told is not None:
        head.append(f": {told.engine} {told.version} in {told.dtype} on {told.device}, layout {one.layout}")
    head.append(f" ({one.note})" if one.note else "")
    lines: list[RenderableType] = [head]
    again = one.reproduction
    if again is not None:
        times = "" if one.times is None else f", {_times(one.times)} times its floor"
        text = f"recorded values again: {again.equal:.1%} bitwise equal, RMS {_number(again.rms)} nats{times}"
        lines.append(_indented(text if one.applied else f"{text} (did not apply: a guard failed)"))
    if one.layouts is not None:
        floor = "bitwise the same, so no floor" if one.floor is None else f"native floor {_number(one.floor)} nats"
        lines.append(_indented(f"in two layouts: {floor}"))
    if one.float32 is not None:
        lines.append(_indented(f"in float32: RMS {_number(one.float32.rms)} nats from the reference"))
    for reason in dict.fromkeys(a.reason for a in found.scores.attempts if a.wanted == one.wanted and a.reason):
        roles = sorted({a.role for a in found.scores.attempts if a.wanted == one.wanted and a.reason == reason})
        lines.append(
            Padding(Text(f"not measured ({', '.join(roles)}): {reason}", style="yellow"), (0, 0, 0, 2), expand=False)
        )
    return lines


def _chain(name: str, links: Mapping[str, Difference]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for index, title in enumerate((f"chain by {name}", "mean abs", "RMS [95 %]", "part of the drift")):
        table.add_column(title, justify="left" if index == 0 else "right", overflow="fold")
    for link, one in links.items():
        spread = f"{_number(one.rms)} [{_bound(one.rms.low)}, {_bound(one.rms.high)}]"
        table.add_row(link.replace("_over_", " / "), _number(one.mean_abs), spread, _percent(one.part))
    return table


def _floors(floors: Floors | None) -> list[RenderableType]:
    if floors is None:
        return []
    lines: list[RenderableType] = []
    for side, native in floors.native.items():
        placebo = floors.placebo.get(side)
        counts = floors.source.get(side, "none")
        told = "-" if placebo is None else _number(placebo)
        lines.append(Text(f"Floor of the {side} side: placebo {told}, native {_number(native)} nats; {counts} counts."))
    return lines


def _indented(text: str) -> Padding:
    return Padding(Text(text), (0, 0, 0, 2), expand=False)


def _percent(one: Interval | None) -> str:
    return "-" if one is None else f"{one.value:.0%} [{one.low:.0%}, {one.high:.0%}]"


def _times(one: Interval) -> str:
    return f"{one.value:.2f} [{one.low:.2f}, {one.high:.2f}]"


def _number(one: Interval) -> str:
    return _bound(one.value)


def _bound(value: float) -> str:
    return "0" if value == 0 else f"{value:.4f}" if abs(value) >= 1e-3 else f"{value:.1e}"
