"""What a factor is, and the verdict on one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from rlk_ledger.audit.finding import plain

FactorVerdict = Literal[
    "caused_by_training_side",
    "caused_by_rollout_side",
    "caused_by_both_sides",
    "coupled_with_other_factors",
    "not_this_factor",
    "reference_itself_is_broken",
    "variant_did_not_apply",
    "insufficient_evidence",
]


@dataclass(frozen=True)
class Factor:
    """One decision of the arithmetic.

    factor: its id. title: in words. predicts: what the drift looks like if it is the cause. intervention: what to align
    to test it on the engines. guards: names of gates that have to have passed, each by prefix: a gate of that name that
    failed or is unknown leaves the factor undecided. needs_experts: it exists only in a mixture of experts.
    """

    factor: str
    title: str
    predicts: str
    intervention: str
    guards: tuple[str, ...] = ()
    needs_experts: bool = False


@dataclass(frozen=True)
class Judged:
    """The verdict on one factor. evidence: variants and numbers it rests on; suspects: what else is named with it."""

    factor: Factor
    verdict: FactorVerdict
    reason: str
    suspects: tuple[str, ...] = ()
    evidence: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The keys scripts rely on."""
        return {
            "factor": self.factor.factor,
            "verdict": self.verdict,
            "reason": self.reason,
            "suspects": list(self.suspects),
            "intervention": self.factor.intervention,
            "evidence": plain(dict(self.evidence)),
        }
