"""The figures of a report: drift over steps, the distribution of d, measured intervals, the weight timeline."""

import dataclasses
import math
from collections.abc import Sequence

from markupsafe import Markup

from rlk_ledger_replay.report import svg
from rlk_ledger_replay.report.answers import Interval
from rlk_ledger_replay.report.drift import Histogram, StepDrift
from rlk_ledger_replay.report.provenance import Version
from rlk_ledger_replay.report.strips import CLIP_HIGH, CLIP_LOW
from rlk_ledger_replay.report.svg import element, text, tick_label, title
from rlk_ledger_replay.report.text import number, plural

SERIES = (("mean", "abs_dlogp_mean"), ("rms", "dlogp_rms"), ("p99", "abs_dlogp_p99"))
"""The lines of the step figure: style class and metric."""
_LOG_FROM = 20.0
"""From this ratio of the largest to the smallest value on, the step figure is logarithmic."""
_MARKERS_TO = 60
POINTS = 400
_LANES, _VERSIONS = 12, 120


@dataclasses.dataclass(frozen=True)
class Frame:
    """A plot's inner box in pixels."""

    left: float
    right: float
    top: float
    bottom: float


@dataclasses.dataclass(frozen=True)
class Measured:
    """One row of an interval figure."""

    label: str
    interval: Interval
    words: str
    style: str = ""


def steps(rows: Sequence[StepDrift], floor: Interval | None) -> Markup | None:
    """Mean, RMS and p99 of abs(d) by step, the drift's noise floor as a band; None where no step was measured.

    Of more than POINTS steps the highest value of every so many neighbours is drawn.
    """
    measured = [row for row in rows if row.drift.values and row.step is not None]
    if not measured:
        return None
    size = math.ceil(len(measured) / POINTS)
    shown = measured if size == 1 else [_highest(measured[i : i + size]) for i in range(0, len(measured), size)]
    label = "Absolute difference of log-probabilities by step: mean, root mean square and 99th percentile"
    return svg.figure(lambda width: _steps(shown, floor, width), label)


def _highest(rows: Sequence[StepDrift]) -> StepDrift:
    """The rows as one, under the first row's step, with the highest value of every metric drawn."""
    values = {name: max((row.drift.values[name] or 0.0) for row in rows) for _, name in SERIES}
    tokens = sum(row.drift.tokens for row in rows)
    return StepDrift(rows[0].step, dataclasses.replace(rows[0].drift, tokens=tokens, values={**values}))


def _steps(rows: Sequence[StepDrift], floor: Interval | None, width: int) -> tuple[int, str]:
    frame = Frame(48, width - 12, 12, 212)
    values = [v for row in rows for _, name in SERIES if (v := row.drift.values[name]) is not None]
    top = max([*values, floor.value if floor else 0.0]) or 1e-6
    positive = [v for v in values if v > 0]
    low = min([*positive, floor.value if floor and floor.value > 0 else top], default=top)
    many = bool(positive) and len(positive) == len(values) and top / low > _LOG_FROM
    y = (svg.logarithmic if many else svg.linear)(low / 1.5 if many else 0.0, top * 1.12, frame.bottom, frame.top)
    marks = svg.decades(low / 1.5, top * 1.12) if many else svg.ticks(0.0, top * 1.12, 4)
    known = [row.step for row in rows if row.step is not None]
    x = svg.linear(min(known), max(known), frame.left + 16, frame.right - 16)
    parts = [_band(floor, y, frame)] if floor else []
    parts += [_rule(frame, y(mark), tick_label(mark)) for mark in marks]
    parts += [
        text(x(mark), frame.bottom + 18, tick_label(mark), "tick", "middle")
        for mark in svg.ticks(min(known), max(known), 8 if width > 500 else 4)
        if mark == int(mark)
    ]
    parts.append(text((frame.left + frame.right) / 2, frame.bottom + 36, "step", "axis", "middle"))
    for style, name in SERIES:
        parts += _line(rows, style, name, x, y)
    return 256, "".join(parts)


def _band(floor: Interval, y: svg.Scale, frame: Frame) -> str:
    high = floor.high if floor.high is not None and math.isfinite(floor.high) else floor.value
    low = floor.low if floor.low is not None else floor.value
    above, below = max(y(high), frame.top), min(y(low), frame.bottom)
    note = title(f"noise floor of the drift (RMS): {floor.text} nats")
    box = element(
        "rect",
        note,
        x=frame.left,
        y=above,
        width=frame.right - frame.left,
        height=max(below - above, 2.0),
        class_="floor",
    )
    at = y(floor.value)
    return box + element("line", x1=frame.left, x2=frame.right, y1=at, y2=at, class_="floor-line")


def _rule(frame: Frame, at: float, label: str) -> str:
    line = element("line", x1=frame.left, x2=frame.right, y1=at, y2=at, class_="rule")
    return line + text(frame.left - 7, at + 4, label, "tick", "end")


def _line(rows: Sequence[StepDrift], style: str, name: str, x: svg.Scale, y: svg.Scale) -> list[str]:
    points = [
        (row, x(row.step), y(value))
        for row in rows
        if row.step is not None and (value := row.drift.values[name]) is not None
    ]
    parts = [svg.path([(px, py) for _, px, py in points], f"line {style}")] if len(points) > 1 else []
    if len(points) <= _MARKERS_TO:
        for row, px, py in points:
            note = f"step {row.step}: {name} {number(row.drift.values[name])} nats over {row.drift.tokens:,} tokens"
            parts.append(element("circle", title(note), cx=px, cy=py, r=3.5, class_=f"dot {style}"))
    return parts


def distribution(found: Histogram | None, floor: Interval | None) -> Markup | None:
    """Counts of d on a logarithmic axis, with the clip edges and the noise floor; None without a compared token."""
    if found is None:
        return None
    label = "Distribution of d, training minus rollout log-probability, counts on a logarithmic axis"
    return svg.figure(lambda width: _distribution(found, floor, width), label)


def _distribution(found: Histogram, floor: Interval | None, width: int) -> tuple[int, str]:
    frame = Frame(48, width - 12, 34, 232)
    peak = max(*found.counts, found.below, found.above, 1)
    x = svg.linear(-found.reach, found.reach, frame.left + 14, frame.right - 14)
    y = svg.logarithmic(0.5, peak * 1.4, frame.bottom, frame.top)
    parts = []
    if floor:
        left, right = x(max(-floor.value, -found.reach)), x(min(floor.value, found.reach))
        note = title(f"within one noise floor (RMS {floor.text} nats) of zero")
        parts.append(
            element(
                "rect", note, x=left, y=frame.top, width=right - left, height=frame.bottom - frame.top, class_="floor"
            )
        )
    parts += [_rule(frame, y(mark), tick_label(mark)) for mark in svg.decades(1, peak * 1.4)]
    size = 2 * found.reach / len(found.counts)
    for index, count in enumerate(found.counts):
        start = -found.reach + index * size
        parts.append(_bar(count, start, start + size, x, y, frame))
    parts += _overflow(found, x, y, frame)
    parts += _edges(found, x, frame, width)
    parts += [
        text(x(mark), frame.bottom + 18, tick_label(mark), "tick", "middle")
        for mark in svg.ticks(-found.reach, found.reach, 8 if width > 500 else 4)
    ]
    parts.append(
        text((frame.left + frame.right) / 2, frame.bottom + 36, "d = training - rollout (nats)", "axis", "middle")
    )
    return 276, "".join(parts)


def _bar(count: int, start: float, end: float, x: svg.Scale, y: svg.Scale, frame: Frame) -> str:
    if not count:
        return ""
    outside = end <= CLIP_LOW or start >= CLIP_HIGH
    note = title(f"{plural(count, 'token')} with d from {number(start)} to {number(end)}")
    width = max(x(end) - x(start) - 1.0, 1.0)
    return element(
        "rect",
        note,
        x=x(start) + 0.5,
        y=y(count),
        width=width,
        height=frame.bottom - y(count),
        class_="bar out" if outside else "bar",
    )


def _overflow(found: Histogram, x: svg.Scale, y: svg.Scale, frame: Frame) -> list[str]:
    """Bars at both ends for what lies beyond the axis."""
    parts = []
    for count, at, word in ((found.below, frame.left, "below"), (found.above, frame.right - 10, "above")):
        if count:
            note = title(f"{plural(count, 'token')} {word} the axis")
            height = frame.bottom - y(count)
            parts.append(element("rect", note, x=at, y=y(count), width=10.0, height=height, class_="bar beyond"))
    return parts


def _edges(found: Histogram, x: svg.Scale, frame: Frame, width: int) -> list[str]:
    parts = []
    for edge, anchor, shift in ((CLIP_LOW, "end", -5), (CLIP_HIGH, "start", 5)):
        at = x(edge)
        parts.append(element("line", x1=at, x2=at, y1=frame.top - 14, y2=frame.bottom, class_="edge"))
        near = at - frame.left < 60 or frame.right - at < 60
        turned = {"end": "start", "start": "end"}[anchor] if near else anchor
        label = f"clip {edge:+.3f}" if width > 500 or not near else f"{edge:+.2f}"
        parts.append(text(at + (-shift if near else shift), frame.top - 5, label, "tick", turned))
    return parts


def intervals(
    rows: Sequence[Measured], low: float, high: float, rules: Sequence[tuple[float, str]], label: str
) -> Markup | None:
    """Values with their 95 % intervals on one axis from `low` to at least `high`, and labelled rules; None if empty."""
    if not rows:
        return None
    ends = [e for row in rows for e in (row.interval.value, row.interval.low, row.interval.high) if e is not None]
    left, right = min([low, *ends]), max([high, *ends])
    return svg.figure(lambda width: _intervals(rows, left, right, rules, width), label)


def _intervals(
    rows: Sequence[Measured], low: float, high: float, rules: Sequence[tuple[float, str]], width: int
) -> tuple[int, str]:
    roomy = width > 500
    gap = 34 if roomy else 48
    frame = Frame(150 if roomy else 12, width - (190 if roomy else 12), 26, 26 + gap * len(rows))
    x = svg.linear(low, high, frame.left + 6, frame.right - 6)
    parts = []
    for value, label in rules:
        parts.append(element("line", x1=x(value), x2=x(value), y1=frame.top - 6, y2=frame.bottom, class_="edge"))
        near = "start" if x(value) - frame.left < 60 else "end" if frame.right - x(value) < 60 else "middle"
        parts.append(text(x(value), frame.top - 11, label, "tick", near))
    for index, row in enumerate(rows):
        parts.append(_interval(row, x, frame, frame.top + gap * index + (gap / 2 if roomy else 34), roomy))
    parts += [text(x(mark), frame.bottom + 18, tick_label(mark), "tick", "middle") for mark in svg.ticks(low, high, 5)]
    base = element("line", x1=frame.left, x2=frame.right, y1=frame.bottom, y2=frame.bottom, class_="rule")
    return int(frame.bottom + 26), base + "".join(parts)


def _interval(row: Measured, x: svg.Scale, frame: Frame, at: float, roomy: bool) -> str:
    found = row.interval
    start = frame.left if found.low is None else x(found.low)
    end = frame.right if found.high is None else x(found.high)
    note = title(f"{row.label}: {row.words}, 95 % interval")
    bar = element("line", note, x1=start, x2=end, y1=at, y2=at, class_=f"interval {row.style}")
    caps = "".join(
        element("line", x1=e, x2=e, y1=at - 5, y2=at + 5, class_=f"cap {row.style}")
        for e, bound in ((start, found.low), (end, found.high))
        if bound is not None
    )
    dot = element("circle", note, cx=x(found.value), cy=at, r=5.0, class_=f"dot {row.style}")
    if roomy:
        words = text(frame.left - 12, at + 4, row.label, "name", "end") + text(
            frame.right + 12, at + 4, row.words, "num"
        )
    else:
        words = text(frame.left, at - 14, row.label, "name") + text(frame.right, at - 14, row.words, "num", "end")
    return bar + caps + dot + words


def timeline(versions: Sequence[Version]) -> Markup | None:
    """Weight versions from left to right: published above, each engine's loads below; None without a load."""
    shown = list(versions)[-_VERSIONS:]
    lanes = list(dict.fromkeys(load.engine for version in shown for load in version.loads))[:_LANES]
    if not lanes or not shown:
        return None
    label = "Weight versions: when published, and which engine took which, with equal or differing digests"
    return svg.figure(lambda width: _timeline(shown, lanes, width), label)


def _timeline(versions: Sequence[Version], lanes: Sequence[str], width: int) -> tuple[int, str]:
    roomy = width > 500
    gap = 30 if roomy else 44
    frame = Frame(150 if roomy else 14, width - 14, 14, 14 + gap * (len(lanes) + 1))
    x = svg.linear(0, len(versions) - 1, frame.left + 14, frame.right - 14)
    rows = {name: frame.top + gap * (i + 1) + gap - 12 for i, name in enumerate(lanes)}
    first = frame.top + gap - 12
    parts = [_lane(frame, first, "published", roomy)]
    parts += [_lane(frame, at, name if len(name) < 22 else name[:20] + "...", roomy) for name, at in rows.items()]
    every = max(1, math.ceil(len(versions) / (10 if roomy else 5)))
    for index, version in enumerate(versions):
        at = x(index)
        if version.digest:
            note = title(f"{version.name} published at step {version.step}: {version.digest}")
            parts.append(element("circle", note, cx=at, cy=first, r=5.0, class_="load equal"))
        for load in version.loads:
            if load.engine in rows:
                parts.append(_mark(at, rows[load.engine], version.name, load.state, load.what))
        if index % every == 0 or index == len(versions) - 1:
            name = version.name if len(version.name) <= 12 else "..." + version.name[-9:]
            parts.append(text(at, frame.bottom + 18, name, "tick", "middle"))
    return int(frame.bottom + 28), "".join(parts)


def _lane(frame: Frame, at: float, name: str, roomy: bool) -> str:
    line = element("line", x1=frame.left, x2=frame.right, y1=at, y2=at, class_="rule")
    return line + (
        text(frame.left - 12, at + 4, name, "name", "end") if roomy else text(frame.left, at - 12, name, "name")
    )


def _mark(x: float, y: float, version: str, state: str, what: str) -> str:
    note = title(f"{version}, {what}: digest {state if state != 'equal' else 'equal to the published one'}")
    if state == "differs":
        return element("path", note, d=f"M{x - 5:.1f} {y - 5:.1f}l10 10m0 -10l-10 10", class_="load differs")
    return element("circle", note, cx=x, cy=y, r=5.0, class_="load equal" if state == "equal" else "load unknown")
