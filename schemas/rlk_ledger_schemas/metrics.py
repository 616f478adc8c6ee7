"""One definition per drift metric, over active tokens.

`r` is the rollout and `t` the training log-probability of a token, `d = t - r`, `rho = exp(d)`.

Direction, space, reduction and truncation are part of what a name means; an import from another framework maps to the
exact definition or is refused. Accumulation is float64; `d` is clamped at +-LOG_RATIO_CLAMP before `exp`.
"""

from typing import Literal

import msgspec

LOG_RATIO_CLAMP = 20.0
CLIP_EPSILON = 0.2
EXTREME_TAU = 2.0
IMPOSSIBLE_ABOVE = 1e-5
DEFAULTED_VALUES = (0.0, 1.0)
DEFAULTED_OTHER_BELOW = -0.01
COPIED_RUN = 8
COPIED_PROBABILITY = 1e-6
ZERO_DRIFT_FRACTION = 0.99

SENTINELS = (
    *(-999.0, -9999.0, -99999.0, -1e4, -1e5, -1e6, -1e8, -1e9, -1e10, -1e20, -1e30, -65504.0),
    *(-3.4028234663852886e38, -3.3895314e38),
)
"""Float32 values that are a clamp wherever they stand: no sampled token has a log-probability of -999 or less."""

VALUE_CLASSES = ("finite", "nan", "pos_inf", "neg_inf", "sentinel", "missing", "impossible", "defaulted", "copied")
"""A value has a class before it has a number; the index is the code in `value_class` arrays."""


class Metric(msgspec.Struct, frozen=True):
    """What a metric name means: formula, direction, space, reduction, whether before or after truncation."""

    formula: str
    direction: Literal["training-rollout", "rollout-training", "symmetric"]
    space: Literal["log", "probability", "ratio", "bits"]
    reduction: Literal[
        "token_mean",
        "token_quantile",
        "token_max",
        "token_min",
        "token_count",
        "sample_mean",
        "sample_max",
        "sample_min",
    ]
    truncation: Literal["none", "log_ratio_clamped", "sum_clamped"] = "none"
    unit: str = "nats"


METRICS: dict[str, Metric] = {
    "abs_dlogp_mean": Metric("mean(|d|)", "symmetric", "log", "token_mean"),
    "abs_dlogp_max": Metric("max(|d|)", "symmetric", "log", "token_max"),
    "abs_dlogp_p50": Metric("median(|d|)", "symmetric", "log", "token_quantile"),
    "abs_dlogp_p90": Metric("p90(|d|)", "symmetric", "log", "token_quantile"),
    "abs_dlogp_p95": Metric("p95(|d|)", "symmetric", "log", "token_quantile"),
    "abs_dlogp_p99": Metric("p99(|d|)", "symmetric", "log", "token_quantile"),
    "abs_dlogp_p999": Metric("p99.9(|d|)", "symmetric", "log", "token_quantile"),
    "dlogp_rms": Metric("sqrt(mean(d^2))", "symmetric", "log", "token_mean"),
    "dlogp_mean": Metric("mean(d)", "training-rollout", "log", "token_mean"),
    "mismatch_count": Metric("count(bits differ)", "symmetric", "bits", "token_count", unit="tokens"),
    "mismatch_fraction": Metric("mean(bits differ)", "symmetric", "bits", "token_mean", unit="1"),
    "kl_k1": Metric("mean(-d)", "rollout-training", "log", "token_mean"),
    "kl_k3": Metric("mean(expm1(d) - d)", "training-rollout", "ratio", "token_mean", "log_ratio_clamped"),
    "policy_kl_k3": Metric("mean(expm1(-d) + d)", "rollout-training", "ratio", "token_mean", "log_ratio_clamped"),
    "ratio_min": Metric("min(rho)", "training-rollout", "ratio", "token_min", "log_ratio_clamped", "1"),
    "ratio_mean": Metric("mean(rho)", "training-rollout", "ratio", "token_mean", "log_ratio_clamped", "1"),
    "ratio_max": Metric("max(rho)", "training-rollout", "ratio", "token_max", "log_ratio_clamped", "1"),
    "clip_fraction": Metric("mean(rho outside [1-eps, 1+eps])", "training-rollout", "ratio", "token_mean", unit="1"),
    "token_mult_prob_error": Metric("mean(exp(|d|))", "symmetric", "ratio", "token_mean", "log_ratio_clamped", "1"),
    "ess": Metric("1/mean((rho/mean(rho))^2)", "training-rollout", "ratio", "token_mean", "log_ratio_clamped", "1"),
    "chi2_token": Metric("mean(rho^2) - 1", "training-rollout", "ratio", "token_mean", "log_ratio_clamped", "1"),
    "chi2_seq": Metric("mean(exp(2 sum d)) - 1", "training-rollout", "ratio", "sample_mean", "sum_clamped", "1"),
    "ppl_ratio": Metric("mean(exp(mean(r) - mean(t)))", "rollout-training", "ratio", "sample_mean", "none", "1"),
    "prob_diff_mean": Metric("mean(exp(t) - exp(r))", "training-rollout", "probability", "token_mean", unit="1"),
    "prob_diff_max": Metric("max(|exp(t) - exp(r)|)", "symmetric", "probability", "token_max", unit="1"),
    "pearson_prob": Metric("corr(exp(t), exp(r))", "symmetric", "probability", "token_mean", unit="1"),
    "extreme_token_fraction": Metric("mean(max(rho, 1/rho) > 2)", "symmetric", "ratio", "token_mean", unit="1"),
    "seq_mult_prob_error_min": Metric(
        "min_s(mean(exp(|d|)))", "symmetric", "ratio", "sample_min", "log_ratio_clamped", "1"
    ),
    "seq_mult_prob_error_mean": Metric(
        "mean_s(mean(exp(|d|)))", "symmetric", "ratio", "sample_mean", "log_ratio_clamped", "1"
    ),
    "seq_mult_prob_error_max": Metric(
        "max_s(mean(exp(|d|)))", "symmetric", "ratio", "sample_max", "log_ratio_clamped", "1"
    ),
}

LIVE = (
    "abs_dlogp_mean",
    "abs_dlogp_max",
    "abs_dlogp_p50",
    "abs_dlogp_p99",
    "dlogp_mean",
    "mismatch_fraction",
    "kl_k1",
    "kl_k3",
    "ratio_mean",
    "clip_fraction",
    "token_mult_prob_error",
    "ess",
    "extreme_token_fraction",
)
"""The metrics a training process is told while it runs; each needs the batch's own tokens only."""
