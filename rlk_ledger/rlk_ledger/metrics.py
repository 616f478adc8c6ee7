"""Drift metrics over paired active tokens, as `rlk_ledger_schemas.metrics.METRICS` defines them.

`r` is the rollout and `t` the training log-probability of a token (nats, float32 bit patterns as recorded),
`d = t - r`, `rho = exp(d)`. Only tokens that are active and finite on both sides enter an aggregate; accumulation is
float64. Nothing here samples, sketches or limits the number of tokens: percentiles are exact at any size.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from rlk_ledger.classes import FINITE, MISSING, class_counts, own_classes
from rlk_ledger_schemas.metrics import CLIP_EPSILON, EXTREME_TAU, LOG_RATIO_CLAMP, METRICS

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Bool = npt.NDArray[np.bool_]
Index = npt.NDArray[np.int64]

_CHUNK = 1 << 20
_EXP_MAX = 700.0
"""Largest exponent taken of a per-sample mean difference, which has no clamp of its own: exp stays finite."""

QUANTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99, "p999": 0.999}


@dataclass(frozen=True, slots=True)
class Drift:
    """Every metric of METRICS over one set of tokens.

    `status` is `measured` or `zero_active_tokens` (then `values` is empty: neither NaN nor 0.0 stands for nothing).
    A metric that these tokens do not define (correlation of constants) is None. `tokens` counts finite pairs, `active`
    active tokens, `clamped` pairs whose log-ratio was clamped at +-20, `excluded` active tokens by value class.
    """

    status: str
    tokens: int
    active: int
    samples: int
    clamped: int = 0
    excluded: dict[str, int] = field(default_factory=dict)
    values: dict[str, float | None] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The same as plain values, for JSON and events."""
        return {
            "status": self.status,
            "tokens": self.tokens,
            "active": self.active,
            "samples": self.samples,
            "clamped": self.clamped,
            "excluded": dict(self.excluded),
            "metrics": dict(self.values),
        }


def measure(
    rollout: Float32,
    training: Float32,
    *,
    active: Bool | None = None,
    sample: Index | None = None,
    classes: tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]] | None = None,
    epsilon: tuple[float, float] = (CLIP_EPSILON, CLIP_EPSILON),
    tau: float = EXTREME_TAU,
) -> Drift:
    """Every drift metric of `rollout` and `training` (float32[n], nats).

    `active` (bool[n], default all) selects tokens, `sample` (int64[n], default one sample) names each token's sample,
    `classes` (two uint8[n] of value-class codes) says which values are measurements; without it a value's class is
    what its own bits say. `epsilon` is the clip band (low, high), `tau` the extreme-token ratio. Raises ValueError
    when the lengths differ.
    """
    if rollout.shape != training.shape or rollout.ndim != 1:
        raise ValueError(f"rollout has shape {rollout.shape}, training {training.shape}; pair them first.")
    keep = np.ones(rollout.shape, np.bool_) if active is None else active.astype(np.bool_)
    left, right = classes if classes is not None else (own_classes(rollout), own_classes(training))
    excluded = class_counts(left[keep], right[keep])
    usable = keep & (left == FINITE) & (right == FINITE)
    present = keep & (left != MISSING) & (right != MISSING)
    n_active = int(np.count_nonzero(keep))
    count = int(np.count_nonzero(usable))
    if count == 0:
        return Drift("zero_active_tokens", 0, n_active, 0, 0, excluded)
    r, t = rollout[usable].astype(np.float64), training[usable].astype(np.float64)
    groups, index = _group(None if sample is None else sample[usable], count)
    values: dict[str, float | None] = {}
    clamped = _token_sums(values, r, t, epsilon, tau)
    _quantiles(values, r, t)
    _bits(values, rollout[present], training[present])
    _sample_metrics(values, r, t, index, groups)
    return Drift("measured", count, n_active, groups, clamped, excluded, {name: values[name] for name in METRICS})


def _group(sample: Index | None, count: int) -> tuple[int, Index | None]:
    if sample is None:
        return 1, None
    names, index = np.unique(sample, return_inverse=True)
    return len(names), index.reshape(count).astype(np.int64)


def _token_sums(out: dict[str, float | None], r: Float64, t: Float64, epsilon: tuple[float, float], tau: float) -> int:
    """Means, extremes and shares over tokens, chunk by chunk; returns how many log-ratios were clamped."""
    low, high = np.log1p(-epsilon[0]), np.log1p(epsilon[1])
    n = len(r)
    sums = np.zeros(11)
    peak_prob, clamped = 0.0, 0
    d_min, d_max = np.inf, -np.inf
    for at in range(0, n, _CHUNK):
        d = t[at : at + _CHUNK] - r[at : at + _CHUNK]
        size = np.abs(d)
        clamped += int(np.count_nonzero(size > LOG_RATIO_CLAMP))
        c = np.clip(d, -LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
        rho = np.exp(c)
        prob = np.exp(t[at : at + _CHUNK]) - np.exp(r[at : at + _CHUNK])
        sums += [
            size.sum(),
            d.sum(),
            np.square(d).sum(),
            (np.expm1(c) - c).sum(),
            (np.expm1(-c) + c).sum(),
            rho.sum(),
            np.square(rho).sum(),
            np.count_nonzero((d < low) | (d > high)),
            np.exp(np.abs(c)).sum(),
            np.count_nonzero(size > np.log(tau)),
            prob.sum(),
        ]
        peak_prob = max(peak_prob, float(np.abs(prob).max()))
        d_min, d_max = min(d_min, float(c.min())), max(d_max, float(c.max()))
    mean = sums / n
    _name_means(out, mean)
    out["ratio_min"], out["ratio_max"] = float(np.exp(d_min)), float(np.exp(d_max))
    out["prob_diff_max"] = peak_prob
    out["pearson_prob"] = _pearson(np.exp(r), np.exp(t))
    return clamped


def _name_means(out: dict[str, float | None], mean: Float64) -> None:
    """Metrics that are (functions of) token means, in the order `_token_sums` adds them up."""
    out["abs_dlogp_mean"], out["dlogp_mean"], out["kl_k1"] = float(mean[0]), float(mean[1]), float(-mean[1])
    out["dlogp_rms"] = float(np.sqrt(mean[2]))
    out["kl_k3"], out["policy_kl_k3"] = float(mean[3]), float(mean[4])
    out["ratio_mean"] = float(mean[5])
    out["ess"], out["chi2_token"] = float(mean[5] ** 2 / mean[6]), float(mean[6] - 1.0)
    out["clip_fraction"], out["token_mult_prob_error"] = float(mean[7]), float(mean[8])
    out["extreme_token_fraction"], out["prob_diff_mean"] = float(mean[9]), float(mean[10])


def _pearson(x: Float64, y: Float64) -> float | None:
    """Correlation, or None where either side does not vary."""
    x = x - x.mean()
    y = y - y.mean()
    scale = float(np.sqrt(np.dot(x, x)) * np.sqrt(np.dot(y, y)))
    if scale == 0.0 or not np.isfinite(scale):
        return None
    return float(np.clip(np.dot(x, y) / scale, -1.0, 1.0))


def _quantiles(out: dict[str, float | None], r: Float64, t: Float64) -> None:
    """Exact quantiles of |d| with linear interpolation between order statistics."""
    size = np.abs(t - r)
    out["abs_dlogp_max"] = float(size.max())
    at = np.quantile(size, list(QUANTILES.values()), overwrite_input=True)
    for name, value in zip(QUANTILES, at):
        out[f"abs_dlogp_{name}"] = float(value)


def _bits(out: dict[str, float | None], r: Float32, t: Float32) -> None:
    """Tokens present on both sides whose float32 bits differ (+0 against -0 and NaN payloads count)."""
    differ = int(np.count_nonzero(np.ascontiguousarray(r).view(np.uint32) != np.ascontiguousarray(t).view(np.uint32)))
    out["mismatch_count"] = float(differ)
    out["mismatch_fraction"] = differ / len(r)


def _sample_metrics(out: dict[str, float | None], r: Float64, t: Float64, index: Index | None, groups: int) -> None:
    """Metrics reduced within each sample first."""
    d = t - r
    error = np.exp(np.minimum(np.abs(d), LOG_RATIO_CLAMP))
    if index is None:
        total, mean_r, mean_t, errors = (np.array([v]) for v in (d.sum(), r.mean(), t.mean(), error.mean()))
    else:
        size = np.bincount(index, minlength=groups).astype(np.float64)
        total = np.bincount(index, weights=d, minlength=groups)
        mean_r = np.bincount(index, weights=r, minlength=groups) / size
        mean_t = np.bincount(index, weights=t, minlength=groups) / size
        errors = np.bincount(index, weights=error, minlength=groups) / size
    out["chi2_seq"] = float(np.exp(2.0 * np.clip(total, -LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)).mean() - 1.0)
    out["ppl_ratio"] = float(np.exp(np.minimum(mean_r - mean_t, _EXP_MAX)).mean())
    out["seq_mult_prob_error_min"] = float(errors.min())
    out["seq_mult_prob_error_mean"] = float(errors.mean())
    out["seq_mult_prob_error_max"] = float(errors.max())
