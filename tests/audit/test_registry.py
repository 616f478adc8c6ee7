"""Every finding id is raised by something real, and not by the same varied run without it; replay's own are listed."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from rlk_ledger.audit import AuditResult, audit
from rlk_ledger.history import History
from rlk_ledger.tombstones import Pruned
from rlk_ledger_schemas.arrays import to_array
from rlk_ledger_schemas.findings import FINDINGS
from rlk_ledger_schemas.fingerprints import sha256

REPLAY = {
    "drift.attributed", "drift.within_floor", "noise.clip_below_floor", "reference.broken", "reference.disagrees",
    "variant.did_not_apply", "explain.reproduced", "replay.redacted", "replay.failed",
}  # fmt: skip
"""Ids that need numbers of replay's own."""

FAULTS = {
    "contract.differs": "hidden_temperature",
    "weights.not_loaded": "stale_engine",
    "mask.differs": "mask_digest",
    "alignment.shift": "training_shift",
    "sampling.support": "rollout_renormalised",
    "drift.split": "bad_engine",
    "replicas.differ": "replica",
    "values.nan": "nan_training",
    "values.inf": "minus_inf",
    "values.sentinel": "sentinel",
    "values.defaulted": "zero_filled",
    "values.copied": "copied",
    "values.impossible": "probabilities",
    "coverage.unobserved": "never_trained",
}
"""Finding -> the fault of made_faults that shows it."""

Edit = Callable[[Any], None]


def envelopes(log: Any, kind: str, **wanted: Any) -> list[Any]:
    """The rows of a type whose envelope holds these values."""
    return [r for r in log.rows if r[2]["type"] == kind and all(r[2].get(k) == v for k, v in wanted.items())]


def numerics(log: Any) -> None:
    for writer, order in (("rollout-0", "hf"), ("train-0", "kernel")):
        log.add(writer, "contract.declared", kind="norm", version="1", body={"eps": 1e-6, "rounding_order": order})


def other_weights(log: Any) -> None:
    envelopes(log, "weights.loaded", weight_version="v2")[0][2]["digest"] = sha256(b"other bytes")


def skipped(log: Any) -> None:
    envelopes(log, "weights.loaded", weight_version="v1")[0][2]["skipped"] = ["layers.3.experts"]


def other_tokens(log: Any) -> None:
    for row in envelopes(log, "logprobs", source="training")[:3]:
        row[2]["token_digest"] = sha256(b"retokenised")


def ambiguous(log: Any) -> None:
    first, second = [r for r in envelopes(log, "rollout.sample") if not r[2].get("attempt")][:2]
    second[2]["sample_id"], second[2]["attempt"] = first[2]["sample_id"], first[2].get("attempt")


def equal(log: Any) -> None:
    rollout = {r[2]["sample_id"]: r[3]["values"] for r in envelopes(log, "logprobs", source="rollout")}
    for row in envelopes(log, "logprobs", source="training"):
        row[3]["values"] = rollout[row[2]["sample_id"]]


def off_policy(log: Any) -> None:
    for row in envelopes(log, "logprobs", source="training", step=1):
        row[2]["weight_version"] = "v0"


def fell_back(log: Any) -> None:
    log.add(
        "rollout-0", "knob.applied", path="rollout.batch_invariant", requested=True, actual=False, status="fallback"
    )


def defaulted(log: Any) -> None:
    for row in envelopes(log, "rollout.sample"):
        row[2]["metadata_source"] = {"weight_spans": "defaulted"}


def missing(log: Any) -> None:
    row = envelopes(log, "logprobs", source="training")[0]
    codes = np.zeros(len(row[3]["values"]), np.uint8)
    codes[0] = 5
    row[3]["value_class"] = to_array(codes, "uint8", "value_class")


def routes(log: Any) -> None:
    for row in envelopes(log, "rollout.sample"):
        row[2]["routed_experts"] = {"coverage": 0.5}


def clones(log: Any) -> None:
    rows = envelopes(log, "rollout.sample", group_id="g0.0")
    n = min(len(row[3]["loss_mask"]) for row in rows)
    for row in rows:
        tokens = to_array(np.arange(n, dtype=np.int32), "int32", "tokens")
        row[2].update(token_digest=sha256(tokens.data), weight_spans=[{"version": "v0", "start": 0, "end": n}])
        row[3].update(response_token_ids=tokens, loss_mask=to_array(np.ones(n, np.uint8), "uint8", "mask"))
        for score in envelopes(log, "logprobs", sample_id=row[2]["sample_id"]):
            score[2].pop("token_digest", None)
            score[2].pop("mask_digest", None)
            score[3]["values"] = to_array(np.full(n, -2.0 - 0.01 * row[1], np.float32), "float32", "values")


def all_masked(log: Any) -> None:
    for row in envelopes(log, "rollout.sample"):
        row[3]["loss_mask"] = to_array(np.zeros(len(row[3]["loss_mask"]), np.uint8), "uint8", "mask")
    for row in envelopes(log, "logprobs"):
        row[2].pop("mask_digest", None)


def shard_lost(log: Any) -> None:
    row = envelopes(log, "logprobs", source="training")[0]
    row[2]["shard"] = {"axis": "sequence", "rank": 0, "world_size": 2, "ranges": [[0, len(row[3]["values"])]]}


def lost(log: Any) -> None:
    log.add("rollout-0", "gap", kind="bulk", first=3, last=9, reason="budget")


def dropped_tokens(log: Any) -> None:
    for row in envelopes(log, "run.opened"):
        row[2]["redaction"] = "drop"
    for row in envelopes(log, "rollout.sample"):
        row[3].pop("response_token_ids")
        row[2].pop("token_digest", None)
    for row in envelopes(log, "logprobs"):
        row[2].pop("token_digest", None)


def second_layout(log: Any) -> None:
    for row in envelopes(log, "logprobs", source="training"):
        again = row[3]["values"].data
        moved = np.frombuffer(again, np.float32) * np.float32(1.0001)
        fields = {k: row[2][k] for k in ("step", "sample_id", "contract_id", "weight_version")}
        log.add("train-0", "logprobs", source="training", values=moved, pass_id="update", layout_id="L9", **fields)


EDITS: dict[str, Edit] = {
    "numerics.differ": numerics,
    "weights.differ": other_weights,
    "weights.skipped": skipped,
    "tokens.differ": other_tokens,
    "samples.ambiguous": ambiguous,
    "layout.sensitive": second_layout,
    "drift.zero": equal,
    "off_policy.lag": off_policy,
    "backend.not_in_force": fell_back,
    "metadata.defaulted": defaulted,
    "values.missing": missing,
    "routes.incomplete": routes,
    "group.duplicates": clones,
    "coverage.zero_active_tokens": all_masked,
    "evidence.shards_missing": shard_lost,
    "evidence.incomplete": lost,
    "tokens.redacted": dropped_tokens,
}
PRUNED = "evidence.pruned"


def quiet(plan: Any) -> None:
    """A varied run without the second passes and mixed versions that are information of their own."""
    plan.second_pass = plan.lagging = False
    plan.cp, plan.steps, plan.groups, plan.per_group = 1, 4, 3, 4


def judged(made: ModuleType, seed: int, edit: Edit | None = None) -> AuditResult:
    def change(plan: Any) -> None:
        quiet(plan)
        plan.edits += [edit] if edit is not None else []

    return audit(History.from_events(made.events(seed, change)))


def test_every_id_is_audits_or_replays_and_has_its_case() -> None:
    assert FAULTS.keys() | EDITS.keys() | {PRUNED} | REPLAY == FINDINGS.keys()
    assert not (FAULTS.keys() | EDITS.keys() | {PRUNED}) & REPLAY


@pytest.mark.parametrize("finding_id", sorted(EDITS))
@pytest.mark.parametrize("seed", [2, 9])
def test_a_finding_is_raised_by_its_cause_and_not_without_it(made: ModuleType, finding_id: str, seed: int) -> None:
    clean = judged(made, seed)
    assert [f for f in clean.findings if f.finding_id == finding_id] == []
    found = [f for f in judged(made, seed, EDITS[finding_id]).findings if f.finding_id == finding_id]
    assert found, finding_id
    for finding in found:
        assert finding.where or finding.evidence
        assert finding.to_dict()["next_step"]


@pytest.mark.parametrize("finding_id", sorted(FAULTS))
def test_a_fault_raises_its_finding_and_the_run_without_it_does_not(
    finding_id: str, audited: Callable[..., AuditResult]
) -> None:
    assert finding_id in {f.finding_id for f in audited(1003, FAULTS[finding_id]).findings}
    assert finding_id not in {f.finding_id for f in audited(1003).findings}


def test_what_was_pruned_is_told(made: ModuleType) -> None:
    history = History.from_events(made.events(2, quiet))
    assert PRUNED not in {f.finding_id for f in audit(history).findings}
    gone = {"segments": 2, "bytes": 900, "events": 6, "stated": 0, "types": {"rollout.sample": 3}}
    who = {"by": ("ops",), "reasons": ("retention",), "first_wall_ns": 1, "last_wall_ns": 2}
    history.pruned = Pruned(first_step=0, last_step=1, **gone, **who)
    assert PRUNED in {f.finding_id for f in audit(history).findings}
