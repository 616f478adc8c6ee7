"""What honest runs do that looks like a fault, and faults that look like honest runs."""

from types import ModuleType
from typing import Any

import numpy as np
import pytest

from rlk_ledger import drift
from rlk_ledger.audit import audit, make_view, summarise
from rlk_ledger.history import History
from rlk_ledger.pairs import pair
from rlk_ledger.token_tables import drift_table, tokens_table
from rlk_ledger_schemas.fingerprints import sha256

BODY = {"mode": "processed", "temperature": 1.0, "alignment": "token_i_given_before_i"}
N = 30


class Case:
    """A run to which a test adds samples and scores."""

    def __init__(self, made: ModuleType) -> None:
        self.log = made.Log("variation")
        self.rng = np.random.default_rng(11)
        for writer, role in (("r", "rollout"), ("t", "training")):
            self.log.add(writer, "writer.opened", role=role, rank=0, world_size=1)
            declared = self.log.add(writer, "contract.declared", kind="logprob", version="1", body=BODY)
        self.contract = declared["contract_id"]

    def publish(self, version: str, step: int, content: str | None = None) -> None:
        fields = {"digest": sha256((content or version).encode()), "tensor_count": 1}
        self.log.add("t", "weights.published", weight_version=version, step=step, **fields)

    def values(self, n: int = N) -> tuple[np.ndarray, np.ndarray]:
        truth = -self.rng.gamma(1.5, 1.0, n) - 0.05
        both = truth + self.rng.normal(0, 0.005, (2, n))
        return both[0].astype(np.float32), both[1].astype(np.float32)

    def sample(self, sample_id: str, n: int = N, spans: Any = None, tokens: Any = None, **fields: Any) -> None:
        held = [("v0", 0, n)] if spans is None else spans
        given = {
            "response_token_ids": self.rng.integers(0, 99, n).astype(np.int32) if tokens is None else tokens,
            "loss_mask": np.ones(n, np.uint8),
            "weight_spans": [{"version": v, "start": a, "end": b} for v, a, b in held],
        }
        self.log.add("r", "rollout.sample", sample_id=sample_id, **{**given, **fields})

    def score(self, source: str, sample_id: str, values: np.ndarray, version: str | None = "v0", **fields: Any) -> None:
        given = {"sample_id": sample_id, "source": source, "contract_id": self.contract, **fields}
        given |= {} if version is None else {"weight_version": version}
        self.log.add(source[0], "logprobs", values=values, **given)

    def both(self, sample_id: str, **fields: Any) -> None:
        rollout, training = self.values()
        self.sample(sample_id, **fields)
        self.score("rollout", sample_id, rollout)
        self.score("training", sample_id, training)

    def history(self) -> History:
        return History.from_events(self.log.rows)

    def found(self) -> dict[str, dict[str, Any]]:
        return {f.finding_id: f.where for f in audit(self.history()).findings if f.severity != "info"}


@pytest.fixture
def case(made: ModuleType) -> Case:
    out = Case(made)
    out.publish("v0", 0)
    return out


def test_only_generated_tokens_need_a_weight_version(case: Case) -> None:
    """Tool text between two turns was written by no weights, so no span covers it."""
    mask = np.ones(N, np.uint8)
    mask[10:16] = 0
    rollout, training = case.values()
    case.sample("s", spans=[("v0", 0, 10), ("v0", 16, N)], loss_mask=mask)
    case.score("rollout", "s", rollout[:10])
    case.score("rollout", "s", rollout[16:], start=16)
    case.score("training", "s", training)
    assert case.found() == {}
    case.sample("t", spans=[("v0", 0, 10)])
    case.score("rollout", "t", rollout)
    case.score("training", "t", training)
    assert case.found()["evidence.incomplete"]["sample_id"] == "t"


@pytest.mark.parametrize("status", ["aborted", "failed"])
def test_an_aborted_sample_owes_values_only_when_it_was_trained_on(case: Case, status: str) -> None:
    case.both("ok")
    case.sample("gone", status=status)
    result = audit(case.history())
    assert (result.verdict, result.findings) == ("pass", ())
    case.score("training", "gone", case.values()[1])
    assert case.found() == {"coverage.unobserved": {"source": "rollout", "tokens": N, "sample_id": "gone"}}


def test_a_run_of_aborted_samples_alone_is_no_pass(case: Case) -> None:
    case.sample("gone", status="aborted")
    result = audit(case.history())
    assert (result.verdict, result.exit_code) == ("inconclusive", 3)


def test_a_group_dropped_in_one_step_excuses_no_other_step(case: Case) -> None:
    for step in (0, 1):
        rollout, _ = case.values()
        case.sample(f"s{step}", step=step, group_id="same prompt")
        case.score("rollout", f"s{step}", rollout)
    dropped = [{"kept": False, "reason": "equal rewards", "group_id": "same prompt"}]
    case.log.add("t", "batch.layout", layout_id="L", step=0, decisions=dropped)
    assert case.found()["coverage.unobserved"] == {"source": "training", "tokens": N, "sample_id": "s1"}


def test_attempts_of_one_sample_are_no_group_of_clones(case: Case) -> None:
    tokens = np.arange(N, dtype=np.int32)
    for attempt in range(2):
        rollout, training = case.values()
        case.sample("s", tokens=tokens, group_id="g", attempt=attempt)
        case.score("rollout", "s", rollout, attempt=attempt)
        case.score("training", "s", training, attempt=attempt)
    assert case.found() == {}


def test_one_sample_under_two_masks_is_named(case: Case) -> None:
    tokens, mask = np.arange(N, dtype=np.int32), np.ones(N, np.uint8)
    case.both("s", tokens=tokens)
    mask[:5] = 0
    case.sample("s", tokens=tokens, loss_mask=mask)
    assert case.found() == {"mask.differs": {"source": "rollout", "samples": 1, "sample_id": "s"}}


def test_a_shift_in_the_only_sample_is_named_and_one_odd_sample_of_many_is_not(case: Case) -> None:
    rollout, training = case.values(200)
    case.sample("s", 200)
    case.score("rollout", "s", rollout)
    case.score("training", "s", np.append(training[1:], np.float32(0)))
    assert case.found()["alignment.shift"]["lag"] == 1
    for i in range(3):
        case.both(f"other{i}")
    assert "alignment.shift" not in case.found()


@pytest.mark.parametrize(("apart", "finding"), [(0.0, None), (0.25, "replicas.differ")])
def test_ranks_that_both_scored_a_position_must_agree(case: Case, apart: float, finding: str | None) -> None:
    rollout, training = case.values()
    case.sample("s")
    case.score("rollout", "s", rollout)
    for rank, (a, b) in enumerate(((0, 18), (12, N))):
        shard = {"axis": "sequence", "rank": rank, "world_size": 2, "ranges": [[a, b]]}
        case.score("training", "s", training[a:b] - np.float32(apart * rank), shard=shard)
    found = case.found()
    assert set(found) == ({finding} if finding else set())
    if finding:
        assert found[finding]["position"] == 12


def test_a_version_published_again_after_a_resume_may_be_loaded_either_way(case: Case) -> None:
    case.both("s")
    case.publish("v0", 0, "after the resume")
    for content in ("v0", "after the resume"):
        fields = {"digest": sha256(content.encode()), "tensor_count": 1, "engine": "e", "what": "received"}
        case.log.add("r", "weights.loaded", weight_version="v0", **fields)
    assert case.found() == {}
    fields = {"digest": sha256(b"another"), "tensor_count": 1, "engine": "e", "what": "received"}
    case.log.add("r", "weights.loaded", weight_version="v0", **fields)
    assert case.found() == {"weights.differ": {"engine": "e", "version": "v0"}}


def test_initial_weights_nobody_published_are_older_than_the_first_published(made: ModuleType) -> None:
    case = Case(made)
    for step in (1, 2):
        case.publish(f"v{step}", step)
    rollout, training = case.values()
    case.sample("s")
    case.score("rollout", "s", rollout)
    case.score("training", "s", training, "v1")
    assert pair(case.history()).versions == ("v0", "v1", "v2")
    assert [row.lag for row in pair(case.history()).off_policy] == [1]


def test_a_version_may_have_any_name(case: Case) -> None:
    case.sample("s", spans=[("²", 0, N)])
    case.score("rollout", "s", case.values()[0], "²")
    assert pair(case.history()).versions == ("v0", "²")


def two_versions(case: Case) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A sample of v1 then v2 that training scored under v5 first and under v2 afterwards."""
    for step in range(1, 6):
        case.publish(f"v{step}", step)
    rollout, late = case.values()
    early = late - np.float32(0.5)
    case.sample("s", spans=[("v1", 0, 12), ("v2", 12, N)])
    case.score("rollout", "s", rollout, None)
    case.score("training", "s", early, "v5", pass_id="a")
    case.score("training", "s", late, "v2", pass_id="b")
    return rollout, early, late


def test_an_off_policy_token_is_measured_with_the_pass_its_version_names(case: Case) -> None:
    rollout, early, _ = two_versions(case)
    (row,) = pair(case.history()).off_policy
    assert (row.rollout_version, row.training_version, row.lag) == ("v1", "v5", 4)
    assert row.dlogp.tolist() == (early.astype(np.float64) - rollout)[:12].tolist()


def test_every_row_of_tokens_holds_the_values_and_version_of_its_own_pass(case: Case) -> None:
    rollout, _, late = two_versions(case)
    rows = tokens_table([case.history()]).to_pylist()
    compared = [row for row in rows if row["dlogp"] is not None]
    assert {(row["pass_id"], row["weight_version"]) for row in compared} == {("b", "v2")}
    d = late.astype(np.float64) - rollout
    assert [row["dlogp"] for row in compared] == d[12:].tolist()
    versions = [row["weight_version"] for row in rows if row["source"] == "rollout"]
    assert versions == ["v1"] * 12 + ["v2"] * 18


def test_a_place_names_the_pass_a_value_came_from(case: Case) -> None:
    case.publish("v1", 1)
    rollout, training = case.values()
    case.sample("s", spans=[("v0", 0, 12), ("v1", 12, N)])
    case.score("rollout", "s", rollout, None)
    case.score("training", "s", training, "v0", pass_id="a", layout_id="A")
    case.score("training", "s", training, "v1", pass_id="b", layout_id="B")
    rows = drift_table([case.history()]).to_pylist()
    assert [(row["pass_id"], row["layout_id"]) for row in rows] == [("a", "A")] * 12 + [("b", "B")] * 18
    view = make_view(case.history())
    assert [view.place(0, position)["pass_id"] for position in (11, 12)] == ["a", "b"]


def test_recorded_classes_belong_to_the_pass_a_position_was_taken_from(case: Case) -> None:
    case.publish("v1", 1)
    rollout, training = case.values()
    case.sample("s", spans=[("v0", 0, 12), ("v1", 12, N)])
    case.score("rollout", "s", rollout, None)
    lost = np.zeros(N, np.uint8)
    lost[20] = 4
    case.score("training", "s", training, "v0", value_class=lost)
    case.score("training", "s", training, "v1")
    assert case.found() == {}


def test_confident_tokens_of_an_asynchronous_run_are_not_defaulted(case: Case) -> None:
    """No token pairs under one version; the run's own off-policy differences say how far a zero may be."""
    case.publish("v1", 1)
    for i in range(12):
        rollout, training = case.values()
        training = np.minimum(training + case.rng.normal(0, 0.05, N), 0).astype(np.float32)
        rollout[5], training[5] = 0.0, -0.014
        case.sample(f"s{i}")
        case.score("rollout", f"s{i}", rollout)
        case.score("training", f"s{i}", training, "v1")
    assert case.found() == {}
    rollout, training = case.values()
    rollout[:8] = 0.0
    case.sample("filled")
    case.score("rollout", "filled", rollout)
    case.score("training", "filled", training - 1, "v1")
    assert "values.defaulted" in case.found()


def test_drift_counts_what_is_no_measurement_as_the_audit_does(case: Case) -> None:
    rollout, training = case.values()
    rollout[3] = np.nan
    case.sample("s")
    case.score("rollout", "s", rollout)
    case.score("training", "s", training)
    view = make_view(case.history())
    total = drift.overall(view).to_dict()
    assert total == summarise(view)["drift"]
    assert (total["active"], total["tokens"], total["excluded"]) == (N, N - 1, {"rollout.nan": 1})


def bfloat16(values: np.ndarray) -> np.ndarray:
    bits = np.minimum(values, 0).astype(np.float32).view(np.uint32)
    return (bits + np.uint32(0x8000) & np.uint32(0xFFFF0000)).view(np.float32)


@pytest.mark.parametrize("seed", range(6))
def test_rounded_values_differ_no_more_where_there_are_more_of_them(case: Case, seed: int) -> None:
    """Most are equal, a few a quantum apart: the log RMS of 100 tokens catches more of those than that of 20."""
    rng = np.random.default_rng(seed)
    for i in range(120):
        n = int(np.clip(rng.lognormal(5.0, 0.4), 60, 400))
        mask = np.ones(n, np.uint8)
        mask[20:30] = 0
        truth = -rng.gamma(1.1, 1.2, n) - 0.001
        sure = rng.random(n) < 0.8
        truth[sure] = -(10 ** rng.uniform(-6, -2, int(sure.sum())))
        scale = 0.001 * np.exp(rng.normal(0, 0.5)) * (1 - np.exp(truth) + 1e-4)
        r, t = (bfloat16(truth + scale * rng.standard_t(4, n)) for _ in range(2))
        case.sample(f"s{i}", n, loss_mask=mask, step=0, group_id=f"g{i // 6}")
        case.score("rollout", f"s{i}", r)
        case.score("training", f"s{i}", t)
    assert "drift.split" not in case.found()


@pytest.mark.parametrize(("shift", "named"), [(-0.08, True), (-0.4, False)])
def test_a_shift_beyond_the_declared_top_p_is_no_renormalisation(case: Case, shift: float, named: bool) -> None:
    """top_p 0.9 keeps at least that mass: it moves a log-probability by 0.105 at most."""
    for i in range(10):
        rollout, _ = case.values()
        training = (rollout + shift * case.rng.uniform(0.8, 1.0, N)).astype(np.float32)
        case.sample(f"s{i}", sampling={"temperature": 1.0, "top_p": 0.9})
        case.score("rollout", f"s{i}", rollout)
        case.score("training", f"s{i}", training)
    assert ("sampling.support" in case.found()) == named


def test_a_neighbour_that_is_only_somewhat_closer_is_no_shift(case: Case) -> None:
    """Values of neighbouring tokens resemble each other in smooth text; large noise then hides which is which."""
    for i in range(10):
        smooth = -2.0 + np.cumsum(case.rng.normal(0, 0.05, N))
        rollout = smooth + case.rng.normal(0, 0.3, N)
        training = 0.6 * smooth + 0.4 * np.roll(rollout, 1) - 0.1
        case.sample(f"s{i}")
        case.score("rollout", f"s{i}", np.minimum(rollout, 0).astype(np.float32))
        case.score("training", f"s{i}", np.minimum(training, 0).astype(np.float32))
    assert "alignment.shift" not in case.found()


@pytest.mark.parametrize(("layouts", "told"), [(("A", "A"), False), (("A", "B"), True)])
def test_two_passes_in_one_layout_say_nothing_about_layouts(case: Case, layouts: Any, told: bool) -> None:
    case.both("s")
    rollout, training = case.values()
    case.sample("t")
    case.score("rollout", "t", rollout)
    for layout, offset in zip(layouts, (0.0, 0.01)):
        case.score("training", "t", training - np.float32(offset), pass_id=f"p{offset}", layout_id=layout)
    found = {f.finding_id for f in audit(case.history()).findings}
    assert ("layout.sensitive" in found) == told


@pytest.mark.parametrize(("seeds", "named"), [((1, 1), True), ((1, 2), False)])
def test_raw_values_understate_how_often_cold_sampling_repeats(case: Case, seeds: Any, named: bool) -> None:
    """At a low temperature two seeds may well give one answer that the raw log-probabilities call improbable."""
    body = {**BODY, "mode": "raw", "temperature": 0.2}
    for writer in ("r", "t"):
        declared = case.log.add(writer, "contract.declared", kind="logprob", version="1", body=body)
    case.contract = declared["contract_id"]
    for i, seed in enumerate(seeds):
        sampling = {"temperature": 0.2, "seed": seed}
        case.both(f"s{i}", tokens=np.arange(N, dtype=np.int32), group_id="g", sampling=sampling)
    assert ("group.duplicates" in case.found()) == named
