"""Explain, from a run to an answer about one side: prepare, score variants, judge on held-out groups, record."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlk_ledger.history import History, load_history
from rlk_ledger.ledger import Ledger
from rlk_ledger.pairs import PairedSample, Pairing, pair
from rlk_ledger.verify import verify
from rlk_ledger_kernels.errors import KernelError
from rlk_ledger_replay import gates
from rlk_ledger_replay.checkpoint import CheckpointError, ModelConfig, load_checkpoint
from rlk_ledger_replay.explain import imitate
from rlk_ledger_replay.explain.answer import Answer, AnswerName, answer
from rlk_ledger_replay.explain.family import family
from rlk_ledger_replay.explain.record import record
from rlk_ledger_replay.explain.result import Explanation
from rlk_ledger_replay.explain.variant import Variant
from rlk_ledger_replay.gates import Gate
from rlk_ledger_replay.intervals import Floats, draw
from rlk_ledger_replay.preparation import Prepared, Request, prepare
from rlk_ledger_replay.record import new_replay_id
from rlk_ledger_replay.run import Progress, Silent
from rlk_ledger_replay.scores import Float32, Scores
from rlk_ledger_replay.semantics import Side
from rlk_ledger_replay.weights import Recorded, find_folder, hold, recorded_versions
from rlk_ledger_schemas.errors import LedgerError, SpoolError, StoreError

MOST_VERSIONS = 6


@dataclass(frozen=True)
class Material:
    """A prepared run: what both sides are explained from."""

    ledger: Ledger
    history: History
    pairing: Pairing
    prepared: Prepared
    request: Request


def explain(
    ledger: Ledger,
    run_id: str,
    side: Side,
    *,
    request: Request | None = None,
    progress: Progress | None = None,
    keep: bool = True,
) -> Explanation:
    """Says which variant of the reference one side's recorded values follow, if any, and records the answer.

    keep: whether it is recorded in the ledger. Raises LedgerError when the run does not exist or does not verify.
    """
    progress = progress or Silent()
    material = load(ledger, run_id, request or Request(), progress)
    return explain_side(material, side, progress, keep=keep)


def load(ledger: Ledger, run_id: str, request: Request, progress: Progress) -> Material:
    """Reads and prepares a run; raises LedgerError when it does not exist or does not verify."""
    progress.stage("verify")
    checked = verify(ledger, run_id)
    if checked.exit_code == 1:
        worst = next(one for one in checked.findings if one.severity == "error")
        raise LedgerError(f"run {run_id!r} does not verify: {worst.object}: {worst.text}. Nothing was explained.")
    progress.stage("prepare")
    history = load_history(ledger, run_id)
    pairing = pair(history)
    return Material(ledger, history, pairing, prepare(ledger, history, pairing, pairing.pairs, request), request)


def explain_side(material: Material, side: Side, progress: Progress | None = None, *, keep: bool = True) -> Explanation:
    """The explanation of one side of a prepared run, recorded where `keep`."""
    progress, started = progress or Silent(), time.monotonic()
    found = _explained(material, side, progress)
    found = replace(found, seconds=time.monotonic() - started)
    if not keep:
        return replace(found, not_recorded="recording was switched off")
    progress.stage("record")
    try:
        with material.ledger.writer(found.run_id, role="replay") as writer:
            record(found, writer)
    except (StoreError, SpoolError) as error:
        return replace(found, not_recorded=str(error))
    return found


def _explained(material: Material, side: Side, progress: Progress) -> Explanation:
    prepared, request = material.prepared, material.request
    pairs, tokens = prepared.selection.pairs, prepared.tokens
    empty = Explanation(
        run_id=material.history.run_id,
        replay_id=new_replay_id(),
        side=side,
        answer=Answer("insufficient_evidence", "Nothing was scored."),
        gates=prepared.gates,
        versions=tuple(material.pairing.versions),
        sample_ids=tuple(one.sample.sample_id for one in pairs),
        seed=request.seed,
        counts={
            "tokens": 0 if tokens is None else len(tokens),
            "samples": len(pairs),
            "groups": 0 if tokens is None else tokens.clusters,
        },
    )
    stopped = _stopped(prepared, side)
    if stopped is not None:
        return replace(empty, answer=stopped)
    assert tokens is not None
    folders, missing = _folders(material)
    config = load_checkpoint(next(iter(folders.values()))).config
    subject = imitate.Subject(side, pairs, tokens, prepared.declared[side], folders, config, request.threads)
    names = {index: material.pairing.versions[index] for index in sorted(folders)}
    variants = family(_temperatures(material), names, sorted(set(tokens.version_N.tolist())))
    tried = imitate.choose(subject, variants)
    owners = {one.name: one.factor for one in variants if one.name in tried.unmet}
    empty = replace(empty, unmet={**tried.unmet, **missing}, unmet_factors=owners, same=tried.same)
    try:
        return _scored(empty, subject, tried.variants, material, progress)
    except (KernelError, CheckpointError, RuntimeError, MemoryError) as error:
        text = f"Scoring failed: {type(error).__name__}: {error}."
        return replace(empty, answer=Answer("insufficient_evidence", text))


def _scored(
    empty: Explanation,
    subject: imitate.Subject,
    variants: Sequence[Variant],
    material: Material,
    progress: Progress,
) -> Explanation:
    passes = [*imitate.base_passes(subject), *filter(None, (imitate.variant_pass(v, subject) for v in variants))]
    progress.stage("score variants", imitate.work(subject, passes))
    scores = imitate.run_passes(subject, passes, progress.advance)
    checks = _checks(scores, material.pairing.versions)
    named = {one.name: one for one in variants}
    base = replace(empty, gates=(*empty.gates, *checks), variants=named, provenance=scores.provenance)
    broken = _broken(checks)
    if broken is not None:
        return replace(base, answer=broken)
    values = dict(scores.values)
    together = _More(subject, named, values, progress)
    bodies = contract_bodies(material.history, material.pairing, subject.pairs, subject.side)
    found = answer(
        imitate.scored(subject, values, variants),
        draw(subject.tokens.cluster_N, material.request.seed),
        material.request.seed,
        together,
        together.repeat,
        lambda name: not is_declared(together.known[name], bodies),
    )
    return replace(base, answer=found, variants=together.known)


class _More:
    """Scores what the search asks for: two variants at once, or some again under other orders of sums."""

    def __init__(
        self, subject: imitate.Subject, known: Mapping[str, Variant], values: Mapping[str, Float32], progress: Progress
    ) -> None:
        self._subject, self._values, self._progress = subject, values, progress
        self.known = dict(known)

    def __call__(self, wanted: Sequence[tuple[str, str]]) -> dict[str, Floats]:
        joined = [self.known[left].with_(self.known[right]) for left, right in wanted]
        pairs = [one for one in joined if one is not None]
        passes = [one for one in (imitate.variant_pass(pair, self._subject) for pair in pairs) if one is not None]
        values = dict(self._values)
        if passes:
            self._progress.stage("score pairs", imitate.work(self._subject, passes))
            values |= imitate.run_passes(self._subject, passes, self._progress.advance).values
        self.known |= {one.name: one for one in pairs}
        return imitate.predictions(self._subject, pairs, values)

    def repeat(self, names: Sequence[str]) -> dict[str, Floats]:
        """The named variants under the first placebo schedules, [schedules, tokens] each."""
        variants = [self.known[name] for name in names]
        passes = imitate.repeated_passes(variants, self._subject)
        self._progress.stage("score again", imitate.work(self._subject, passes))
        scores = imitate.run_passes(self._subject, passes, self._progress.advance).values
        return imitate.repeated(variants, self._subject, {**self._values, **scores})


def _stopped(prepared: Prepared, side: Side) -> Answer | None:
    """Why nothing can be scored at all."""
    if prepared.blocked is not None:
        return Answer("insufficient_evidence", f"Nothing can be scored: {prepared.blocked}.")
    if prepared.selection.biased:
        return Answer("insufficient_evidence", "These samples were chosen by their drift and stand for no run.")
    for gate in prepared.gates:
        if gate.status == "passed":
            continue
        if gate.gate in (f"evidence.dtypes.{side}", "evidence.shards"):
            return Answer("insufficient_evidence", f"Evidence is missing: {gate.reason}.")
        if gate.gate == f"applied.semantics.{side}":
            return Answer("variant_did_not_apply", f"{gate.reason}.")
        if gate.gate.startswith("weights.digest.") and gate.status == "failed":
            return Answer("insufficient_evidence", f"The weights are not the recorded ones: {gate.reason}.")
    return None


def _checks(scores: Scores, versions: Sequence[str]) -> list[Gate]:
    return [
        *gates.applied(scores.decisions),
        gates.self_check(scores.values[imitate.REFERENCE], scores.values[imitate.DECODE]),
        gates.read_only(scores.unchanged, versions),
    ]


def _broken(checks: Sequence[Gate]) -> Answer | None:
    stops: dict[str, AnswerName] = {
        "reference": "reference_itself_is_broken",
        "scorer": "reference_itself_is_broken",
        "applied": "variant_did_not_apply",
    }
    for gate in checks:
        if gate.status != "passed":
            return Answer(stops[gate.gate.partition(".")[0]], f"Nothing is named: {gate.reason}.")
    return None


def _folders(material: Material) -> tuple[dict[int, Path], dict[str, str]]:
    """Checkpoints by version index, of other recorded versions too, and why some are not to be had."""
    folders, missing = dict(material.prepared.folders or {}), dict[str, str]()
    facts = [
        {"type": fact.type, **fact.fields}
        for kind in ("weights.published", "weights.loaded")
        for fact in material.history.of(kind)
    ]
    recorded = recorded_versions(facts)
    own = sorted(folders)
    others = [index for index in range(len(material.pairing.versions)) if index not in folders]
    for index in sorted(others, key=lambda index: min(abs(index - one) for one in own))[:MOST_VERSIONS]:
        version = material.pairing.versions[index]
        one = recorded.get(version, Recorded(version))
        try:
            held = hold(one, find_folder(one, material.ledger.url, material.request.weights))
        except (LedgerError, CheckpointError) as error:
            missing[f"weights of {version}"] = str(error)
            continue
        if held.status == "failed":
            missing[f"weights of {version}"] = held.reason
        else:
            folders[index] = held.folder
    return folders, missing


def _temperatures(material: Material) -> set[float]:
    """Every temperature that was declared or sampled with anywhere among the chosen samples."""
    found: set[float] = set()
    for one in material.prepared.selection.pairs:
        for place in (one.rollout_contract, one.training_contract, one.sample.sampling):
            value = place.get("temperature")
            if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf"):
                found.add(float(value))
    return found


def contract_bodies(
    history: History, pairing: Pairing, pairs: Sequence[PairedSample], side: Side
) -> dict[str, dict[str, Any]]:
    """What a side's writers declared, by contract kind."""
    writers = {(one.rollout_series if side == "rollout" else one.training_series).first.writer_id for one in pairs}
    bodies: dict[str, dict[str, Any]] = {}
    for fact in history.of("contract.declared"):
        if fact.writer_id in writers or history.role(fact.writer_id) == side:
            bodies.setdefault(fact.fields["kind"], {}).update(fact.fields["body"])
    for one in pairs:
        bodies.setdefault("logprob", {}).update(one.rollout_contract if side == "rollout" else one.training_contract)
    return bodies


def is_declared(variant: Variant, bodies: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether the record says what the side should run where this variant departs."""
    return not variant.declared_by or any(
        bodies.get(kind, {}).get(name) is not None for kind, name in variant.declared_by
    )


__all__ = ["Explanation", "Material", "ModelConfig", "explain", "explain_side", "load"]
