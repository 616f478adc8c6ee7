"""The audit answers about any record that a recorder can write: torn, thinned, reordered, degenerate."""

from types import ModuleType
from typing import Any

import numpy as np
import pytest

from rlk_ledger import drift
from rlk_ledger.audit import audit, make_view
from rlk_ledger.history import History
from rlk_ledger.token_tables import BUILDERS


@pytest.mark.parametrize("seed", range(30))
def test_a_thinned_record_is_audited_and_never_passes_unseen_tokens(made: ModuleType, seed: int) -> None:
    rng = np.random.default_rng(seed)
    events = made.events(3000 + seed)
    kept = [row for row in events if rng.random() > rng.choice([0.02, 0.3, 0.8])]
    history = History.from_events(kept)
    result = audit(history)
    assert result.to_dict()["verdict"] in ("pass", "fail", "inconclusive", "not_comparable")
    view = make_view(history)
    tables = {name: builder([history]).to_pylist() for name, builder in BUILDERS.items()}
    compared = sorted(row["dlogp"] for row in tables["tokens"] if row["dlogp"] is not None)
    assert compared == sorted(row["dlogp"] for row in tables["drift"]) == sorted(view.tokens.d.tolist())
    assert len(tables["off_policy"]) == result.summary["off_policy_tokens"]
    drift.by(view, ["step", "cache"]) if view.pairs and "cache.hit" in drift.names(view) else None
    scored = {s.sample_id for s in history.scores if s.source == "training"}
    if any(s.sample_id not in scored and s.loss_mask.any() for s in view.pairing.samples):
        assert result.verdict != "pass"


def sample(log: Any, sample_id: str, n: int, mask: Any = None, **fields: Any) -> None:
    log.add(
        "r",
        "rollout.sample",
        sample_id=sample_id,
        response_token_ids=np.arange(n, dtype=np.int32),
        loss_mask=np.ones(n, np.uint8) if mask is None else mask,
        **fields,
    )


def scores(log: Any, sample_id: str, values: Any, **fields: Any) -> None:
    for writer, source in (("r", "rollout"), ("t", "training")):
        log.add(writer, "logprobs", sample_id=sample_id, source=source, values=values, contract_id="c", **fields)


@pytest.mark.parametrize("n", [0, 1, 2, 9])
def test_degenerate_lengths(made: ModuleType, n: int) -> None:
    log = made.Log()
    span = [{"version": "v", "start": 0, "end": n}]
    for i in range(10):
        sample(log, f"s{i}", n, weight_spans=span)
        scores(log, f"s{i}", np.full(n, -1.0 - i, np.float32), weight_version="v")
    result = audit(History.from_events(log.rows))
    assert result.summary["compared_tokens"] == 10 * n
    assert result.verdict == "inconclusive"


def test_everything_non_finite(made: ModuleType) -> None:
    log = made.Log()
    for i in range(10):
        sample(log, f"s{i}", 12, weight_spans=[{"version": "v", "start": 0, "end": 12}])
        scores(log, f"s{i}", np.full(12, np.nan, np.float32), weight_version="v")
    result = audit(History.from_events(log.rows))
    assert {f.finding_id for f in result.findings if f.severity == "error"} == {"values.nan"}
    assert result.summary["drift"]["status"] == "zero_active_tokens"


def test_overlapping_and_empty_spans(made: ModuleType) -> None:
    log = made.Log()
    spans = [
        {"version": "a", "start": 0, "end": 8},
        {"version": "b", "start": 4, "end": 4},
        {"version": "b", "start": 6, "end": 12},
    ]
    sample(log, "s", 12, weight_spans=spans)
    scores(log, "s", np.full(12, -1.5, np.float32), weight_version="b")
    assert audit(History.from_events(log.rows)).summary["compared_tokens"] == 6


def test_shards_with_ranges_beyond_the_sample(made: ModuleType) -> None:
    log = made.Log()
    sample(log, "s", 6, weight_spans=[{"version": "v", "start": 0, "end": 6}])
    log.add("r", "logprobs", sample_id="s", source="rollout", values=np.full(6, -1, np.float32), contract_id="c")
    for rank, ranges in ((0, [[0, 4]]), (1, [[4, 9]])):
        values = np.full(ranges[0][1] - ranges[0][0], -1.0, np.float32)
        shard = {"axis": "sequence", "rank": rank, "world_size": 2, "ranges": ranges}
        common = {"sample_id": "s", "contract_id": "c", "weight_version": "v"}
        log.add("t", "logprobs", source="training", values=values, shard=shard, **common)
    found = {f.finding_id: f.where for f in audit(History.from_events(log.rows)).findings}
    assert found["tokens.differ"]["first_index"] == 6
