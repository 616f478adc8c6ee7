"""Every fault is named with its place, whatever else varies in the run; a clean run raises nothing."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from rlk_ledger.audit import AuditResult, audit
from rlk_ledger.history import History
from rlk_ledger_schemas.findings import FINDINGS

NAMED: dict[str, tuple[str, dict[str, Any], str]] = {
    "stale_cache": ("drift.split", {"dimension": "cache.stale", "level": "true"}, "fail"),
    "bad_engine": ("drift.split", {"dimension": "engine", "level": "vllm-1"}, "fail"),
    "bad_shard": ("drift.split", {"dimension": "training.shard_rank", "level": "1"}, "fail"),
    "garbled_spec": ("drift.split", {"dimension": "spec.used", "level": "true"}, "fail"),
    "bad_label": ("drift.split", {"dimension": "labels.kernel_build", "level": "b"}, "fail"),
    "seam": ("drift.split", {"dimension": "seam.token", "level": "true"}, "fail"),
    "rollout_shift": ("alignment.shift", {"side": "rollout", "lag": 1}, "not_comparable"),
    "training_shift": ("alignment.shift", {"side": "training", "lag": 1}, "not_comparable"),
    "training_shift_back": ("alignment.shift", {"side": "training", "lag": -1}, "not_comparable"),
    "hidden_temperature": ("contract.differs", {"kind": "logprob", "field": "temperature"}, "not_comparable"),
    "rollout_renormalised": ("sampling.support", {"side": "rollout"}, "fail"),
    "training_renormalised": ("sampling.support", {"side": "training"}, "fail"),
    "renormalised_unrecorded": ("sampling.support", {"side": "rollout"}, "fail"),
    "nan_training": ("values.nan", {"source": "training"}, "fail"),
    "minus_inf": ("values.inf", {"source": "rollout"}, "fail"),
    "sentinel": ("values.sentinel", {"source": "rollout"}, "fail"),
    "clamp_floor": ("values.sentinel", {"source": "training"}, "fail"),
    "zero_filled": ("values.defaulted", {"source": "rollout"}, "fail"),
    "one_filled": ("values.defaulted", {"source": "training"}, "fail"),
    "probabilities": ("values.impossible", {"source": "rollout"}, "fail"),
    "copied": ("values.copied", {"source": "training"}, "fail"),
    "mask_digest": ("mask.differs", {"source": "training"}, "not_comparable"),
    "stale_engine": ("weights.not_loaded", {"engine": "vllm-1", "version": "v1"}, "fail"),
    "never_trained": ("coverage.unobserved", {"source": "training"}, "inconclusive"),
    "replica": ("replicas.differ", {"source": "training", "ranks": [0, 1], "position": 7}, "fail"),
}
ALSO = {"one_filled": {"values.impossible"}, "seam": {"values.impossible"}, "bad_label": {"values.impossible"}}
ALSO |= {"stale_cache": {"values.impossible"}, "bad_shard": {"values.impossible"}, "bad_engine": {"values.impossible"}}
"""Values the fault itself pushed above zero."""

Audited = Callable[..., AuditResult]


@pytest.mark.parametrize("seed", range(4))
def test_a_fault_is_named_with_its_place(fault: str, seed: int, audited: Audited) -> None:
    finding_id, where, verdict = NAMED[fault]
    result = audited(1000 + seed, fault)
    hits = [f for f in result.findings if f.finding_id == finding_id and where.items() <= f.where.items()]
    assert hits, [(f.finding_id, f.where) for f in result.findings]
    assert result.verdict == verdict
    assert result.exit_code == (3 if verdict == "inconclusive" else 1)
    others = {f.finding_id for f in result.findings if f.severity != "info"} - {finding_id}
    assert others <= ALSO.get(fault, set())


def test_every_fault_has_an_expectation(faults: dict[str, Any]) -> None:
    assert NAMED.keys() == faults.keys()


@pytest.mark.parametrize("seed", range(20))
def test_the_same_runs_without_a_fault_raise_nothing(seed: int, audited: Audited) -> None:
    result = audited(1000 + seed)
    assert [f.to_dict() for f in result.findings if f.severity != "info"] == []
    assert (result.verdict, result.exit_code) == ("pass", 0)


@pytest.mark.slow
def test_at_most_two_of_two_hundred_clean_runs_raise_any_finding(audited: Audited) -> None:
    """The rate the splitter promises, over runs that are heteroscedastic and heterogeneous in everything recorded."""
    raised = {}
    for seed in range(200):
        found = [(f.finding_id, f.where) for f in audited(seed).findings if f.severity != "info"]
        if found:
            raised[seed] = found
    assert len(raised) <= 2, raised


def test_findings_are_plain_values_with_every_key(audited: Audited) -> None:
    import json

    document = audited(1000, "stale_cache").to_dict()
    assert json.loads(json.dumps(document)) == document
    for finding in document["findings"]:
        assert finding.keys() == {"finding_id", "severity", "where", "evidence", "next_step"}
        assert finding["severity"] == FINDINGS[finding["finding_id"]].severity
        assert finding["next_step"]


def test_a_split_says_what_else_it_explains_and_where_the_worst_token_is(audited: Audited) -> None:
    finding = next(f for f in audited(1001, "stale_cache").findings if f.finding_id == "drift.split")
    assert {"cache.cached_tokens"} <= {*finding.where["aliases"], *finding.evidence["also_explains"]}
    worst = finding.evidence["worst"]
    for key in ("sample_id", "position", "token_id", "engine", "weight_version", "training_contract", "layout_id"):
        assert worst[key] is not None, key
    assert finding.evidence["ratio"] >= 2.0
    assert finding.evidence["p_adjusted"] < 0.001


def test_what_is_not_comparable_is_not_attributed_to_a_level(audited: Audited) -> None:
    result = audited(1002, "hidden_temperature")
    assert not any(f.finding_id == "drift.split" for f in result.findings)
    slope = next(f for f in result.findings if f.finding_id == "contract.differs").where["measured_slope"]
    assert slope == pytest.approx(1 / 0.6, rel=0.05)


def test_the_order_in_which_events_arrive_changes_nothing(made: ModuleType, faults: dict[str, Any]) -> None:
    events = made.events(1003, faults["bad_engine"])
    forward, backward = audit(History.from_events(events)), audit(History.from_events(reversed(events)))
    assert forward.to_dict() == backward.to_dict()
