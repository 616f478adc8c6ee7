"""The drift a report shows: the whole run, every step, the distribution, and the worst tokens with their place.

Every number is one of `rlk_ledger.metrics`; nothing here defines a metric of its own. Suffixes: N tokens of all
paired samples, one after the other.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rlk_ledger.classes import FINITE
from rlk_ledger.metrics import Drift, measure
from rlk_ledger.pairs import PairedSample, Pairing
from rlk_ledger_replay.report.tokens import is_bytes, token_text

LEAST_REACH = 0.3
"""The histogram reaches at least this far (nats), so that the clip edges are always on it."""
_BINS = 60
WORST_TOKENS = 12
BROKEN = 2


@dataclass(frozen=True)
class Columns:
    """The tokens of a pairing as arrays [N]; `usable` marks those that enter drift, `pair` indexes `Pairing.pairs`."""

    rollout: npt.NDArray[np.float32]
    training: npt.NDArray[np.float32]
    active: npt.NDArray[np.bool_]
    usable: npt.NDArray[np.bool_]
    pair: npt.NDArray[np.int64]
    position: npt.NDArray[np.int64]
    step: npt.NDArray[np.int64]
    classes: tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]

    @property
    def dlogp(self) -> npt.NDArray[np.float64]:
        """d = t - r (nats) of the usable tokens."""
        return self.training[self.usable].astype(np.float64) - self.rollout[self.usable]


@dataclass(frozen=True)
class StepDrift:
    """The drift of one step; `step` is None for samples recorded outside any."""

    step: int | None
    drift: Drift


@dataclass(frozen=True)
class Histogram:
    """Counts of d in equal bins over [-reach, reach] (nats), and how many tokens lie outside on either side."""

    reach: float
    counts: tuple[int, ...]
    below: int
    above: int


@dataclass(frozen=True)
class WorstToken:
    """One token and where it stands."""

    sample_id: str
    step: int | None
    position: int
    token_id: int | None
    text: str
    rollout: float
    training: float
    dlogp: float
    version: str
    engine: str
    layout: str
    rank: int | None


def columns(pairing: Pairing) -> Columns:
    """The tokens of every pair. `active` also asks that the token is paired: the rest is coverage, not drift."""
    pairs = pairing.pairs
    lengths = np.array([len(p.sample) for p in pairs], np.int64)
    left = _joined([p.rollout_class for p in pairs], np.uint8)
    right = _joined([p.training_class for p in pairs], np.uint8)
    active = _joined([p.active & p.paired for p in pairs], np.bool_)
    steps = np.array([-1 if p.sample.step is None else p.sample.step for p in pairs], np.int64)
    return Columns(
        rollout=_joined([p.rollout for p in pairs], np.float32),
        training=_joined([p.training for p in pairs], np.float32),
        active=active,
        usable=active & (left == FINITE) & (right == FINITE),
        pair=np.repeat(np.arange(len(pairs)), lengths),
        position=_joined([np.arange(n) for n in lengths], np.int64),
        step=np.repeat(steps, lengths),
        classes=(left, right),
    )


def _joined(parts: list[npt.NDArray[Any]], dtype: type) -> npt.NDArray[Any]:
    return np.concatenate(parts).astype(dtype, copy=False) if parts else np.empty(0, dtype)


def overall(found: Columns) -> Drift:
    """Every metric over all paired active tokens of the run."""
    return measure(found.rollout, found.training, active=found.active, sample=found.pair, classes=found.classes)


def by_step(found: Columns) -> list[StepDrift]:
    """Every metric of every step, in step order."""
    order = np.argsort(found.step, kind="stable")
    known, starts = np.unique(found.step[order], return_index=True)
    parts = np.split(order, starts[1:])
    return [StepDrift(None if step < 0 else step, _at(found, at)) for step, at in zip(known.tolist(), parts)]


def _at(found: Columns, at: npt.NDArray[np.int64]) -> Drift:
    left, right = found.classes
    return measure(
        found.rollout[at],
        found.training[at],
        active=found.active[at],
        sample=found.pair[at],
        classes=(left[at], right[at]),
    )


def histogram(found: Columns) -> Histogram | None:
    """The distribution of d; its reach follows p99.9 of abs(d), so that a few outliers do not flatten the rest."""
    d = found.dlogp
    if not len(d):
        return None
    reach = max(LEAST_REACH, 1.25 * float(np.quantile(np.abs(d), 0.999)))
    counts, _ = np.histogram(d, bins=_BINS, range=(-reach, reach))
    return Histogram(reach, tuple(counts.tolist()), int((d < -reach).sum()), int((d > reach).sum()))


def worst_tokens(pairing: Pairing, found: Columns, count: int = WORST_TOKENS) -> list[WorstToken]:
    """The usable tokens with the largest abs(d), largest first."""
    at = np.flatnonzero(found.usable)
    d = found.dlogp
    order = np.argsort(-np.abs(d), kind="stable")[:count]
    return [
        _place(pairing, pairing.pairs[found.pair[at[i]]], int(found.position[at[i]]), float(d[i]))
        for i in order.tolist()
    ]


def _place(pairing: Pairing, pair: PairedSample, position: int, dlogp: float) -> WorstToken:
    sample, version, rank = pair.sample, int(pair.version[position]), int(pair.rank[position])
    tokens = sample.response_token_ids
    token = int(tokens[position]) if position < len(tokens) else None
    return WorstToken(
        sample_id=sample.sample_id,
        step=sample.step,
        position=position,
        token_id=token,
        text=token_text(token, is_bytes(sample)),
        rollout=float(pair.rollout[position]),
        training=float(pair.training[position]),
        dlogp=dlogp,
        version=pairing.versions[version] if version >= 0 else "",
        engine=sample.engine or "",
        layout=pair.layout_id or "",
        rank=rank if rank >= 0 else None,
    )


def worst_pairs(pairing: Pairing, count: int) -> list[PairedSample]:
    """The `count` samples with the largest root mean square of d, the one holding the worst token among them.

    Before them come up to BROKEN samples with the most active tokens whose value is no measurement.
    """
    broken = sorted((-int(unmeasured(pair).sum()), index) for index, pair in enumerate(pairing.pairs))
    first = [index for lost, index in broken[:BROKEN] if lost]
    scored = sorted(_sizes(pairing), key=lambda row: (-row[0], row[2]))
    best = scored[:count]
    if scored and (peak := max(scored, key=lambda row: row[1])) not in best:
        best = [*best[:-1], peak]
    return [pairing.pairs[index] for index in dict.fromkeys([*first, *(index for _, _, index in best)])]


def unmeasured(pair: PairedSample) -> npt.NDArray[np.bool_]:
    """Positions (bool[n]) that are active and paired, and whose value on one side is no measurement."""
    found: npt.NDArray[np.bool_] = pair.active & pair.paired & ~pair.compared
    return found


def _sizes(pairing: Pairing) -> Iterator[tuple[float, float, int]]:
    """(root mean square, largest abs, index) of d of every pair that has a usable token."""
    for index, pair in enumerate(pairing.pairs):
        at = pair.compared
        if at.any():
            d = pair.training[at].astype(np.float64) - pair.rollout[at]
            yield float(np.sqrt(np.mean(d * d))), float(np.abs(d).max()), index
