"""Drift by every recorded dimension that varies: what differs between tokens that drift and tokens that do not."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rlk_ledger.audit import dimensions
from rlk_ledger.audit.view import View, make_view
from rlk_ledger.history import History
from rlk_ledger.metrics import measure
from rlk_ledger.pairs import Pairing
from rlk_ledger_replay.report.text import plain

Codes = npt.NDArray[np.int64]

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
    for name, codes, labels in _dimensions(view):
        levels = _levels(view, codes, labels)
        if 2 <= len(levels) <= MOST:
            found[name] = levels
            alike.setdefault(tuple((level.tokens, level.mean) for level in levels), []).append(name)
    kept = [_split(names, found[names[0]]) for names in alike.values()]
    return sorted(kept, key=lambda split: (-split.spread, split.dimension))


def _dimensions(view: View) -> Iterator[tuple[str, Codes, Sequence[Any]]]:
    """(name, level code of each compared token, levels) of every dimension that may be a split."""
    yield "weight_version", view.tokens.version, view.pairing.versions
    for between in dimensions.between(view):
        if between.name not in _OWN:
            yield between.name, between.codes[view.tokens.sample], between.labels
    for within in dimensions.within(view):
        yield within.name, within.codes, within.labels


def _levels(view: View, codes: Codes, labels: Sequence[Any]) -> list[Level]:
    """The levels that hold a compared token, by falling mean; tokens without a level (-1) are left out."""
    known = np.unique(codes[codes >= 0]).tolist()
    if not 2 <= len(known) <= MOST:
        return []
    levels = [_level(plain(labels[code]), view, np.flatnonzero(codes == code)) for code in known]
    return sorted(levels, key=lambda level: (-level.mean, level.name))


def _level(name: str, view: View, at: Codes) -> Level:
    tokens = view.tokens
    r, t = tokens.r[at].astype(np.float32), tokens.t[at].astype(np.float32)
    drift = measure(r, t, sample=tokens.sample[at])
    found = {metric: value or 0.0 for metric, value in drift.values.items()}
    return Level(
        name=name,
        tokens=drift.tokens,
        samples=drift.samples,
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
