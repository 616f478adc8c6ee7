"""A run that asked for strict passes only when strict held for all of it."""

import pytest

from rlk_ledger.audit import audit
from rlk_ledger.history import History
from rlk_ledger_schemas.modes import REASONS

SEED = 3
ROLES = {"rollout": 1, "training": 1}


def decided(code, field, *names, status="quarantined"):
    return {"status": status, "reasons": [{"code": code, "field": field}], "sample_ids": list(names)}


def batch(outcome, *decisions, step=0):
    held = sum(len(d["sample_ids"]) for d in decisions if d["status"] == "quarantined")
    apart = sum(len(d["sample_ids"]) for d in decisions if d["status"] == "not_applicable")
    reasons = {r["code"]: len(d["sample_ids"]) for d in decisions for r in d["reasons"]}
    counts = {"samples": 8, "admitted": 8 - held - apart, "quarantined": held, "not_applicable": apart}
    return {"step": step, "outcome": outcome, **counts, "reasons": reasons, "decisions": list(decisions)}


@pytest.fixture
def judged(made):
    """The audit of a healthy run with these batches admitted, under strict or audit."""

    def run(*batches, consistency="strict", knobs=()):
        def edit(log):
            log.add(made.TRAINING, "run.opened", roles=ROLES, mode={"consistency": consistency})
            for fields in knobs:
                log.add(made.ROLLOUT, "knob.applied", **fields)
            for fields in batches:
                log.add(made.TRAINING, "batch.admitted", **fields)

        return audit(History.from_events(made.events(SEED, lambda plan: plan.edits.append(edit))))

    return run


def test_a_strict_run_whose_batches_were_complete_passes(judged):
    masked = decided("zero_active_tokens", "loss_mask", "s1", status="not_applicable")
    result = judged(batch("admitted"), batch("admitted", masked))
    assert (result.verdict, result.exit_code) == ("pass", 0)


def test_a_downgraded_batch_makes_a_pass_impossible_and_is_named(judged):
    bad = batch("downgraded", decided("metadata_missing", "engine", "s1", "s2"), step=4)
    result = judged(batch("admitted"), bad, bad)
    assert (result.verdict, result.exit_code) == ("inconclusive", 3)
    (finding,) = (f for f in result.findings if f.severity == "gap")
    assert finding.finding_id == "evidence.incomplete"
    assert finding.where == {"field": "consistency", "outcome": "downgraded", "batches": 2, "step": 4}
    assert finding.evidence["reason"] == "consistency=strict was asked for and batches were trained on under audit"
    assert finding.evidence["code"] == "strict_downgraded"
    assert (finding.evidence["samples"], finding.evidence["fields"]) == (4, ["engine"])
    assert "consistency" in result.reason


def test_a_refused_batch_is_named(judged):
    result = judged(batch("failed", decided("no_tolerance", "contract.compute_dtype", "s1")))
    assert result.verdict == "inconclusive"
    assert any(f.where.get("outcome") == "failed" for f in result.findings)


def test_quarantined_samples_are_counted_by_reason_and_field(judged):
    result = judged(
        batch("quarantined", decided("metadata_defaulted", "sampling.temperature", "s1")),
        batch("quarantined", decided("metadata_defaulted", "sampling.temperature", "s2", "s3")),
        batch("quarantined", decided("spans_incomplete", "weight_spans", "s4")),
    )
    assert (result.verdict, result.exit_code) == ("inconclusive", 3)
    found = {(f.finding_id, f.where["field"]): f.evidence for f in result.findings if f.severity == "gap"}
    assert found.keys() == {
        ("metadata.defaulted", "sampling.temperature"),
        ("evidence.incomplete", "weight_spans"),
    }
    evidence = found["metadata.defaulted", "sampling.temperature"]
    assert (evidence["samples"], evidence["sample_ids"], evidence["quarantined"]) == (3, ["s1", "s2", "s3"], 4)
    steps = {f.where.get("code"): f.to_dict()["next_step"] for f in result.findings if f.severity == "gap"}
    assert steps["spans_incomplete"] == REASONS["spans_incomplete"].next_step, "it says what to record"


def test_strict_that_nobody_enforced_is_a_gap(judged):
    result = judged()
    assert result.verdict == "inconclusive"
    (finding,) = (f for f in result.findings if f.severity == "gap")
    assert "no batch went through admission" in finding.evidence["reason"]


def test_what_audit_only_observed_is_no_finding(judged):
    seen = batch("observed", decided("metadata_missing", "engine", "s1"))
    assert judged(seen, consistency="audit").verdict == "pass"
    assert judged(consistency="audit").verdict == "pass"


UNSEEN = {"path": "rollout.batch_invariant", "requested": True, "status": "unobservable"}


def test_a_strict_promise_that_rests_on_a_setting_nobody_can_read_does_not_pass(judged):
    result = judged(batch("admitted"), knobs=[UNSEEN, UNSEEN])
    assert result.verdict == "inconclusive"
    (finding,) = (f for f in result.findings if f.severity == "gap")
    assert finding.where == {"field": "rollout.batch_invariant", "code": "unobservable_knob"}
    assert finding.to_dict()["next_step"] == REASONS["unobservable_knob"].next_step


@pytest.mark.parametrize(
    ("change", "consistency"),
    [
        ({"path": "sampling.seed"}, "strict"),
        ({"requested": False}, "strict"),
        ({"status": "applied", "actual": True}, "strict"),
        ({}, "audit"),
    ],
    ids=["promises no bits", "not asked for", "read back", "not strict"],
)
def test_only_an_unseen_setting_of_a_strict_promise_is_one(judged, change, consistency):
    assert judged(batch("admitted"), knobs=[UNSEEN | change], consistency=consistency).verdict == "pass"
