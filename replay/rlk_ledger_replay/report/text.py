"""Recorded values as text a page may hold: every string in a ledger is untrusted.

`clean` makes control and direction characters visible, so that no recorded string can hide or reorder what stands
beside it; escaping for HTML is the page's own work.
"""

import json
import math
import unicodedata
from typing import Any

from rlk_ledger_schemas.errors import RlkError

LONGEST = 600
"""Characters of one recorded string a page shows."""
ABSENT = "not recorded"
_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
_KEPT = frozenset("\n\t")


class ReportError(RlkError):
    """A report that cannot be made or written where it was asked for."""


def clean(text: str) -> str:
    """`text` with every control, format, surrogate and unassigned character written as its code point, `\\u{202E}`."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(c if c in _KEPT or unicodedata.category(c) not in _HIDDEN else _visible(c) for c in text)


def _visible(character: str) -> str:
    return f"\\u{{{ord(character):04X}}}"


def cut(text: str, longest: int = LONGEST) -> str:
    """`text`, or its first `longest` characters and how many follow."""
    return text if len(text) <= longest else f"{text[:longest]} ... ({len(text) - longest} more characters)"


def number(value: float | int | None, digits: int = 3) -> str:
    """A number for a reader: `digits` significant digits, thousands separated, powers of ten beyond the readable."""
    if value is None:
        return ABSENT
    if isinstance(value, int):
        return f"{value:,}"
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "infinite" if value > 0 else "minus infinite"
    size = abs(value)
    if value == 0.0:
        return "0"
    if size >= 1e6 or size < 1e-4:
        return f"{value:.{digits - 1}e}"
    if size >= 10 ** (digits - 1):
        return f"{value:,.0f}" if size >= 1000 else f"{value:.1f}"
    return f"{value:.{max(0, digits - 1 - math.floor(math.log10(size)))}f}"


def percent(value: float | None) -> str:
    """A share (0 to 1) in percent, finer where it is small."""
    if value is None:
        return ABSENT
    if value == 0.0 or value == 1.0:
        return f"{value:.0%}"
    return f"{value:.2%}" if value < 0.1 or value > 0.99 else f"{value:.1%}"


def short(digest: str | None) -> str:
    """A digest's algorithm and first ten hexadecimal digits."""
    if not digest:
        return ABSENT
    algorithm, colon, rest = digest.partition(":")
    return f"{algorithm}:{rest[:10]}" if colon else digest[:16]


def plural(count: int, noun: str, many: str | None = None) -> str:
    """`1 sample`, `1,204 samples`."""
    return f"{count:,} {noun if count == 1 else many or noun + 's'}"


def plain(value: Any) -> str:
    """Any recorded value as one line of text: intervals as `value [low, high]`, lists joined, maps as JSON."""
    if value is None:
        return ABSENT
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        return interval_text(value) if is_interval(value) else _json(value)
    if isinstance(value, list | tuple):
        if not value:
            return "none"
        flat = not any(isinstance(item, dict | list | tuple) for item in value)
        return ", ".join(plain(item) for item in value) if flat else _json(value)
    return str(value)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True, default=str)


def is_interval(value: Any) -> bool:
    """Whether `value` is a recorded interval: a map of exactly value, low and high."""
    return isinstance(value, dict) and value.keys() == {"value", "low", "high"}


def interval_text(value: dict[str, Any]) -> str:
    """`0.85 [0.76, 1.42]`; a bound the data could not give is said so."""
    low, high = value.get("low"), value.get("high")
    if low is None and high is None:
        return f"{number(value.get('value'))} [not bounded]"
    return f"{number(value.get('value'))} [{_bound(low)}, {_bound(high)}]"


def _bound(value: float | None) -> str:
    return "not bounded" if value is None else number(value)


def flat(value: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """A nested map as (dotted key, text) rows, in recorded order."""
    rows: list[tuple[str, str]] = []
    for key, item in value.items():
        name = f"{prefix}{key}"
        if isinstance(item, dict) and item and not is_interval(item):
            rows += flat(item, f"{name}.")
        else:
            rows.append((name, cut(plain(item))))
    return rows
