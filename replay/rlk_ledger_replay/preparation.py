"""Everything a replay settles before it computes a number: samples, semantics, checkpoints, gates and passes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from rlk_ledger.history import History
from rlk_ledger.ledger import Ledger
from rlk_ledger.pairs import PairedSample, Pairing
from rlk_ledger_kernels.dtypes import DType
from rlk_ledger_kernels.schedule import placebo_schedules
from rlk_ledger_replay import gates
from rlk_ledger_replay.adapters import How
from rlk_ledger_replay.executors import Plan
from rlk_ledger_replay.gates import Gate
from rlk_ledger_replay.numerics import Numerics
from rlk_ledger_replay.progress import Progress
from rlk_ledger_replay.routed_pass import routed_pass
from rlk_ledger_replay.routes import Coverage
from rlk_ledger_replay.scorers.engines import Live
from rlk_ledger_replay.scores import Pass, Tokens, compared_tokens, is_redacted, why_unscorable
from rlk_ledger_replay.selection import Method, Selection, select
from rlk_ledger_replay.semantics import SIDES, Declared, Side, declared
from rlk_ledger_replay.shelf import OTHER_WAY, Shelf, applied_as, other_way
from rlk_ledger_replay.weights import Held
from rlk_ledger_replay.work import Model

HELD = "rollout.held"
"""The pass that scores the rollout's values with the weights its engine really held."""


@dataclass(frozen=True)
class Request:
    """What the user asked for. samples: how many to score; schedules: placebo schedules a floor is measured with.

    live: which engines stand in for the sides, and how they are run. plan: who scores. adapter: where low-rank adapters
    are, as `weights`; adapter_as: how a side applied them, where the record does not say; merge_dtype: what merged
    weights are rounded to, None for their own dtype. attempts: the folder scorings are kept in while the replay runs,
    None to keep none; resume: whether those of earlier replays are used.
    """

    samples: int = 64
    seed: int = 0
    method: Method = "stratified"
    weights: str | None = None
    schedules: int = 4
    threads: int = 1
    live: Live = field(default_factory=Live)
    plan: Plan = field(default_factory=Plan)
    adapter: str | None = None
    adapter_as: Mapping[Side, How] = field(default_factory=dict)
    merge_dtype: DType | None = None
    attempts: Path | None = None
    resume: bool = False


@dataclass(frozen=True)
class Prepared:
    """A replay ready to score: passes and folders are empty when `blocked` says why nothing can be scored.

    `redacted`: nothing can, whatever checkpoints there are, because no token id is on record. models: the weights to
    score each version with. adapters: how each side applied its adapters, empty without any. routes: what of the chosen
    samples recorded routes cover, None where none were recorded.
    """

    selection: Selection
    tokens: Tokens | None
    declared: dict[Side, tuple[Declared, ...]]
    gates: tuple[Gate, ...]
    passes: tuple[Pass, ...] = ()
    folders: dict[int, Path] | None = None
    blocked: str | None = None
    redacted: bool = False
    models: dict[int, Model] = field(default_factory=dict)
    adapters: Mapping[Side, How] = field(default_factory=dict)
    routes: Coverage | None = None


def prepare(
    ledger: Ledger,
    history: History,
    pairing: Pairing,
    pairs: Sequence[PairedSample],
    request: Request,
    progress: Progress | None = None,
) -> Prepared:
    """Chooses samples among `pairs`, reads their checkpoints and checks every gate that needs no score.

    Checkpoints that are missing, unreadable or not the recorded ones block scoring; nothing is computed on them.
    """
    first = select(pairs, request.samples, request.seed, request.method)
    if not first.pairs:
        return Prepared(first, None, dict.fromkeys(SIDES, ()), (), blocked="no token is paired, active and finite")
    if all(is_redacted(pair.sample) for pair in pairs if pair.compared.any()):
        sides = {side: tuple(_declared(history, pair, side) for pair in first.pairs) for side in SIDES}
        reason = f"token ids are redacted ({history.redaction}); only their owner can score them again"
        alike = tuple(gates.comparability(first.pairs))
        return Prepared(first, compared_tokens(first.pairs), sides, alike, blocked=reason, redacted=True)
    shelf = Shelf(ledger, history, pairing, request, progress)
    shelf.take(_claimed(first.pairs))
    usable, left_out = _scorable(pairs, shelf.held)
    selection = select(usable, request.samples, request.seed, request.method)
    chosen = selection.pairs or first.pairs
    shelf.take(_claimed(chosen))
    sides = {side: tuple(_declared(history, pair, side) for pair in chosen) for side in SIDES}
    tokens = compared_tokens(chosen)
    unlike = gates.engine_weights(history, [pairing.versions[i] for i in shelf.held])
    blocked = _blocked(shelf, bool(selection.pairs), left_out)
    swap = [] if blocked is not None else _as_held(unlike, pairing, chosen, tokens, sides, shelf)
    checks = (
        *gates.comparability(chosen),
        *gates.checkpoints(shelf.held.values()),
        *unlike,
        *gates.evidence(sides, pairing, left_out),
        *shelf.missing.values(),
    )
    if blocked is not None:
        stand_in = selection if selection.pairs else first
        return Prepared(stand_in, tokens, sides, checks, blocked=blocked)
    folders = {version: one.folder for version, one in shelf.held.items()}
    how = applied_as(history, shelf.adapted, request)
    config = next(iter(shelf.held.values())).config
    routed, routes, unfit = routed_pass(chosen, sides["rollout"], config, how.get("rollout"))
    passes = (*_passes(sides, request.schedules, how), *swap, *routed)
    every = (*checks, *shelf.adapter_gates, *unfit)
    return Prepared(
        selection, tokens, sides, every, passes, folders, models=shelf.models(), adapters=how, routes=routes
    )


def _claimed(pairs: Sequence[PairedSample]) -> list[int]:
    """Indices of the weight versions the compared tokens claim; unknown ones are left out."""
    return sorted({int(v) for pair in pairs for v in np.unique(pair.version[pair.compared]) if v >= 0})


def _scorable(pairs: Sequence[PairedSample], held: dict[int, Held]) -> tuple[list[PairedSample], dict[str, int]]:
    """Pairs the decoder can score, and how many it cannot, by reason. Versions without a checkpoint are not judged."""
    if not held:
        return [], {}
    config = next(iter(held.values())).config
    usable, left_out = [], Counter[str]()
    for pair in pairs:
        if not pair.compared.any():
            continue
        reason = why_unscorable(pair, config.positions, config.vocabulary)
        if reason is None:
            usable.append(pair)
        else:
            left_out[reason] += 1
    return usable, dict(left_out)


def _blocked(shelf: Shelf, scorable: bool, left_out: Mapping[str, int]) -> str | None:
    for one in shelf.held.values():
        if one.status == "failed":
            return f"the checkpoint of {one.version} in {one.folder} is not the recorded one: {one.reason}"
    for gate in shelf.missing.values():
        return gate.reason
    if not shelf.held:
        return "no weight version was recorded for the compared tokens"
    return None if scorable else f"no sample can be scored: {', '.join(left_out)}"


def _as_held(
    unlike: Sequence[Gate],
    pairing: Pairing,
    pairs: Sequence[PairedSample],
    tokens: Tokens,
    sides: dict[Side, tuple[Declared, ...]],
    shelf: Shelf,
) -> list[Pass]:
    """The rollout's reference under the weights an engine held instead of those it claimed, where a digest says so."""
    used = tokens.version_N.copy()
    for gate in unlike:
        held = [pairing.versions.index(name) for name in gate.evidence["holds"][:1]]
        shelf.take(held)
        engine = np.array([pair.sample.engine == gate.evidence["engine"] for pair in pairs])
        claimed = tokens.version_N == pairing.versions.index(gate.evidence["version"])
        if held and held[0] in shelf.held and shelf.held[held[0]].status != "failed":
            used[claimed & engine[tokens.pair_N]] = held[0]
    if np.array_equal(used, tokens.version_N):
        return []
    return [Pass(HELD, tuple(one.reference for one in sides["rollout"]), "prefill", used)]


def _declared(history: History, pair: PairedSample, side: Side) -> Declared:
    series = pair.rollout_series if side == "rollout" else pair.training_series
    body = pair.rollout_contract if side == "rollout" else pair.training_contract
    writer = series.first.writer_id
    others: dict[str, Mapping[str, Any]] = {}
    for fact in sorted(history.of("contract.declared"), key=lambda fact: fact.writer_id == writer):
        if fact.fields["kind"] != "logprob" and (fact.writer_id == writer or history.role(fact.writer_id) == side):
            others[fact.fields["kind"]] = fact.fields["body"]
    knobs = {
        fact.fields["path"]: fact.fields.get("actual")
        for fact in history.of("knob.applied")
        if fact.writer_id == writer and fact.fields["status"] in ("applied", "fallback")
    }
    sampling = pair.sample.sampling if side == "rollout" else None
    return declared(side, body, others.items(), knobs=knobs, sampling=sampling)


def _passes(sides: dict[Side, tuple[Declared, ...]], schedules: int, how: Mapping[Side, How]) -> tuple[Pass, ...]:
    """Both references, the rollout's along both paths, and both sides' placebo schedules.

    how: how each side applied its adapters; the reference is then scored the other way as well.
    """
    rollout = tuple(one.reference for one in sides["rollout"])
    training = tuple(one.reference for one in sides["training"])
    out = [
        Pass("rollout.decode", rollout, "decode", how=how.get("rollout")),
        Pass("rollout.prefill", rollout, "prefill", how=how.get("rollout")),
        Pass("training.prefill", training, "prefill", how=how.get("training")),
    ]
    for side in how:
        references = rollout if side == "rollout" else training
        out.append(Pass(f"{side}.{OTHER_WAY}", references, "prefill", how=other_way(how[side])))
    for side in SIDES:
        if any(one.imitation is None for one in sides[side]):
            continue
        for number, schedule in enumerate(placebo_schedules(schedules)):
            numerics: list[Numerics | None] = [
                replace(one.imitation, schedule=schedule) for one in sides[side] if one.imitation is not None
            ]
            out.append(Pass(f"{side}.floor.{number}", tuple(numerics), "prefill", how=how.get(side)))
    return tuple(out)
