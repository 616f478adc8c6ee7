"""Single detectors on small runs built for them: what raises, and what must not."""

from types import ModuleType
from typing import Any

import numpy as np
import pytest

from rlk_ledger.audit import audit
from rlk_ledger.history import History
from rlk_ledger.pairs import SIDES

N = 24
BODY = {"mode": "processed", "temperature": 1.0, "top_p": 1.0, "head_dtype": "float32", "alignment": "before"}


class Small:
    """A healthy run of a few samples; keyword arguments of `findings` change it before it is audited."""

    def __init__(self, made: ModuleType, samples: int = 8) -> None:
        self.log = made.Log("small")
        self.rng = np.random.default_rng(5)
        self.samples = samples
        self.bodies: dict[str, dict[str, Any]] = {"rollout": dict(BODY), "training": dict(BODY)}
        self.roles = {"rollout": 1, "training": 1}
        self.spans = [{"version": "v0", "start": 0, "end": N}]
        self.sample_fields: dict[str, Any] = {}
        self.tokens: np.ndarray | None = None
        self.published = True
        self.scored = ("rollout", "training")
        self.training_version = "v0"

    def add(self, writer_: str, type_: str, /, **fields: Any) -> dict[str, Any]:
        return self.log.add(writer_, type_, **fields)  # type: ignore[no-any-return]

    def audit(self) -> Any:
        ids = {}
        self.add("rollout", "run.opened", roles=self.roles)
        for side, body in self.bodies.items():
            self.add(side, "writer.opened", role=side, rank=0, world_size=1)
            ids[side] = self.add(side, "contract.declared", kind="logprob", version="1", body=body)["contract_id"]
        if self.published:
            for v in range(2):
                digest = f"sha256:{v:064x}"
                self.add("training", "weights.published", weight_version=f"v{v}", digest=digest, tensor_count=2)
        for i in range(self.samples):
            self._sample(f"s{i}", ids)
        return audit(History.from_events(self.log.rows))

    def _sample(self, sample_id: str, ids: dict[str, str]) -> None:
        tokens = self.rng.integers(0, 99, N).astype(np.int32) if self.tokens is None else self.tokens
        fields = {"response_token_ids": tokens, "loss_mask": np.ones(N, np.uint8), "weight_spans": self.spans}
        self.add("rollout", "rollout.sample", sample_id=sample_id, step=0, **{**fields, **self.sample_fields})
        truth = -self.rng.gamma(1.5, 1.0, N) - 0.05
        for side in self.scored:
            values = (truth + self.rng.normal(0, 0.003, N)).astype(np.float32)
            version = "v0" if side == "rollout" else self.training_version
            common = {"sample_id": sample_id, "step": 0, "weight_version": version, "contract_id": ids[side]}
            self.add(side, "logprobs", source=side, values=values, **common)

    def findings(self) -> dict[str, dict[str, Any]]:
        return {f.finding_id: f.where for f in self.audit().findings}


@pytest.fixture
def small(made: ModuleType) -> Small:
    return Small(made)


def test_the_small_run_is_clean(small: Small) -> None:
    result = small.audit()
    assert (result.findings, result.verdict) == ((), "pass")
    assert "not judged" in result.reason


@pytest.mark.parametrize(
    ("rollout", "training", "verdict"),
    [
        ({"temperature": 0.7}, {}, "not_comparable"),
        ({"top_p": 0.9}, {}, "not_comparable"),
        ({"mode": "raw", "temperature": 0.7}, {"temperature": 0.7}, "not_comparable"),
        ({"alignment": "after"}, {}, "not_comparable"),
        ({"head_dtype": "bfloat16"}, {}, "fail"),
        ({"something_new": 1}, {"something_new": 2}, "fail"),
    ],
)
def test_declared_differences(small: Small, rollout: Any, training: Any, verdict: str) -> None:
    small.bodies["rollout"] |= rollout
    small.bodies["training"] |= training
    result = small.audit()
    assert result.verdict == verdict
    assert {f.finding_id for f in result.findings} == {"contract.differs"}
    assert result.findings[0].where["field"] in rollout


def test_an_engine_in_another_precision_is_said_once_and_is_no_error(small: Small) -> None:
    for side, dtype in (("rollout", "bfloat16"), ("training", "float32")):
        small.bodies[side] |= {"compute_dtype": dtype, "head_dtype": dtype, "logits_dtype": dtype}
    result = small.audit()
    assert [(f.finding_id, f.severity) for f in result.findings] == [("numerics.differ", "info")]
    assert (result.verdict, result.exit_code) == ("pass", 0)


@pytest.mark.parametrize("written", ["bf16", "torch.bfloat16", "BFloat16"])
def test_one_precision_written_in_two_ways_is_no_difference(small: Small, written: str) -> None:
    small.bodies["rollout"] |= {"compute_dtype": written, "head_dtype": "float32", "logits_dtype": "fp32"}
    small.bodies["training"] |= {"compute_dtype": "bfloat16", "head_dtype": "torch.float32", "logits_dtype": "float"}
    assert small.audit().findings == ()


def test_dtypes_that_follow_from_the_engines_are_known_however_they_are_written(small: Small) -> None:
    small.bodies["rollout"] |= {"compute_dtype": "bf16", "head_dtype": "torch.bfloat16", "logits_dtype": "bfloat16"}
    small.bodies["training"] |= {"compute_dtype": "torch.float32", "head_dtype": "fp32", "logits_dtype": "float32"}
    assert [(f.finding_id, f.where["field"]) for f in small.audit().findings] == [("numerics.differ", "compute_dtype")]


@pytest.mark.parametrize(("kind", "field"), [("attention", "lse_dtype"), ("norm", "accumulate_dtype")])
def test_an_accumulator_follows_from_no_precision(small: Small, kind: str, field: str) -> None:
    for side, dtype in (("rollout", "bfloat16"), ("training", "float32")):
        small.bodies[side] |= {"compute_dtype": dtype, "head_dtype": dtype, "logits_dtype": dtype}
        small.add(side, "contract.declared", kind=kind, version="1", body={field: dtype, "output_dtype": dtype})
    assert [f.where["field"] for f in small.audit().findings] == ["compute_dtype", field]


@pytest.mark.parametrize("undeclared", ["rollout", "training"])
def test_a_dtype_follows_from_no_engine_whose_precision_is_undeclared(small: Small, undeclared: str) -> None:
    for side, dtype in (("rollout", "bfloat16"), ("training", "float32")):
        small.bodies[side] |= {"compute_dtype": dtype, "head_dtype": dtype}
    del small.bodies[undeclared]["compute_dtype"]
    assert [(f.finding_id, f.where["field"]) for f in small.audit().findings] == [("contract.differs", "head_dtype")]


@pytest.mark.parametrize(("training", "named"), [(1e-6, False), (1e-4, True)])
def test_a_second_contract_of_a_kind_hides_no_difference(small: Small, training: float, named: bool) -> None:
    """A side may hold several norms; a value none of them has in common with the other side is a difference."""
    for eps in (1e-6, 1e-5):
        small.add("rollout", "contract.declared", kind="norm", version="1", body={"eps": eps})
    small.add("training", "contract.declared", kind="norm", version="1", body={"eps": training})
    assert ("contract.differs" in small.findings()) == named


@pytest.mark.parametrize("head", ["rollout", "training"])
def test_a_head_in_a_dtype_of_its_own_is_a_difference_whatever_the_engines_compute_in(small: Small, head: str) -> None:
    for side, dtype in (("rollout", "bfloat16"), ("training", "float32")):
        small.bodies[side] |= {"compute_dtype": dtype, "head_dtype": dtype, "logits_dtype": dtype}
    small.bodies[head]["head_dtype"] = "float16"
    result = small.audit()
    assert ("contract.differs", "head_dtype") in {(f.finding_id, f.where["field"]) for f in result.findings}
    assert result.exit_code == 1


@pytest.mark.parametrize(
    ("rollout", "training"),
    [
        ({"mode": "raw"}, {"mode": "processed"}),
        ({"mode": "raw", "temperature": 0.7}, {"mode": "processed", "temperature": 1.0}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"execution_path": "decode"}, {"execution_path": "full_prefill"}),
        ({"penalties": {}}, {}),
    ],
)
def test_declarations_that_mean_the_same_are_no_difference(small: Small, rollout: Any, training: Any) -> None:
    small.bodies["rollout"] |= rollout
    small.bodies["training"] |= training
    assert small.audit().findings == ()


def test_a_field_only_one_side_declares_is_a_gap(small: Small) -> None:
    del small.bodies["training"]["temperature"]
    small.bodies["rollout"]["temperature"] = 0.7
    found = small.findings()
    assert found["evidence.incomplete"] == {"kind": "logprob", "field": "temperature", "side": "training"}


def test_two_engines_that_round_at_different_places_are_told_apart_and_not_accused(small: Small) -> None:
    for side, order in (("rollout", "hf"), ("training", "kernel")):
        small.add(side, "contract.declared", kind="norm", version="1", body={"eps": 1e-6, "rounding_order": order})
    result = small.audit()
    assert [(f.finding_id, f.severity) for f in result.findings] == [("numerics.differ", "info")]
    assert (result.findings[0].where["kind"], result.findings[0].where["field"]) == ("norm", "rounding_order")
    assert result.exit_code == 0


def test_another_computation_is_a_difference_and_another_last_bit_of_a_double_is_none(small: Small) -> None:
    small.add("rollout", "contract.declared", kind="attention", version="1", body={"softmax_scale": 32**-0.5})
    small.add("training", "contract.declared", kind="attention", version="1", body={"softmax_scale": 1 / 32**0.5})
    assert 32**-0.5 != 1 / 32**0.5
    assert small.audit().findings == ()
    small.add("rollout", "contract.declared", kind="norm", version="1", body={"eps": 1e-6})
    small.add("training", "contract.declared", kind="norm", version="1", body={"eps": 1e-5})
    where = small.findings()["contract.differs"]
    assert (where["kind"], where["field"], where["class"]) == ("norm", "eps", "semantic")


def load(small: Small, version: str, number: int, **fields: Any) -> None:
    given = {"weight_version": version, "digest": f"sha256:{number:064x}", "tensor_count": 2, "engine": "e"} | fields
    small.add("rollout", "weights.loaded", **given)


def test_loads_of_what_was_published_are_clean(small: Small) -> None:
    load(small, "v0", 0)
    load(small, "v1", 1)
    assert small.audit().findings == ()


def test_old_bytes_under_a_new_version_were_not_loaded(small: Small) -> None:
    load(small, "v0", 0)
    load(small, "v1", 0)
    assert small.findings() == {"weights.not_loaded": {"engine": "e", "version": "v1"}}


def test_other_bytes_under_a_version_differ(small: Small) -> None:
    load(small, "v0", 0)
    load(small, "v1", 7)
    assert small.findings() == {"weights.differ": {"engine": "e", "version": "v1"}}


def test_the_tensors_that_differ_are_named_in_the_next_step(small: Small) -> None:
    def listed(*changed: str) -> list[dict[str, str]]:
        names = ("a", "b", "c", "d", "head")
        return [{"name": n, "digest": f"sha256:{int(n in changed):064x}"} for n in names]

    common = {"tensor_count": 5, "step": 1}
    digest = "sha256:" + "5" * 64
    small.add("training", "weights.published", weight_version="v9", digest=digest, tensors=listed(), **common)
    small.add(
        "rollout",
        "weights.loaded",
        weight_version="v9",
        digest="sha256:" + "6" * 64,
        engine="e",
        tensors=listed("b", "head"),
        **common,
    )
    (found,) = [one for one in small.audit().findings if one.finding_id == "weights.differ"]
    assert found.evidence["differing_tensors"] == ["b", "head"]
    assert "takes b, head: it holds other values" in found.to_dict()["next_step"]


def test_an_adapter_that_never_arrived_is_named(small: Small) -> None:
    small.published = False
    adapter = {"name": "lora", "digest": "sha256:" + "a" * 64}
    base = {"weight_version": "v0", "digest": f"sha256:{0:064x}", "tensor_count": 2}
    small.add("training", "weights.published", adapters=[adapter], **base)
    load(small, "v0", 0, adapters=[])
    result = small.audit()
    assert result.findings[0].finding_id == "weights.not_loaded"
    assert result.findings[0].evidence["missing_adapters"] == ["lora"]


def test_skipped_tensors_are_listed(small: Small) -> None:
    load(small, "v0", 9, skipped=["a", "b"], tensor_count=0)
    assert small.findings()["weights.skipped"] == {"engine": "e", "version": "v0", "tensors": ["a", "b"]}


def test_digests_of_different_algorithms_are_a_gap_and_no_difference(small: Small) -> None:
    load(small, "v0", 0, digest="sum64x2:" + "0" * 32)
    assert small.findings()["evidence.incomplete"]["field"] == "digest"


def test_a_version_samples_claim_and_the_engine_never_loaded_is_a_gap(small: Small) -> None:
    small.spans = [{"version": "v1", "start": 0, "end": N}]
    small.sample_fields = {"engine": "e"}
    load(small, "v0", 0)
    found = small.findings()
    assert found["evidence.incomplete"] == {"engine": "e", "version": "v1", "field": "weights.loaded"}


@pytest.mark.parametrize(
    ("fields", "raised"),
    [
        ({"requested": True, "actual": False, "status": "fallback"}, True),
        ({"requested": "a", "actual": "b", "status": "applied"}, True),
        ({"requested": "a", "status": "unsupported"}, True),
        ({"requested": True, "actual": True, "status": "applied"}, False),
        ({"requested": True, "status": "unobservable"}, False),
    ],
)
def test_knobs(small: Small, fields: dict[str, Any], raised: bool) -> None:
    small.add("rollout", "knob.applied", path="rollout.batch_invariant", **fields)
    assert ("backend.not_in_force" in small.findings()) is raised


@pytest.mark.parametrize(
    ("requested", "actual", "extra", "raised"),
    [
        ("triton", "torch", {"fallback": True}, True),
        ("triton", "torch", {"fallback": True, "bucket": "contract_preserving"}, False),
        ("auto", "torch", {"fallback": False}, False),
        ("triton", "triton", {"fallback": False}, False),
    ],
)
def test_operator_decisions(small: Small, requested: str, actual: str, extra: dict[str, Any], raised: bool) -> None:
    backends = {"requested_backend": requested, "actual_backend": actual}
    small.add("rollout", "operator.decided", operator="attention", side="rollout", **backends, **extra)
    found = small.findings()
    assert ("backend.not_in_force" in found) is raised
    if raised:
        assert found["backend.not_in_force"]["path"] == "rollout.attention"


def test_a_declared_rank_that_never_recorded_is_a_gap(small: Small) -> None:
    small.roles = {"rollout": 1, "training": 4}
    assert small.findings()["evidence.incomplete"] == {"role": "training", "missing_ranks": [1, 2, 3]}


def test_a_recorded_gap_is_a_gap(small: Small) -> None:
    small.add("rollout", "gap", kind="bulk", first=3, last=9, reason="budget")
    where = small.findings()["evidence.incomplete"]
    assert (where["first"], where["last"], where["kind"]) == (3, 9, "bulk")


def test_a_writer_lost_without_loss_is_no_gap(small: Small) -> None:
    small.add("rollout", "writer.lost", writer="x", reason="killed", last_seq=4, bytes_left=0)
    assert small.audit().findings == ()


def test_clones_of_a_likely_answer_are_no_fault(small: Small) -> None:
    """Short certain answers repeat; what repeats must have been improbable."""
    small.tokens = np.arange(N, dtype=np.int32)
    small.sample_fields = {"group_id": "g", "sampling": {"temperature": 0.0}}
    assert "group.duplicates" not in small.findings()


def test_clones_of_an_unlikely_answer_are_a_fault(small: Small) -> None:
    small.tokens = np.arange(N, dtype=np.int32)
    small.sample_fields = {"group_id": "g", "sampling": {"temperature": 1.0, "seed": 1}}
    assert small.findings()["group.duplicates"]["groups"] == 1


def test_nothing_compared_is_never_a_pass(small: Small) -> None:
    small.training_version = "v1"
    result = small.audit()
    assert {f.finding_id for f in result.findings} == {"off_policy.lag"}
    assert (result.verdict, result.exit_code, result.decision) == ("inconclusive", 3, "nothing_compared")


def test_an_empty_run_is_a_gap() -> None:
    result = audit(History.from_events([]))
    assert (result.verdict, result.exit_code) == ("inconclusive", 3)


def test_bitwise_equal_sides_pass_only_with_determinism_read_back(made: ModuleType) -> None:
    """Both sides: that one is deterministic does not show that the other was computed at all."""
    for sides, verdict, code in (((), "inconclusive", 3), (("rollout",), "inconclusive", 3), (SIDES, "pass", 0)):
        result = _equal(made, sides).audit()
        assert {f.finding_id for f in result.findings} == {"drift.zero"}
        assert (result.verdict, result.exit_code) == (verdict, code)


def _equal(made: ModuleType, deterministic: tuple[str, ...]) -> Small:
    class Equal(Small):
        def _sample(self, sample_id: str, ids: dict[str, str]) -> None:
            before = len(self.log.rows)
            super()._sample(sample_id, ids)
            rows = [row for row in self.log.rows[before:] if row[2]["type"] == "logprobs"]
            rows[1][3]["values"] = rows[0][3]["values"]

    run = Equal(made)
    for side in deterministic:
        knob = {"requested": True, "actual": True, "status": "applied", "evidence": "read back: num_splits=1"}
        run.add(side, "knob.applied", path=f"{side}.batch_invariant", **knob)
    return run
