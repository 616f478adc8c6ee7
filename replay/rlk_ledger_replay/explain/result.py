"""What explain answers about one side of a run, as one value and as plain data for machines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlk_ledger.audit.finding import Finding, plain
from rlk_ledger_kernels.registry import Provenance
from rlk_ledger_replay.explain.answer import Answer
from rlk_ledger_replay.explain.variant import Variant
from rlk_ledger_replay.gates import Gate
from rlk_ledger_replay.semantics import Side
from rlk_ledger_schemas.findings import exit_code

NEXT = {
    "reproduced": "Change what the side runs to what it declares, or declare what it runs; then record again.",
    "consistent_with": "Record more of this side (boundary captures, kernels' settings): its size alone names nothing.",
    "none_of_these": "The cause is outside these variants: compare boundaries (first divergence) or run the engine.",
    "cannot_separate": "Score more groups (--samples), or repeat with a shallower model or wider dtypes.",
    "no_excess": "Nothing to explain on this side; `rlk-ledger audit` shows what the record alone holds.",
    "insufficient_evidence": "Record what is missing, then run explain again.",
    "reference_itself_is_broken": "Run `rlk-ledger kernels check`; nothing else is believed until it passes.",
    "variant_did_not_apply": "See which operator fell back (`operator.decided`) and install its backend.",
}
_GAPS = ("insufficient_evidence", "reference_itself_is_broken", "variant_did_not_apply")


@dataclass(frozen=True)
class Explanation:
    """One run of explain over one side.

    variants: every one that was scored, by name. unmet: those that could not be, with the reason; unmet_factors: the
    factor each of those belongs to. same: those that are
    what the side declares. counts: tokens, samples, groups. provenance: which backend ran each operator.
    """

    run_id: str
    replay_id: str
    side: Side
    answer: Answer
    gates: tuple[Gate, ...] = ()
    variants: Mapping[str, Variant] = field(default_factory=dict)
    unmet: Mapping[str, str] = field(default_factory=dict)
    unmet_factors: Mapping[str, str] = field(default_factory=dict)
    same: tuple[str, ...] = ()
    versions: tuple[str, ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict)
    sample_ids: tuple[str, ...] = ()
    provenance: tuple[Provenance, ...] = ()
    seed: int = 0
    seconds: float = 0.0
    not_recorded: str | None = None

    @property
    def factors(self) -> tuple[str, ...]:
        """The factors of what is named, each once."""
        found = [part for name in self.answer.named for part in self.variants[name].factor.split(" + ")]
        return tuple(dict.fromkeys(found))

    @property
    def findings(self) -> tuple[Finding, ...]:
        """`explain.reproduced` for a named variant; a gap where the answer could not be had."""
        found = self.answer
        where: dict[str, Any] = {"side": self.side}
        if found.answer == "reproduced":
            where |= {"variant": found.named[0], "factors": list(self.factors)}
            return (Finding("explain.reproduced", where, self.evidence(), NEXT["reproduced"]),)
        if found.answer == "reference_itself_is_broken":
            return (Finding("reference.broken", where, {"reason": found.reason}, NEXT[found.answer]),)
        if found.answer == "variant_did_not_apply":
            return (Finding("variant.did_not_apply", where, {"reason": found.reason}, NEXT[found.answer]),)
        if found.answer == "insufficient_evidence":
            body = {"reason": found.reason}
            return (Finding("evidence.incomplete", {**where, "subject": "explain"}, body, found.reason),)
        return ()

    @property
    def exit_code(self) -> int:
        """0 for every answer, 1 where the reference is broken or a variant did not apply, 3 for a gap."""
        return int(exit_code(finding.severity for finding in self.findings))

    def evidence(self) -> dict[str, Any]:
        """What the answer rests on, as plain values."""
        found = self.answer
        ranked = [
            {"variant": one.name, "part": one.part, "error": one.error, "beta": one.beta, "left": one.left}
            for one in found.ranked
        ]
        body = {
            "answer": found.answer,
            "reason": found.reason,
            "members": list(found.members),
            "chance": found.chance,
            "distance": found.distance,
            "floor": found.floor,
            "multiple": None if found.multiple is None else found.multiple.as_dict(),
            "floor_multiple": None if found.floor_multiple is None else found.floor_multiple.as_dict(),
            "choice": found.choice,
            "ranked": ranked,
            "classes": [list(one) for one in found.classes],
            "blind": list(found.blind),
            "unmet": dict(self.unmet),
            "as_declared": list(self.same),
            "seed": self.seed,
            **self.counts,
        }
        return dict(plain(body))

    def to_dict(self) -> dict[str, Any]:
        """The document for machines."""
        return {
            "run_id": self.run_id,
            "replay_id": self.replay_id,
            "side": self.side,
            "answer": self.answer.answer,
            "named": list(self.answer.named),
            "factors": list(self.factors),
            "reason": self.answer.reason,
            "next_step": NEXT[self.answer.answer],
            "exit_code": self.exit_code,
            "findings": [one.to_dict() for one in self.findings],
            "evidence": self.evidence(),
            "gates": [
                {"gate": g.gate, "status": g.status, "reason": g.reason, "evidence": plain(g.evidence)}
                for g in self.gates
            ],
            "recorded": self.not_recorded is None,
            "seconds": self.seconds,
        }
