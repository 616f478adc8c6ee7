"""Intervals over clusters: quantiles, determinism, small samples, coverage."""

import math

import numpy as np
import pytest

from rlk_ledger_replay.intervals import Interval, draw, expanded_tail, student_quantile

# Two-sided 95 % points of Student's t from any printed table.
TABLE = {1: 12.7062, 2: 4.3027, 3: 3.1824, 4: 2.7764, 5: 2.5706, 7: 2.3646, 11: 2.2010, 30: 2.0423, 200: 1.9719}


@pytest.mark.parametrize(("degrees", "expected"), TABLE.items())
def test_student_quantile_agrees_with_the_printed_table(degrees: int, expected: float) -> None:
    assert student_quantile(0.975, degrees) == pytest.approx(expected, rel=5e-4)


def test_expanded_tail_tends_to_the_plain_tail() -> None:
    assert expanded_tail(8) < 0.01 < expanded_tail(40) < 0.025
    assert expanded_tail(100_000) == pytest.approx(0.025, abs=1e-4)


def test_one_seed_gives_one_set_of_draws_and_another_seed_another() -> None:
    labels = np.repeat(np.arange(6), 5)
    same, again, other = (draw(labels, seed).counts_DG for seed in (3, 3, 4))
    assert np.array_equal(same, again)
    assert not np.array_equal(same, other)
    assert (same.sum(axis=1) == 6).all()


def test_labels_need_not_be_dense() -> None:
    draws = draw(np.array([900, -4, 900, 17]), 0)
    assert draws.clusters == 3
    assert draws.sums(np.array([1.0, 2.0, 3.0, 4.0])).tolist() == [2.0, 4.0, 4.0]


def test_mean_equals_the_literal_resampling_of_tokens() -> None:
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 5, 40)
    values = rng.normal(size=40)
    draws = draw(labels, 1, draws=50)
    value, in_draws = draws.mean(values)
    assert value == pytest.approx(values.mean())
    for counts, mean in zip(draws.counts_DG, in_draws, strict=True):
        tokens = np.concatenate([np.tile(values[draws.cluster_N == g], int(n)) for g, n in enumerate(counts)])
        assert mean == pytest.approx(tokens.mean())


def test_an_interval_is_taken_at_the_expanded_percentiles_and_so_wider_than_the_plain_one() -> None:
    draws = draw(np.arange(6), 0)
    drawn = np.linspace(0.0, 1.0, 2000)
    tail = expanded_tail(6)
    bounds = draws.interval(0.5, drawn)
    assert (bounds.low, bounds.high) == pytest.approx((tail, 1 - tail), abs=1e-3)
    assert bounds.low < 0.01
    assert draws.interval(0.5, np.append(drawn, math.nan)) == Interval(0.5, -math.inf, math.inf)


def test_one_cluster_bounds_nothing() -> None:
    draws = draw(np.zeros(100, dtype=np.int64), 0)
    value, in_draws = draws.mean(np.random.default_rng(0).normal(size=100))
    assert draws.interval(value, in_draws) == Interval(value, -math.inf, math.inf)


def test_no_token_is_refused() -> None:
    with pytest.raises(ValueError, match="no active paired token"):
        draw(np.array([], dtype=np.int64), 0)


def test_infinite_bounds_become_none_in_json() -> None:
    assert Interval(1.0, -math.inf, math.inf).as_dict() == {"value": 1.0, "low": None, "high": None}


@pytest.mark.slow
@pytest.mark.parametrize("clusters", [6, 8, 12, 40])
def test_the_interval_of_a_mean_covers_the_truth_at_least_nine_times_in_ten(clusters: int) -> None:
    rng = np.random.default_rng(clusters)
    hits, trials = 0, 400
    for seed in range(trials):
        level = rng.normal(size=clusters).repeat(30)
        values = level + rng.normal(size=clusters * 30)
        draws = draw(np.arange(clusters).repeat(30), seed)
        bounds = draws.interval(*draws.mean(values))
        hits += bounds.low <= 0.0 <= bounds.high
    assert 0.91 <= hits / trials <= 0.99
