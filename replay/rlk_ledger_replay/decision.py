"""What the numbers say about the drift's cause: a pure function over intervals, first rule that applies.

(0) both sides much farther from the reference than from each other, and farther than rounding explains: the
    reference is in doubt. (Two engines that round at the same places move together: on a shallow model both can be
    several times farther from float32 than from each other, each exactly at its floor. That is no disagreement.)
(1) the drift is within its measured noise floor;
(2) one side holds the drift and stands above its own floor: that side;
(3) both hold a part of it and stand above their floors: both;
(4) otherwise there is not enough evidence.

No rule accuses or acquits on a value; only interval bounds count. Without a measured floor nothing passes and nobody
is accused. The four arms decide in place of (4) when enough tokens are clipped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rlk_ledger_replay.floor import Floors
from rlk_ledger_replay.intervals import Interval
from rlk_ledger_replay.shares import Shares

DecisionName = Literal[
    "reference_itself_is_broken",
    "variant_did_not_apply",
    "drift_zero",
    "reference_disagrees_with_both",
    "within_floor",
    "caused_by_rollout_side",
    "caused_by_training_side",
    "caused_by_both_sides",
    "insufficient_evidence",
    "not_comparable",
    "not_applicable",
]
Verdict = Literal["pass", "fail", "inconclusive", "not_comparable", "not_applicable"]
Side = Literal["rollout", "training"]

FAR_RATIO = 2.0
FLOOR_MULTIPLE = 1.5
"""Up to this multiple a distance counts as its floor: placebo schedules imitate an engine's rounding, not its code."""
SHARE_ONE = 0.8
SHARE_BOTH = 0.2
ARM_CLIPPED, ARM_GROUPS, ARM_LEFT = 30, 10, 0.1


@dataclass(frozen=True)
class ArmCounts:
    """What the arms' rule needs: clip fractions (share of tokens, 0..1) of the arms, clipped tokens and their groups.

    clipped and groups count the baseline's clipped tokens and the groups they come from.
    """

    both_native: float
    training_reference_only: float
    rollout_reference_only: float
    clipped: int
    groups: int


@dataclass(frozen=True)
class Decision:
    """The answer: decision name, verdict, one sentence of reason, and the side it names, where it names one."""

    decision: DecisionName
    verdict: Verdict
    reason: str
    side: Side | None = None


@dataclass(frozen=True)
class _Standing:
    """One side once everything about it is measured: its share of the drift and its multiple of its own floor."""

    side: Side
    share: Interval
    multiple: Interval

    @property
    def above_floor(self) -> bool:
        """The lower bound exceeds what (1) still calls within the floor."""
        return self.multiple.low > FLOOR_MULTIPLE


def decide(shares: Shares, floors: Floors, arms: ArmCounts | None = None, *, determinism: bool = False) -> Decision:
    """The decision over intervals of one set of draws.

    determinism: whether the record holds evidence that both engines are bitwise deterministic; without it two equal
    sides are not known to be two computations.
    """
    if shares.far is None or shares.rollout is None or shares.training is None:
        return zero_drift(1.0, determinism)
    measured = floors.multiple_rollout is not None and floors.multiple_training is not None
    if shares.far.low > FAR_RATIO and measured and not _explained(floors):
        return Decision(
            "reference_disagrees_with_both",
            "inconclusive",
            f"Both sides are at least {_times(shares.far)} as far from the reference as from each other; "
            f"the reference may score another model.",
        )
    if floors.multiple_drift is None or floors.multiple_rollout is None or floors.multiple_training is None:
        return Decision("insufficient_evidence", "inconclusive", _floorless(shares.far, floors))
    rollout = _Standing("rollout", shares.rollout, floors.multiple_rollout)
    training = _Standing("training", shares.training, floors.multiple_training)
    if floors.multiple_drift.high <= FLOOR_MULTIPLE:
        reason = (
            f"The drift is {_times(floors.multiple_drift)} its measured noise floor; {_multiples(rollout, training)}."
        )
        return Decision("within_floor", "pass", reason)
    return (
        _by_shares(rollout, training)
        or _by_arms(rollout, training, arms)
        or _undecided(rollout, training, floors.multiple_drift)
    )


def zero_drift(equal_fraction: float, determinism: bool) -> Decision:
    """The decision about two sides of which `equal_fraction` (0..1) of the tokens agree bit for bit."""
    equal = f"{equal_fraction:.1%} of the tokens are bitwise equal on both sides"
    if determinism:
        return Decision("drift_zero", "pass", f"{equal}, and both engines are recorded as deterministic.")
    return Decision(
        "drift_zero",
        "inconclusive",
        f"{equal}, but nothing recorded says that the engines are deterministic: one side may be a copy.",
    )


def _explained(floors: Floors) -> bool:
    """Whether both sides' distances from the reference are within their own measured floors."""
    multiples = (floors.multiple_rollout, floors.multiple_training)
    return all(multiple is not None and multiple.high <= FLOOR_MULTIPLE for multiple in multiples)


def _by_shares(rollout: _Standing, training: _Standing) -> Decision | None:
    for one in (rollout, training):
        if one.share.low > SHARE_ONE and one.above_floor:
            return _one_side(one, f"it holds {_percent(one.share)} of the drift")
    if all(one.share.low > SHARE_BOTH and one.above_floor for one in (rollout, training)):
        return Decision(
            "caused_by_both_sides",
            "fail",
            f"Both sides left the reference ({_multiples(rollout, training)}) and each holds more than "
            f"{SHARE_BOTH:.0%} of the drift.",
        )
    return None


def _by_arms(rollout: _Standing, training: _Standing, arms: ArmCounts | None) -> Decision | None:
    """The side whose replacement by the reference removes nine tenths of the clipping, when the other's does not."""
    if arms is None or arms.clipped < ARM_CLIPPED or arms.groups < ARM_GROUPS:
        return None
    limit = ARM_LEFT * arms.both_native
    cures = [
        (one, left)
        for one, left in ((rollout, arms.rollout_reference_only), (training, arms.training_reference_only))
        if left <= limit
    ]
    if len(cures) != 1 or not cures[0][0].above_floor:
        return None
    one, left = cures[0]
    return _one_side(
        one, f"with the reference in its place {left:.2%} of tokens are clipped, not {arms.both_native:.2%}"
    )


def _one_side(one: _Standing, because: str) -> Decision:
    return Decision(
        "caused_by_rollout_side" if one.side == "rollout" else "caused_by_training_side",
        "fail",
        f"The {one.side} side left the reference: {because} and stands at {_times(one.multiple)} its own noise floor.",
        one.side,
    )


def _undecided(rollout: _Standing, training: _Standing, drift: Interval) -> Decision:
    return Decision(
        "insufficient_evidence",
        "inconclusive",
        f"The drift is {_times(drift)} its floor (up to {FLOOR_MULTIPLE} is noise), but the shares, rollout "
        f"{_percent(rollout.share)} and training {_percent(training.share)}, name no side; replay more groups.",
    )


def _multiples(rollout: _Standing, training: _Standing) -> str:
    return f"rollout at {_times(rollout.multiple)} and training at {_times(training.multiple)} its own"


def _floorless(far: Interval, floors: Floors) -> str:
    missing = [name for name, one in (("rollout", floors.rollout), ("training", floors.training)) if one is None]
    sides = f"the {' and the '.join(missing)} side"
    reason = f"The noise floor of {sides} could not be measured, and without a floor nothing passes."
    if far.low > FAR_RATIO:
        reason += f" Both sides are at least {_times(far)} as far from the reference as from each other."
    return reason


def _times(interval: Interval) -> str:
    return f"{interval.value:.2f} [{interval.low:.2f}, {interval.high:.2f}] times"


def _percent(interval: Interval) -> str:
    return f"{interval.value:.0%} [{interval.low:.0%}, {interval.high:.0%}]"
