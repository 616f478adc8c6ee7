"""The answer of explain over arrays whose truth is known: it names the cause, and nothing where it cannot know."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from rlk_ledger_replay.explain.answer import Answer, Scored, answer
from rlk_ledger_replay.explain.heldout import folds, held_out, schedule_floor
from rlk_ledger_replay.intervals import Floats, draw

GROUPS, EACH = 12, 60
N = GROUPS * EACH
CLUSTER_N = np.repeat(np.arange(GROUPS), EACH)
NOISE = 0.01


def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def made(values_N: Floats, variants: dict[str, Floats], seed: int = 0) -> Scored:
    """A side whose declared arithmetic gives zero plus the noise of schedules; the reference stands 0.03 away."""
    r = rng(seed)
    return Scored(
        values_N=values_N,
        reference_N=r.normal(0, 0.03, N),
        declared_N=r.normal(0, NOISE, N),
        placebo_KN=r.normal(0, NOISE, (8, N)),
        variants=variants,
    )


def directions(seed: int = 1) -> dict[str, Floats]:
    """Three independent departures, each ten times the floor."""
    r = rng(seed)
    return {name: r.normal(0, 10 * NOISE, N) for name in ("a", "b", "c")}


def noisy(values_N: Floats, seed: int) -> Floats:
    return values_N + rng(100 + seed).normal(0, NOISE, N)


def asked(scored: Scored, **more: object) -> Answer:
    return answer(scored, draw(CLUSTER_N, 0, 300), 0, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("cause", ["a", "b", "c"])
def test_the_variant_the_values_follow_is_named(cause: str) -> None:
    variants = directions()
    found = asked(made(noisy(variants[cause], 1), {name: noisy(v, 2) for name, v in variants.items()}))
    assert (found.answer, found.named) == ("reproduced", (cause,))
    assert found.ranked[0].part > 0.9
    assert found.ranked[0].error < 0.05


def test_no_excess_is_said_and_nothing_named() -> None:
    for seed in range(20):
        found = asked(made(noisy(np.zeros(N), seed), directions(), seed))
        assert found.answer == "no_excess"
        assert not found.named


def test_variants_closer_than_the_floor_are_one_class_and_reported_together() -> None:
    variants = directions()
    variants["twin"] = variants["a"] + rng(3).normal(0, NOISE / 4, N)
    found = asked(made(noisy(variants["a"], 1), variants))
    assert found.answer == "reproduced"
    assert set(found.members) == {"a", "twin"}
    assert any(set(one) == {"a", "twin"} for one in found.classes)


def test_a_variant_nobody_could_see_is_blind_and_never_named() -> None:
    variants = {**directions(), "nothing": rng(4).normal(0, NOISE / 4, N)}
    scored = made(noisy(directions()["a"], 1), variants)
    variants["nothing"] = scored.declared_N + rng(4).normal(0, NOISE / 4, N)
    found = asked(replace(scored, variants=variants))
    assert found.blind == ("nothing",)
    assert found.named == ("a",)


def test_a_cause_outside_the_family_is_none_of_these() -> None:
    for seed in range(10):
        found = asked(made(noisy(rng(50 + seed).normal(0, 0.1, N), seed), {"small": directions()["a"] * 0.4}, seed))
        assert found.answer == "none_of_these"
        assert not found.named


def test_a_match_of_scale_alone_is_never_called_the_cause() -> None:
    found = asked(made(noisy(rng(60).normal(0, 0.1, N), 1), directions()))
    assert found.answer == "consistent_with"
    assert not found.named
    assert set(found.members) == {"a", "b", "c"}


def test_a_shrunk_copy_of_a_variant_is_no_match_of_values() -> None:
    """A fitted amount of a third would explain all of it; the values of the variant are still others."""
    variants = {"a": directions()["a"] * 3}
    found = asked(made(noisy(directions()["a"], 1), variants))
    assert not found.named
    assert found.ranked[0].beta < 0.5


def test_two_causes_are_named_together_when_the_pair_improves_by_more_than_its_error() -> None:
    variants = directions()

    def combine(pairs: Sequence[tuple[str, str]]) -> dict[str, Floats]:
        return {f"{left} + {right}": variants[left] + variants[right] for left, right in pairs}

    truth = variants["a"] + variants["b"]
    found = asked(made(noisy(truth, 1), variants), combine=combine)
    assert found.answer == "reproduced"
    assert set(found.named[0].split(" + ")) == {"a", "b"}
    alone = asked(made(noisy(variants["a"], 1), variants), combine=combine)
    assert alone.named == ("a",), "a second variant that adds nothing is not taken"


def test_two_variants_that_explain_it_alike_are_not_separated() -> None:
    """Each holds the cause and something else of the same size that cancels in neither: far apart, equally near."""
    truth = directions()["a"]
    other = np.where(rng(7).random(N) < 0.5, 0.04, -0.04)
    found = asked(made(noisy(truth, 1), {"a": truth + other, "b": truth - other}))
    assert found.answer == "cannot_separate"
    assert not found.named
    assert set(found.members) == {"a", "b"}


def test_within_its_floor_a_choice_nobody_declared_is_no_fault() -> None:
    variants = {"a": directions()["a"] * 0.25}
    scored = made(noisy(variants["a"], 1), variants)
    scored = replace(scored, reference_N=rng(8).normal(0, 0.2, N))
    assert asked(scored, undeclared=lambda _: False).named == ("a",)
    found = asked(scored, undeclared=lambda _: True)
    assert (found.answer, found.named, found.choice) == ("no_excess", (), "a")


@pytest.mark.parametrize("groups", [1, 2, 3])
def test_too_few_groups_name_nothing(groups: int) -> None:
    variants = directions()
    found = answer(made(noisy(variants["a"], 1), variants), draw(CLUSTER_N % groups, 0, 100), 0)
    assert found.answer == "insufficient_evidence"
    assert not found.named


def test_a_value_that_is_not_finite_names_nothing() -> None:
    values_N = noisy(directions()["a"], 1)
    values_N[3] = np.nan
    assert asked(made(values_N, directions())).answer == "insufficient_evidence"


def test_a_gain_is_what_a_slow_loop_over_splits_and_groups_gives() -> None:
    r, groups = rng(9), 6
    cluster_N = np.repeat(np.arange(groups), [3, 9, 1, 20, 5, 7])
    residual_N, direction_N = r.normal(size=45), r.normal(size=45)
    fitted_RG = folds(groups, 3)
    gained, times = np.zeros(groups), np.zeros(groups)
    betas = []
    for fitted_G in [*fitted_RG, *~fitted_RG]:
        fit = fitted_G[cluster_N]
        beta = (residual_N[fit] @ direction_N[fit]) / (direction_N[fit] @ direction_N[fit])
        beta = min(1.0, max(0.0, beta))
        betas.append(beta)
        for group in np.flatnonzero(~fitted_G):
            at = cluster_N == group
            gained[group] += (residual_N[at] ** 2 - (residual_N[at] - beta * direction_N[at]) ** 2).sum()
            times[group] += 1
    found = held_out(residual_N, direction_N, draw(cluster_N, 0, 10), fitted_RG)
    np.testing.assert_allclose(found.by_group_G, gained / times, rtol=1e-12, atol=1e-12)
    assert found.beta == pytest.approx(np.mean(betas))


def test_the_floor_is_each_schedule_against_the_mean_of_the_others() -> None:
    placebo_KN = rng(11).normal(size=(5, 30))
    slow = np.mean([(placebo_KN[k] - np.delete(placebo_KN, k, 0).mean(axis=0)) ** 2 for k in range(5)], axis=0)
    pairs = [((placebo_KN[i] - placebo_KN[j]) ** 2).mean() for i in range(5) for j in range(i)]
    found = schedule_floor(placebo_KN)
    np.testing.assert_allclose(found.spread_N, slow, rtol=1e-12)
    assert found.between == pytest.approx(np.mean(pairs))
