"""Faults put into otherwise clean runs, to measure what the splitter still finds.

Each fault multiplies the noise of some samples, or of some tokens of them, by an effect before anything is rounded.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from splitter_rate.runs import Plan

Fault = Callable[[Plan, float, int], None]


def _chosen(plan: Plan, count: int) -> set[int]:
    """`count` of the run's samples, spread over groups by chance."""
    total = plan.steps * plan.groups * plan.per_group
    return set(plan.rng.permutation(total)[:count].tolist())


def _label(plan: Plan, effect: float, count: int) -> None:
    """A recorded label of some samples: between samples, inside groups."""
    chosen = _chosen(plan, count)

    def factor(row: dict[str, Any]) -> float:
        bad = row["number"] in chosen
        row["labels"] = {"kernel_build": "b" if bad else "a"}
        return effect if bad else 1.0

    plan.factor = factor


def _stale(plan: Plan, effect: float, count: int) -> None:
    """A cache written by an older version, in whole groups where it must be."""
    chosen = _chosen(plan, count)

    def factor(row: dict[str, Any]) -> float:
        row["cached"] = 64
        bad = row["number"] in chosen
        row["cache_writer"] = f"v{row['step'] - bad}"
        return effect if bad else 1.0

    plan.factor = factor


def _shard(plan: Plan, effect: float, count: int) -> None:
    """The second context-parallel rank of those samples that two ranks scored: within a sample."""
    plan.shards, plan.turns = 2, False
    plan.only = chosen = _chosen(plan, count)

    def factor(row: dict[str, Any]) -> Any:
        out, n = np.ones(row["n"]), row["n"]
        if row["number"] in chosen and n >= 4:
            edges = np.linspace(0, n, 5).astype(int)
            out[edges[1] : edges[3]] = effect
        return out

    plan.factor = factor


def _seam(plan: Plan, effect: float, count: int) -> None:
    """Everything after the first tool text, in those samples that have one: within a sample."""
    plan.shards, plan.turns, plan.length = 1, True, max(plan.length, 80.0)
    plan.only = chosen = _chosen(plan, count)

    def factor(row: dict[str, Any]) -> Any:
        masked = np.flatnonzero(row["mask"] == 0)
        out = np.ones(row["n"])
        if masked.size and row["number"] in chosen:
            out[masked[0] :] = effect
        return out

    plan.factor = factor


def _engine(plan: Plan, effect: float, count: int) -> None:
    """One engine of two, each of which samples whole groups: between samples, and between groups."""
    plan.engines, plan.engine_by_group = (1.0, effect), True


def _rare(plan: Plan, effect: float, count: int) -> None:
    """One token in twenty of a label's samples, ten times the effect: only the tail shows it."""
    chosen = _chosen(plan, count)

    def factor(row: dict[str, Any]) -> Any:
        bad = row["number"] in chosen
        row["labels"] = {"kernel_build": "b" if bad else "a"}
        out = np.ones(row["n"])
        if bad:
            out[plan.rng.random(row["n"]) < 0.05] = 10.0 * effect
        return out

    plan.factor = factor


FAULTS: dict[str, tuple[Fault, str]] = {
    "label": (_label, "labels.kernel_build"),
    "stale": (_stale, "cache.stale"),
    "shard": (_shard, "training.shard_rank"),
    "seam": (_seam, "seam.after"),
    "engine": (_engine, "engine"),
    "rare": (_rare, "labels.kernel_build"),
}
"""name -> (what it does to a plan, the dimension that must be named)."""
