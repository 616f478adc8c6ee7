"""What the values of a side follow: a pure function over arrays, fail-closed.

Order: enough groups, is there an excess at all, which variants this data can tell apart, who explains it on held-out
groups, alone, then greedily, then in pairs, and whether that is a match of values or of scale only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Literal

import numpy as np

from rlk_ledger_replay.decision import FLOOR_MULTIPLE
from rlk_ledger_replay.explain.heldout import (
    LEAST_GROUPS,
    Floor,
    Gain,
    distances,
    folds,
    held_out,
    schedule_floor,
    standard_error,
)
from rlk_ledger_replay.floor import noise_moment
from rlk_ledger_replay.intervals import Draws, Floats, Interval
from rlk_ledger_replay.shares import root, root_ratio, winsorise

AnswerName = Literal[
    "reproduced",
    "consistent_with",
    "none_of_these",
    "cannot_separate",
    "no_excess",
    "insufficient_evidence",
    "reference_itself_is_broken",
    "variant_did_not_apply",
]
DECLARED = "as declared"
HALF = 0.5
"""Below half of the excess nothing is called an explanation; a fitted amount below half is no match of values."""
SCALE = 1.25
SURVIVORS = 4
LEAST_REACH = 0.5
"""However much its own schedules move it, a variant is measured against at least this part of the excess."""
EPSILON = 1e-14
"""Nats^2 below which two predictions are the same numbers."""


@dataclass(frozen=True)
class Scored:
    """What was scored of one side. Everything is float64 nats [tokens].

    values: what the side recorded. reference: float32. declared: its declared numerics under the default order of
    sums. placebos: [schedules, tokens], under other orders. variants: by name.
    """

    values_N: Floats
    reference_N: Floats
    declared_N: Floats
    placebo_KN: Floats
    variants: Mapping[str, Floats]


@dataclass(frozen=True)
class Explained:
    """How one variant did on held-out groups. part: of the excess, 1 is all of it; error: one standard error of it.

    beta: the fitted amount. left: distance that remains, RMS nats.
    """

    name: str
    part: float
    error: float
    beta: float
    left: float


@dataclass(frozen=True)
class Answer:
    """The answer about one side.

    named: what it names, empty unless `reproduced`. members: names alike within the floor, or that tie. blind: variants
    that change nothing this data could show. separable: which of the others it tells apart from all others. best: what
    did best, whatever it is worth. chance: what the best placebo schedule explains. excess: RMS nats beyond the floor.
    """

    answer: AnswerName
    reason: str
    named: tuple[str, ...] = ()
    members: tuple[str, ...] = ()
    classes: tuple[tuple[str, ...], ...] = ()
    blind: tuple[str, ...] = ()
    ranked: tuple[Explained, ...] = ()
    chance: float = 0.0
    multiple: Interval | None = None
    floor_multiple: Interval | None = None
    distance: float = 0.0
    floor: float = 0.0
    choice: str | None = None
    extra: Mapping[str, float] = field(default_factory=dict)


Combine = Callable[[Sequence[tuple[str, str]]], Mapping[str, Floats]]
"""Scores pairs of variants together; gives predictions [N] by `A + B`, leaving out pairs that cannot be."""
Repeat = Callable[[Sequence[str]], Mapping[str, Floats]]
"""Scores variants, or pairs of them, under some placebo schedules; gives [schedules, N] by name."""
Told = dict[str, tuple[Explained, Gain]]


class _Trial:
    """One side's residual, its floor and what directions explain of it."""

    def __init__(self, scored: Scored, draws: Draws, seed: int) -> None:
        self.draws, self.scored = draws, scored
        self.base_N = scored.placebo_KN.mean(axis=0)
        self.residual_N = scored.values_N - self.base_N
        self.floor: Floor = schedule_floor(scored.placebo_KN)
        self.fitted_RG = folds(draws.clusters, seed)
        self._excess_G = draws.sums(self.residual_N**2 - self.floor.spread_N)
        self.excess = float(self._excess_G.sum())
        placebos = [*scored.placebo_KN, scored.declared_N]
        self.chance = max((self.gain(one) for one in placebos), key=lambda gain: gain.total)

    def gain(self, prediction_N: Floats) -> Gain:
        return held_out(self.residual_N, prediction_N - self.base_N, self.draws, self.fitted_RG)

    def explained(self, name: str, prediction_KN: Floats) -> tuple[Explained, Gain]:
        """What the mean of a variant's schedules explains, of what that variant could explain at all.

        Its own schedules move it too: what they do is no one's to explain. prediction_KN: [schedules, tokens].
        """
        gain = self.gain(prediction_KN.mean(axis=0))
        reach_G = self._excess_G
        if len(prediction_KN) > 1:
            own_N = np.nan_to_num(schedule_floor(prediction_KN).spread_N)
            own_G = self.draws.sums(self.residual_N**2 - np.maximum(own_N, self.floor.spread_N))
            reach_G = own_G if own_G.sum() > LEAST_REACH * self.excess else reach_G * LEAST_REACH
        part = gain.total / float(reach_G.sum())
        error = standard_error(gain.by_group_G - part * reach_G) / float(reach_G.sum())
        left = float((self.residual_N**2).sum()) - gain.total
        rms = float(np.sqrt(max(left, 0.0) / len(self.residual_N)))
        return Explained(name, part, error, gain.beta, rms), gain


def answer(
    scored: Scored,
    draws: Draws,
    seed: int,
    combine: Combine | None = None,
    repeat: Repeat | None = None,
    undeclared: Callable[[str], bool] | None = None,
) -> Answer:
    """The answer about one side whose gates all passed.

    combine: scores two variants at once, for the greedy and the pairwise step; None skips both. repeat: scores the best
    under other orders of sums, so that their own noise is told from what they explain; None takes one order for all.
    undeclared: whether a variant departs from something the side never declared: within the side's own noise floor that
    is its choice.
    """
    if draws.clusters < LEAST_GROUPS:
        return Answer(
            "insufficient_evidence",
            f"{draws.clusters} groups cannot be split into some to fit on and others to judge on; "
            f"at least {LEAST_GROUPS} are needed.",
        )
    if not all(np.isfinite(part).all() for part in (scored.values_N, scored.declared_N, scored.placebo_KN)):
        return Answer("insufficient_evidence", "Some values are not finite, so no distance can be told.")
    trial = _Trial(scored, draws, seed)
    multiple = root_ratio(draws.mean(winsorise(trial.residual_N) ** 2), draws.mean(trial.floor.spread_N), draws)
    own = root_ratio(
        draws.mean(winsorise(scored.values_N - scored.reference_N) ** 2),
        noise_moment(scored.placebo_KN - scored.reference_N, draws),
        draws,
    )
    classes, blind = separable(scored, trial.floor)
    facts = {
        "classes": classes,
        "blind": blind,
        "multiple": multiple,
        "floor_multiple": own,
        "distance": float(np.sqrt((trial.residual_N**2).mean())),
        "floor": root(draws.mean(trial.floor.spread_N), draws).value,
    }
    if multiple.low <= FLOOR_MULTIPLE or trial.excess <= 0.0:
        reason = (
            f"The side stands {multiple.value:.2f} [{multiple.low:.2f}, {multiple.high:.2f}] times as far from what it "
            f"declares as schedules alone move it (up to {FLOOR_MULTIPLE} is noise): there is no excess to explain."
        )
        return Answer("no_excess", reason, **facts)  # type: ignore[arg-type]
    found = _Search(trial, scored, classes, blind, combine, repeat).found()
    small = trial.excess / len(trial.residual_N) <= FLOOR_MULTIPLE**2 * trial.floor.between
    return _judged(found, facts, own, undeclared or (lambda _: False), blind, small)


def separable(scored: Scored, floor: Floor) -> tuple[tuple[tuple[str, ...], ...], tuple[str, ...]]:
    """(classes, blind): variants this data cannot tell from each other, and those it cannot tell from the declaration.

    Two predictions differ when their distance exceeds FLOOR_MULTIPLE times that of two schedules of one arithmetic.
    Only predictions of one schedule are compared. A class is held together by its first member.
    """
    least = FLOOR_MULTIPLE**2 * floor.between
    apart = distances({DECLARED: scored.declared_N, **scored.variants})
    seen = [name for name in scored.variants if apart[DECLARED, name] > least]
    blind = tuple(name for name in scored.variants if name not in seen)
    classes: list[list[str]] = []
    for name in seen:
        home = next((one for one in classes if all(apart[name, other] <= least + EPSILON for other in one)), None)
        if home is None:
            classes.append([name])
        else:
            home.append(name)
    return tuple(tuple(one) for one in classes), blind


@dataclass(frozen=True)
class _Found:
    ranked: tuple[Explained, ...]
    winner: Explained | None
    members: tuple[str, ...]
    tied: bool
    scale: tuple[str, ...]
    chance: float


class _Search:
    """One at a time, then greedily on the best, then every pair of survivors."""

    def __init__(
        self,
        trial: _Trial,
        scored: Scored,
        classes: Sequence[Sequence[str]],
        blind: Sequence[str],
        combine: Combine | None,
        repeat: Repeat | None,
    ) -> None:
        self.trial, self.scored, self.classes, self.blind = trial, scored, classes, blind
        self.combine, self.repeat = combine, repeat
        self.home = {name: index for index, one in enumerate(classes) for name in one}
        self.once: Told = {
            name: trial.explained(name, values_N[None])
            for name, values_N in scored.variants.items()
            if name not in blind
        }

    def found(self) -> _Found:
        """Who explains the excess, and who explains it as well."""
        trial = self.trial
        first = sorted(self.once, key=lambda name: -self.once[name][1].total)
        better = [name for name in first if self.once[name][1].total > trial.chance.total]
        refined = self._refined(better[:SURVIVORS], self.scored.variants)
        told = {**self.once, **refined}
        alive = [name for name in told if told[name][0].beta >= HALF and told[name][1].beats(trial.chance)]
        alive.sort(key=lambda name: (name not in refined, -told[name][1].total))
        ranked = [one for one, _ in told.values()]
        chance = trial.chance.total / trial.excess
        if not alive:
            return _Found(_ordered(ranked), None, (), False, _scale(self.scored, self.once, self.blind), chance)
        best, gain = told[alive[0]]
        joint = self._joint(alive, best)
        for pair_one, pair_gain in joint.values():
            if pair_gain.beats(gain) and pair_one.beta >= HALF:
                best, gain = pair_one, pair_gain
        ranked = [*ranked, *(one for one, _ in joint.values())]
        if best.name in joint:
            return _Found(_ordered(ranked), best, (best.name,), False, (), chance)
        home = tuple(self.classes[self.home[best.name]])
        rivals = [name for name in alive if name not in home and self._ties(best.name, name, refined)]
        return _Found(_ordered(ranked), best, (*home, *rivals), bool(rivals), (), chance)

    def _ties(self, best: str, other: str, refined: Told) -> bool:
        """Whether the best is no better than another by more than one standard error, both scored alike."""
        told = refined if other in refined and best in refined else self.once
        return not told[best][1].beats(told[other][1])

    def _refined(self, names: Sequence[str], once: Mapping[str, Floats]) -> Told:
        """The same variants over several orders of sums."""
        if self.repeat is None or not names:
            return {}
        return {
            name: self.trial.explained(name, np.concatenate([once[name][None], more_KN]))
            for name, more_KN in self.repeat(names).items()
        }

    def _joint(self, alive: Sequence[str], best: Explained) -> Told:
        """Pairs that may do better than the best alone: the best with whoever explains the rest, and the survivors."""
        if self.combine is None:
            return {}
        wanted = [(best.name, name) for name in self._helpers(best)]
        wanted += [pair for pair in combinations(alive[:SURVIVORS], 2) if self.home[pair[0]] != self.home[pair[1]]]
        once = self.combine(list(dict.fromkeys(wanted)))
        told = {name: self.trial.explained(name, values_N[None]) for name, values_N in once.items()}
        base = self.once[best.name][1]
        promising = sorted((n for n in told if told[n][1].beats(base)), key=lambda name: -told[name][1].total)
        refined = self._refined(promising[:2], once)
        return refined if self.repeat is not None else {name: told[name] for name in promising}

    def _helpers(self, best: Explained) -> list[str]:
        """Variants that explain what the best leaves better than any placebo schedule does."""
        trial, variants = self.trial, self.scored.variants
        direction_N = np.nan_to_num(variants[best.name] - trial.base_N)
        left_N = trial.residual_N - best.beta * direction_N

        def gain(prediction_N: Floats, base_N: Floats) -> Gain:
            return held_out(left_N, prediction_N - base_N, trial.draws, trial.fitted_RG)

        chance = max((gain(one, trial.base_N) for one in self.scored.placebo_KN), key=lambda one: one.total)
        more = {
            name: gain(variants[name], self.scored.declared_N)
            for name in self.once
            if self.home[name] != self.home[best.name]
        }
        able = [name for name in more if more[name].beats(chance)]
        return sorted(able, key=lambda name: -more[name].total)[:SURVIVORS]


def _ordered(ranked: Sequence[Explained]) -> tuple[Explained, ...]:
    return tuple(sorted(ranked, key=lambda one: -one.part))


def _scale(scored: Scored, told: Told, blind: Sequence[str]) -> tuple[str, ...]:
    """Variants as far from the reference as the side is, where the declaration is not."""
    size = _rms(scored.values_N - scored.reference_N)

    def alike(values_N: Floats) -> bool:
        other = _rms(values_N - scored.reference_N)
        return other > 0.0 and 1.0 / SCALE < size / other < SCALE

    if alike(scored.declared_N):
        return ()
    return tuple(name for name in told if name not in blind and alike(scored.variants[name]))


def _rms(values_N: Floats) -> float:
    return float(np.sqrt(np.nanmean(values_N**2)))


def _judged(
    found: _Found,
    facts: Mapping[str, object],
    own: Interval,
    undeclared: Callable[[str], bool],
    blind: Sequence[str],
    small: bool,
) -> Answer:
    """small: the excess is within what blind variants can differ by."""
    shared: dict[str, object] = {**facts, "ranked": found.ranked, "chance": found.chance}

    def say(name: AnswerName, reason: str, **more: object) -> Answer:
        return Answer(name, reason, **shared, **more)  # type: ignore[arg-type]

    best = found.winner
    if best is None or best.part < HALF:
        top = found.ranked[0] if found.ranked else None
        if small:
            listed = ", ".join(blind[:3]) if blind else "a variant below the floor"
            text = f"The excess is as small as what variants nobody could see here leave ({listed}): nothing is named."
            return say("cannot_separate", text, members=tuple(blind))
        if found.scale:
            listed = ", ".join(found.scale[:3])
            return say(
                "consistent_with",
                f"Only the size of the distance matches {listed}; the values do not, so it is not called the cause.",
                members=found.scale,
            )
        tells = f"the best, {top.name}, explains {top.part:.0%} of it" if top else "no variant could be seen"
        return say("none_of_these", f"There is an excess, and no variant explains half of it: {tells}.")
    text = f"{best.name} explains {best.part:.0%} (standard error {best.error:.0%}) of the excess on held-out groups"
    if found.tied:
        rest = ", ".join(name for name in found.members if name != best.name)
        return say("cannot_separate", f"{text}, but so does {rest}: nothing is named.", members=found.members)
    if best.part - best.error < HALF:
        return say("cannot_separate", f"{text}: too unsure to name it; score more groups.", members=found.members)
    if own.low <= FLOOR_MULTIPLE and undeclared(best.name):
        reason = (
            f"The side is within its own noise floor; {text}, but nobody declared otherwise: it is that engine's own "
            "choice of arithmetic, not a fault."
        )
        return say("no_excess", reason, choice=best.name, members=found.members)
    chance = f"the best placebo schedule {found.chance:.0%}"
    return say("reproduced", f"{text}, {chance}.", named=(best.name,), members=found.members)
