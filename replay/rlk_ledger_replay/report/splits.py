"""Drift by every recorded dimension that varies: what differs between tokens that drift and tokens that do not."""

import math
from dataclasses import dataclass
from typing import Any

from rlk_ledger import drift
from rlk_ledger.audit.view import make_view
from rlk_ledger.history import History
from rlk_ledger.pairs import Pairing
from rlk_ledger_replay.report.text import plain

LEVELS = 8
"""Levels shown of one dimension, the most drifting ones; a dimension with more than MOST is no split."""
MOST = 64
_OWN = frozenset({"step", "group_id", "sample_id"})


@dataclass(frozen=True)
class Level:
    """One level of a dimension and the drift of its tokens (nats)."""

    name: str
    tokens: int
    samples: int
    mean: float
    rms: float
    p99: float
    clipped: float


@dataclass(frozen=True)
class Split:
    """One dimension, with the `aliases` that separate the same tokens: its levels by falling mean.

    `ratio` is the largest mean over the smallest (None where the smallest is 0). `spread` orders dimensions: the
    variance of abs(d) between levels over that within them, each by its degrees of freedom. It is no test.
    """

    dimension: str
    aliases: tuple[str, ...]
    levels: tuple[Level, ...]
    ratio: float | None
    spread: float


def splits(history: History, pairing: Pairing) -> list[Split]:
    """The dimensions with 2 to MOST levels, the most separating first; steps, groups and samples stand elsewhere."""
    view = make_view(history, pairing)
    if not len(view.tokens):
        return []
    alike: dict[tuple[tuple[int, float], ...], list[str]] = {}
    found: dict[str, list[Level]] = {}
    for name in drift.names(view):
        levels = [] if name in _OWN else _levels(name, drift.by(view, [name]))
        if 2 <= len(levels) <= MOST:
            found[name] = levels
            alike.setdefault(tuple((level.tokens, level.mean) for level in levels), []).append(name)
    kept = [_split(names, found[names[0]]) for names in alike.values()]
    return sorted(kept, key=lambda split: (-split.spread, split.dimension))


def _levels(name: str, rows: list[dict[str, Any]]) -> list[Level]:
    levels = [_level(plain(row["level"][name]), row) for row in rows if row["metrics"]]
    return sorted(levels, key=lambda level: (-level.mean, level.name))


def _level(name: str, row: dict[str, Any]) -> Level:
    found = row["metrics"]
    return Level(
        name=name,
        tokens=row["tokens"],
        samples=row["samples"],
        mean=found["abs_dlogp_mean"],
        rms=found["dlogp_rms"],
        p99=found["abs_dlogp_p99"],
        clipped=found["clip_fraction"],
    )


def _split(names: list[str], levels: list[Level]) -> Split:
    least = levels[-1].mean
    return Split(
        dimension=names[0],
        aliases=tuple(names[1:]),
        levels=tuple(levels),
        ratio=levels[0].mean / least if least > 0 else None,
        spread=_spread(levels),
    )


def _spread(levels: list[Level]) -> float:
    total = sum(level.tokens for level in levels)
    mean = sum(level.tokens * level.mean for level in levels) / total
    between = sum(level.tokens * (level.mean - mean) ** 2 for level in levels) / (len(levels) - 1)
    within = sum(level.tokens * max(level.rms**2 - level.mean**2, 0.0) for level in levels)
    rest = total - len(levels)
    if within <= 0.0 or rest <= 0:
        return math.inf if between > 0.0 else 0.0
    return between / (within / rest)
