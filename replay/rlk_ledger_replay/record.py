"""What a replay leaves in the ledger: its plan, operators, cases, scores, gates, findings and verdict, as events."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np

from rlk_ledger.audit.finding import plain
from rlk_ledger.classes import FINITE, MISSING
from rlk_ledger_replay.arms import Arm
from rlk_ledger_replay.decision import FAR_RATIO, FLOOR_MULTIPLE, SHARE_BOTH, SHARE_ONE
from rlk_ledger_replay.floor import CLIP_HIGH, CLIP_LOW
from rlk_ledger_replay.numerics import Numerics
from rlk_ledger_replay.record_live import live_events
from rlk_ledger_replay.result import ReplayResult
from rlk_ledger_schemas import tolerances
from rlk_ledger_schemas.fingerprints import canonical_json, contract_id, sha256

SCORED = {"rollout.decode": "replay:reference-rollout", "training.prefill": "replay:reference-training"}
"""The passes whose values are recorded, and the source they are recorded under."""

_PATHS = {"rollout.decode": "decode", "training.prefill": "full_prefill"}


class Recorder(Protocol):
    """Anything that records an event by type and fields."""

    def record(self, event: str, /, **fields: Any) -> Any:
        """Records one event."""


def new_replay_id() -> str:
    """A fresh id: replays of one run are told apart and never overwrite each other."""
    return f"replay-{uuid.uuid4().hex[:12]}"


def record(result: ReplayResult, recorder: Recorder) -> None:
    """Records everything `result` rests on, in the order it came about."""
    for kind, fields in events(result):
        recorder.record(kind, **fields)


def events(result: ReplayResult) -> Iterator[tuple[str, dict[str, Any]]]:
    """The events of one replay as (type, fields)."""
    yield "replay.planned", _planned(result)
    for one in result.scores.provenance if result.scores is not None else ():
        yield "operator.decided", {**one.to_event("reference").fields(), "labels": {"replay_id": result.replay_id}}
    yield from _scores(result)
    yield from _cases(result)
    yield from _lost(result)
    yield from live_events(result)
    for gate in result.judgement.gates:
        fields = {"gate": gate.gate, "status": gate.status, "reason": gate.reason, "evidence": plain(gate.evidence)}
        yield "gate.checked", {"replay_id": result.replay_id, **fields}
    for finding in result.findings:
        yield "finding.raised", {"subject": result.replay_id, **finding.to_dict()}
    yield "verdict.reached", _verdict(result)


def _planned(result: ReplayResult) -> dict[str, Any]:
    gates = [g for g in result.judgement.gates if g.gate.startswith("weights.digest.")]
    return {
        "replay_id": result.replay_id,
        "arms": list(result.arms),
        "samples": len(result.prepared.selection.pairs),
        "selection": result.prepared.selection.as_dict(),
        "scorer": {
            "name": "reference",
            "schedules": result.request.schedules,
            "threads": result.request.threads,
            "live": [one.label for one in result.request.live.scorers],
            "executor": result.request.plan.executor,
            "workers": result.request.plan.workers,
            "attempts": None if result.attempts is None else plain(result.attempts),
        },
        "weights": [{"gate": g.gate, "status": g.status, **plain(g.evidence)} for g in gates],
        "tolerance_version": tolerances.VERSION,
    }


def _cases(result: ReplayResult) -> Iterator[tuple[str, dict[str, Any]]]:
    scored = {arm.arm: arm for arm in result.judgement.arms}
    selection = result.prepared.selection
    counts = result.counts()
    failed = result.judgement.failed
    for name in result.arms:
        request = {"arm": name, "run_id": result.run_id, "samples": selection.as_dict()["sample_ids"]}
        case_id = sha256(canonical_json({**request, "tolerance": tolerances.FINGERPRINT}))
        arm = scored.get(name)
        status = "completed" if arm is not None else "not_measured" if failed is None else "error"
        base = {"replay_id": result.replay_id, "case_id": case_id, "arm": name}
        reason = None if arm is not None else failed or result.decision.reason
        yield "case.attempted", {**base, "status": status, "request": request, "reason": reason}
        if arm is not None:
            yield "arm.scored", {**base, **_arm(arm), "groups": counts["groups"]}


def _lost(result: ReplayResult) -> Iterator[tuple[str, dict[str, Any]]]:
    """One error attempt for each reason workers gave for samples they could not score."""
    by_reason: dict[str, list[str]] = {}
    for pair, reason in () if result.scores is None else sorted(result.scores.lost.items()):
        by_reason.setdefault(reason, []).append(result.prepared.selection.pairs[pair].sample.sample_id)
    for reason, samples in by_reason.items():
        request = {"run_id": result.run_id, "scorer": "reference", "samples": samples}
        case_id = sha256(canonical_json({**request, "tolerance": tolerances.FINGERPRINT}))
        told = {"status": "error", "request": request, "reason": reason}
        yield "case.attempted", {"replay_id": result.replay_id, "case_id": case_id, "arm": "both_reference", **told}


def _arm(arm: Arm) -> dict[str, Any]:
    return {
        "applied": arm.applied,
        "tokens": arm.drift.tokens,
        "samples": arm.drift.samples,
        "metrics": plain(arm.drift.values),
        "reason": arm.reason or None,
    }


def _scores(result: ReplayResult) -> Iterator[tuple[str, dict[str, Any]]]:
    """The reference's values of both sides' paths, one event a sample, NaN where no token was compared."""
    scores, tokens = result.scores, result.prepared.tokens
    if scores is None or tokens is None:
        return
    passes = {one.name: one for one in result.prepared.passes}
    declared: set[str] = set()
    for name, source in SCORED.items():
        for index, pair in enumerate(result.prepared.selection.pairs):
            numerics = passes[name].numerics[index]
            if numerics is None:
                continue
            body = _contract(numerics, _PATHS[name])
            contract = contract_id("logprob", "1", body)
            if contract not in declared:
                declared.add(contract)
                yield "contract.declared", {"kind": "logprob", "version": "1", "body": body}
            rows = np.flatnonzero(tokens.pair_N == index)
            values = np.full(len(pair.sample), np.nan, dtype=np.float32)
            values[tokens.position_N[rows]] = scores.values[name][rows]
            sample = pair.sample
            fields: dict[str, Any] = {"sample_id": sample.sample_id, "source": source, "contract_id": contract}
            yield (
                "logprobs",
                {
                    **fields,
                    "values": values,
                    "value_class": np.where(np.isnan(values), MISSING, FINITE).astype(np.uint8),
                    "dtype": "float32",
                    "pass_id": result.replay_id,
                    "step": sample.step,
                    "attempt": sample.attempt,
                    "token_digest": sample.token_digest or None,
                    "mask_digest": sample.mask_digest or None,
                },
            )


def _contract(numerics: Numerics, path: str) -> dict[str, Any]:
    return {
        "mode": numerics.logprob_mode,
        "temperature": numerics.temperature,
        "compute_dtype": numerics.compute,
        "head_dtype": numerics.lm_head or numerics.compute,
        "logits_dtype": numerics.logits or numerics.lm_head or numerics.compute,
        "alignment": "token_i_given_before_i",
        "execution_path": path,
    }


def _verdict(result: ReplayResult) -> dict[str, Any]:
    return {
        "verdict": result.verdict,
        "subject": result.replay_id,
        "decision": result.decision.decision,
        "reason": result.decision.reason,
        "exit_code": result.exit_code,
        "tolerance_version": tolerances.VERSION,
        "evidence": plain(
            {
                **result.numbers(),
                "counts": result.counts(),
                "clip_edges": [CLIP_LOW, CLIP_HIGH],
                "side": result.decision.side,
                "rules": {
                    "far_ratio": FAR_RATIO,
                    "floor_multiple": FLOOR_MULTIPLE,
                    "share_one": SHARE_ONE,
                    "share_both": SHARE_BOTH,
                },
                "tolerance_fingerprint": tolerances.FINGERPRINT,
            }
        ),
    }
