"""What a prediction explains of a side's distance from its declaration, judged on groups it was not fitted on.

r = v - b is how far the recorded values v are from the declared arithmetic, b being the mean over placebo schedules.
A prediction q points in the direction d = q - b. On one half of the groups its amount beta in [0, 1] is fitted; on the
other half it gains r^2 - (r - beta d)^2. Every group is judged by a fit that never saw it, in several seeded splits.
A placebo schedule is a prediction like any other, so what it gains is what chance gains.

G groups, N tokens, R splits. All sums are float64 nats^2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlk_ledger_replay.intervals import Draws, Floats

SPLITS = 16
LEAST_GROUPS = 4
"""With fewer groups there is no half to fit on and another to judge on whose spread could be told."""


@dataclass(frozen=True)
class Gain:
    """What one prediction explains on groups it was not fitted on.

    by_group_G: nats^2 gained in each group, averaged over splits. beta: mean fitted amount, 0..1.
    """

    by_group_G: Floats
    beta: float

    @property
    def total(self) -> float:
        """Nats^2 gained in all groups."""
        return float(self.by_group_G.sum())

    def beats(self, other: Gain) -> bool:
        """Whether it gains more than `other` by more than one standard error of the difference."""
        difference_G = self.by_group_G - other.by_group_G
        return float(difference_G.sum()) > standard_error(difference_G)


def standard_error(values_G: Floats) -> float:
    """The standard error of a sum over independent groups; infinite for a single one."""
    groups = len(values_G)
    return float(np.sqrt(groups * values_G.var(ddof=1))) if groups > 1 else float("inf")


def folds(groups: int, seed: int) -> NDArray[np.bool_]:
    """Which groups are fitted on, bool [R, groups]: halves, the same for the same seed."""
    rng = np.random.default_rng(seed)
    fitted_RG = np.zeros((SPLITS, groups), dtype=bool)
    for row in fitted_RG:
        row[rng.permutation(groups)[: groups // 2]] = True
    return fitted_RG


def held_out(residual_N: Floats, direction_N: Floats, draws: Draws, fitted_RG: NDArray[np.bool_]) -> Gain:
    """What a direction explains of a residual; a direction that is nowhere defined (NaN) or zero gains nothing.

    residual_N, direction_N: float64 nats [tokens]. Tokens whose direction is NaN are left as they are.
    """
    d = np.nan_to_num(direction_N, nan=0.0)
    square_G, cross_G = draws.sums(d * d), draws.sums(d * residual_N)
    both = np.concatenate([fitted_RG, ~fitted_RG])
    square, cross = both @ square_G, both @ cross_G
    beta = np.clip(np.divide(cross, square, out=np.zeros_like(cross), where=square > 0.0), 0.0, 1.0)
    gain = 2.0 * beta[:, None] * cross_G - (beta**2)[:, None] * square_G
    judged = ~both
    return Gain((gain * judged).sum(axis=0) / judged.sum(axis=0), float(beta.mean()))


@dataclass(frozen=True)
class Floor:
    """What schedules alone do, nats^2: spread_N from the mean of the others, and between two of them on average."""

    spread_N: Floats
    between: float


def schedule_floor(placebo_KN: Floats) -> Floor:
    """The floor of a residual against the mean of K placebo schedules, each left out once.

    placebo_KN: float64 nats [schedules, tokens].
    """
    k = len(placebo_KN)
    mean_N = placebo_KN.mean(axis=0)
    spread_N = ((placebo_KN - mean_N) ** 2).mean(axis=0) * (k / (k - 1)) ** 2
    return Floor(spread_N, float(2.0 * placebo_KN.var(axis=0, ddof=1).mean()))


def distances(predictions: Mapping[str, Floats]) -> dict[tuple[str, str], float]:
    """Mean square difference, nats^2, of every two predictions where both are defined; infinite where none is."""
    names = list(predictions)
    found = {}
    for i, left in enumerate(names):
        for right in names[i + 1 :]:
            difference = predictions[left] - predictions[right]
            defined = difference[~np.isnan(difference)]
            found[left, right] = found[right, left] = float((defined**2).mean()) if len(defined) else float("inf")
    return found
