"""Was strict kept where it was asked for? (evidence.incomplete, metadata.defaulted)

A batch that was downgraded or refused, a sample that was quarantined, a strict run whose batches nobody admitted, and
one whose promise rests on a setting that cannot be read back all mean that what strict promises is not known to hold
for the whole run: none of them passes.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Any

from rlk_ledger.audit.backends import promises_bits
from rlk_ledger.audit.finding import Finding
from rlk_ledger.audit.view import View
from rlk_ledger_schemas.modes import REASONS

_TOLD = {
    "downgraded": "consistency=strict was asked for and batches were trained on under audit",
    "failed": "consistency=strict refused batches, which ended their steps",
}
_CODES = {"downgraded": "strict_downgraded"}
_NEXT = "Complete the named fields where the samples are made, or ask for consistency=audit."


def detect(view: View) -> Iterable[Finding]:
    """Downgraded and refused batches, quarantined samples, strict without admission or without sight."""
    batches = [fact.fields for fact in view.history.of("batch.admitted")]
    for outcome, told in _TOLD.items():
        rows = [b for b in batches if b.get("outcome") == outcome]
        if rows:
            where = {"field": "consistency", "outcome": outcome, "batches": len(rows), "step": rows[0].get("step")}
            yield Finding("evidence.incomplete", where, {"reason": told} | _code(outcome) | _why(rows), _NEXT)
    yield from _quarantined([b for b in batches if b.get("outcome") == "quarantined"])
    if _strict(view):
        yield from _never_admitted(view, batches)
        yield from _unobservable(view)


def _strict(view: View) -> bool:
    opened = view.history.of("run.opened")
    return any((fact.fields.get("mode") or {}).get("consistency") == "strict" for fact in opened)


def _code(outcome: str) -> dict[str, str]:
    return {"code": _CODES[outcome]} if outcome in _CODES else {}


def _why(rows: list[dict[str, Any]]) -> dict[str, Any]:
    reasons: Counter[str] = Counter()
    for row in rows:
        reasons.update(row.get("reasons") or {})
    return {
        "samples": sum(row.get("quarantined") or 0 for row in rows),
        "reasons": dict(reasons),
        "fields": sorted({field for row in rows for _, field, _ in _decided(row)}),
        "steps": sorted({row["step"] for row in rows if row.get("step") is not None})[:50],
    }


def _decided(row: dict[str, Any]) -> Iterable[tuple[str, str, list[str]]]:
    """(code, field, sample ids) of every reason for which samples of a batch were quarantined."""
    for entry in row.get("decisions") or ():
        if entry.get("status") == "quarantined":
            for reason in entry.get("reasons") or ():
                yield reason["code"], reason.get("field") or "", list(entry.get("sample_ids") or ())


def _quarantined(rows: list[dict[str, Any]]) -> Iterable[Finding]:
    samples: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for code, field, names in _decided(row):
            samples.setdefault((code, field), []).extend(names)
    total = sum(row.get("quarantined") or 0 for row in rows)
    for (code, field), names in samples.items():
        finding_id = "metadata.defaulted" if code == "metadata_defaulted" else "evidence.incomplete"
        where = {"field": field, "code": code, "sample_id": names[0] if names else None}
        evidence = {
            "reason": f"strict left samples out of their batches: {REASONS[code].meaning if code in REASONS else code}",
            "samples": len(names),
            "quarantined": total,
            "sample_ids": names[:20],
        }
        yield Finding(finding_id, where, evidence, REASONS[code].next_step if code in REASONS else "")


def _never_admitted(view: View, batches: list[dict[str, Any]]) -> Iterable[Finding]:
    trained = any(score.source == "training" for score in view.history.scores)
    if trained and not batches:
        yield Finding(
            "evidence.incomplete",
            {"field": "consistency"},
            {"reason": "consistency=strict was asked for and no batch went through admission"},
            "Call rlk_ledger.admit() on every batch before it is trained on.",
        )


def _unobservable(view: View) -> Iterable[Finding]:
    knobs: dict[str, set[str]] = {}
    for fact in view.history.of("knob.applied"):
        if fact.fields["status"] == "unobservable" and promises_bits(fact):
            knobs.setdefault(fact.fields["path"], set()).add(fact.writer_id)
    reason = REASONS["unobservable_knob"]
    for path, writers in knobs.items():
        where = {"field": path, "code": "unobservable_knob"}
        evidence = {"reason": f"consistency=strict was asked for and {reason.meaning}", "writers": sorted(writers)}
        yield Finding("evidence.incomplete", where, evidence, reason.next_step)
