"""Did what was asked for run? Requested, materialised and actual are three facts. (backend.not_in_force)"""

from collections.abc import Iterable
from typing import Any

from rlk_ledger.audit.finding import Finding
from rlk_ledger.audit.view import View
from rlk_ledger.history import Fact
from rlk_ledger.pairs import SIDES

_FAILED = ("fallback", "unsupported", "error")
_ANY_BACKEND = ("auto", "default", "native", "any")
_OFF = (False, None, "off", "0", 0)
_GUARANTEES = ("batch_invariant", "determinis", "bitwise")
"""Words in the path of a setting that promises equal bits."""


def detect(view: View) -> Iterable[Finding]:
    """Knobs and operator decisions whose actual value is not the requested one."""
    knobs: dict[str, list[Fact]] = {}
    for fact in view.history.of("knob.applied"):
        if _knob_failed(fact.fields):
            knobs.setdefault(fact.fields["path"], []).append(fact)
    decided = [f for f in view.history.of("operator.decided") if _operator_failed(f.fields)]
    explained: set[int] = set()
    for path, facts in knobs.items():
        related = [f for f in decided if _belongs(f.fields, path)]
        explained |= {id(f) for f in related}
        yield _knob(path, facts, related)
    groups: dict[tuple[str, str], list[Fact]] = {}
    for fact in decided:
        if id(fact) not in explained:
            groups.setdefault((fact.fields["side"], fact.fields["operator"]), []).append(fact)
    for (side, operator), facts in groups.items():
        where = {"path": f"{side}.{operator}", "side": side, "operator": operator}
        yield Finding("backend.not_in_force", where, _decision(facts[0].fields) | {"decisions": len(facts)})


def _knob_failed(fields: dict[str, Any]) -> bool:
    if fields["status"] in _FAILED:
        return True
    actual, requested = fields.get("actual"), fields["requested"]
    return (
        fields["status"] == "applied" and actual is not None and requested not in _ANY_BACKEND and actual != requested
    )


def _operator_failed(fields: dict[str, Any]) -> bool:
    """A fallback to a backend that preserves the same contract keeps the promise and is no failure."""
    if fields.get("bucket") == "contract_preserving":
        return False
    requested, actual = fields["requested_backend"], fields["actual_backend"]
    return bool(fields["fallback"]) or (requested not in _ANY_BACKEND and requested != actual)


def _belongs(fields: dict[str, Any], path: str) -> bool:
    """Whether an operator decision is the same failure as a knob's: same side, same word."""
    side, _, name = path.partition(".")
    requested = fields["requested_backend"]
    return bool(fields["side"] == side and (requested in name or name in requested or fields["operator"] in name))


def _decision(fields: dict[str, Any]) -> dict[str, Any]:
    names = ("operator", "requested_backend", "actual_backend", "reason", "rejected", "contract_id")
    return {name: fields.get(name) for name in names}


def _knob(path: str, facts: list[Fact], related: list[Fact]) -> Finding:
    first = facts[0].fields
    names = ("requested", "materialized", "actual", "status", "evidence", "lifecycle")
    evidence: dict[str, Any] = {name: first.get(name) for name in names}
    evidence["writers"] = sorted({fact.writer_id for fact in facts})
    evidence["operators"] = [_decision(fact.fields) for fact in related]
    return Finding("backend.not_in_force", {"path": path, "status": first["status"]}, evidence)


def promises_bits(knob: Fact) -> bool:
    """Whether a `knob.applied` asks for batch invariance or determinism."""
    return any(word in knob.fields["path"] for word in _GUARANTEES) and knob.fields["requested"] not in _OFF


def determinism(view: View) -> list[dict[str, Any]]:
    """Knobs that make a side batch-invariant or deterministic and that were read back in force, as evidence."""
    return [
        {"path": f.fields["path"], "evidence": f.fields["evidence"], "writer": f.writer_id}
        for f in view.history.of("knob.applied")
        if promises_bits(f)
        and f.fields["status"] == "applied"
        and f.fields.get("actual") == f.fields["requested"]
        and f.fields.get("evidence")
    ]


def deterministic_sides(view: View) -> tuple[str, ...]:
    """The sides that recorded such evidence: bitwise equality is expected only where both did."""
    roles = {view.history.role(one["writer"]) for one in determinism(view)}
    return tuple(side for side in SIDES if side in roles)
