"""How far honest rounding alone moves a side: the noise floor.

A side's floor is the same statistic as its distance from the reference, of the reference itself run in that side's
declared dtypes under placebo schedules: other orders of the same sums, nothing else. It is a measurement of that
side's arithmetic on these very tokens, not a constant. A side declared in float32 has a tiny floor, kept as measured.

Where a live engine ran in two layouts, their difference over the root of two is a second measurement. It misses the
rounding that both layouts share (an engine that no layout moves would have none), as placebo schedules miss arithmetic
that only the engine has, so the larger of the two is the floor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from rlk_ledger_replay.intervals import Draws, Floats, Interval
from rlk_ledger_replay.shares import Moments, root, root_ratio, winsorise

LEAST_SCHEDULES = 4
Source = Literal["placebo", "native"]
Moment = tuple[float, Floats]
CLIP_LOW, CLIP_HIGH = math.log(0.8), math.log(1.2)
"""Edges of the default clip band in log-ratio: d outside them is clipped."""


@dataclass(frozen=True)
class Floors:
    """Floors in nats (root mean squares) and each distance as a multiple of its own floor, with intervals.

    None stands for what could not be measured. `combined` is sqrt(F_r^2 + F_t^2), the floor of the drift. placebo,
    native: both measurements of a side's floor, by side, where there are any; source: which one counts.
    """

    rollout: Interval | None
    training: Interval | None
    combined: Interval | None
    multiple_rollout: Interval | None
    multiple_training: Interval | None
    multiple_drift: Interval | None
    placebo: Mapping[str, Interval] = field(default_factory=dict)
    native: Mapping[str, Interval] = field(default_factory=dict)
    source: Mapping[str, Source] = field(default_factory=dict)


def noise_moment(noise_SN: Floats, draws: Draws) -> tuple[float, Floats]:
    """The winsorised second moment (nats^2) of one side's placebo noise, averaged over schedules, in every draw.

    noise_SN: float64 nats [schedules, tokens]. Raises ValueError for fewer than LEAST_SCHEDULES.
    """
    if len(noise_SN) < LEAST_SCHEDULES:
        raise ValueError(f"a floor needs at least {LEAST_SCHEDULES} placebo schedules, got {len(noise_SN)}.")
    return draws.mean((winsorise(noise_SN) ** 2).mean(axis=0))


def floor_moment(noise_SN: Floats | None, native_1N: Floats | None, draws: Draws) -> tuple[Moment | None, Source]:
    """The second moment (nats^2) that is a side's floor, and where it comes from.

    native_1N: the difference of a live engine's two layouts over the root of two. It counts where it is larger. A side
    without placebo noise (its dtypes were not declared) has no floor: a layout difference alone is a lower bound.
    """
    if noise_SN is None:
        return None, "placebo"
    placebo = noise_moment(noise_SN, draws)
    if native_1N is None:
        return placebo, "placebo"
    native = native_moment(native_1N, draws)
    return (native, "native") if native[0] > placebo[0] else (placebo, "placebo")


def native_moment(native_1N: Floats, draws: Draws) -> Moment:
    """The winsorised second moment (nats^2) of a scaled layout difference, in every draw."""
    return draws.mean((winsorise(native_1N) ** 2).mean(axis=0))


def floors(
    found: Moments,
    noise_r_SN: Floats | None,
    noise_t_SN: Floats | None,
    draws: Draws,
    native: Mapping[str, Floats] | None = None,
) -> Floors:
    """Both sides' floors and the multiples of them at which the measured distances stand.

    The same draws serve distance and floor, so a multiple's interval is that of the ratio. None for a side's noise
    means that its floor could not be measured; then the drift has no floor either. native: by side, a live engine's
    layout difference over the root of two, float64 nats [1, tokens].
    """
    noise, native = {"rollout": noise_r_SN, "training": noise_t_SN}, native or {}
    f_r, source_r = floor_moment(noise_r_SN, native.get("rollout"), draws)
    f_t, source_t = floor_moment(noise_t_SN, native.get("training"), draws)
    both = None if f_r is None or f_t is None else (f_r[0] + f_t[0], f_r[1] + f_t[1])
    return Floors(
        rollout=None if f_r is None else root(f_r, draws),
        training=None if f_t is None else root(f_t, draws),
        combined=None if both is None else root(both, draws),
        multiple_rollout=None if f_r is None else root_ratio(found.rr, f_r, draws),
        multiple_training=None if f_t is None else root_ratio(found.tt, f_t, draws),
        multiple_drift=None if both is None else root_ratio(found.dd, both, draws),
        placebo={side: root(noise_moment(part, draws), draws) for side, part in noise.items() if part is not None},
        native={side: root(native_moment(part, draws), draws) for side, part in native.items()},
        source={
            side: source
            for side, source, moment in (("rollout", source_r, f_r), ("training", source_t, f_t))
            if moment is not None
        },
    )


def noise_statistics(noise_SN: Floats) -> dict[str, float]:
    """The floor in the other statistics of the drift, averaged over schedules: mean and p99 and max of abs (nats).

    `dlogp_rms_low` and `_high` are the smallest and largest RMS of a single schedule: how much the choice of
    schedule matters. `between_schedules_rms` is the drift between two schedules: what two engines that round at the
    same places, in another order, would show.
    """
    size = np.abs(noise_SN)
    rms_S = np.sqrt((noise_SN**2).mean(axis=1))
    return {
        "abs_dlogp_mean": float(size.mean()),
        "abs_dlogp_p99": float(np.quantile(size, 0.99, axis=1).mean()),
        "abs_dlogp_max": float(size.max()),
        "dlogp_rms": float(np.sqrt((noise_SN**2).mean())),
        "dlogp_rms_low": float(rms_S.min()),
        "dlogp_rms_high": float(rms_S.max()),
        "between_schedules_rms": float(np.sqrt(2.0 * noise_SN.var(axis=0, ddof=1).mean())),
        "schedules": float(len(noise_SN)),
    }


def clipped_by_noise(noise_r_SN: Floats, noise_t_SN: Floats) -> float:
    """The share of tokens that rounding alone puts outside the default clip band.

    Every pair of schedules (one a side) gives one noise drift; with equal sides a schedule is never paired with
    itself, since a deterministic side does not cancel its own noise.
    """
    outside = []
    for i, noise_r in enumerate(noise_r_SN):
        for j, noise_t in enumerate(noise_t_SN):
            if i != j:
                d = noise_t - noise_r
                outside.append(float(((d < CLIP_LOW) | (d > CLIP_HIGH)).mean()))
    return float(np.mean(outside))
