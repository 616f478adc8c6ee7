"""A small SVG writer: elements as escaped text, scales, and ticks.

Figures are inline SVG that takes its colours from the page's style sheet, so that one file serves light, dark and
paper, needs no script and weighs a few kilobytes. Every figure is drawn for a wide and for a narrow page.
"""

import html
import math
from collections.abc import Callable, Sequence

from markupsafe import Markup

from rlk_ledger_replay.report.text import clean, number

Scale = Callable[[float], float]

WIDE, NARROW = 940, 360


def element(tag: str, content: str = "", /, **attributes: object) -> str:
    """One element: `class_` becomes `class`, floats keep one decimal, attributes are escaped, `content` is not."""
    parts = [f' {_attribute(name)}="{_value(value)}"' for name, value in attributes.items() if value is not None]
    return f"<{tag}{''.join(parts)}>{content}</{tag}>" if content else f"<{tag}{''.join(parts)}/>"


def _attribute(name: str) -> str:
    return name.rstrip("_").replace("_", "-")


def _value(value: object) -> str:
    return f"{value:.1f}" if isinstance(value, float) else html.escape(clean(str(value)))


def text(x: float, y: float, content: str, class_: str = "tick", anchor: str = "start") -> str:
    """A line of text at (x, y)."""
    return element("text", html.escape(clean(content)), x=x, y=y, class_=class_, text_anchor=anchor)


def title(content: str) -> str:
    """What a pointer or a screen reader is told about the element around it."""
    return element("title", html.escape(clean(content)))


def figure(draw: Callable[[int], tuple[int, str]], label: str) -> Markup:
    """The figure `draw(width) -> (height, content)` makes, wide and narrow; `label` describes it in words."""
    parts = []
    for width, class_ in ((WIDE, "wide"), (NARROW, "narrow")):
        height, content = draw(width)
        body = title(label) + content
        parts.append(element("svg", body, class_=class_, viewBox=f"0 0 {width} {height}", role="img"))
    return Markup("".join(parts))


def linear(low: float, high: float, start: float, end: float) -> Scale:
    """A linear scale from [low, high] to [start, end]; one value maps to the middle."""
    if high <= low:
        return lambda value: (start + end) / 2
    return lambda value: start + (value - low) / (high - low) * (end - start)


def logarithmic(low: float, high: float, start: float, end: float) -> Scale:
    """A logarithmic scale; values below `low` (also zero) stand at its beginning."""
    inner = linear(math.log10(low), math.log10(high), start, end)
    return lambda value: inner(math.log10(max(value, low)))


def ticks(low: float, high: float, wanted: int) -> list[float]:
    """About `wanted` round values inside [low, high]."""
    if high <= low:
        return [low]
    raw = (high - low) / max(wanted, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    size = next(step * power for step in (1, 2, 2.5, 5, 10) if step * power >= raw * 0.999)
    first = math.ceil(low / size - 1e-9)
    return [round(i * size, 12) for i in range(first, math.floor(high / size + 1e-9) + 1)]


def decades(low: float, high: float) -> list[float]:
    """Powers of ten inside [low, high]."""
    return [10.0**p for p in range(math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9) + 1)]


def tick_label(value: float) -> str:
    """A tick without needless digits."""
    return number(value, 2) if value and abs(value) < 1e-3 else f"{value:g}" if abs(value) < 1e4 else f"{value:,.0f}"


def path(points: Sequence[tuple[float, float]], class_: str) -> str:
    """A polyline through points."""
    return element("path", d="M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points), class_=class_)
