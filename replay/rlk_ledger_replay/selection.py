"""Which samples a replay scores: a seeded, stratified choice, the worst ones, or all.

Intervals are over groups, so breadth is worth more than depth: the stratified choice takes one sample of every group
before a second of any, and walks the steps in turn.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from rlk_ledger.pairs import PairedSample

Method = Literal["stratified", "worst", "all"]


@dataclass(frozen=True)
class Selection:
    """The chosen pairs and how they were chosen. `biased`: chosen by their drift, so they stand for no run."""

    pairs: tuple[PairedSample, ...]
    method: Method
    seed: int
    available: int

    @property
    def biased(self) -> bool:
        """Whether the choice looked at the drift and left samples out."""
        return self.method == "worst" and len(self.pairs) < self.available

    def as_dict(self) -> dict[str, Any]:
        """What an event records about the choice."""
        return {
            "method": self.method,
            "seed": self.seed,
            "available": self.available,
            "sample_ids": [pair.sample.sample_id for pair in self.pairs],
        }


def group_key(pair: PairedSample) -> tuple[str, ...]:
    """What counts as one cluster: a group of one step, or a single sample where no group was recorded."""
    sample = pair.sample
    if sample.group_id is None:
        return ("sample", sample.sample_id, str(sample.attempt))
    return ("group", str(sample.step), sample.group_id)


def select(pairs: Sequence[PairedSample], count: int, seed: int = 0, method: Method = "stratified") -> Selection:
    """At most `count` (at least 1) of the pairs that have a compared token, in recorded order.

    `worst` takes those with the largest root mean square of the drift.
    """
    candidates = [pair for pair in pairs if pair.compared.any()]
    if method == "all" or count >= len(candidates):
        return Selection(tuple(candidates), method, seed, len(candidates))
    if method == "worst":
        order = np.argsort([-_drift(pair) for pair in candidates], kind="stable")
    else:
        order = _stratified(candidates, seed)
    chosen = sorted(int(index) for index in order[:count])
    return Selection(tuple(candidates[index] for index in chosen), method, seed, len(candidates))


def _drift(pair: PairedSample) -> float:
    at = pair.compared
    return float(np.sqrt(np.mean((pair.training[at].astype(np.float64) - pair.rollout[at]) ** 2)))


def _stratified(pairs: Sequence[PairedSample], seed: int) -> NDArray[np.int64]:
    rng = np.random.default_rng(seed)
    in_group: dict[tuple[str, ...], int] = defaultdict(int)
    groups_of_step: dict[int | None, dict[tuple[str, ...], int]] = defaultdict(dict)
    key = {}
    for index in rng.permutation(len(pairs)).tolist():
        pair = pairs[index]
        group = group_key(pair)
        turn = groups_of_step[pair.sample.step].setdefault(group, len(groups_of_step[pair.sample.step]))
        key[index] = (in_group[group], turn, -1 if pair.sample.step is None else pair.sample.step, index)
        in_group[group] += 1
    return np.array(sorted(key, key=key.__getitem__), dtype=np.int64)
