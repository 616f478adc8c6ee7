"""Every drift metric against a slow float64 oracle in plain Python, on inputs made to break it."""

import math
import os
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlk_ledger import classes
from rlk_ledger.metrics import measure
from rlk_ledger_schemas.metrics import METRICS


def oracle(r: list[float], t: list[float], sample: list[int]) -> dict[str, float | None]:
    """The definitions, one token at a time."""
    d = [b - a for a, b in zip(r, t)]
    c = [max(-20.0, min(20.0, x)) for x in d]
    rho = [math.exp(x) for x in c]
    n = len(d)
    size = sorted(abs(x) for x in d)
    mean = lambda xs: math.fsum(xs) / len(xs)  # noqa: E731
    out: dict[str, float | None] = {
        "abs_dlogp_mean": mean(size),
        "abs_dlogp_max": size[-1],
        "dlogp_rms": math.sqrt(mean([x * x for x in d])),
        "dlogp_mean": mean(d),
        "mismatch_count": float(sum(bits(a) != bits(b) for a, b in zip(r, t))),
        "kl_k1": mean([-x for x in d]),
        "kl_k3": mean([math.expm1(x) - x for x in c]),
        "policy_kl_k3": mean([math.expm1(-x) + x for x in c]),
        "ratio_min": min(rho),
        "ratio_mean": mean(rho),
        "ratio_max": max(rho),
        "clip_fraction": mean([float(not -0.2 <= math.expm1(x) <= 0.2) for x in d]),
        "token_mult_prob_error": mean([math.exp(abs(x)) for x in c]),
        "ess": 1.0 / mean([(x / mean(rho)) ** 2 for x in rho]),
        "chi2_token": mean([x * x for x in rho]) - 1.0,
        "prob_diff_mean": mean([math.exp(b) - math.exp(a) for a, b in zip(r, t)]),
        "prob_diff_max": max(abs(math.exp(b) - math.exp(a)) for a, b in zip(r, t)),
        "extreme_token_fraction": mean([float(abs(x) > math.log(2.0)) for x in d]),
    }
    out["mismatch_fraction"] = out["mismatch_count"] / n  # type: ignore[operator]
    for name, q in (("p50", 0.5), ("p90", 0.9), ("p95", 0.95), ("p99", 0.99), ("p999", 0.999)):
        at = q * (n - 1)
        low, high = size[math.floor(at)], size[math.ceil(at)]
        out[f"abs_dlogp_{name}"] = low + (high - low) * (at - math.floor(at))
    out |= sample_oracle(r, t, d, sample)
    x, y = [math.exp(v) for v in r], [math.exp(v) for v in t]
    vx, vy = math.fsum((v - mean(x)) ** 2 for v in x), math.fsum((v - mean(y)) ** 2 for v in y)
    cov = math.fsum((a - mean(x)) * (b - mean(y)) for a, b in zip(x, y))
    out["pearson_prob"] = cov / math.sqrt(vx * vy) if vx * vy > 0 else None
    return out


def sample_oracle(r: list[float], t: list[float], d: list[float], sample: list[int]) -> dict[str, float]:
    totals, ppl, errors = [], [], []
    for s in sorted(set(sample)):
        rows = [i for i, v in enumerate(sample) if v == s]
        total = math.fsum(d[i] for i in rows)
        totals.append(math.exp(2.0 * max(-20.0, min(20.0, total))))
        gap = math.fsum(r[i] for i in rows) / len(rows) - math.fsum(t[i] for i in rows) / len(rows)
        ppl.append(math.exp(min(gap, 700.0)))
        errors.append(math.fsum(math.exp(min(abs(d[i]), 20.0)) for i in rows) / len(rows))
    return {
        "chi2_seq": math.fsum(totals) / len(totals) - 1.0,
        "ppl_ratio": math.fsum(ppl) / len(ppl),
        "seq_mult_prob_error_min": min(errors),
        "seq_mult_prob_error_mean": math.fsum(errors) / len(errors),
        "seq_mult_prob_error_max": max(errors),
    }


def bits(value: float) -> bytes:
    return struct.pack("<f", value)


def check(r: Any, t: Any, sample: Any = None) -> None:
    r32, t32 = np.asarray(r, np.float32), np.asarray(t, np.float32)
    owner = np.zeros(len(r32), np.int64) if sample is None else np.asarray(sample, np.int64)
    got = measure(r32, t32, sample=owner).values
    want = oracle([float(v) for v in r32], [float(v) for v in t32], owner.tolist())
    assert got.keys() == want.keys() == METRICS.keys()
    for name, value in want.items():
        if value is None:
            assert got[name] is None, name
        elif name == "pearson_prob":
            assert got[name] is None or abs(got[name] - value) < 1e-6
        else:
            assert got[name] == pytest.approx(value, rel=1e-9, abs=1e-12), name


LOGPROB = st.floats(-30.0, 0.0, width=32)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(LOGPROB, LOGPROB, st.integers(0, 4)), min_size=1, max_size=60))
def test_every_metric_is_its_definition(rows: list[tuple[float, float, int]]) -> None:
    r, t, sample = zip(*rows)
    check(r, t, sample)


@pytest.mark.parametrize(
    ("r", "t"),
    [
        ([-1.0] * 50, [-1.0] * 50),
        ([-0.5], [-0.25]),
        ([-1e-7, -1e-7], [-2e-7, 0.0]),
        ([-1.0] * 9, [-1.0 + 1e-4] * 9),
        ([-500.0, -1.0, -600.0], [-0.5, -501.0, -0.1]),
        (list(np.linspace(-8, 0, 1001)), list(np.linspace(-8, 0, 1001)[::-1])),
    ],
    ids=["all-equal", "one-token", "tiny", "constant-shift", "log-ratio-of-500", "reversed"],
)
def test_adversarial_inputs_match_the_oracle(r: list[float], t: list[float]) -> None:
    check(r, t)


def test_a_log_ratio_of_500_is_clamped_and_counted_and_nothing_overflows() -> None:
    got = measure(np.array([-500.0, -1.0], np.float32), np.array([-0.5, -501.0], np.float32))
    assert got.clamped == 2
    assert all(value is None or math.isfinite(value) for value in got.values.values())
    assert got.values["ratio_max"] == pytest.approx(math.exp(20.0))


def test_k3_of_a_tiny_difference_is_not_lost_to_rounding() -> None:
    d = 1e-6
    got = measure(np.array([0.0], np.float32), np.array([d], np.float32)).values["kl_k3"]
    assert got == pytest.approx(float(np.float32(d)) ** 2 / 2, rel=1e-5)


def test_zero_active_tokens_is_a_status_and_no_number() -> None:
    got = measure(np.array([-1.0], np.float32), np.array([-2.0], np.float32), active=np.array([False]))
    assert (got.status, got.tokens, got.values) == ("zero_active_tokens", 0, {})


def test_only_finite_values_enter_and_the_others_are_counted() -> None:
    r = np.array([-1.0, np.nan, -np.inf, -9999.0, -2.0, 0.5], np.float32)
    t = np.array([-1.1, -1.0, -1.0, -1.0, -2.0, -0.1], np.float32)
    got = measure(r, t)
    assert got.tokens == 2
    assert got.excluded == {"rollout.nan": 1, "rollout.neg_inf": 1, "rollout.sentinel": 1, "rollout.impossible": 1}
    assert got.values["abs_dlogp_max"] == pytest.approx(0.1, rel=1e-5)


def test_mismatch_compares_bits() -> None:
    nan = np.array([0x7FC00000, 0x7FC00001], np.uint32).view(np.float32)
    r = np.array([0.0, nan[0], -1.0, -2.0], np.float32)
    t = np.array([-0.0, nan[1], -1.0, -2.0], np.float32)
    assert measure(r, t).values["mismatch_count"] == 2.0


def test_missing_values_are_neither_compared_nor_a_mismatch() -> None:
    r, t = np.array([-1.0, np.nan], np.float32), np.array([-1.0, -3.0], np.float32)
    codes = np.array([classes.FINITE, classes.MISSING], np.uint8), np.zeros(2, np.uint8)
    got = measure(r, t, classes=codes)
    assert (got.tokens, got.values["mismatch_count"], got.excluded) == (1, 0.0, {"rollout.missing": 1})


def test_lengths_that_differ_are_refused() -> None:
    with pytest.raises(ValueError, match="pair them first"):
        measure(np.zeros(2, np.float32), np.zeros(3, np.float32))


@pytest.mark.slow
def test_percentiles_are_exact_beyond_two_to_the_24_tokens() -> None:
    n = 1 << 25
    r = np.zeros(n, np.float32)
    t = np.zeros(n, np.float32)
    t[: n // 1000] = -1.0
    got = measure(r, t).values
    assert got["abs_dlogp_p99"] == 0.0
    assert got["abs_dlogp_max"] == 1.0
    assert got["abs_dlogp_mean"] == pytest.approx((n // 1000) / n, rel=1e-12)
    size = np.sort(np.abs(t))
    at = 0.999 * (n - 1)
    low, high = float(size[math.floor(at)]), float(size[math.ceil(at)])
    assert got["abs_dlogp_p999"] == pytest.approx(low + (high - low) * (at % 1), abs=1e-6)


@pytest.mark.parametrize(
    ("d", "clipped"), [(0.18, 0.0), (0.185, 1.0), (-0.185, 0.0), (-0.22, 0.0), (-0.226, 1.0), (0.0, 0.0)]
)
def test_the_clip_band_is_one_of_ratios_and_so_lopsided_in_log_space(d: float, clipped: float) -> None:
    """Ratios 0.8 and 1.2 stand at -0.223 and +0.182."""
    r = np.full(3, -2.0, np.float32)
    assert measure(r, (r + np.float32(d)).astype(np.float32)).values["clip_fraction"] == clipped


MANY = 1 << int(os.environ.get("RLK_METRICS_LOG2", "18"))
"""Tokens of the test below; 25 by hand takes a minute and 6 GB."""


def test_every_metric_of_very_many_tokens_with_every_class_of_value() -> None:
    """Against the definitions in extended precision, in one piece, with log-ratios of 500 and values that are none."""
    rng = np.random.default_rng(5)
    r = -rng.gamma(1.0, 1.0, MANY).astype(np.float32)
    t = np.minimum(r + rng.normal(0, 0.1, MANY).astype(np.float32), 0)
    t[::1001], r[7::5003] = -500.0, -600.0
    lost = np.zeros(MANY, np.bool_)
    for at, value in ((3, np.nan), (5, -np.inf), (6, -9999.0), (9, 0.5)):
        r[at :: MANY // 7] = value
        lost[at :: MANY // 7] = True
    owner = np.sort(rng.integers(0, MANY // 500, MANY))
    got = measure(r, t, sample=owner)
    assert got.tokens == MANY - np.count_nonzero(lost)
    x, y = r[~lost].astype(np.longdouble), t[~lost].astype(np.longdouble)
    d, sample = y - x, np.unique(owner[~lost], return_inverse=True)[1]
    c = np.clip(d, -20, 20)
    rho, size = np.exp(c), np.sort(np.abs(d))
    differ = r.view(np.uint32) != t.view(np.uint32)  # a value that is none was recorded all the same
    sizes = np.bincount(sample)
    starts = np.cumsum(sizes) - sizes
    per_sample = lambda values: np.add.reduceat(values, starts)  # noqa: E731
    errors = per_sample(np.exp(np.abs(c))) / sizes
    want = {
        "abs_dlogp_mean": size.mean(),
        "abs_dlogp_max": size[-1],
        "dlogp_rms": np.sqrt(np.square(d).mean()),
        "dlogp_mean": d.mean(),
        "mismatch_count": np.count_nonzero(differ),
        "mismatch_fraction": differ.mean(),
        "kl_k1": -d.mean(),
        "kl_k3": (np.expm1(c) - c).mean(),
        "policy_kl_k3": (np.expm1(-c) + c).mean(),
        "ratio_min": rho.min(),
        "ratio_mean": rho.mean(),
        "ratio_max": rho.max(),
        "clip_fraction": ((rho < 0.8) | (rho > 1.2)).mean(),
        "token_mult_prob_error": np.exp(np.abs(c)).mean(),
        "ess": 1 / np.square(rho / rho.mean()).mean(),
        "chi2_token": np.square(rho).mean() - 1,
        "prob_diff_mean": (np.exp(y) - np.exp(x)).mean(),
        "prob_diff_max": np.abs(np.exp(y) - np.exp(x)).max(),
        "extreme_token_fraction": (np.maximum(rho, 1 / rho) > 2).mean(),
        "pearson_prob": np.corrcoef(np.exp(x), np.exp(y))[0, 1],
        "chi2_seq": np.exp(2 * np.clip(per_sample(d), -20, 20)).mean() - 1,
        "ppl_ratio": np.exp(np.minimum(per_sample(x) / sizes - per_sample(y) / sizes, 700)).mean(),
        "seq_mult_prob_error_min": errors.min(),
        "seq_mult_prob_error_mean": errors.mean(),
        "seq_mult_prob_error_max": errors.max(),
    }
    for name, q in (("p50", 0.5), ("p90", 0.9), ("p95", 0.95), ("p99", 0.99), ("p999", 0.999)):
        at = q * (len(size) - 1)
        low, high = size[math.floor(at)], size[math.ceil(at)]
        want[f"abs_dlogp_{name}"] = low + (high - low) * (at - math.floor(at))
    assert want.keys() == METRICS.keys()
    wrong = {n: (got.values[n], float(v)) for n, v in want.items()}
    wrong = {n: pair for n, pair in wrong.items() if pair[0] != pytest.approx(pair[1], rel=1e-9, abs=1e-12)}
    assert wrong == {}
