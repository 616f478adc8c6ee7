"""Which side the drift comes from: second moments of both sides' distances from the reference.

With `e_r = r - ref`, `e_t = t - ref` and `d = e_t - e_r`, the second moments give
`S_t = (M_tt - M_rt) / M_dd` and `S_r = (M_rr - M_rt) / M_dd`, which sum to 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from rlk_ledger_replay.intervals import Draws, Floats, Interval

WINSOR = 0.999


@dataclass(frozen=True)
class Shares:
    """Distances in nats (root mean squares) and shares (1 = the whole drift), each with its interval.

    drift is the RMS of `e_t - e_r`; far is the nearer side's distance from the reference divided by the drift.
    Shares are None where the drift is exactly zero.
    """

    rollout: Interval | None
    training: Interval | None
    error_rollout: Interval
    error_training: Interval
    drift: Interval
    far: Interval | None


@dataclass(frozen=True)
class Moments:
    """Winsorised second moments in nats^2: the value and its value in every draw."""

    rr: tuple[float, Floats]
    tt: tuple[float, Floats]
    rt: tuple[float, Floats]
    dd: tuple[float, Floats]


def winsorise(values: Floats, quantile: float = WINSOR) -> Floats:
    """`values` clipped to plus and minus the `quantile` of their absolute values, so that no token decides alone."""
    limit = np.quantile(np.abs(values), quantile)
    return np.clip(values, -limit, limit)


def moments(error_r_N: Floats, error_t_N: Floats, draws: Draws) -> Moments:
    """Second moments of the two sides' winsorised errors, in every draw. Errors are float64 nats [tokens]."""
    e_r, e_t = winsorise(error_r_N), winsorise(error_t_N)
    return Moments(
        rr=draws.mean(e_r * e_r),
        tt=draws.mean(e_t * e_t),
        rt=draws.mean(e_r * e_t),
        dd=draws.mean((e_t - e_r) ** 2),
    )


def shares(found: Moments, draws: Draws) -> Shares:
    """Shares and distances of `moments`, with intervals over the same draws."""
    drifting = found.dd[0] > 0.0
    return Shares(
        rollout=_share(found.rr, found.rt, found.dd, draws) if drifting else None,
        training=_share(found.tt, found.rt, found.dd, draws) if drifting else None,
        error_rollout=root(found.rr, draws),
        error_training=root(found.tt, draws),
        drift=root(found.dd, draws),
        far=_far(found, draws) if drifting else None,
    )


def root(moment: tuple[float, Floats], draws: Draws) -> Interval:
    """The square root of a second moment, in nats."""
    return draws.interval(math.sqrt(moment[0]), np.sqrt(moment[1]))


def root_ratio(above: tuple[float, Floats], below: tuple[float, Floats], draws: Draws) -> Interval:
    """sqrt(above / below); 0 / 0 is 1 (both measured as nothing), anything else over zero is infinite."""
    values = np.sqrt(_divide(np.append(above[1], above[0]), np.append(below[1], below[0])))
    return draws.interval(float(values[-1]), values[:-1])


def _divide(above: Floats, below: Floats) -> Floats:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where((above == 0.0) & (below == 0.0), 1.0, above / below)


def _share(
    own: tuple[float, Floats], cross: tuple[float, Floats], drift: tuple[float, Floats], draws: Draws
) -> Interval:
    # A draw without any drift (only clusters that agree bitwise) says nothing about the side: it counts as one half.
    apart = drift[1] > 0.0
    inside = np.where(apart, (own[1] - cross[1]) / np.where(apart, drift[1], 1.0), 0.5)
    return draws.interval((own[0] - cross[0]) / drift[0], inside)


def _far(found: Moments, draws: Draws) -> Interval:
    nearer = min(found.rr[0], found.tt[0]), np.minimum(found.rr[1], found.tt[1])
    return root_ratio(nearer, found.dd, draws)
