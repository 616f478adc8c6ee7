"""Does value i belong to token i? A lag scan per sample. (alignment.shift)

Rollout values r and training values t of one sample are compared at lags -2..2: mean |t[i + lag] - r[i]| has its
minimum at 0 unless one side is shifted. The lag alone does not say which side; a fill at one end does (a shifted side
repeats, zeroes or lacks its last or first value). Without a fill the side is the one whose entry i then scores token
i + 1, the usual form of the fault, and the evidence says so.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from rlk_ledger import classes
from rlk_ledger.audit.finding import Finding
from rlk_ledger.audit.view import View
from rlk_ledger.pairs import PairedSample

LAGS = (-2, -1, 1, 2)
_MIN_TOKENS = 8
_MIN_DRIFT = 0.05
"""Below this mean |d| (nats) a sample has nothing a shift would explain."""
_GAIN = 0.25
_MIN_SAMPLES = 2
"""Of one sample in many a shift may be chance; where the run has one only, it is all there is to see."""


def detect(view: View) -> Iterable[Finding]:
    """Samples that agree at a lag other than 0."""
    shifted: list[tuple[PairedSample, int, float, float]] = []
    for pair in view.pairs:
        found = best_lag(pair)
        if found is not None:
            shifted.append((pair, *found))
    if len(shifted) < min(_MIN_SAMPLES, len(view.pairs)) or not shifted:
        return
    lag, _ = Counter(row[1] for row in shifted).most_common(1)[0]
    rows = [row for row in shifted if row[1] == lag]
    votes = Counter(_shifted_side(row[0], lag) for row in rows)
    known = [(side, count) for side, count in votes.most_common() if side is not None]
    side = known[0][0] if known else ("rollout" if lag > 0 else "training")
    where: dict[str, Any] = {"side": side, "lag": lag if side == "rollout" else -lag}
    where |= {"samples": len(rows), "sample_id": rows[0][0].sample.sample_id}
    evidence = {
        "mean_abs_dlogp_at_lag_0": float(np.mean([row[2] for row in rows])),
        "mean_abs_dlogp_at_lag": float(np.mean([row[3] for row in rows])),
        "compared_samples": len(view.pairs),
        "side_from": "fill value at the end of the values"
        if known
        else "convention (a shift looks alike from both sides)",
    }
    yield Finding("alignment.shift", where, evidence, "" if known else _either(lag))


def _either(lag: int) -> str:
    """What to do when nothing in the values tells which side moved."""
    return (
        f"Look at both sides: rollout shifted by {lag:+d} and training by {-lag:+d} look alike here; "
        f"entry i must score token i given the tokens before it."
    )


def best_lag(pair: PairedSample) -> tuple[int, float, float] | None:
    """(lag, mean |d| at 0, mean |d| at that lag) when another lag explains a sample far better than 0, else None."""
    usable = pair.compared
    if np.count_nonzero(usable) < _MIN_TOKENS:
        return None
    r, t = pair.rollout.astype(np.float64), pair.training.astype(np.float64)
    here = float(np.abs(t[usable] - r[usable]).mean())
    if here < _MIN_DRIFT:
        return None
    best: tuple[int, float] | None = None
    for lag in LAGS:
        left, right = _overlap(len(r), lag)
        both = usable[left] & (pair.training_class[right] == classes.FINITE)
        if np.count_nonzero(both) < _MIN_TOKENS:
            continue
        there = float(np.abs(t[right][both] - r[left][both]).mean())
        if there < _GAIN * here and (best is None or there < best[1]):
            best = (lag, there)
    return None if best is None else (best[0], here, best[1])


def _overlap(n: int, lag: int) -> tuple[slice, slice]:
    """Slices of r and t so that r[i] meets t[i + lag]."""
    return (slice(0, n - lag), slice(lag, n)) if lag > 0 else (slice(-lag, n), slice(0, n + lag))


def _shifted_side(pair: PairedSample, lag: int) -> str | None:
    """The side that carries a fill at the end a shift empties: with lag > 0, rollout's last or training's first."""
    width = abs(lag)
    late, early = (pair.rollout, pair.training) if lag > 0 else (pair.training, pair.rollout)
    names = ("rollout", "training") if lag > 0 else ("training", "rollout")
    tail, head = _is_fill(late[-width:], late[-width - 1]), _is_fill(early[:width], early[width])
    if tail == head:
        return None
    return names[0] if tail else names[1]


def _is_fill(values: npt.NDArray[np.float32], neighbour: np.float32) -> bool:
    return bool(np.all(np.isnan(values) | (values == 0.0) | (values == neighbour)))
