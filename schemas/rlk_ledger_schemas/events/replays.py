"""What replay and audit record: the replay engine is a writer like any other."""

from typing import ClassVar, Literal

from rlk_ledger_schemas.events.base import Count, Digest, Event, Free, Name, register

Severity = Literal["error", "gap", "info"]
Verdict = Literal["pass", "fail", "inconclusive", "not_comparable", "not_applicable"]


@register
class ReplayPlanned(Event, frozen=True, kw_only=True):
    """What a replay set out to do: samples, arms, seed, scorer, weights, tolerance version."""

    TYPE: ClassVar[str] = "replay.planned"
    replay_id: Name
    arms: tuple[Name, ...]
    samples: Count
    selection: Free | None = None
    scorer: Free | None = None
    weights: tuple[Free, ...] | None = None
    tolerance_version: str | None = None


@register
class CaseAttempted(Event, frozen=True, kw_only=True):
    """One case (arm x schedule) tried; `case_id` is the digest of the normalised request, a retry is a new attempt."""

    TYPE: ClassVar[str] = "case.attempted"
    replay_id: Name
    case_id: Digest
    arm: Name
    status: Literal["completed", "error", "not_measured"]
    request: Free | None = None
    reason: str | None = None
    elapsed_ms: float | None = None


@register
class ArmScored(Event, frozen=True, kw_only=True):
    """One arm's metrics over the replayed samples; `applied` is false when what was asked for did not run."""

    TYPE: ClassVar[str] = "arm.scored"
    replay_id: Name
    case_id: Digest
    arm: Name
    applied: bool
    tokens: Count
    samples: Count
    groups: Count | None = None
    metrics: Free | None = None
    reason: str | None = None


@register
class GateChecked(Event, frozen=True, kw_only=True):
    """A condition for believing the numbers; `unknown` (not measured) is never `passed`."""

    TYPE: ClassVar[str] = "gate.checked"
    replay_id: Name
    gate: Name
    status: Literal["passed", "failed", "unknown"]
    reason: str | None = None
    evidence: Free | None = None


@register
class FindingRaised(Event, frozen=True, kw_only=True):
    """One named finding: where, on which evidence, what to do next."""

    TYPE: ClassVar[str] = "finding.raised"
    finding_id: Name
    severity: Severity
    where: Free
    evidence: Free
    next_step: str
    subject: Name | None = None


@register
class VerdictReached(Event, frozen=True, kw_only=True):
    """The answer of one audit or replay (`subject`), with what it rests on."""

    TYPE: ClassVar[str] = "verdict.reached"
    verdict: Verdict
    subject: Name
    decision: Name
    reason: str
    exit_code: Count
    evidence: Free | None = None
    tolerance_version: str | None = None


@register
class ReportWritten(Event, frozen=True, kw_only=True):
    """A report file and its digest."""

    TYPE: ClassVar[str] = "report.written"
    digest: Digest
    bytes: Count
    subject: Name | None = None
    name: str | None = None
