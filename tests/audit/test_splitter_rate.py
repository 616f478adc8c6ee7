"""A small share of the runs that `python -m splitter_rate` measures: clean ones stay clean, faults stay named."""

import pytest
from splitter_rate.__main__ import named, raised, upper_bound
from splitter_rate.runs import KINDS, draw_plan, events

from rlk_ledger.history import History


@pytest.mark.parametrize("kind", KINDS)
def test_a_clean_run_of_every_kind_raises_nothing(kind: str) -> None:
    assert [raised(kind, seed) for seed in (200_000, 200_001)] == [[], []]


@pytest.mark.parametrize(
    ("planted", "effect", "samples", "least"),
    [("label", 4.0, 30, 5), ("stale", 4.0, 30, 5), ("shard", 4.0, 30, 5), ("rare", 4.0, 30, 4)],
)
def test_faults_are_named_in_most_runs(planted: str, effect: float, samples: int, least: int) -> None:
    hits = [named(KINDS[i], 200_000 + i, planted, effect, samples) for i in range(6)]
    assert sum(hits) >= least


def test_a_run_is_what_its_seed_says_and_no_recorder_would_refuse_it() -> None:
    left, right = (History.from_events(events(draw_plan("turns", 3))) for _ in range(2))
    assert [s.values.tobytes() for s in left.scores] == [s.values.tobytes() for s in right.scores]
    assert left.refused == []


@pytest.mark.parametrize(("hits", "runs", "bound"), [(0, 200, 0.01487), (2, 200, 0.03113), (5, 5, 1.0)])
def test_the_bound_is_that_of_clopper_and_pearson(hits: int, runs: int, bound: float) -> None:
    assert upper_bound(hits, runs) == pytest.approx(bound, abs=2e-4)
