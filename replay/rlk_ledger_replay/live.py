"""What live engines add to a replay: where along the chain the drift arises, whether a recorded side can be had again,
how much its own layouts move it, and whether float32 runs of the engines give the same shares as the reference.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rlk_ledger.audit.finding import Finding
from rlk_ledger_replay.arms import References
from rlk_ledger_replay.floor import floor_moment
from rlk_ledger_replay.gates import Gate
from rlk_ledger_replay.intervals import Draws, Floats, Interval
from rlk_ledger_replay.scorers.engines import OWN_PATH, Wanted
from rlk_ledger_replay.scorers.plan import Attempt, LiveScores, Role
from rlk_ledger_replay.scorers.protocol import Guard, Statement
from rlk_ledger_replay.scores import Float32, Tokens
from rlk_ledger_replay.semantics import SIDES, Side
from rlk_ledger_replay.shares import Moments, Shares, moments, root, root_ratio, shares, winsorise

_ORDER = {"failed": 0, "unknown": 1, "passed": 2}


@dataclass(frozen=True)
class Difference:
    """How far two series of log-probabilities (nats) are apart: b from a.

    equal: share of bitwise equal tokens. part: of the whole drift, where this is a link of its chain; parts sum to 1.
    """

    mean: float
    mean_abs: Interval
    rms: Interval
    max: float
    equal: float
    sample_sum: float
    part: Interval | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        found: dict[str, Any] = {"mean": self.mean, "max": self.max, "equal": self.equal, "sample_sum": self.sample_sum}
        found |= {"mean_abs": self.mean_abs.as_dict(), "rms": self.rms.as_dict()}
        return found if self.part is None else found | {"part": self.part.as_dict()}


@dataclass(frozen=True)
class Stood:
    """One live engine in one side's place.

    applied: no guard failed. reproduction: recorded values against its own along the side's path. error: its distance
    from the float32 reference. layouts: its two layouts against each other; floor: that over the root of two, in nats,
    None where they agree bit for bit. times: the reproduction's RMS over the side's noise floor. float32: its float32
    run against the reference.
    """

    wanted: Wanted
    statements: Mapping[str, Statement]
    layout: str
    note: str
    roles: tuple[Role, ...]
    applied: bool
    guards: tuple[Guard, ...]
    reproduction: Difference | None = None
    error: Difference | None = None
    layouts: Difference | None = None
    floor: Interval | None = None
    times: Interval | None = None
    float32: Difference | None = None


@dataclass(frozen=True)
class LiveFindings:
    """Everything the live engines add. chains: by rollout engine, link to its difference, in order.

    native: by side, layout noise for its floor, float64 nats [1, N]. shares32: shares with float32 runs of the engines
    in place of the reference; sides32: whose; agree32: whether their intervals overlap the reference's.
    """

    scores: LiveScores
    stood: tuple[Stood, ...]
    chains: Mapping[str, Mapping[str, Difference]] = field(default_factory=dict)
    native: Mapping[str, Floats] = field(default_factory=dict)
    shares32: Shares | None = None
    sides32: tuple[Side, ...] = ()
    agree32: bool | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain values for events and machines."""
        return {
            "scorers": {one.wanted.label: _stood_dict(one) for one in self.stood},
            "attempts": [_attempt_dict(one) for one in self.scores.attempts],
            "chain": {
                name: {link: one.as_dict() for link, one in links.items()} for name, links in self.chains.items()
            },
            "float32": self._float32(),
        }

    def _float32(self) -> dict[str, Any] | None:
        found = self.shares32
        if found is None:
            return None
        named = {"share_rollout": found.rollout, "share_training": found.training}
        values = {name: None if one is None else one.as_dict() for name, one in named.items()}
        return {**values, "sides": list(self.sides32), "agrees": self.agree32}


def judge_live(
    scores: LiveScores,
    tokens: Tokens,
    reference: References,
    draws: Draws,
    parts: Shares,
    noise: Mapping[Side, Floats | None],
) -> LiveFindings:
    """Everything the live engines' values say; what has none is left out and stays an attempt.

    parts: the shares by the reference. noise: each side's placebo noise, float64 nats [schedules, N].
    """
    stood = [_stood(scores, one, tokens, reference, draws) for one in scores.wanted]
    native: dict[str, Floats] = {side: found for side in SIDES if (found := _native(scores, stood, side)) is not None}
    shares32, sides32 = _shares32(scores, tokens, reference, draws)
    return LiveFindings(
        scores=scores,
        stood=tuple(replace(one, times=_times(scores, one.wanted, tokens, noise, native, draws)) for one in stood),
        chains=_chains(scores, tokens, draws),
        native=native,
        shares32=shares32,
        sides32=sides32,
        agree32=None if shares32 is None else agreeing(shares32, parts),
    )


def _native(scores: LiveScores, stood: Sequence[Stood], side: Side) -> Floats | None:
    """The layout difference over the root of two, float64 nats [1, N], of a side's first engine that has one.

    None where no engine has both layouts, a guard did not pass, or the layouts agree bit for bit: what an engine does
    not move at all is no measurement of its noise.
    """
    for one in stood:
        if one.wanted.side != side or one.floor is None or any(g.status != "passed" for g in one.guards):
            continue
        a, b = scores.get(one.wanted, _own(one.wanted)), scores.get(one.wanted, "alone")
        if a is not None and b is not None:
            return _floored(a, b)[None, :]
    return None


def _times(
    scores: LiveScores,
    one: Wanted,
    tokens: Tokens,
    noise: Mapping[Side, Floats | None],
    native: Mapping[str, Floats],
    draws: Draws,
) -> Interval | None:
    """How far the recorded values are from the live ones, over the side's floor."""
    own = scores.get(one, _own(one))
    floor, _ = floor_moment(noise[one.side], native.get(one.side), draws)
    if own is None or floor is None:
        return None
    recorded = tokens.rollout_N if one.side == "rollout" else tokens.training_N
    apart = winsorise(recorded.astype(np.float64) - own)
    return root_ratio(draws.mean(apart**2), floor, draws)


def gates(found: LiveFindings | None) -> list[Gate]:
    """One gate for each condition checked on a live engine, at its worst."""
    out: list[Gate] = []
    if found is None:
        return out
    for one in found.stood:
        for guard in one.guards:
            name = f"live.{one.wanted.label}.{guard.name}"
            out.append(Gate(name, guard.status, guard.reason, dict(guard.evidence)))
    if found.agree32 is not None:
        sides = " and ".join(found.sides32)
        reason = f"shares by float32 runs of the live {sides} engine{'s' * (len(found.sides32) > 1)}"
        told = "agree with" if found.agree32 else "differ from"
        sentence = f"{reason} {told} those by the reference"
        out.append(Gate("live.float32.shares", "passed" if found.agree32 else "failed", sentence))
    return out


def findings(found: LiveFindings | None) -> list[Finding]:
    """What was asked of live engines and could not be had: attempts without values, guards that failed."""
    out: list[Finding] = []
    if found is None:
        return out
    for one in found.stood:
        failed = [guard for guard in one.guards if guard.status == "failed"]
        if failed:
            trace = {guard.name: guard.reason for guard in failed}
            where = {"scorer": one.wanted.label, "gate": failed[0].name}
            out.append(Finding("variant.did_not_apply", where, {"reason": failed[0].reason, "trace": trace}))
        missing: dict[str, list[str]] = {}
        for attempt in found.scores.attempts:
            if attempt.wanted == one.wanted and attempt.status != "completed":
                missing.setdefault(attempt.reason, []).append(attempt.role)
        for reason, roles in missing.items():
            told = {"scorer": one.wanted.label, "arms": sorted(set(roles))}
            step = f"The {one.wanted.label} scorer has no values: {reason.rstrip('.')}."
            out.append(Finding("replay.failed", told, {"reason": reason}, step))
    if found.agree32 is False:
        body = found.as_dict()["float32"]
        step = "Find out which of the two is wrong before believing either: the shares rest on it."
        out.append(Finding("evidence.incomplete", {"gate": "live.float32.shares"}, body, step))
    return out


def agreeing(shares32: Shares, parts: Shares) -> bool | None:
    """Whether the shares by float32 engines and by the reference overlap in their intervals; None where neither is."""
    pairs = zip((shares32.rollout, shares32.training), (parts.rollout, parts.training))
    both = [(a, b) for a, b in pairs if a is not None and b is not None]
    return all(a.low <= b.high and b.low <= a.high for a, b in both) if both else None


def _stood(scores: LiveScores, one: Wanted, tokens: Tokens, reference: References, draws: Draws) -> Stood:
    recorded = tokens.rollout_N if one.side == "rollout" else tokens.training_N
    ref = reference.rollout_prefill if one.side == "rollout" else reference.training_prefill
    guards = _worst(scores.guards.get(one, ()))
    own, alone, in32 = scores.get(one, _own(one)), scores.get(one, "alone"), scores.get(one, "float32")
    floor = None
    if own is not None and alone is not None and not np.array_equal(own, alone):
        floor = root(draws.mean(winsorise(_floored(own, alone)) ** 2), draws)
    return Stood(
        wanted=one,
        statements={dtype: told for (name, dtype), told in scores.statements.items() if name == one},
        layout=scores.layout(one),
        note=scores.notes.get(one, ""),
        roles=tuple(role for name, role in scores.values if name == one),
        applied=all(guard.status != "failed" for guard in guards),
        guards=guards,
        reproduction=None if own is None else difference(own, recorded, tokens, draws),
        error=None if own is None else difference(ref, own, tokens, draws),
        layouts=None if own is None or alone is None else difference(alone, own, tokens, draws),
        floor=floor,
        float32=None if in32 is None else difference(ref, in32, tokens, draws),
    )


def difference(a_N: Float32, b_N: Float32, tokens: Tokens, draws: Draws, drift_N: Floats | None = None) -> Difference:
    """b - a over the compared tokens; `drift_N` makes it a link: its part is its covariance with the drift."""
    d_N = b_N.astype(np.float64) - a_N
    size = draws.mean(np.abs(d_N))
    return Difference(
        mean=float(d_N.mean()),
        mean_abs=draws.interval(*size),
        rms=root(draws.mean(winsorise(d_N) ** 2), draws),
        max=float(np.abs(d_N).max()),
        equal=float((a_N.view(np.uint32) == b_N.view(np.uint32)).mean()),
        sample_sum=float(d_N.sum() / len(np.unique(tokens.pair_N))),
        part=None if drift_N is None else _part(d_N, drift_N, draws),
    )


def _part(link_N: Floats, drift_N: Floats, draws: Draws) -> Interval | None:
    own, whole = draws.mean(link_N * drift_N), draws.mean(drift_N * drift_N)
    if whole[0] == 0.0:
        return None
    apart = whole[1] > 0.0
    return draws.interval(own[0] / whole[0], np.where(apart, own[1] / np.where(apart, whole[1], 1.0), np.nan))


def _chains(scores: LiveScores, tokens: Tokens, draws: Draws) -> dict[str, dict[str, Difference]]:
    """t/r = (t / prefill) x (prefill / decode) x (decode / r) by every rollout engine that has both paths.

    A live engine of the training side takes the first link apart: (t / live) x (live / prefill).
    """
    drift_N = tokens.training_N.astype(np.float64) - tokens.rollout_N
    trainers = ((one, scores.get(one, "prefill")) for one in scores.wanted if one.side == "training")
    trained = next(((one.label, values) for one, values in trainers if values is not None), None)
    out = {}
    for one in scores.wanted:
        prefill, decode = scores.get(one, "prefill"), scores.get(one, "decode")
        if one.side != "rollout" or prefill is None or decode is None:
            continue
        series: list[tuple[str, Float32]] = [("rollout", tokens.rollout_N), ("decode", decode), ("prefill", prefill)]
        if trained is not None:
            series.append(trained)
        series.append(("training", tokens.training_N))
        links = {
            f"{name}_over_{below}": difference(low, high, tokens, draws, drift_N)
            for (below, low), (name, high) in itertools.pairwise(series)
        }
        links["training_over_rollout"] = difference(tokens.rollout_N, tokens.training_N, tokens, draws, drift_N)
        out[one.label] = links
    return out


def _shares32(
    scores: LiveScores, tokens: Tokens, reference: References, draws: Draws
) -> tuple[Shares | None, tuple[Side, ...]]:
    """Shares with each side's first float32 run in place of the reference, and the sides that have one."""
    against = {"rollout": reference.rollout_prefill, "training": reference.training_prefill}
    found: list[Side] = []
    for side in SIDES:
        runs = (scores.get(one, "float32") for one in scores.wanted if one.side == side)
        in32 = next((values for values in runs if values is not None), None)
        if in32 is not None:
            against[side] = in32
            found.append(side)
    if not found:
        return None, ()
    e_r = tokens.rollout_N.astype(np.float64) - against["rollout"]
    e_t = tokens.training_N.astype(np.float64) - against["training"]
    measured: Moments = moments(e_r, e_t, draws)
    return shares(measured, draws), tuple(found)


def _own(wanted: Wanted) -> Role:
    return "decode" if OWN_PATH[wanted.side] == "decode" else "prefill"


def _floored(a_N: Float32, b_N: Float32) -> Floats:
    scaled: Floats = (a_N.astype(np.float64) - b_N) / np.sqrt(2.0)
    return scaled


def _worst(guards: Sequence[Guard]) -> tuple[Guard, ...]:
    worst: dict[str, Guard] = {}
    for guard in guards:
        held = worst.get(guard.name)
        if held is None or _ORDER[guard.status] < _ORDER[held.status]:
            worst[guard.name] = guard
    return tuple(worst.values())


def _stood_dict(one: Stood) -> dict[str, Any]:
    measured = {
        "reproduction": one.reproduction,
        "error": one.error,
        "layouts": one.layouts,
        "float32": one.float32,
    }
    return {
        "side": one.wanted.side,
        "layout": one.layout,
        "note": one.note or None,
        "applied": one.applied,
        "statements": [_statement_dict(told) for told in one.statements.values()],
        **{name: None if value is None else value.as_dict() for name, value in measured.items()},
        "roles": list(one.roles),
        "reproduction_times_floor": None if one.times is None else one.times.as_dict(),
        "floor_native": None if one.floor is None else one.floor.as_dict(),
        "guards": {guard.name: {"status": guard.status, "reason": guard.reason} for guard in one.guards},
    }


def _statement_dict(told: Statement) -> dict[str, Any]:
    return {
        "engine": told.engine,
        "version": told.version,
        "device": told.device,
        "dtype": told.dtype,
        "how": dict(told.how),
        "knobs": [{"path": k.path, "requested": k.requested, "actual": k.actual} for k in told.knobs],
    }


def _attempt_dict(one: Attempt) -> dict[str, Any]:
    return {
        "scorer": one.wanted.label,
        "role": one.role,
        "status": one.status,
        "reason": one.reason or None,
        "layout": one.layout,
        "elapsed_s": round(one.elapsed, 3),
    }
