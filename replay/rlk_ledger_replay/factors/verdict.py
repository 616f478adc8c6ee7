"""The verdict on a factor from what explains each side; a pure function, fail-closed.

First rule that applies: a broken reference, a variant that did not run, a guard that is not sound or evidence that is
missing; then what is named; then whether this data could have shown the factor at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlk_ledger_replay.explain.result import Explanation
from rlk_ledger_replay.factors.factor import Factor, FactorVerdict, Judged
from rlk_ledger_replay.semantics import SIDES, Side


def judge(factor: Factor, sides: Mapping[Side, Explanation]) -> Judged:
    """The verdict on `factor`. sides: the explanation of each side that was asked for."""
    for side, found in sides.items():
        name = found.answer.answer
        if name in ("reference_itself_is_broken", "variant_did_not_apply"):
            return Judged(factor, name, f"{side} side: {found.answer.reason}")
    missing = [side for side in SIDES if side not in sides]
    if missing:
        return Judged(factor, "insufficient_evidence", f"The {missing[0]} side was not explained.")
    unsound = _unsound(factor, sides)
    if unsound is not None:
        return Judged(factor, "insufficient_evidence", unsound)
    for side, found in sides.items():
        if found.answer.answer == "insufficient_evidence":
            return Judged(factor, "insufficient_evidence", f"{side} side: {found.answer.reason}")
    named = [side for side in SIDES if factor.factor in sides[side].factors]
    return _named(factor, sides, named) if named else _unnamed(factor, sides)


def _unsound(factor: Factor, sides: Mapping[Side, Explanation]) -> str | None:
    for found in sides.values():
        for gate in found.gates:
            if gate.status != "passed" and any(gate.gate.startswith(guard) for guard in factor.guards):
                return f"Guard {gate.gate} is not sound: {gate.reason}."
    return None


def _named(factor: Factor, sides: Mapping[Side, Explanation], named: list[Side]) -> Judged:
    others = sorted({one for side in named for one in sides[side].factors} - {factor.factor})
    evidence: dict[str, Any] = {side: sides[side].evidence()["ranked"][:3] for side in named}
    reason = "; ".join(f"{side} side: {sides[side].answer.reason}" for side in named)
    if others:
        reason = f"Only together with {', '.join(others)}: {reason}"
        return Judged(factor, "coupled_with_other_factors", reason, tuple(others), evidence)
    alike = sorted({_factor_of(sides[side], name) for side in named for name in sides[side].answer.members})
    rivals = tuple(name for name in alike if name not in ("", factor.factor))
    if rivals:
        text = f"This data cannot tell it from {', '.join(rivals)}: {reason}"
        return Judged(factor, "insufficient_evidence", text, rivals, evidence)
    verdict: FactorVerdict = "caused_by_both_sides"
    if len(named) == 1:
        verdict = "caused_by_rollout_side" if named[0] == "rollout" else "caused_by_training_side"
    return Judged(factor, verdict, reason, (), evidence)


def _unnamed(factor: Factor, sides: Mapping[Side, Explanation]) -> Judged:
    for side, found in sides.items():
        names = [name for name, one in found.variants.items() if one.factor == factor.factor]
        unmet = [f"{name}: {reason}" for name, reason in found.unmet.items() if _belongs(factor, name, found)]
        answer = found.answer
        if factor.needs_experts and unmet:
            continue
        if not names:
            return Judged(factor, "insufficient_evidence", f"{side} side: no variant of it could be tried.")
        if answer.answer in ("no_excess", "reproduced"):
            continue
        if answer.answer == "cannot_separate" and any(name in answer.members for name in names):
            return Judged(factor, "insufficient_evidence", f"{side} side: {answer.reason}")
        if all(name in answer.blind for name in names):
            text = f"{side} side: nothing here could show it, so the excess may or may not be its doing."
            return Judged(factor, "insufficient_evidence", text)
    return Judged(factor, "not_this_factor", "Every variant of it was tried, and none explains what a side does.")


def _belongs(factor: Factor, name: str, found: Explanation) -> bool:
    return found.unmet_factors.get(name) == factor.factor


def _factor_of(found: Explanation, name: str) -> str:
    one = found.variants.get(name)
    return "" if one is None else one.factor
