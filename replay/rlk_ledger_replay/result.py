"""What a replay answers, as one value: the verdict, what it rests on, and the same as plain data for machines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rlk_ledger.audit.finding import AuditResult, Finding, plain
from rlk_ledger_replay.arms import ArmName
from rlk_ledger_replay.decision import Decision, Verdict
from rlk_ledger_replay.judgement import Judgement, evidence
from rlk_ledger_replay.preparation import Prepared, Request
from rlk_ledger_replay.scores import Scores
from rlk_ledger_replay.shelf import OTHER_WAY
from rlk_ledger_schemas import tolerances

NUMBERS = (
    *("share_rollout", "share_training", "error_rollout", "error_training", "drift"),
    *("floor_rollout", "floor_training", "floor_drift", "multiple_rollout", "multiple_training", "multiple_drift"),
    *("floor_rollout_placebo", "floor_training_placebo", "floor_rollout_native", "floor_training_native"),
    *("noise", "chain", "live", "residual", "routes", "adapters"),
)
"""Every name under `numbers` in the document for machines: null where it was not measured, never left out."""


@dataclass(frozen=True)
class ReplayResult:
    """One replay of one run.

    `scores` is None where the reference did not score, `arms` are those asked for, `seconds` is wall time,
    `not_recorded` says why the ledger does not hold the result, where it does not. `attempts` tells how many scorings
    were taken from earlier attempts and made, where they were kept.
    """

    run_id: str
    replay_id: str
    verdict: Verdict
    exit_code: int
    findings: tuple[Finding, ...]
    judgement: Judgement
    audit: AuditResult
    prepared: Prepared
    request: Request
    scores: Scores | None
    arms: tuple[ArmName, ...]
    seconds: float
    not_recorded: str | None = None
    attempts: Mapping[str, Any] | None = None

    @property
    def decision(self) -> Decision:
        """What the numbers say about the cause."""
        return self.judgement.decision

    def counts(self) -> dict[str, int]:
        """How much was compared: tokens, samples, groups, and samples that could have been."""
        tokens = self.prepared.tokens
        return {
            "tokens": 0 if tokens is None else len(tokens),
            "samples": len(self.prepared.selection.pairs),
            "groups": 0 if tokens is None else tokens.clusters,
            "available": self.prepared.selection.available,
        }

    def numbers(self) -> dict[str, Any]:
        """Shares, distances, floors, multiples, noise, links and residual as plain values."""
        found = self.judgement
        residual = found.residual
        return {
            **evidence(found.shares, found.floors),
            "noise": {side: dict(values) for side, values in found.noise.items()},
            "chain": {name: dict(link) for name, link in found.links.items()},
            **({} if found.live is None else {"live": found.live.as_dict()}),
            "residual": None if residual is None else {"decision": residual.decision, "reason": residual.reason},
            **self._routes(),
            **self._adapters(),
        }

    def _routes(self) -> dict[str, Any]:
        """What recorded routes cover, and how far the reference's routers agree with them."""
        routes = self.prepared.routes
        if routes is None:
            return {}
        told = {} if self.scores is None else self.scores.routes
        return {"routes": replace(routes, agreeing=told.get("agreeing")).as_dict()}

    def _adapters(self) -> dict[str, Any]:
        """How each side applied its adapter, and the RMS (nats) between its reference so and the other way."""
        out: dict[str, Any] = {}
        for side, how in self.prepared.adapters.items():
            apart = None
            if self.scores is not None:
                a_N, b_N = self.scores.values[f"{side}.prefill"], self.scores.values[f"{side}.{OTHER_WAY}"]
                apart = float(np.sqrt(np.mean((a_N.astype(np.float64) - b_N) ** 2)))
            out[side] = {"applied": how, "other_way_rms": apart}
        return {"adapters": out} if out else {}

    def to_dict(self) -> dict[str, Any]:
        """One JSON document with stable keys."""
        found = self.judgement
        document = {
            "run_id": self.run_id,
            "replay_id": self.replay_id,
            "verdict": self.verdict,
            "exit_code": self.exit_code,
            "decision": self.decision.decision,
            "reason": self.decision.reason,
            "side": self.decision.side,
            "findings": [one.to_dict() for one in self.findings],
            "counts": self.counts(),
            "numbers": dict.fromkeys(NUMBERS) | self.numbers(),
            "arms": {
                arm.arm: {"applied": arm.applied, "tokens": arm.drift.tokens, "metrics": arm.drift.values}
                for arm in found.arms
            },
            "gates": [{"gate": g.gate, "status": g.status, "reason": g.reason} for g in found.gates],
            "selection": self.prepared.selection.as_dict(),
            "tolerance_version": tolerances.VERSION,
            "tolerance_fingerprint": tolerances.FINGERPRINT,
            "seconds": round(self.seconds, 3),
            "not_recorded": self.not_recorded,
            "attempts": self.attempts,
        }
        return plain(document)  # type: ignore[no-any-return]
