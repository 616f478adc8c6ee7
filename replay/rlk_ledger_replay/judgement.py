"""From scores to an answer: arms, shares, floors, the decision and the findings it raises."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rlk_ledger.audit.finding import Finding
from rlk_ledger_replay import gates
from rlk_ledger_replay.arms import ARMS, Arm, ArmName, References, arm_counts, chain, score_arms
from rlk_ledger_replay.decision import FLOOR_MULTIPLE, Decision, decide, zero_drift
from rlk_ledger_replay.floor import CLIP_HIGH, Floors, clipped_by_noise, floors, noise_statistics
from rlk_ledger_replay.gates import Gate
from rlk_ledger_replay.intervals import DRAWS, Draws, Floats, Interval, draw
from rlk_ledger_replay.live import LiveFindings, judge_live
from rlk_ledger_replay.live import findings as live_findings
from rlk_ledger_replay.live import gates as live_gates
from rlk_ledger_replay.preparation import HELD, Prepared
from rlk_ledger_replay.routed_pass import ROUTED
from rlk_ledger_replay.scorers.plan import LiveScores
from rlk_ledger_replay.scores import Float32, Scores, Tokens
from rlk_ledger_replay.semantics import SIDES, Side
from rlk_ledger_replay.shares import Shares, moments, shares
from rlk_ledger_schemas.findings import FINDINGS
from rlk_ledger_schemas.metrics import ZERO_DRIFT_FRACTION


@dataclass(frozen=True)
class Judgement:
    """What a replay found. Shares, floors, noise and links are empty where the reference did not score.

    failed: the error that stopped the scoring, where one did. live: what live engines add, where any was asked for.
    """

    decision: Decision
    arms: tuple[Arm, ...]
    gates: tuple[Gate, ...]
    findings: tuple[Finding, ...]
    shares: Shares | None = None
    floors: Floors | None = None
    noise: Mapping[Side, Mapping[str, float]] = field(default_factory=dict)
    links: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    residual: Decision | None = None
    failed: str | None = None
    live: LiveFindings | None = None


def judge(
    prepared: Prepared,
    scores: Scores,
    versions: Sequence[str],
    *,
    arms: tuple[ArmName, ...] = ARMS,
    determinism: bool = False,
    live: LiveScores | None = None,
) -> Judgement:
    """Judges the scored tokens of `prepared`; `versions` names weight versions by index.

    determinism: whether both engines are recorded as bitwise deterministic. live: what live engines gave.
    """
    tokens = prepared.tokens
    if tokens is None:
        raise ValueError("nothing was prepared to be judged")
    reference = References(
        scores.values["training.prefill"], scores.values["rollout.decode"], scores.values["rollout.prefill"]
    )
    every = score_arms(tokens, reference)
    draws = draw(tokens.cluster_N, prepared.selection.seed, DRAWS)
    e_r = tokens.rollout_N.astype(np.float64) - reference.rollout_prefill
    e_t = tokens.training_N.astype(np.float64) - reference.training_prefill
    found = moments(e_r, e_t, draws)
    noise = {side: _noise(scores, side, reference) for side in SIDES}
    parts = shares(found, draws)
    engines = None if live is None else judge_live(live, tokens, reference, draws, parts, noise)
    native = {} if engines is None else engines.native
    measured = floors(found, noise["rollout"], noise["training"], draws, native)
    checks = [*prepared.gates, *_checks(tokens, reference, scores, versions), *live_gates(engines)]
    numeric = decide(parts, measured, arm_counts(every, tokens), determinism=determinism)
    equal = _equal_fraction(tokens, measured)
    decision, residual = _first(checks, equal, prepared, numeric, determinism)
    if HELD in scores.values:
        told = "Scored with the weights its engine held"
        decision = _explained(decision, told, scores.values[HELD], e_t, tokens, noise, draws, native)
    if ROUTED in scores.values:
        routed = scores.values[ROUTED]
        along_N = np.where(np.isnan(routed), reference.rollout_prefill, routed)
        decision = _explained(decision, "Along its recorded routes", along_N, e_t, tokens, noise, draws, native)
    statistics = {side: noise_statistics(part) for side, part in noise.items() if part is not None}
    return Judgement(
        decision=decision,
        arms=tuple(arm for arm in every if arm.arm in arms),
        gates=tuple(checks),
        findings=(*_findings(decision, checks, parts, measured, noise), *live_findings(engines)),
        shares=parts,
        floors=measured,
        noise=statistics,
        links=chain(tokens, reference),
        residual=residual,
        live=engines,
    )


def _checks(tokens: Tokens, reference: References, scores: Scores, versions: Sequence[str]) -> list[Gate]:
    """The gates that need scores."""
    return [
        *gates.applied(scores.decisions),
        gates.self_check(reference.rollout_prefill, reference.rollout_decode),
        gates.read_only(scores.unchanged, versions),
        gates.alignment("rollout", tokens.rollout_N, reference.rollout_prefill, tokens),
        gates.alignment("training", tokens.training_N, reference.training_prefill, tokens),
    ]


def _equal_fraction(tokens: Tokens, measured: Floors) -> float:
    """The share of bitwise equal tokens; 0 where the others drift beyond the floor, or no floor says that they do not.

    Equality of most tokens must not hide the rest.
    """
    equal = float((tokens.rollout_N.view(np.uint32) == tokens.training_N.view(np.uint32)).mean())
    if equal < 1.0 and (measured.multiple_drift is None or measured.multiple_drift.high > FLOOR_MULTIPLE):
        return 0.0
    return equal


def unscored(prepared: Prepared, reason: str, *, requested: bool = False, failed: bool = False) -> Judgement:
    """The judgement when the reference did not score: only the recorded values can be compared.

    requested: the user asked for the recorded values alone. failed: scoring began and `reason` is the error.
    """
    decision = Decision("insufficient_evidence", "inconclusive", f"The reference did not score: {reason.rstrip('.')}.")
    if prepared.redacted:
        decision = replace(decision, decision="not_applicable", verdict="not_applicable")
    arms = []
    if prepared.tokens is not None:
        empty = np.full(len(prepared.tokens), np.nan, dtype=np.float32)
        arms = score_arms(prepared.tokens, References(empty, empty, empty), ("both_native",))
    finding_id = "evidence.incomplete" if requested else "replay.redacted" if prepared.redacted else "replay.failed"
    finding = Finding(finding_id, {"arms": list(ARMS[1:])}, {"reason": reason}, decision.reason)
    return Judgement(decision, tuple(arms), prepared.gates, (finding,), failed=reason if failed else None)


def _explained(
    decision: Decision,
    how: str,
    held_N: Float32,
    e_t: Floats,
    tokens: Tokens,
    noise: Mapping[Side, Floats | None],
    draws: Draws,
    native: Mapping[str, Floats],
) -> Decision:
    """The decision with what is left of the rollout's distance once it is scored `how`, which gave `held_N`."""
    e_r = tokens.rollout_N.astype(np.float64) - held_N
    left = floors(moments(e_r, e_t, draws), noise["rollout"], noise["training"], draws, native).multiple_rollout
    if left is None:
        return decision
    told = f"{left.value:.2f} [{left.low:.2f}, {left.high:.2f}] times its floor"
    cause = decision.side == "rollout" and left.high <= FLOOR_MULTIPLE
    extra = f" {how}, the rollout side stands at {told}{': they are the cause' if cause else ''}."
    return replace(decision, reason=decision.reason + extra)


def _noise(scores: Scores, side: Side, reference: References) -> Floats | None:
    names = [name for name in scores.values if name.startswith(f"{side}.floor.")]
    if not names:
        return None
    base = reference.rollout_prefill if side == "rollout" else reference.training_prefill
    return np.stack([scores.values[name].astype(np.float64) - base for name in names])


def _first(
    checks: Sequence[Gate], equal: float, prepared: Prepared, numeric: Decision, determinism: bool
) -> tuple[Decision, Decision | None]:
    """The first thing that decides: a broken reference, a variant that did not run, unlike sides, then the numbers.

    Returns (decision, residual): the residual is what the numbers say once each side is scored as it declares.
    """
    failed = {gate.gate: gate for gate in checks if gate.status == "failed"}
    for name in ("reference.self_check", "scorer.read_only"):
        if name in failed:
            broken = f"The reference cannot be believed: {failed[name].reason}."
            return Decision("reference_itself_is_broken", "inconclusive", broken), None
    for name, gate in failed.items():
        if name.startswith("applied."):
            return Decision("variant_did_not_apply", "inconclusive", _sentence(gate.reason)), None
    for name, gate in failed.items():
        if name.startswith(("comparable.", "alignment.")):
            return _unlike(gate, numeric), numeric
    if equal >= ZERO_DRIFT_FRACTION:
        return zero_drift(equal, determinism), None
    if prepared.selection.biased and numeric.verdict != "inconclusive":
        reason = f"{numeric.reason} These samples were chosen by their drift and do not stand for the run."
        return Decision("insufficient_evidence", "inconclusive", reason), numeric
    return numeric, None


def _unlike(gate: Gate, numeric: Decision) -> Decision:
    if gate.gate.startswith("alignment."):
        return Decision("not_comparable", "not_comparable", _sentence(gate.reason))
    confirmed = numeric.decision == "within_floor"
    scored = "That difference is the cause; scored" if confirmed else "Scored"
    reason = f"{_sentence(gate.reason)} {scored} as each side declares it: {_lower(numeric.reason)}"
    return Decision("not_comparable", "not_comparable", reason)


def _findings(
    decision: Decision,
    checks: Sequence[Gate],
    parts: Shares,
    measured: Floors,
    noise: Mapping[Side, Floats | None],
) -> list[Finding]:
    numbers = {"reason": decision.reason, **evidence(parts, measured)}
    out = []
    if decision.decision == "within_floor":
        out.append(Finding("drift.within_floor", {}, numbers))
    elif decision.decision.startswith("caused_by"):
        out.append(Finding("drift.attributed", {"side": decision.side or "both"}, numbers))
    elif decision.decision == "reference_disagrees_with_both":
        out.append(Finding("reference.disagrees", {}, numbers))
    elif decision.decision == "drift_zero":
        out.append(Finding("drift.zero", {}, numbers))
    if decision.decision == "insufficient_evidence" or (
        decision.decision == "drift_zero" and decision.verdict == "inconclusive"
    ):
        step = FINDINGS["drift.zero"].next_step if decision.decision == "drift_zero" else decision.reason
        out.append(Finding("evidence.incomplete", {"subject": "replay"}, numbers, step))
    out += [finding for gate in checks for finding in _of_gate(gate)]
    out += _clipped(measured, noise)
    return out


def _of_gate(gate: Gate) -> list[Finding]:
    """The finding a gate that did not pass raises; comparability and engine weights are the audit's to raise.

    The conditions on live engines raise theirs together, by engine.
    """
    kind = gate.gate.partition(".")[0]
    if gate.status == "passed" or kind in ("comparable", "live") or gate.gate.startswith("weights.held"):
        return []
    body = {"reason": gate.reason, **gate.evidence}
    if kind in ("reference", "scorer"):
        return [Finding("reference.broken", {"gate": gate.gate}, body)]
    if kind == "applied":
        return [Finding("variant.did_not_apply", {"gate": gate.gate}, body)]
    if kind == "alignment":
        return [Finding("alignment.shift", {"side": gate.evidence["side"], "lag": gate.evidence["lag"]}, body)]
    return [Finding("evidence.incomplete", {"gate": gate.gate}, body, _sentence(gate.reason))]


def _clipped(measured: Floors, noise: Mapping[Side, Floats | None]) -> list[Finding]:
    r, t = noise["rollout"], noise["training"]
    if measured.combined is None or r is None or t is None or measured.combined.low <= CLIP_HIGH:
        return []
    body = {"floor": measured.combined.as_dict(), "edge": CLIP_HIGH, "clipped_by_noise": clipped_by_noise(r, t)}
    return [Finding("noise.clip_below_floor", {}, body)]


def evidence(parts: Shares | None, measured: Floors | None) -> dict[str, Any]:
    """Shares, distances, floors and multiples as plain values; None where not measured."""
    numbers: dict[str, Interval | None] = {}
    if parts is not None:
        numbers |= {
            "share_rollout": parts.rollout,
            "share_training": parts.training,
            "error_rollout": parts.error_rollout,
            "error_training": parts.error_training,
            "drift": parts.drift,
        }
    if measured is not None:
        numbers |= {
            "floor_rollout": measured.rollout,
            "floor_training": measured.training,
            "floor_drift": measured.combined,
            "multiple_rollout": measured.multiple_rollout,
            "multiple_training": measured.multiple_training,
            "multiple_drift": measured.multiple_drift,
        }
        numbers |= {f"floor_{side}_placebo": one for side, one in measured.placebo.items() if measured.native}
        numbers |= {f"floor_{side}_native": one for side, one in measured.native.items()}
    return {name: None if value is None else value.as_dict() for name, value in numbers.items()}


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:].rstrip(".") + "."


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]
