"""Do the sides declare the same numeric contract? (contract.differs, numerics.differ, evidence.incomplete)

What is computed (semantic fields) and how the head rounds (numeric fields of the logprob contract) must be the same on
both sides: `contract.differs`. Two engines are never the same program, though: an order of rounding inside a norm, or
a whole engine in another precision, is said as `numerics.differ`, and replay measures what it costs against each
side's own floor. The dtype fields that follow from an engine's precision are part of that one finding.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from itertools import product
from typing import Any

from rlk_ledger.audit.finding import Finding
from rlk_ledger.audit.view import View
from rlk_ledger_schemas.contracts import differing_fields, field_class, same, undeclared_fields
from rlk_ledger_schemas.dtypes import dtype_name

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "temperature": (1.0,),
    "top_p": (1.0, None),
    "top_k": (-1, 0, None),
    "min_p": (0.0, None),
    "penalties": ({}, None),
}
_ACCUMULATORS = frozenset({"lse_dtype", "accumulate_dtype"})
"""Float32 whatever an engine computes in; a narrower one is a choice of its own."""


def detect(view: View) -> Iterable[Finding]:
    """Fields of the contracts that scores of both sides name, then contracts of other kinds."""
    used: Counter[tuple[str, str]] = Counter()
    for held in view.pairing.series.values():
        if held["rollout"] and held["training"]:
            used[held["rollout"][0].first.contract_id, held["training"][0].first.contract_id] += 1
    found: dict[str, Finding] = {}
    precisions: set[Precision] = set()
    for (left, right), samples in used.items():
        for finding in _scores(view, left, right, samples):
            found.setdefault(f"{finding.where.get('kind')}.{finding.where.get('field')}", finding)
        precisions.add(_precision(view.history.contracts, left, right))
    yield from found.values()
    yield from _other_kinds(view, precisions.pop() if len(precisions) == 1 else (None, None))


def _scores(view: View, left_id: str, right_id: str, samples: int) -> Iterable[Finding]:
    contracts = view.history.contracts
    for contract_id in (left_id, right_id):
        if contract_id not in contracts:
            yield Finding(
                "evidence.incomplete",
                {"kind": "logprob", "field": "contract_id", "contract_id": contract_id},
                {"reason": "scores name a contract that no writer declared", "samples": samples},
                "Record contract.declared once per writer before its scores.",
            )
    if left_id not in contracts or right_id not in contracts:
        return
    left, right = contracts[left_id]["body"], contracts[right_id]["body"]
    evidence = {"rollout_contract": left_id, "training_contract": right_id, "samples": samples}
    same_semantics = effective(left) == effective(right)
    precision = _precision(contracts, left_id, right_id)
    if precision[0] != precision[1]:
        yield _differs("logprob", "compute_dtype", "numeric", *precision, evidence, "numerics.differ")
    for name, kind, a, b in differing_fields("logprob", left, right):
        if same_semantics and (name == "mode" or name in _NEUTRAL):
            continue
        if not _follows(name, a, b, precision):
            yield _differs("logprob", name, kind, a, b, evidence)
    for name, kind in undeclared_fields("logprob", left, right):
        if kind == "semantic" and name in ("mode", "temperature", "alignment") and not same_semantics:
            yield Finding(
                "evidence.incomplete",
                {"kind": "logprob", "field": name, "side": "training" if name in left else "rollout"},
                {"reason": "only one side declares this field; not declared is not equal", **evidence},
                "Declare the field on both sides.",
            )


Precision = tuple[str | None, str | None]
"""The dtype the rollout and the training engine compute in, as declared."""


def _precision(contracts: Mapping[str, Mapping[str, Any]], left_id: str, right_id: str) -> Precision:
    """Both engines' `compute_dtype` under one spelling; (None, None) unless both declare it."""
    bodies = [contracts[one]["body"] if one in contracts else {} for one in (left_id, right_id)]
    left, right = (body.get("compute_dtype") for body in bodies)
    if isinstance(left, str) and isinstance(right, str):
        return dtype_name(left) or left, dtype_name(right) or right
    return None, None


def _follows(name: str, left: Any, right: Any, precision: Precision) -> bool:
    """Whether a dtype differs because each side's is the dtype its engine computes in. Accumulators never follow."""
    if name in _ACCUMULATORS or not name.endswith("_dtype") or precision[0] is None:
        return False
    return same(left, precision[0]) and same(right, precision[1])


def effective(body: dict[str, Any]) -> dict[str, Any]:
    """What a logprob contract's mode and sampling fields come to: raw log-probabilities ignore every transform."""
    raw = body.get("mode") == "raw"
    out: dict[str, Any] = {}
    for name, neutral in _NEUTRAL.items():
        if name in body and body[name] not in neutral and not raw:
            out[name] = body[name]
        elif name == "temperature" and name not in body and not raw:
            out[name] = "undeclared"
    return out


def _differs(
    kind: str,
    name: str,
    cls: str,
    left: Any,
    right: Any,
    evidence: dict[str, Any],
    finding_id: str = "contract.differs",
) -> Finding:
    where = {"kind": kind, "field": name, "class": cls, "rollout": left, "training": right}
    if finding_id != "contract.differs":
        return Finding(finding_id, where, evidence)
    return Finding(
        finding_id,
        where,
        evidence,
        f"Make `{name}` equal on both sides (rollout {left!r}, training {right!r}), or declare what really runs.",
    )


def _other_kinds(view: View, precision: Precision) -> Iterable[Finding]:
    """Fields of the kinds both roles declare (attention, norm, rope ...) that no two of their contracts agree on."""
    bodies: dict[str, dict[str, dict[str, dict[str, Any]]]] = defaultdict(lambda: defaultdict(dict))
    for fact in view.history.of("contract.declared"):
        role = view.history.role(fact.writer_id)
        if role in ("rollout", "training") and fact.fields["kind"] != "logprob":
            bodies[fact.fields["kind"]][role][fact.fields["contract_id"]] = fact.fields["body"]
    for kind, sides in bodies.items():
        for name, cls, a, b, evidence in _nowhere_equal(kind, sides["rollout"], sides["training"]):
            if not _follows(name, a, b, precision):
                finding_id = "numerics.differ" if cls == "numeric" else "contract.differs"
                yield _differs(kind, name, cls, a, b, evidence, finding_id)


def _nowhere_equal(
    kind: str, left: dict[str, dict[str, Any]], right: dict[str, dict[str, Any]]
) -> Iterable[tuple[str, str, Any, Any, dict[str, Any]]]:
    """(field, class, left value, right value, evidence) of fields that differ between any contract of either side."""
    held: Counter[str] = Counter()
    found: dict[str, list[tuple[str, str, Any, Any, dict[str, Any]]]] = defaultdict(list)
    for (left_id, a), (right_id, b) in product(left.items(), right.items()):
        held.update(a.keys() & b.keys())
        evidence = {"rollout_contract": left_id, "training_contract": right_id}
        for row in differing_fields(kind, a, b):
            found[row[0]].append((*row, evidence))
    return [rows[0] for name, rows in found.items() if len(rows) == held[name]]


def is_semantic(finding: Finding) -> bool:
    """Whether a contract finding makes the sides not comparable."""
    where = finding.where
    return finding.finding_id == "contract.differs" and field_class(where["kind"], where["field"]) == "semantic"
