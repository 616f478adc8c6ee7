"""One verdict and one exit code out of the audit's findings and the replay's decision."""

from __future__ import annotations

from collections.abc import Sequence

from rlk_ledger.audit.finding import AuditResult, Finding, ordered
from rlk_ledger_replay.decision import Decision, Verdict
from rlk_ledger_schemas.findings import Exit, exit_code


def combine(
    audit: AuditResult, findings: Sequence[Finding], decision: Decision
) -> tuple[tuple[Finding, ...], Verdict, int]:
    """(findings, verdict, exit code): what the record alone shows first, then what replay measured.

    The audit's verdict stands where it holds an error; otherwise an error of the replay fails the run, a gap of
    either or an inconclusive audit leaves it inconclusive, and only then does the decision's own verdict count. A
    finding both raise about one thing is kept once, the audit's.
    """
    merged = ordered([*audit.findings, *(one for one in findings if not _raised(audit.findings, one))])
    code = int(exit_code(one.severity for one in merged))
    severities = {one.severity for one in merged}
    if any(one.severity == "error" for one in audit.findings):
        return merged, audit.verdict, code
    if decision.verdict in ("not_comparable", "fail", "not_applicable"):
        return merged, decision.verdict, code
    if "error" in severities:
        return merged, "inconclusive" if decision.decision == "reference_itself_is_broken" else "fail", code
    if "gap" in severities or audit.verdict == "inconclusive":
        return merged, "inconclusive", code or int(Exit.GAP)
    return merged, decision.verdict, code


def _raised(findings: Sequence[Finding], one: Finding) -> bool:
    """Whether the audit already raised it: the same id about the same side, or about nothing in particular."""
    same = [other for other in findings if other.finding_id == one.finding_id]
    if one.finding_id in ("drift.zero", "alignment.shift"):
        return any(other.where.get("side") == one.where.get("side") for other in same)
    return any(other.where == one.where for other in same)
