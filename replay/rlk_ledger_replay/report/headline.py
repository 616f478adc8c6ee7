"""The first screen in words: what happened, how sure, on which evidence, what to do next, and what was not measured."""

from dataclasses import dataclass

from rlk_ledger_replay.report.answers import Answer, Interval, query_of
from rlk_ledger_replay.report.gather import Report
from rlk_ledger_replay.report.text import cut, flat, plural
from rlk_ledger_schemas.findings import FINDINGS

WORDS = {
    "pass": "Pass",
    "fail": "Fail",
    "inconclusive": "Inconclusive",
    "not_comparable": "Not comparable",
    "not_applicable": "Not applicable",
}
_BY_REPLAY = frozenset({"drift.attributed"})
"""Findings that say what the verdict's reason says in numbers."""
_DAMAGED = "The ledger does not hold what was recorded, so nothing on this page can be believed."
_MEANING = {
    "pass": "The two policies agree as far as this arithmetic can.",
    "fail": "Something is wrong in this run.",
    "inconclusive": "The record does not decide.",
    "not_comparable": "The two sides do not compute the same thing; their difference has no numerical cause to name.",
    "not_applicable": "There is nothing to judge.",
}


@dataclass(frozen=True)
class FindingView:
    """A finding as a page shows it; `where` and `evidence` are (name, text) rows."""

    finding_id: str
    severity: str
    meaning: str
    where: tuple[tuple[str, str], ...]
    evidence: tuple[tuple[str, str], ...]
    next_step: str
    query: str


@dataclass(frozen=True)
class Headline:
    """The banner: the verdict's word and class, one sentence of what happened, and the answers to three questions."""

    verdict: str
    word: str
    happened: str
    sure: str
    evidence: str
    next_step: str
    exit_code: int | None
    decision: str


def headline(report: Report) -> Headline:
    """The banner of a report."""
    fields = report.lead.verdict or {}
    verdict = str(fields.get("verdict") or "inconclusive")
    happened = _happened(report.lead, verdict)
    damaged = report.verified.exit_code == 1
    return Headline(
        verdict="fail" if damaged else verdict if verdict in WORDS else "inconclusive",
        word="Does not verify" if damaged else WORDS.get(verdict, verdict),
        happened=f"{_DAMAGED} The recorded answer was: {happened}" if damaged else happened,
        sure=_sure(report),
        evidence=_evidence(report),
        next_step=_next(report),
        exit_code=fields.get("exit_code"),
        decision=str(fields.get("decision") or ""),
    )


def _happened(lead: Answer, verdict: str) -> str:
    """The first error the record itself shows, in words, then the verdict's own reason unless it says the same.

    A gap is told the same way where it alone keeps a drift within its floor from passing.
    """
    fields = lead.verdict or {}
    reason = str(fields.get("reason") or "").strip()
    parts = [_sentence(reason)] if reason else []
    undecided = verdict == "inconclusive" and fields.get("decision") == "within_floor"
    telling = ("error", "gap") if undecided else ("error",)
    for finding in lead.findings:
        known = FINDINGS.get(str(finding.get("finding_id")))
        if finding.get("severity") not in telling or known is None or finding["finding_id"] in _BY_REPLAY:
            continue
        where = finding.get("where")
        rows = flat({name: value for name, value in where.items() if value}) if isinstance(where, dict) else []
        places = ", ".join(f"{name} {value}" for name, value in rows[:3])
        named = _sentence(f"{known.meaning} ({places})" if places else known.meaning)
        parts = [named, *(part for part in parts if finding["finding_id"] not in part)]
        break
    return " ".join(parts) or _MEANING.get(verdict, _MEANING["inconclusive"])


def _sentence(text: str) -> str:
    text = text[:1].upper() + text[1:]
    return text if text.endswith((".", "!", "?")) else text + "."


def _sure(report: Report) -> str:
    lead = report.lead
    if not report.replayed:
        return "Judged from the record alone. No replay: neither the noise floor nor either side's share was measured."
    multiple = lead.interval("multiple_drift")
    if multiple is None:
        return "The noise floor was not measured, so the size of the drift has nothing to be compared with."
    groups = lead.count("groups")
    over = f", resampled over {plural(groups, 'group')}" if groups else ""
    if lead.as_declared:
        words = f"Once each side is scored as it declares itself, {multiple.times} noise floors of drift remain"
        return f"{words} (95 % interval{over}).{_limit(lead, multiple)}"
    words = f"The drift stands at {multiple.times} times its noise floor (95 % interval{over})."
    return words + _limit(lead, multiple) + _shares(lead)


def _limit(lead: Answer, multiple: Interval) -> str:
    """Where the interval lies against the multiple up to which a distance counts as noise."""
    limit = (lead.evidence.get("rules") or {}).get("floor_multiple")
    if not isinstance(limit, int | float) or multiple.high is None or multiple.low is None:
        return ""
    if multiple.low <= limit < multiple.high:
        return f" It lies on both sides of the {limit} that still counts as noise."
    return f" All of it lies {'below' if multiple.high <= limit else 'above'} the {limit} that still counts as noise."


def _shares(lead: Answer) -> str:
    left, right = lead.interval("share_rollout"), lead.interval("share_training")
    if left is None or right is None:
        return ""
    return f" Share of the drift: rollout {left.share}, training {right.share}."


def _evidence(report: Report) -> str:
    lead, parts = report.lead, []
    tokens, samples = lead.count("tokens"), lead.count("samples")
    if report.replayed and tokens is not None and samples is not None:
        available = lead.count("available")
        of = f" of {available:,}" if available and available != samples else ""
        parts.append(f"{plural(tokens, 'token')} of {samples:,}{of} samples replayed")
    parts.append(f"{plural(report.drift.tokens, 'token')} compared in the whole run")
    if lead.gates:
        passed = sum(gate.get("status") == "passed" for gate in lead.gates)
        parts.append(f"{passed} of {plural(len(lead.gates), 'gate')} passed")
    parts.append(_verified(report))
    return "; ".join(parts) + "."


def _verified(report: Report) -> str:
    return {
        0: "the record verifies",
        1: "the record does NOT verify",
        3: "the record verifies, with gaps",
    }.get(report.verified.exit_code, "the record could not be verified")


def _next(report: Report) -> str:
    if report.verified.exit_code == 1:
        return f"Run `rlk-ledger verify {report.run_id}` first: what the ledger holds is not what was recorded."
    for finding in report.lead.findings:
        if finding.get("severity") in ("error", "gap") and finding.get("next_step"):
            return _sentence(str(finding["next_step"]))
    if not report.replayed:
        return f"Measure the noise floor and the sides' shares: `rlk-ledger replay --run-id {report.run_id}`."
    for finding in report.lead.findings:
        if finding.get("next_step"):
            return _sentence(str(finding["next_step"]))
    return "Nothing to do."


def findings(answer: Answer, run_id: str) -> list[FindingView]:
    """The findings of an answer, errors first."""
    return [_view(fields, run_id) for fields in answer.findings]


def _view(fields: dict[str, object], run_id: str) -> FindingView:
    finding_id = str(fields.get("finding_id"))
    known = FINDINGS.get(finding_id)
    where, evidence = fields.get("where"), fields.get("evidence")
    return FindingView(
        finding_id=finding_id,
        severity=str(fields.get("severity")),
        meaning=_sentence(known.meaning) if known else "",
        where=tuple(flat(where)) if isinstance(where, dict) else (),
        evidence=tuple(flat(evidence)) if isinstance(evidence, dict) else (),
        next_step=cut(str(fields.get("next_step") or "")),
        query=query_of(finding_id, run_id),
    )


def unmeasured(report: Report) -> list[str]:
    """What this report cannot say, each with what would say it."""
    run, lead = report.run_id, report.lead
    out = []
    if not report.replayed:
        out.append(
            f"No replay of this run is recorded: noise floor, shares and arms are not measured. "
            f"`rlk-ledger replay --run-id {run}` measures them."
        )
    else:
        out += [f"{gate.get('gate')}: {gate.get('reason')}" for gate in lead.gates if gate.get("status") == "unknown"]
        out += [f"{case.get('arm')}: {case.get('reason')}" for case in lead.cases if case.get("status") != "completed"]
    if report.drift.status != "measured":
        out.append(
            "No active token has a finite value on both sides, so there is no drift to measure: this is no pass."
        )
    out += [f"{line.label}: {line.value}, {line.note}." for line in report.coverage if line.concern]
    if not lead.recorded:
        out.append(
            "No audit of this run is recorded either; the findings here come from an audit made for this page. "
            f"`rlk-ledger audit {run}` repeats it."
        )
    return list(dict.fromkeys(out))
