"""A value has a class before it has a number."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rlk_ledger import classes as c


def own(*values: float) -> list[int]:
    return c.own_classes(np.array(values, np.float32)).tolist()


def cross(r: list[float], t: list[float], sample: list[int] | None = None) -> c.Crossed:
    a, b = np.array(r, np.float32), np.array(t, np.float32)
    owner = np.zeros(len(a), np.int64) if sample is None else np.array(sample, np.int64)
    return c.cross_classes(a, b, c.own_classes(a), c.own_classes(b), np.ones(len(a), bool), owner)


def test_a_value_s_own_bits() -> None:
    values = (-1.0, np.nan, np.inf, -np.inf, -9999.0, -1e4, float(np.finfo(np.float32).min), 2e-5, 1e-6, 0.0)
    want = [c.FINITE, c.NAN, c.POS_INF, c.NEG_INF, c.SENTINEL, c.SENTINEL, c.SENTINEL, c.IMPOSSIBLE, c.FINITE, c.FINITE]
    assert own(*values) == want


def test_a_recorded_class_wins_over_the_bits() -> None:
    codes = c.own_classes(np.array([-1.0, -2.0], np.float32), np.array([c.MISSING, 0], np.uint8))
    assert codes.tolist() == [c.MISSING, c.FINITE]


def test_recurring_bits_below_minus_50_are_a_clamp_and_one_alone_is_not() -> None:
    values = np.array([-1.0, -77.25, -77.25, -61.5], np.float32)
    assert c.recurring_sentinels(values).view(np.float32).tolist() == [-77.25]


def test_a_piled_up_whole_minimum_is_a_clamp_and_a_rounded_tail_is_not() -> None:
    floor = np.array([-20.0] * 6 + [-19.5, -18.0, -1.0], np.float32)
    assert c.recurring_sentinels(floor).view(np.float32).tolist() == [-20.0]
    bf16_tail = np.array([-20.0, -20.0, -19.5, -19.5, -19.5, -19.0, -19.0, -18.5, -18.5], np.float32)
    assert c.recurring_sentinels(bf16_tail).size == 0


def test_a_clamp_of_a_part_of_a_run_is_a_clamp_although_other_values_lie_below_it() -> None:
    """One of two engines clamps, or one path: the pile then is not the minimum."""
    tail = [-25.01, -20.13, -18.5, -18.25, -12.0, -12.0, -11.0]
    assert c.recurring_sentinels(np.array([-20.0] * 12 + tail, np.float32)).view(np.float32).tolist() == [-20.0]
    assert c.recurring_sentinels(np.array([-20.5] * 12 + tail, np.float32)).size == 0
    assert c.recurring_sentinels(np.array([-20.0] * 7 + tail, np.float32)).size == 0
    grid = np.repeat(np.arange(-24, -10, 0.125), 12)
    assert c.recurring_sentinels(grid.astype(np.float32)).size == 0


def test_zero_and_one_are_defaulted_only_against_a_real_value() -> None:
    got = cross([0.0, 0.0, 1.0, 0.0], [-0.5, -0.001, -0.5, 0.0])
    assert got.rollout.tolist() == [c.DEFAULTED, c.FINITE, c.DEFAULTED, c.FINITE]
    assert got.training.tolist() == [c.FINITE] * 4


def test_a_long_equal_run_is_copied_and_a_short_one_is_not() -> None:
    rng = np.random.default_rng(0)
    r = -rng.gamma(1.0, 1.5, 4000).astype(np.float32)
    t = (r + rng.normal(0, 0.01, 4000)).astype(np.float32)
    t[100:140] = r[100:140]
    t[900:904] = r[900:904]
    got = cross(r.tolist(), t.tolist())
    assert (np.flatnonzero(got.training == c.COPIED) == np.arange(100, 140)).all()


def test_a_run_does_not_cross_samples() -> None:
    rng = np.random.default_rng(1)
    r = -rng.gamma(1.0, 1.5, 400).astype(np.float32)
    t = (r + 0.01).astype(np.float32)
    t[96:104] = r[96:104]
    assert (cross(r.tolist(), t.tolist()).training == c.COPIED).any()
    halves = [0] * 100 + [1] * 300
    assert not (cross(r.tolist(), t.tolist(), halves).training == c.COPIED).any()


def test_saturated_zeros_on_both_sides_are_never_copied() -> None:
    rng = np.random.default_rng(2)
    r = np.zeros(2000, np.float32)
    t = np.zeros(2000, np.float32)
    loud = rng.random(2000) < 0.4
    r[loud] = -rng.gamma(1.0, 1.0, loud.sum())
    t[loud] = r[loud] + rng.normal(0, 0.01, loud.sum())
    assert not (cross(r.tolist(), t.tolist()).training == c.COPIED).any()


def test_nearly_all_equal_is_zero_drift_and_never_copied() -> None:
    r = np.linspace(-5, -0.1, 1000, dtype=np.float32)
    got = cross(r.tolist(), r.tolist())
    assert got.equal_fraction == 1.0
    assert not got.copied_runs


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-9.0, -0.03125, width=32), min_size=1, max_size=200), st.integers(0, 2**32 - 1))
def test_measurements_that_differ_everywhere_stay_finite(values: list[float], seed: int) -> None:
    """No class is invented for two honest sides."""
    r = np.array(values, np.float32)
    t = (r * np.float32(1.001) - np.float32(0.003)).astype(np.float32)
    got = cross(r.tolist(), t.tolist())
    assert not got.rollout.any()
    assert not got.training.any()


def test_a_sample_whose_sides_often_agree_is_not_copied() -> None:
    """Samples differ in noise: runs of equal bits in a quiet one are what its own rate makes likely."""
    rng = np.random.default_rng(3)
    n, samples = 60, 20
    rollout = (-rng.gamma(1.5, 1.0, n * samples) - 0.1).astype(np.float32)
    training = np.nextafter(rollout, np.float32(-9))
    quiet = np.arange(n)[rng.random(n) < 0.85]
    training[quiet] = rollout[quiet]
    owner = np.repeat(np.arange(samples), n)
    finite, active = np.zeros(n * samples, np.uint8), np.ones(n * samples, np.bool_)
    got = c.cross_classes(rollout, training, finite, finite, active, owner)
    assert got.copied_runs == ()
    training[:n] = rollout[:n]
    got = c.cross_classes(rollout, training, finite, finite, active, owner)
    assert got.copied_runs == ((0, n),)
