"""The audit's distributions against published values, brute force and simulation."""

import itertools
import math

import numpy as np
import pytest

from rlk_ledger.audit import stats


@pytest.mark.parametrize(
    ("t", "df", "p"),
    [
        (6.313751514675043, 1, 0.05),
        (2.015048372669157, 5, 0.05),
        (4.032142983557536, 5, 0.005),
        (1.6463788172854639, 1000, 0.05),
        (0.0, 7, 0.5),
        (-2.015048372669157, 5, 0.95),
    ],
)
def test_student_tail_is_the_published_table(t: float, df: float, p: float) -> None:
    assert stats.student_tail(t, df) == pytest.approx(p, rel=1e-6)


def test_normal_tail() -> None:
    assert stats.normal_tail(1.959963984540054) == pytest.approx(0.025, rel=1e-9)


def test_holm_is_the_step_down_of_the_paper() -> None:
    assert stats.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert stats.holm([]) == []


def test_permutation_tail_follows_the_exact_permutation_distribution() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=12)
    member = np.array([True] * 6 + [False] * 6)
    x[member] += 1.0
    stratum = np.zeros(12, np.int64)
    effect, p = stats.permutation_tail(x, member, stratum)
    assert effect == pytest.approx(x[member].mean() - x[~member].mean())
    sums = [x[list(rows)].sum() for rows in itertools.combinations(range(12), 6)]
    exact = float(np.mean(np.array(sums) >= x[member].sum() - 1e-12))
    assert p == pytest.approx(exact, rel=0.5)


def test_permutation_tail_never_reports_less_than_one_permutation() -> None:
    x = np.array([100.0, 100.0, 0.0, 0.0])
    _, p = stats.permutation_tail(x, np.array([True, True, False, False]), np.zeros(4, np.int64))
    assert p >= 1 / math.comb(4, 2)


def test_a_difference_between_strata_is_no_effect() -> None:
    """Only what varies inside a step counts: a later step may drift more."""
    stratum = np.repeat([0, 1], 20)
    member = stratum == 1
    member[::4] ^= True
    x = stratum * 5.0 + np.tile([0.1, -0.1], 20)
    effect, p = stats.permutation_tail(x, member, stratum)
    assert abs(effect) < 0.2
    assert p > 0.01


def test_p_values_of_noise_are_not_small_more_often_than_they_say() -> None:
    rng = np.random.default_rng(1)
    small = {"permutation": 0, "flip": 0}
    for _ in range(2000):
        x = rng.standard_t(4, 48)
        member = rng.permuted(np.tile([True, False, False, False], 12).reshape(12, 4), axis=1).ravel()
        small["permutation"] += stats.permutation_tail(x, member, np.repeat(np.arange(12), 4))[1] < 0.01
        small["flip"] += stats.sign_flip_tail(rng.standard_t(4, 24))[1] < 0.01
    assert small["permutation"] <= 40
    assert small["flip"] <= 40


def test_sign_flips_of_few_contrasts_cannot_be_significant() -> None:
    effect, p = stats.sign_flip_tail(np.full(8, 3.0))
    assert effect == 3.0
    assert p >= 2.0**-8


def test_group_tests_need_groups() -> None:
    assert stats.welch_tail(np.array([1.0]), np.array([0.0, 0.1])) == 1.0
    assert stats.mean_tail(np.array([5.0])) == 1.0
    assert stats.welch_tail(np.array([1.0, 1.1, 0.9]), np.array([0.0, 0.1, -0.1])) < 1e-3
