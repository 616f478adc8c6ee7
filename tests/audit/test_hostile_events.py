"""An event of impossible types or lengths costs that event, is named by writer, number and field, and nothing more."""

import copy
import os
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from rlk_ledger import drift
from rlk_ledger.audit import AuditResult, audit, make_view
from rlk_ledger.history import History
from rlk_ledger.refusals import refuse
from rlk_ledger.token_tables import BUILDERS
from rlk_ledger_schemas.arrays import Array

ROUNDS = int(os.environ.get("RLK_HOSTILE_ROUNDS", "120"))
VALUES: list[Any] = [
    [], {}, [[1]], {"a": [1]}, "text", "", -1, 0, 1, 2**63, -(2**63), 1.5, float("nan"), float("inf"), True, None,
    b"\xff", [None], {"": {}}, [{"version": []}], "²", 10**15,
]  # fmt: skip


def judge(rows: list[Any]) -> tuple[History, AuditResult]:
    """Everything that reads a run, over one that may hold anything."""
    history = History.from_events(rows)
    view = make_view(history)
    result = audit(history)
    for build in BUILDERS.values():
        build([history]).to_pylist()
    drift.names(view)
    drift.by(view, ["step", "sample_id"])
    drift.worst(view, 5)
    drift.overall(view).to_dict()
    result.to_dict()
    return history, result


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a nested value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(p for key, one in inner for p in places(one, (*path, key)))]


def change(fields: dict[str, Any], path: tuple[Any, ...], value: Any) -> None:
    at: Any = fields
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value


@pytest.fixture(scope="module")
def run(made: ModuleType) -> list[Any]:
    """A small made run with turns, caches, shards and several versions."""

    def smaller(plan: Any) -> None:
        plan.steps, plan.groups, plan.per_group, plan.length = 2, 2, 3, 24.0
        plan.lagging = plan.turns = plan.labelled = plan.spec = plan.routes = True

    return made.events(5, smaller)


@pytest.mark.parametrize(
    ("kind", "field", "value", "named"),
    [
        ("rollout.sample", "sample_id", ["s"], "sample_id"),
        ("rollout.sample", "weight_spans", [{"version": ["v"], "start": 0, "end": 1}], "weight_spans[0].version"),
        ("rollout.sample", "cache", {"cached_tokens": [16]}, "cache.cached_tokens"),
        ("rollout.sample", "step", "three", "step"),
        ("rollout.sample", "turn", [1], "turn"),
        ("logprobs", "sample_id", {"a": 1}, "sample_id"),
        ("logprobs", "start", [0], "start"),
        ("logprobs", "weight_version", ["v0"], "weight_version"),
        ("logprobs", "shard", {"axis": "sequence", "rank": 0, "world_size": 1, "ranges": [["a", 3]]}, "shard.ranges"),
        ("weights.published", "digest", 7, "digest"),
        ("weights.loaded", "engine", ["e"], "engine"),
        ("batch.layout", "layout_id", [1], "layout_id"),
        ("writer.opened", "rank", "zero", "rank"),
    ],
)
def test_the_event_is_named_and_the_rest_is_audited(
    run: list[Any], kind: str, field: str, value: Any, named: str
) -> None:
    rows = copy.deepcopy(run)
    writer, seq, fields, _ = next(row for row in rows if row[2]["type"] == kind)
    fields[field] = value
    before, (history, result) = audit(History.from_events(run)), judge(rows)
    (one,) = history.refused
    assert (one.type, one.writer_id, one.seq) == (kind, writer, seq)
    assert one.field.startswith(named)
    assert one.reason.startswith(f"writer {writer}, event {seq} ({kind}): ")
    assert one.reason.count("\n") == 0
    gap = next(f for f in result.findings if f.where.get("seq") == seq and f.where.get("type") == kind)
    assert (gap.finding_id, gap.severity, gap.where["writer"]) == ("evidence.incomplete", "gap", writer)
    assert result.verdict != "pass"
    assert result.summary["samples"] >= before.summary["samples"] - 1
    assert result.summary["compared_tokens"] > 0


@pytest.mark.parametrize(
    ("kind", "name", "array"),
    [
        ("rollout.sample", "loss_mask", None),
        ("rollout.sample", "loss_mask", Array("uint8", b"\1")),
        ("rollout.sample", "loss_mask", Array("float32", b"\0\0\0\0")),
        ("rollout.sample", "kept_mass", Array("float32", b"\0\0\0\0")),
        ("logprobs", "values", None),
        ("logprobs", "values", Array("int32", b"\0\0\0\0")),
        ("logprobs", "value_class", Array("uint8", b"\0")),
    ],
)
def test_arrays_of_other_types_and_lengths_are_told_too(run: list[Any], kind: str, name: str, array: Any) -> None:
    rows = copy.deepcopy(run)
    row = next(row for row in rows if row[2]["type"] == kind)
    row[3].pop(name, None)
    if array is not None:
        row[3][name] = array
    history, result = judge(rows)
    (one,) = history.refused
    assert name in one.reason
    assert result.exit_code in (1, 3)


@pytest.mark.parametrize("seed", range(4))
def test_any_field_may_hold_anything(run: list[Any], seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(ROUNDS // 4):
        rows = list(run)
        for _ in range(int(rng.integers(1, 4))):
            index = int(rng.integers(len(rows)))
            writer, seq, fields, arrays = copy.deepcopy(rows[index])
            held = [p for p in places(fields) if p and p != ("type",)]
            change(fields, held[int(rng.integers(len(held)))], VALUES[int(rng.integers(len(VALUES)))])
            rows[index] = (writer, seq, fields, arrays)
        judge(rows)


def test_what_every_recorder_writes_is_never_refused(made: ModuleType) -> None:
    for seed in range(8):
        assert History.from_events(made.events(seed)).refused == []


def test_fields_and_words_of_a_newer_writer_refuse_nothing(run: list[Any]) -> None:
    rows = copy.deepcopy(run)
    for _, _, fields, _ in rows:
        fields["invented"] = [1, {"a": 2}]
        if fields["type"] == "rollout.sample":
            fields["cache"]["tier"] = "disk"
            fields["status"] = "paused"
    rows.append(("w", 0, {"type": "invented.event", "sample_id": [1]}, {}))
    history, _ = judge(rows)
    assert history.refused == []


def test_redacted_samples_are_whole(run: list[Any]) -> None:
    row = next(row for row in copy.deepcopy(run) if row[2]["type"] == "rollout.sample")
    tokens = row[3].pop("response_token_ids")
    assert refuse(row[0], row[1], row[2], row[3]) is None
    row[3]["response_token_ids"] = Array("uint64", bytes(2 * len(tokens.data)))
    assert refuse(row[0], row[1], row[2], row[3]) is None
