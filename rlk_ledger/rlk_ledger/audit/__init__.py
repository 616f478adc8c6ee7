"""The audit: findings that the record alone can show, without torch and without a model.

Each module is one detector over a `View`; `audit` runs them all and gives one verdict. Numerical attribution (the
splitter) is left out where the sides are not comparable.
"""

from typing import Any

from rlk_ledger import metrics
from rlk_ledger.audit import (
    admission,
    alignment,
    backends,
    contracts,
    coverage,
    groups,
    passes,
    refused,
    split,
    support,
    temperature,
    tokens,
    values,
    weights,
)
from rlk_ledger.audit.finding import AuditResult, Finding, ordered
from rlk_ledger.audit.verdict import decide, not_comparable
from rlk_ledger.audit.view import Detector, View, make_view
from rlk_ledger.history import History
from rlk_ledger.pairs import Pairing

__all__ = ["DETECTORS", "NUMERIC", "AuditResult", "Finding", "View", "audit", "make_view", "measured", "summarise"]

DETECTORS: dict[str, Detector] = {
    "contracts": contracts.detect,
    "tokens": tokens.detect,
    "weights": weights.detect,
    "backends": backends.detect,
    "values": values.detect,
    "coverage": coverage.detect,
    "refused": refused.detect,
    "admission": admission.detect,
    "groups": groups.detect,
    "passes": passes.detect,
    "alignment": alignment.detect,
}
"""Detectors that always run."""

NUMERIC: dict[str, Detector] = {
    "temperature": temperature.detect,
    "support": support.detect,
    "split": split.detect,
}
"""Detectors that explain numbers; each runs only while the sides are comparable and no earlier one explained them."""

_GLOBAL = ("contract.differs", "alignment.shift")


def audit(history: History, pairing: Pairing | None = None) -> AuditResult:
    """Everything wrong or unknown that a recorded run shows by itself; `pairing` is reused when given."""
    view = make_view(history, pairing)
    found: list[Finding] = []
    for detect in DETECTORS.values():
        found += detect(view)
    for detect in NUMERIC.values():
        if not any(_explains_everything(f) for f in found):
            found += detect(view)
    findings = ordered(found)
    verdict, code, decision, reason = decide(findings, len(view.tokens))
    return AuditResult(view.history.run_id, findings, verdict, int(code), decision, reason, summarise(view))


def _explains_everything(finding: Finding) -> bool:
    """Whether a finding moves every value, so that looking for a guilty level would name shadows of it."""
    if finding.finding_id == "sampling.support":
        return True
    return finding.finding_id in _GLOBAL and not_comparable(finding)


def summarise(view: View) -> dict[str, Any]:
    """Counts and metrics of the run: samples, active, paired and off-policy tokens, and every drift metric."""
    pairing, flat = view.pairing, view.tokens
    active = sum(int(s.loss_mask.sum()) for s in pairing.samples)
    return {
        "samples": len(pairing.samples),
        "paired_samples": len(view.pairs),
        "active_tokens": active,
        "compared_tokens": len(flat),
        "coverage": len(flat) / active if active else None,
        "off_policy_tokens": sum(len(row.positions) for row in pairing.off_policy),
        "later_passes": len(pairing.passes),
        "equal_fraction": pairing.equal_fraction,
        "weight_versions": list(pairing.versions),
        "drift": measured(view).to_dict(),
    }


def measured(view: View) -> metrics.Drift:
    """Every drift metric over the paired active tokens, what is no measurement counted beside them."""
    columns = view.pairing.columns
    rows = columns.paired & columns.active
    return metrics.measure(
        columns.rollout[rows],
        columns.training[rows],
        sample=columns.owner[rows],
        classes=(columns.rollout_class[rows], columns.training_class[rows]),
    )
