"""What live engines leave in the ledger: a case for each engine, role and weight version, and the values they gave."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from rlk_ledger.audit.finding import plain
from rlk_ledger.classes import FINITE, MISSING
from rlk_ledger.metrics import measure
from rlk_ledger_replay.live import LiveFindings, Stood
from rlk_ledger_replay.result import ReplayResult
from rlk_ledger_replay.scorers.plan import Attempt, LiveScores, Role
from rlk_ledger_schemas.fingerprints import canonical_json, contract_id, sha256

RECORDED: tuple[Role, ...] = ("prefill", "decode")
"""The roles whose values are recorded, under the source `replay:<scorer>-<role>` (`@` of a scorer written `.`)."""

_PATHS = {"prefill": "full_prefill", "decode": "decode"}

Events = Iterator[tuple[str, dict[str, Any]]]


def live_events(result: ReplayResult) -> Events:
    """The events of the live engines of one replay as (type, fields); a case is `live:<scorer>:<role>`."""
    wanted = result.request.live.scorers
    found = result.judgement.live
    if found is None:
        for one in wanted:
            reason = f"the reference did not score, so no engine was started: {result.decision.reason}"
            yield "case.attempted", _case(result, f"live:{one.label}", {}, "not_measured", reason)
        return
    for attempt in found.scores.attempts:
        yield from _attempt(result, found, attempt)
    for stood in found.stood:
        yield from _values(result, found.scores, stood)


def _attempt(result: ReplayResult, found: LiveFindings, attempt: Attempt) -> Events:
    arm = f"live:{attempt.wanted.label}:{attempt.role}"
    stood = next(one for one in found.stood if one.wanted == attempt.wanted)
    request = {
        "engine": attempt.wanted.engine.name,
        "side": attempt.wanted.side,
        "role": attempt.role,
        "layout": attempt.layout,
        "weights": str((result.prepared.folders or {}).get(attempt.version, "")),
        "statements": plain(found.as_dict()["scorers"][attempt.wanted.label]["statements"]),
    }
    fields = _case(result, arm, request, attempt.status, attempt.reason or None)
    yield "case.attempted", {**fields, "elapsed_ms": 1000.0 * attempt.elapsed}
    values, tokens = found.scores.get(attempt.wanted, attempt.role), result.prepared.tokens
    if attempt.status != "completed" or values is None or tokens is None:
        return
    rows = np.flatnonzero(tokens.version_N == attempt.version)
    recorded = tokens.rollout_N if attempt.wanted.side == "rollout" else tokens.training_N
    drift = measure(recorded[rows], values[rows], sample=tokens.pair_N[rows])
    failed = [guard.reason for guard in stood.guards if guard.status == "failed"]
    yield (
        "arm.scored",
        {
            **{name: fields[name] for name in ("replay_id", "case_id", "arm")},
            "applied": stood.applied,
            "tokens": drift.tokens,
            "samples": drift.samples,
            "groups": len(np.unique(tokens.cluster_N[rows])),
            "metrics": plain(drift.values),
            "reason": failed[0] if failed else None,
        },
    )


def _case(result: ReplayResult, arm: str, request: dict[str, Any], status: str, reason: str | None) -> dict[str, Any]:
    full = {"arm": arm, "run_id": result.run_id, "samples": result.prepared.selection.as_dict()["sample_ids"]} | request
    case_id = sha256(canonical_json(full))
    base = {"replay_id": result.replay_id, "case_id": case_id, "arm": arm}
    return {**base, "status": status, "request": full, "reason": reason}


def _values(result: ReplayResult, scores: LiveScores, one: Stood) -> Events:
    """The values of an engine's paths, one event a sample, NaN where no token was compared."""
    tokens = result.prepared.tokens
    assert tokens is not None
    declared: set[str] = set()
    for role in RECORDED:
        values_N = scores.get(one.wanted, role)
        if values_N is None:
            continue
        for index, pair in enumerate(result.prepared.selection.pairs):
            body = _contract(result, one, role, index)
            contract = contract_id("logprob", "1", body)
            if contract not in declared:
                declared.add(contract)
                yield "contract.declared", {"kind": "logprob", "version": "1", "body": body}
            rows = np.flatnonzero(tokens.pair_N == index)
            values = np.full(len(pair.sample), np.nan, dtype=np.float32)
            values[tokens.position_N[rows]] = values_N[rows]
            yield (
                "logprobs",
                {
                    "sample_id": pair.sample.sample_id,
                    "source": f"replay:{one.wanted.label.replace('@', '.')}-{role}",
                    "contract_id": contract,
                    "values": values,
                    "value_class": np.where(np.isnan(values), MISSING, FINITE).astype(np.uint8),
                    "dtype": "float32",
                    "pass_id": result.replay_id,
                    "step": pair.sample.step,
                    "attempt": pair.sample.attempt,
                    "token_digest": pair.sample.token_digest or None,
                    "mask_digest": pair.sample.mask_digest or None,
                },
            )


def _contract(result: ReplayResult, one: Stood, role: Role, index: int) -> dict[str, Any]:
    """What the values are, by what the engine said it runs."""
    numerics = result.prepared.declared[one.wanted.side][index].reference
    told = next(iter(one.statements.values()))
    actual = {knob.path: knob.actual for knob in told.knobs}
    return {
        "mode": numerics.logprob_mode,
        "temperature": numerics.temperature,
        "compute_dtype": told.dtype,
        "head_dtype": actual.get("head_dtype") or told.dtype,
        "logits_dtype": actual.get("logits_dtype") or actual.get("head_dtype") or told.dtype,
        "alignment": "token_i_given_before_i",
        "execution_path": _PATHS[role],
    }
