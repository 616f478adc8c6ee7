"""Writes an explanation into the ledger: plan, one case a variant, gates, findings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rlk_ledger.audit.finding import plain
from rlk_ledger_replay.explain.result import Explanation
from rlk_ledger_replay.record import Recorder
from rlk_ledger_schemas import tolerances
from rlk_ledger_schemas.fingerprints import canonical_json, sha256


def record(found: Explanation, recorder: Recorder) -> None:
    """Records everything the explanation rests on."""
    for kind, fields in events(found):
        recorder.record(kind, **fields)


def events(found: Explanation) -> Iterator[tuple[str, dict[str, Any]]]:
    """The events of one explanation as (type, fields)."""
    yield (
        "replay.planned",
        {
            "replay_id": found.replay_id,
            "arms": [_arm(found)],
            "samples": found.counts.get("samples", 0),
            "selection": {"sample_ids": list(found.sample_ids), "seed": found.seed},
            "scorer": {"name": "explain", "side": found.side, "variants": sorted(found.variants)},
            "tolerance_version": tolerances.VERSION,
        },
    )
    for one in found.provenance:
        yield "operator.decided", {**one.to_event("reference").fields(), "labels": {"replay_id": found.replay_id}}
    yield from _cases(found)
    for gate in found.gates:
        fields = {"gate": gate.gate, "status": gate.status, "reason": gate.reason, "evidence": plain(gate.evidence)}
        yield "gate.checked", {"replay_id": found.replay_id, **fields}
    for finding in found.findings:
        yield "finding.raised", {"subject": found.replay_id, **finding.to_dict()}


def _arm(found: Explanation) -> str:
    return f"explain.{found.side}"


def _cases(found: Explanation) -> Iterator[tuple[str, dict[str, Any]]]:
    ranked = {one.name: one for one in found.answer.ranked}
    for name, variant in found.variants.items():
        request = {"variant": name, "changes": plain(dict(variant.changes)), "factor": variant.factor}
        base = _base(found, request)
        yield "case.attempted", {**base, "status": "completed", "request": request, "reason": None}
        one = ranked.get(name)
        why = None if one is not None else "changes nothing this data could show" if found.answer.multiple else None
        numbers = None if one is None else {"part": one.part, "error": one.error, "beta": one.beta, "left": one.left}
        yield (
            "arm.scored",
            {
                **base,
                "applied": name not in found.answer.blind,
                "tokens": found.counts["tokens"],
                "samples": found.counts["samples"],
                "groups": found.counts["groups"],
                "metrics": plain(numbers),
                "reason": why,
            },
        )
    for name, reason in found.unmet.items():
        request = {"variant": name}
        fields = {"status": "not_measured", "request": request, "reason": reason}
        yield "case.attempted", {**_base(found, request), **fields}


def _base(found: Explanation, request: dict[str, Any]) -> dict[str, Any]:
    key = {**request, "run_id": found.run_id, "side": found.side, "samples": list(found.sample_ids)}
    case_id = sha256(canonical_json({**key, "tolerance": tolerances.FINGERPRINT}))
    return {"replay_id": found.replay_id, "case_id": case_id, "arm": _arm(found)}
