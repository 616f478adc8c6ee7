"""What an audit says: findings and their sum."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlk_ledger_schemas.findings import FINDINGS, Severity, Verdict


@dataclass(frozen=True, slots=True)
class Finding:
    """One named finding; severity and next step are fixed by the vocabulary unless the next step is more specific."""

    finding_id: str
    where: dict[str, Any]
    evidence: dict[str, Any]
    next_step: str = ""

    @property
    def severity(self) -> Severity:
        """Severity of the id in the vocabulary."""
        return FINDINGS[self.finding_id].severity

    @property
    def meaning(self) -> str:
        """One line on what the id means."""
        return FINDINGS[self.finding_id].meaning

    def to_dict(self) -> dict[str, Any]:
        """The keys scripts rely on: finding_id, severity, where, evidence, next_step."""
        return {
            "finding_id": self.finding_id,
            "severity": self.severity,
            "where": plain(self.where),
            "evidence": plain(self.evidence),
            "next_step": self.next_step or FINDINGS[self.finding_id].next_step,
        }


@dataclass(frozen=True, slots=True)
class AuditResult:
    """Findings (errors first), the verdict, the exit code and what they rest on.

    `decision` names the rule that gave the verdict, `reason` says it in a sentence, `summary` holds the counts and
    metrics the first lines of a report need.
    """

    run_id: str
    findings: tuple[Finding, ...]
    verdict: Verdict
    exit_code: int
    decision: str
    reason: str
    summary: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """One JSON document with stable keys."""
        return {
            "run_id": self.run_id,
            "verdict": self.verdict,
            "exit_code": self.exit_code,
            "decision": self.decision,
            "reason": self.reason,
            "findings": [finding.to_dict() for finding in self.findings],
            "summary": plain(self.summary),
        }


_RANK = {"error": 0, "gap": 1, "info": 2}


def ordered(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Errors, then gaps, then information; within one severity in the order detectors raised them."""
    return tuple(sorted(findings, key=lambda finding: _RANK[finding.severity]))


def plain(value: Any) -> Any:
    """Numpy scalars and arrays as plain Python values, recursively; floats that JSON lacks become strings."""
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if isinstance(value, np.ndarray):
        return [plain(v) for v in value.tolist()]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not np.isfinite(value):
        return "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"
    return value
