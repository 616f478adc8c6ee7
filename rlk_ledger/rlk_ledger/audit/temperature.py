"""Do the sides score at one temperature, whatever they declare? (contract.differs, measured)

At temperature T a side's log-probabilities are those at 1 divided by T, less a normaliser: regressing one side on the
other gives a slope of 1 / T, while honest noise, stale weights and outliers leave it at 1. The slope is the ratio of
standard deviations (reduced major axis), which treats both sides alike, with a bootstrap interval over groups.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from rlk_ledger.audit import contracts
from rlk_ledger.audit.finding import Finding
from rlk_ledger.audit.view import View

Float64 = npt.NDArray[np.float64]

MIN_CORRELATION = 0.9
MIN_SLOPE = 1.08
MAX_UNEXPLAINED = 0.6
"""The slope must explain at least 40 % of the variance of d, or it is not what moves the values apart."""
_MIN_SAMPLES = 8
_MIN_TOKENS = 64
_DRAWS = 500
_TAIL = 0.0005


def detect(view: View) -> Iterable[Finding]:
    """A slope away from 1 that the declared contracts do not account for."""
    if any(contracts.is_semantic(finding) for finding in contracts.detect(view)):
        return
    measured = slope(view)
    if measured is None:
        return
    where = {"kind": "logprob", "field": "temperature", "class": "semantic", "measured_slope": measured["slope"]}
    yield Finding(
        "contract.differs",
        where,
        measured | {"declared": "equal, or not at all"},
        "The sides agree up to a factor: apply the sampling temperature on both sides, or record raw log-probabilities "
        "on both, and declare which.",
    )


def slope(view: View) -> dict[str, Any] | None:
    """Slope of rollout on training with its interval, or None where 1 explains the run."""
    tokens = view.tokens
    if len(tokens) < _MIN_TOKENS or len(np.unique(tokens.sample)) < _MIN_SAMPLES:
        return None
    sums = _sums(view)
    value, correlation, unexplained = _fit(sums.sum(axis=0, keepdims=True))
    if (
        correlation[0] < MIN_CORRELATION
        or unexplained[0] > MAX_UNEXPLAINED
        or abs(np.log(value[0])) < np.log(MIN_SLOPE)
    ):
        return None
    draws = np.random.default_rng(0).multinomial(len(sums), np.full(len(sums), 1.0 / len(sums)), size=_DRAWS)
    drawn = _fit(draws.astype(np.float64) @ sums)[0]
    low, high = np.quantile(drawn, [_TAIL, 1.0 - _TAIL])
    if low <= 1.0 <= high:
        return None
    return {
        "slope": float(value[0]),
        "interval": [float(low), float(high)],
        "correlation": float(correlation[0]),
        "unexplained_variance": float(unexplained[0]),
        "tokens": len(tokens),
        "groups": len(sums),
    }


def _sums(view: View) -> Float64:
    """Per group: n and the sums of r, t, r^2, t^2, r t."""
    groups: dict[Any, int] = {}
    of_pair = [groups.setdefault((p.sample.step, p.sample.group_id or p.sample.key), len(groups)) for p in view.pairs]
    owner = np.array(of_pair, np.int64)[view.tokens.sample]
    r, t = view.tokens.r, view.tokens.t
    columns = (np.ones(len(r)), r, t, r * r, t * t, r * t)
    sums = np.stack([np.bincount(owner, weights=c, minlength=len(groups)) for c in columns], axis=1)
    return np.asarray(sums[sums[:, 0] > 0], np.float64)


def _fit(sums: Float64) -> tuple[Float64, Float64, Float64]:
    """(sd(r) / sd(t), correlation, share of the variance of d the slope leaves) of rows of sums."""
    n, r, t, rr, tt, rt = sums.T
    var_r, var_t = np.maximum(rr / n - (r / n) ** 2, 1e-300), np.maximum(tt / n - (t / n) ** 2, 1e-300)
    cov = rt / n - r * t / n**2
    value = np.sqrt(var_r / var_t)
    var_d = np.maximum(var_r + var_t - 2.0 * cov, 1e-300)
    residual = var_t + var_r / value**2 - 2.0 * cov / value
    return value, cov / np.sqrt(var_r * var_t), residual / var_d
