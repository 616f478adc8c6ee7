"""Everything a replay settles before it computes a number: samples, semantics, checkpoints, gates and passes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlk_ledger.history import History
from rlk_ledger.ledger import Ledger
from rlk_ledger.pairs import PairedSample, Pairing
from rlk_ledger_kernels.schedule import placebo_schedules
from rlk_ledger_replay import gates
from rlk_ledger_replay.checkpoint import CheckpointError
from rlk_ledger_replay.gates import Gate
from rlk_ledger_replay.numerics import Numerics
from rlk_ledger_replay.scores import Pass, Tokens, compared_tokens, why_unscorable
from rlk_ledger_replay.selection import Method, Selection, select
from rlk_ledger_replay.semantics import SIDES, Declared, Side, declared
from rlk_ledger_replay.weights import Held, Recorded, find_folder, hold, recorded_versions
from rlk_ledger_schemas.errors import LedgerError


@dataclass(frozen=True)
class Request:
    """What the user asked for. samples: how many to score; schedules: placebo schedules a floor is measured with."""

    samples: int = 64
    seed: int = 0
    method: Method = "stratified"
    weights: str | None = None
    schedules: int = 4
    threads: int = 1


@dataclass(frozen=True)
class Prepared:
    """A replay ready to score: passes and folders are empty when `blocked` says why nothing can be scored."""

    selection: Selection
    tokens: Tokens | None
    declared: dict[Side, tuple[Declared, ...]]
    gates: tuple[Gate, ...]
    passes: tuple[Pass, ...] = ()
    folders: dict[int, Path] | None = None
    blocked: str | None = None


def prepare(
    ledger: Ledger, history: History, pairing: Pairing, pairs: Sequence[PairedSample], request: Request
) -> Prepared:
    """Chooses samples among `pairs`, reads their checkpoints and checks every gate that needs no score.

    Checkpoints that are missing, unreadable or not the recorded ones block scoring; nothing is computed on them.
    """
    first = select(pairs, request.samples, request.seed, request.method)
    if not first.pairs:
        return Prepared(first, None, dict.fromkeys(SIDES, ()), (), blocked="no token is paired, active and finite")
    held, missing = _checkpoints(ledger, history, pairing, pairs, first.pairs, request)
    usable, left_out = _scorable(pairs, held)
    selection = select(usable, request.samples, request.seed, request.method)
    chosen = selection.pairs or first.pairs
    sides = {side: tuple(_declared(history, pair, side) for pair in chosen) for side in SIDES}
    tokens = compared_tokens(chosen)
    checks = [
        *gates.comparability(chosen),
        *gates.checkpoints(held.values()),
        *gates.engine_weights(history, [pairing.versions[i] for i in held]),
        *gates.evidence(sides, pairing, left_out),
        *missing,
    ]
    blocked = _blocked(held, missing, bool(selection.pairs))
    if blocked is not None:
        return Prepared(replace(selection, pairs=chosen), tokens, sides, tuple(checks), blocked=blocked)
    folders = {version: one.folder for version, one in held.items()}
    return Prepared(selection, tokens, sides, tuple(checks), _passes(sides, request.schedules), folders)


def _checkpoints(
    ledger: Ledger,
    history: History,
    pairing: Pairing,
    pairs: Sequence[PairedSample],
    chosen: Sequence[PairedSample],
    request: Request,
) -> tuple[dict[int, Held], list[Gate]]:
    """Checkpoints of every version the chosen samples claim, by version index, and gates for those not to be had."""
    events = [
        {"type": f.type, **f.fields} for kind in ("weights.published", "weights.loaded") for f in history.of(kind)
    ]
    recorded = recorded_versions(events)
    held: dict[int, Held] = {}
    missing: list[Gate] = []
    for index in sorted({int(v) for pair in chosen for v in pair.version[pair.compared] if v >= 0}):
        version = pairing.versions[index]
        wanted = recorded.get(version, Recorded(version))
        try:
            held[index] = hold(wanted, find_folder(wanted, ledger.url, request.weights))
        except (LedgerError, CheckpointError) as error:
            missing.append(Gate(f"weights.digest.{version}", "unknown", str(error), {"version": version}))
    return held, missing


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


def _blocked(held: dict[int, Held], missing: Sequence[Gate], scorable: bool) -> str | None:
    wrong = [one for one in held.values() if one.status == "failed"]
    if wrong:
        return f"the checkpoint of {wrong[0].version} in {wrong[0].folder} is not the recorded one: {wrong[0].reason}"
    if missing:
        return missing[0].reason
    if not held:
        return "no weight version was recorded for the compared tokens"
    return None if scorable else "no sample can be scored by the reference"


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


def _passes(sides: dict[Side, tuple[Declared, ...]], schedules: int) -> tuple[Pass, ...]:
    """Both references, the rollout's along both paths, and both sides' placebo schedules."""
    rollout = tuple(one.reference for one in sides["rollout"])
    training = tuple(one.reference for one in sides["training"])
    out = [
        Pass("rollout.decode", rollout, "decode"),
        Pass("rollout.prefill", rollout, "prefill"),
        Pass("training.prefill", training, "prefill"),
    ]
    for side in SIDES:
        if any(one.imitation is None for one in sides[side]):
            continue
        for number, schedule in enumerate(placebo_schedules(schedules)):
            numerics: list[Numerics | None] = [
                replace(one.imitation, schedule=schedule) for one in sides[side] if one.imitation is not None
            ]
            out.append(Pass(f"{side}.floor.{number}", tuple(numerics), "prefill"))
    return tuple(out)
