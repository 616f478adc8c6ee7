"""The decision over intervals: its order, and simulated runs whose true cause is known."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlk_ledger_replay.decision import ArmCounts, Decision, decide, zero_drift
from rlk_ledger_replay.floor import Floors, clipped_by_noise, floors, noise_statistics
from rlk_ledger_replay.intervals import Interval, draw
from rlk_ledger_replay.shares import Shares, moments, shares, winsorise


def exactly(value: float, spread: float = 0.05) -> Interval:
    return Interval(value, value * (1 - spread), value * (1 + spread))


def seen(share_t: float = 0.5, far: float = 0.7) -> Shares:
    return Shares(exactly(1 - share_t), exactly(share_t), exactly(0.03), exactly(0.03), exactly(0.04), exactly(far))


def floored(drift: float = 1.0, rollout: float = 1.0, training: float = 1.0) -> Floors:
    return Floors(exactly(0.03), exactly(0.03), exactly(0.04), exactly(rollout), exactly(training), exactly(drift))


NO_FLOOR = Floors(exactly(0.03), None, None, exactly(1.0), None, None)


@pytest.mark.parametrize(
    ("found", "floor", "decision", "verdict"),
    [
        (seen(far=3.0), floored(drift=0.5, rollout=9.0, training=9.0), "reference_disagrees_with_both", "inconclusive"),
        (seen(far=3.0), floored(drift=0.5, training=9.0), "reference_disagrees_with_both", "inconclusive"),
        (seen(far=3.0), NO_FLOOR, "insufficient_evidence", "inconclusive"),
        (seen(far=4.0), floored(drift=0.2), "within_floor", "pass"),
        (seen(), floored(drift=1.2), "within_floor", "pass"),
        (seen(share_t=0.01), floored(drift=1.2), "within_floor", "pass"),
        (seen(share_t=0.95), floored(drift=3.0, training=4.0), "caused_by_training_side", "fail"),
        (seen(share_t=0.02), floored(drift=3.0, rollout=4.0), "caused_by_rollout_side", "fail"),
        (seen(share_t=0.6), floored(drift=3.0, rollout=3.0, training=3.0), "caused_by_both_sides", "fail"),
        (seen(share_t=0.95), floored(drift=3.0, training=1.1), "insufficient_evidence", "inconclusive"),
        (seen(share_t=0.7), floored(drift=3.0, rollout=1.0, training=3.0), "insufficient_evidence", "inconclusive"),
        (seen(), floored(drift=1.48), "insufficient_evidence", "inconclusive"),
    ],
)
def test_the_first_rule_that_applies_decides(found: Shares, floor: Floors, decision: str, verdict: str) -> None:
    got = decide(found, floor)
    assert (got.decision, got.verdict) == (decision, verdict)
    assert got.reason.endswith(".")


@pytest.mark.parametrize("share_t", [0.01, 0.5, 0.99])
def test_without_a_floor_nothing_passes_and_nobody_is_accused(share_t: float) -> None:
    got = decide(seen(share_t), NO_FLOOR)
    assert (got.decision, got.verdict, got.side) == ("insufficient_evidence", "inconclusive", None)
    assert "the training side" in got.reason


positive = st.floats(0.01, 50, allow_nan=False)


@given(share=st.floats(-0.5, 1.5), drift=positive, rollout=positive, training=positive, far=positive)
def test_a_pass_always_rests_on_the_upper_bound_and_an_accusation_on_the_lower(
    share: float, drift: float, rollout: float, training: float, far: float
) -> None:
    floor = floored(drift, rollout, training)
    got = decide(seen(share, far), floor)
    if got.verdict == "pass":
        assert floor.multiple_drift is not None
        assert floor.multiple_drift.high <= 1.5
    if got.side is not None:
        multiple = floor.multiple_rollout if got.side == "rollout" else floor.multiple_training
        assert multiple is not None
        assert multiple.low > 1.5


def test_a_wide_interval_around_a_damning_value_accuses_nobody() -> None:
    wide = Interval(0.95, 0.5, 1.2)
    found = dataclasses.replace(seen(0.95), training=wide)
    assert decide(found, floored(3.0, 1.0, 4.0)).decision == "insufficient_evidence"


CURED = ArmCounts(0.08, training_reference_only=0.004, rollout_reference_only=0.07, clipped=60, groups=12)


@pytest.mark.parametrize(
    ("arms", "expected"),
    [
        (CURED, "caused_by_training_side"),
        (dataclasses.replace(CURED, clipped=29), "insufficient_evidence"),
        (dataclasses.replace(CURED, groups=9), "insufficient_evidence"),
        (dataclasses.replace(CURED, training_reference_only=0.009), "insufficient_evidence"),
        (dataclasses.replace(CURED, rollout_reference_only=0.004), "insufficient_evidence"),
    ],
)
def test_arms_decide_only_with_enough_clipped_tokens_and_one_cure(arms: ArmCounts, expected: str) -> None:
    undecided = seen(share_t=0.75), floored(drift=3.0, rollout=1.0, training=4.0)
    assert decide(*undecided, arms).decision == expected


def test_arms_never_overrule_the_floor() -> None:
    assert decide(seen(0.75), floored(drift=1.2), CURED).decision == "within_floor"


@pytest.mark.parametrize(("determinism", "verdict"), [(True, "pass"), (False, "inconclusive")])
def test_zero_drift_passes_only_with_determinism_evidence(determinism: bool, verdict: str) -> None:
    labels = np.repeat(np.arange(6), 20)
    error = np.random.default_rng(0).normal(size=120)
    draws = draw(labels, 0)
    found = moments(error, error.copy(), draws)
    got = decide(shares(found, draws), floors(found, None, None, draws), determinism=determinism)
    assert (got.decision, got.verdict) == ("drift_zero", verdict)
    assert "99.5%" in zero_drift(0.995, determinism).reason


def simulate(
    seed: int,
    *,
    excess_r: float = 0.0,
    excess_t: float = 0.0,
    common: float = 0.0,
    groups: int = 12,
    noise: tuple[float, float] = (0.03, 0.03),
) -> Decision:
    """A run of `groups` groups whose noise varies by group and token; excess and common offset in nats."""
    rng = np.random.default_rng(seed)
    labels = np.repeat(np.arange(groups), 300)
    n = len(labels)
    heat = rng.lognormal(0, 0.3, groups)[labels] * rng.lognormal(0, 0.5, n)

    def rounding(scale: float, *shape: int) -> np.ndarray:
        return scale * heat * rng.standard_t(5, size=(*shape, n)) / math.sqrt(5 / 3)

    shift = common * rng.normal(size=n)
    e_r = rounding(noise[0]) + shift + excess_r * rng.normal(size=n)
    e_t = rounding(noise[1]) + shift + excess_t * rng.normal(size=n)
    draws = draw(labels, seed)
    found = moments(e_r, e_t, draws)
    return decide(shares(found, draws), floors(found, rounding(noise[0], 4), rounding(noise[1], 4), draws))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ({}, "within_floor"),
        ({"noise": (0.03, 1e-6)}, "within_floor"),
        ({"noise": (1e-6, 0.03)}, "within_floor"),
        ({"excess_t": 0.15}, "caused_by_training_side"),
        ({"excess_r": 0.15}, "caused_by_rollout_side"),
        ({"excess_r": 0.1, "excess_t": 0.1}, "caused_by_both_sides"),
        ({"common": 0.5}, "reference_disagrees_with_both"),
        ({"excess_t": 0.15, "groups": 1}, "insufficient_evidence"),
    ],
)
def test_a_simulated_cause_is_named(seed: int, case: dict, expected: str) -> None:
    assert simulate(seed, **case).decision == expected


@pytest.mark.slow
@pytest.mark.parametrize("case", [{}, {"groups": 6}, {"noise": (0.03, 1e-6)}, {"noise": (0.05, 0.01), "groups": 20}])
def test_clean_runs_are_never_accused(case: dict) -> None:
    decisions = [simulate(seed, **case).verdict for seed in range(200)]
    assert decisions.count("fail") == 0
    assert decisions.count("pass") >= 190


@pytest.mark.slow
def test_the_share_interval_covers_the_true_share() -> None:
    hits, trials, excess, noise = 0, 300, 0.06, 0.03
    truth = (noise**2 + excess**2) / (2 * noise**2 + excess**2)
    for seed in range(trials):
        rng = np.random.default_rng(seed)
        labels = np.repeat(np.arange(12), 200)
        e_r = noise * rng.normal(size=2400)
        e_t = noise * rng.normal(size=2400) + excess * rng.normal(size=2400)
        draws = draw(labels, seed)
        share = shares(moments(e_r, e_t, draws), draws).training
        assert share is not None
        hits += share.low <= truth <= share.high
    assert hits / trials >= 0.9


@given(st.integers(0, 2**32 - 1), st.integers(2, 9))
def test_shares_always_sum_to_one(seed: int, groups: int) -> None:
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, groups, 60)
    e_r, e_t = rng.normal(size=60) * rng.lognormal(), rng.normal(size=60)
    draws = draw(labels, seed, draws=20)
    found = shares(moments(e_r, e_t, draws), draws)
    assert found.rollout is not None
    assert found.training is not None
    assert found.rollout.value + found.training.value == pytest.approx(1.0)


def test_shares_match_the_written_formula() -> None:
    e_r, e_t = np.array([0.1, -0.2, 0.3, 0.0]), np.array([0.4, 0.1, -0.1, 0.2])
    draws = draw(np.arange(4), 0)
    found = shares(moments(e_r, e_t, draws), draws)
    limit = np.quantile(np.abs(e_r), 0.999), np.quantile(np.abs(e_t), 0.999)
    r, t = np.clip(e_r, -limit[0], limit[0]), np.clip(e_t, -limit[1], limit[1])
    assert found.training is not None
    assert found.training.value == pytest.approx((t @ t - r @ t) / ((t - r) @ (t - r)))
    assert found.drift.value == pytest.approx(math.sqrt(((t - r) ** 2).mean()))


def test_one_wild_token_of_two_thousand_does_not_decide() -> None:
    values = np.random.default_rng(0).normal(size=2000)
    wild = values.copy()
    wild[7] = 1e6
    assert np.abs(winsorise(wild)).max() < 10


def test_a_floor_needs_four_schedules() -> None:
    draws = draw(np.arange(10), 0)
    noise = np.random.default_rng(0).normal(size=(3, 10))
    found = moments(noise[0], noise[1], draws)
    with pytest.raises(ValueError, match="at least 4 placebo schedules"):
        floors(found, noise, noise, draws)


def test_a_float32_side_keeps_its_tiny_measured_floor() -> None:
    rng = np.random.default_rng(0)
    draws = draw(np.repeat(np.arange(10), 50), 0)
    tiny, coarse = 1e-7 * rng.normal(size=(4, 500)), 0.03 * rng.normal(size=(4, 500))
    floor = floors(moments(coarse[0], tiny[0], draws), coarse, tiny, draws)
    assert floor.training is not None
    assert floor.combined is not None
    assert floor.training.value == pytest.approx(1e-7, rel=0.1)
    assert floor.combined.value == pytest.approx(0.03, rel=0.1)


def test_the_floors_other_statistics_and_the_clipping_it_causes() -> None:
    rng = np.random.default_rng(0)
    quiet, loud = 0.01 * rng.normal(size=(4, 5000)), 0.3 * rng.normal(size=(4, 5000))
    assert noise_statistics(quiet)["dlogp_rms"] == pytest.approx(0.01, rel=0.05)
    assert noise_statistics(quiet)["between_schedules_rms"] == pytest.approx(0.01 * math.sqrt(2), rel=0.05)
    assert noise_statistics(quiet)["schedules"] == 4
    assert clipped_by_noise(quiet, quiet) == 0.0
    assert clipped_by_noise(loud, loud) > 0.5
