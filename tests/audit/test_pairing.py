"""The pairing rule of the event catalogue, case by case."""

from types import ModuleType
from typing import Any

import numpy as np
import pytest

from rlk_ledger.audit import audit
from rlk_ledger.history import History
from rlk_ledger.pairs import Pairing, pair
from rlk_ledger_schemas.arrays import Array
from rlk_ledger_schemas.fingerprints import mask_digest, token_digest

N = 12
TOKENS = np.arange(N, dtype=np.int32)
R = np.linspace(-3.0, -0.5, N).astype(np.float32)
T = (R + np.float32(0.01)).astype(np.float32)


class Run:
    """A run of one sample, to which a test adds scores."""

    def __init__(self, made: ModuleType) -> None:
        self.log = made.Log("pairing")
        for writer, role in (("r", "rollout"), ("t", "training")):
            self.log.add(writer, "writer.opened", role=role, rank=0, world_size=1)
        body = {"mode": "processed", "temperature": 1.0, "alignment": "token_i_given_before_i"}
        for writer in ("r", "t"):
            self.contract = self.log.add(writer, "contract.declared", kind="logprob", version="1", body=body)[
                "contract_id"
            ]
        for v in range(3):
            digest = f"sha256:{v:064x}"
            self.log.add("t", "weights.published", weight_version=f"v{v}", digest=digest, tensor_count=1, step=v)

    def sample(self, sample_id: str = "s", spans: Any = (("v1", 0, N),), **fields: Any) -> None:
        held = [{"version": v, "start": a, "end": b} for v, a, b in spans]
        fields = {"response_token_ids": TOKENS, "loss_mask": np.ones(N, np.uint8), "weight_spans": held} | fields
        self.log.add("r", "rollout.sample", sample_id=sample_id, step=0, **fields)

    def rollout(self, values: Any = R, sample_id: str = "s", **fields: Any) -> None:
        self.score("r", "rollout", values, sample_id, **({"weight_version": "v1"} | fields))

    def training(self, values: Any = T, version: str | None = "v1", sample_id: str = "s", **fields: Any) -> None:
        given = {"weight_version": version} if version else {}
        self.score("t", "training", values, sample_id, **(given | fields))

    def score(self, writer: str, source: str, values: Any, sample_id: str, **fields: Any) -> None:
        fields = {"sample_id": sample_id, "source": source, "values": values, "contract_id": self.contract} | fields
        self.log.add(writer, "logprobs", step=0, **fields)

    def paired(self) -> Pairing:
        return pair(History.from_events(self.log.rows))

    def findings(self) -> dict[str, dict[str, Any]]:
        return {f.finding_id: f.where for f in audit(History.from_events(self.log.rows)).findings}


@pytest.fixture
def run(made: ModuleType) -> Run:
    return Run(made)


def test_the_first_training_pass_of_the_span_s_version_pairs(run: Run) -> None:
    run.sample()
    run.rollout()
    run.training(pass_id="old")
    run.training(T + 1, pass_id="inner")
    got = run.paired()
    assert got.pairs[0].paired.all()
    assert got.pairs[0].pass_id == "old"
    assert got.pairs[0].training.tolist() == T.tolist()
    assert [p.series.first.pass_id for p in got.passes] == ["inner"]


def test_an_unnamed_pass_recorded_again_is_another_pass(run: Run) -> None:
    run.sample()
    run.rollout()
    run.training()
    run.training(T + 1)
    got = run.paired()
    assert got.pairs[0].training.tolist() == T.tolist()
    assert len(got.passes) == 1


def test_a_pass_of_another_version_is_off_policy_and_outside_drift(run: Run) -> None:
    run.sample()
    run.rollout()
    run.training(version="v2")
    got = run.paired()
    assert not got.pairs[0].paired.any()
    assert [(row.lag, len(row.positions)) for row in got.off_policy] == [(1, N)]
    assert run.findings()["off_policy.lag"] == {"lag": 1, "count": N}


def test_a_response_of_two_versions_pairs_each_part_with_its_own(run: Run) -> None:
    run.sample(spans=(("v0", 0, 5), ("v1", 5, N)))
    run.rollout()
    run.training(version="v0", pass_id="a")
    run.training(T + 1, version="v1", pass_id="b")
    got = run.paired().pairs[0]
    assert got.paired.all()
    assert got.training.tolist() == [*T[:5].tolist(), *(T + 1)[5:].tolist()]


def test_the_part_without_a_pass_of_its_version_is_off_policy(run: Run) -> None:
    run.sample(spans=(("v0", 0, 5), ("v1", 5, N)))
    run.rollout()
    run.training(version="v1")
    got = run.paired()
    assert got.pairs[0].paired.tolist() == [False] * 5 + [True] * (N - 5)
    assert got.off_policy[0].positions.tolist() == [0, 1, 2, 3, 4]


def test_masked_positions_pair_and_are_never_compared(run: Run) -> None:
    mask = np.ones(N, np.uint8)
    mask[3:6] = 0
    run.sample(loss_mask=mask)
    run.rollout()
    run.training(mask_digest=mask_digest(mask))
    got = run.paired().pairs[0]
    assert got.paired.all()
    assert np.flatnonzero(~got.compared).tolist() == [3, 4, 5]


@pytest.mark.parametrize(
    ("fields", "finding", "where"),
    [
        ({"token_digest": token_digest([1, 2])}, "tokens.differ", {"source": "training"}),
        ({"token_ids": [*range(7), 99, *range(8, N)]}, "tokens.differ", {"source": "training", "first_index": 7}),
        ({"mask_digest": mask_digest([0] * N)}, "mask.differs", {"source": "training"}),
    ],
)
def test_a_pass_over_other_tokens_does_not_pair(run: Run, fields: dict[str, Any], finding: str, where: Any) -> None:
    run.sample()
    run.rollout()
    run.training(**fields)
    assert not run.paired().pairs
    assert where.items() <= run.findings()[finding].items()


def test_more_values_than_tokens_are_other_tokens(run: Run) -> None:
    run.sample()
    run.rollout()
    run.training(np.concatenate([T, T[:2]]))
    assert run.findings()["tokens.differ"]["first_index"] == N


def test_one_id_with_two_token_lists_is_ambiguous_unless_attempts_tell_them_apart(run: Run) -> None:
    run.sample()
    run.sample(response_token_ids=TOKENS + 1)
    run.rollout()
    assert run.findings()["samples.ambiguous"]["sample_id"] == "s"


def test_attempts_are_different_samples(run: Run) -> None:
    run.sample(attempt=0)
    run.sample(attempt=1, response_token_ids=TOKENS + 1)
    for attempt, shift in ((0, 0.0), (1, 0.5)):
        run.rollout(R - np.float32(shift), attempt=attempt)
        run.training(T - np.float32(shift), attempt=attempt)
    got = run.paired()
    assert not got.ambiguous
    assert [float(p.training[0]) for p in got.pairs] == pytest.approx([float(T[0]), float(T[0]) - 0.5])


def shards(run: Run, ranks: list[int], world: int = 2) -> None:
    edges = np.linspace(0, N, 2 * world + 1).astype(int).tolist()
    for rank in ranks:
        ranges = [[edges[j], edges[j + 1]] for j in (rank, 2 * world - 1 - rank)]
        values = np.concatenate([T[a:b] for a, b in ranges])
        run.training(values, shard={"axis": "sequence", "rank": rank, "world_size": world, "ranges": ranges})


def test_context_parallel_shards_are_reassembled(run: Run) -> None:
    run.sample()
    run.rollout()
    shards(run, [1, 0])
    got = run.paired().pairs[0]
    assert got.training.tolist() == T.tolist()
    assert got.rank.tolist() == [0] * 3 + [1] * 6 + [0] * 3


def test_a_missing_shard_pairs_nothing_and_is_named(run: Run) -> None:
    run.sample()
    run.rollout()
    shards(run, [0, 2, 3], world=4)
    assert not run.paired().pairs
    assert run.findings() == {"evidence.shards_missing": {"source": "training", "missing_ranks": [1]}}


def test_ranks_of_two_world_sizes_are_no_whole_pass(run: Run) -> None:
    run.sample()
    run.rollout()
    for rank, world in ((0, 2), (1, 2), (2, 4), (3, 4)):
        shard = {"axis": "sequence", "rank": rank, "world_size": world, "ranges": [[3 * rank, 3 * rank + 3]]}
        run.training(T[3 * rank : 3 * rank + 3], shard=shard)
    assert "evidence.shards_missing" in run.findings()
    assert not run.paired().pairs


def test_the_first_pass_is_that_of_the_earliest_step_whoever_recorded_it(run: Run) -> None:
    run.sample()
    run.rollout()
    for writer, step in (("t-early-name", 2), ("t-late-name", 0)):
        run.log.add(writer, "writer.opened", role="training", rank=0, world_size=1)
        fields = {"sample_id": "s", "source": "training", "contract_id": run.contract, "weight_version": "v1"}
        run.log.add(writer, "logprobs", values=T - np.float32(step), step=step, **fields)
    assert run.paired().pairs[0].training.tolist() == T.tolist()


def vocabulary(run: Run, parts: Any = ((0, 6), (6, 32)), short: int = 0, **fields: Any) -> Any:
    """Records partials of random logits over 32 ids, a rank a part; returns the exact log-probabilities."""
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 4, (N, 32))
    run.sample(**fields)
    run.rollout()
    for rank, (a, b) in enumerate(parts):
        part = logits[: N - short * rank, a:b]
        inside = ((a <= TOKENS) & (b > TOKENS))[: len(part)]
        partials = {
            "max": part.max(axis=1),
            "sum_exp": np.exp(part - part.max(axis=1, keepdims=True)).sum(axis=1),
            "target_logit": np.where(inside, logits[np.arange(N), TOKENS][: len(part)], 0.0),
        }
        shard = {"axis": "vocab", "rank": rank, "world_size": len(parts), "ranges": [[a, b]]}
        run.training(np.zeros(len(part)), shard=shard, partials=partials)
    return logits[np.arange(N), TOKENS] - np.log(np.exp(logits).sum(axis=1))


@pytest.mark.parametrize("parts", [((0, 6), (6, 32)), ((16, 32), (0, 7), (7, 16))])
def test_vocabulary_shards_merge_to_the_log_softmax(run: Run, parts: Any) -> None:
    exact = vocabulary(run, parts)
    assert run.paired().pairs[0].training == pytest.approx(exact, abs=1e-5)


@pytest.mark.parametrize(
    "fields",
    [
        {"parts": ((0, 8), (6, 32))},
        {"parts": ((0, 6), (8, 32))},
        {"parts": ((0, 4), (4, 9))},
        {"short": 1},
    ],
)
def test_partials_that_cannot_be_merged_are_missing_and_never_guessed(run: Run, fields: dict[str, Any]) -> None:
    """Overlap, hole, ids no rank owns, ranks of different lengths."""
    vocabulary(run, **fields)
    assert run.findings()["values.missing"]["count"] == N
    assert audit(History.from_events(run.log.rows)).verdict != "pass"


def test_partials_without_a_logarithm_are_no_measurement(run: Run) -> None:
    run.sample()
    run.rollout()
    zeros = {name: np.zeros(N, np.float32) for name in ("max", "sum_exp", "target_logit")}
    run.training(np.zeros(N), shard={"axis": "vocab", "rank": 0, "world_size": 1, "ranges": [[0, 32]]}, partials=zeros)
    assert run.findings()["values.inf"]["count"] == N


@pytest.mark.parametrize("redacted", [Array("uint64", np.arange(N, dtype="<u8").tobytes()), None])
def test_partials_of_redacted_tokens_are_missing(run: Run, redacted: Array | None) -> None:
    vocabulary(run)
    arrays = next(arrays for _, _, fields, arrays in run.log.rows if fields["type"] == "rollout.sample")
    del arrays["response_token_ids"]
    if redacted is not None:
        arrays["response_token_ids"] = redacted
    assert run.findings()["values.missing"]["count"] == N


@pytest.mark.parametrize(("group", "finding"), [("tp", "replicas.differ"), ("dp", None)])
def test_only_tensor_parallel_ranks_are_replicas(run: Run, group: str, finding: str | None) -> None:
    """Another data-parallel rank that scores a sample again makes another pass of it."""
    for rank in (0, 1):
        place = {group: {"rank": rank, "size": 2}}
        run.log.add(f"t{rank}", "writer.opened", role="training", rank=rank, world_size=2, parallel=place)
    run.sample()
    run.rollout()
    for rank in (0, 1):
        run.score(f"t{rank}", "training", T - np.float32(rank), "s", weight_version="v1")
    assert ("replicas.differ" in run.findings()) == (finding is not None)
    assert len(run.paired().passes) == (0 if finding else 1)


def test_values_streamed_in_parts_are_one_series(run: Run) -> None:
    run.sample()
    run.rollout(R[:4])
    run.rollout(R[4:], start=4)
    run.training()
    assert run.paired().pairs[0].paired.all()


def test_a_hole_in_one_side_is_missing_values(run: Run) -> None:
    run.sample()
    run.rollout()
    run.training(T[:9])
    assert run.findings()["values.missing"] == {"source": "training", "count": 3, "sample_id": "s", "position": 9}


def test_a_side_that_never_scored_is_unobserved(run: Run) -> None:
    run.sample()
    run.rollout()
    assert run.findings()["coverage.unobserved"] == {"source": "training", "tokens": N, "sample_id": "s"}


def test_scores_that_fit_two_attempts_belong_to_neither(run: Run) -> None:
    for attempt in (0, 1):
        run.sample(attempt=attempt)
        run.rollout(attempt=attempt)
    run.training(token_digest=token_digest(TOKENS))
    assert not run.paired().pairs
    assert run.findings()["evidence.incomplete"] == {"field": "sample_id", "sample_id": "s", "source": "training"}


def test_samples_dropped_on_record_owe_no_training_values(run: Run) -> None:
    run.sample()
    run.rollout()
    decisions = [{"kept": False, "reason": "all rewards equal", "sample_id": "s"}]
    run.log.add("t", "batch.layout", layout_id="L", decisions=decisions)
    assert "coverage.unobserved" not in run.findings()


def test_an_unknown_version_pairs_and_leaves_a_gap(run: Run) -> None:
    run.sample(spans=())
    run.rollout(weight_version=None)
    run.training(version=None)
    assert run.paired().pairs[0].paired.all()
    assert run.findings()["evidence.incomplete"]["field"] == "weight_version"


def test_scores_without_a_sample_are_a_gap(run: Run) -> None:
    run.sample()
    run.rollout()
    run.training()
    run.training(sample_id="nobody")
    assert run.findings()["evidence.incomplete"]["sample_id"] == "nobody"


def test_versions_order_as_published_then_naturally(run: Run) -> None:
    run.sample(spans=(("v10", 0, 6), ("v9", 6, N)))
    run.rollout(weight_version=None)
    assert run.paired().versions == ("v0", "v1", "v2", "v9", "v10")
