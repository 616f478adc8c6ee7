"""slime's and vime's hooks on a stand-in job of their shape: job -> recorder -> ledger -> audit."""

import asyncio
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import rlk_ledger
from rlk_ledger.audit import AuditResult, audit
from rlk_ledger.history import History, load_history
from rlk_ledger.pairs import pair
from rlk_ledger_sdk.integrations.slime.parallel import Rank, owned_ranges
from rlk_ledger_sdk.testing import capture

_spec = importlib.util.spec_from_file_location("slime_standin", Path(__file__).with_name("slime_standin.py"))
assert _spec is not None
assert _spec.loader is not None
job = importlib.util.module_from_spec(_spec)
sys.modules["slime_standin"] = job
_spec.loader.exec_module(job)

FRAMEWORKS = ("slime", "vime")


@pytest.fixture(params=FRAMEWORKS)
def framework(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a framework whose modules the stand-in plays."""
    name = str(request.param)
    engine = {"slime": "sglang", "vime": "vllm"}[name]
    for path, function in (
        (f"{name}.rollout.{engine}_rollout", job.generate),
        (f"{name}.backends.megatron_utils.loss", job.vanilla_tis_function),
    ):
        module = ModuleType(path)
        setattr(module, function.__name__, function)
        monkeypatch.setitem(sys.modules, path, module)
    for variable in ("RLK_LEDGER", "SGLANG_RETURN_ORIGINAL_LOGPROB", "RETURN_ORIGINAL_LOGPROB", "WORLD_SIZE", "RANK"):
        monkeypatch.delenv(variable, raising=False)
    return name


@pytest.fixture
def parallel(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """megatron.core.parallel_state of one rank; its fields can be set."""
    place = SimpleNamespace(tp=0, tp_size=1, cp=0, cp_size=1, dp=0, dp_size=1, last=True)
    state = ModuleType("megatron.core.parallel_state")
    for name, what in (("tensor_model", "tp"), ("context", "cp"), ("data", "dp")):
        setattr(state, f"get_{name}_parallel_rank", lambda what=what: getattr(place, what))
        setattr(state, f"get_{name}_parallel_world_size", lambda what=what: getattr(place, f"{what}_size"))
    state.is_pipeline_last_stage = lambda: place.last  # type: ignore[attr-defined]
    state.model_parallel_is_initialized = lambda: True  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", state)
    return place


def hooks(name: str, **changes: Any) -> Any:
    """Arguments of a job whose two hooks are the recorder's."""
    base = f"rlk_ledger.integrations.{name}"
    given = {"custom_rollout_log_function_path": f"{base}.log_rollout"}
    return job.make_args(**{**given, "rollout_data_postprocess_path": f"{base}.postprocess", **changes})


class Job:
    """Both sides of a stand-in job into one ledger: a rollout writer, then a writer for each trainer rank."""

    def __init__(self, folder: Path, args: Any, cp_size: int = 1) -> None:
        self.folder, self.args, self.cp_size = folder, args, cp_size
        self.train_data: list[tuple[int, int, dict[str, Any]]] = []

    def writer(self, role: str, rank: int = 0, size: int = 1) -> None:
        rlk_ledger.init(
            self.folder / "ledger",
            run_id="r",
            role=role,
            rank=rank,
            world_size=size,
            roles={"rollout": 1, "training": self.cp_size},
            spool=self.folder / "spool",
            shipper="inline",
        )

    def roll(
        self, rounds: int = 3, change: Callable[[int, dict[str, Any]], None] | None = None, **engine: Any
    ) -> "Job":
        self.writer("rollout")
        for r in range(rounds):
            job.ENGINE.now = job.Engine(version=r + 1, seed=r, **engine)
            data = job.rollout(self.args, r, job.prompts(16 * r, 4, 4))
            if change is not None:
                change(r, data)
            self.train_data.append((r, r + 1, data))
        rlk_ledger.close()
        return self

    def train(self, parallel: Any = None, **trainer: Any) -> "Job":
        how = {k: trainer.pop(k) for k in ("reuse", "steps") if k in trainer}
        for rank in range(self.cp_size):
            if parallel is not None:
                parallel.cp, parallel.cp_size = rank, self.cp_size
            self.writer("training", rank, self.cp_size)
            for rollout_id, version, data in self.train_data:
                actor = job.Trainer(self.args, version, rank, self.cp_size, **trainer)
                actor.train_actor(rollout_id, data, **how)
            rlk_ledger.close()
        return self

    def history(self) -> History:
        return load_history(rlk_ledger.open(self.folder / "ledger"), "r")

    def audit(self) -> AuditResult:
        return audit(self.history())


def found(result: AuditResult) -> set[str]:
    return {f.finding_id for f in result.findings if f.severity != "info"}


def test_a_clean_job_of_two_hooks_passes_its_audit(framework: str, tmp_path: Path) -> None:
    done = Job(tmp_path, hooks(framework)).roll().train()
    result = done.audit()
    assert found(result) == set()
    assert result.verdict == "pass"
    history = done.history()
    assert len(history.samples) == 48
    assert {s.step for s in history.samples} == {0, 1, 2}
    assert all(s.reward is not None and s.group_id is not None and s.status == "completed" for s in history.samples)
    assert {s.weight_spans for s in history.samples if s.step == 1} == {(("2", 0, 24),)}
    training = [s for s in history.scores if s.source == "training"]
    assert {s.weight_version for s in training if s.step == 1} == {"2"}
    assert {s.token_digest for s in training} == {s.token_digest for s in history.samples}


def temperature(done: Job) -> AuditResult:
    return done.roll().train(scores=1.0).audit()


def zero_fill(done: Job) -> AuditResult:
    def lose(_: int, samples: Any) -> None:
        for values in samples:
            values.rollout_log_probs = [0.0 if i % 3 == 0 else v for i, v in enumerate(values.rollout_log_probs)]

    original = job.convert
    done.args.custom_rollout_log_function_path, log = None, done.args.custom_rollout_log_function_path

    def converted(samples: Any) -> Any:
        lose(0, samples)
        job.load_function(log)(0, done.args, samples, {}, 0.0)
        return original(samples)

    job.convert = converted
    try:
        return done.roll().train().audit()
    finally:
        job.convert = original


def tool_tokens(done: Job) -> AuditResult:
    done.args.custom_generate_function_path = "slime_standin.with_a_tool"

    def unmask(_: int, data: dict[str, Any]) -> None:
        data["loss_masks"] = [torch.ones_like(mask) for mask in data["loss_masks"]]

    return done.roll(change=unmask).train().audit()


def tokenised_again(done: Job) -> AuditResult:
    def change(_: int, data: dict[str, Any]) -> None:
        for tokens in data["tokens"]:
            tokens[-3] = (tokens[-3] + 1) % job.VOCAB

    return done.roll(change=change).train().audit()


@pytest.mark.parametrize(
    ("fault", "finding"),
    [
        (temperature, "contract.differs"),
        (zero_fill, "values.defaulted"),
        (tool_tokens, "mask.differs"),
        (tokenised_again, "tokens.differ"),
    ],
)
def test_an_injected_fault_is_named(
    framework: str, tmp_path: Path, fault: Callable[[Job], AuditResult], finding: str
) -> None:
    result = fault(Job(tmp_path, hooks(framework)))
    assert finding in found(result)
    assert result.verdict in ("fail", "not_comparable")


def test_raw_log_probabilities_of_sglang_are_declared_raw(
    tmp_path: Path, framework: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = hooks(framework)
    if framework == "slime":
        monkeypatch.setenv("SGLANG_RETURN_ORIGINAL_LOGPROB", "1")
    else:
        args.vllm_logprobs_mode, args._vllm_user_provided = "raw_logprobs", {"vllm_logprobs_mode"}
    result = Job(tmp_path, args).roll(scores=1.0).train().audit()
    assert "contract.differs" in found(result)
    assert {f.where.get("field") for f in result.findings} & {"mode", "temperature"}


def test_tool_tokens_are_masked_missing_and_never_compared(framework: str, tmp_path: Path) -> None:
    args = hooks(framework, custom_generate_function_path="slime_standin.with_a_tool")
    done = Job(tmp_path, args).roll(1).train()
    assert found(done.audit()) == set()
    score = next(s for s in done.history().scores if s.source == "rollout")
    assert score.value_class is not None
    assert [i for i, c in enumerate(score.value_class) if c] == [10, 11, 12, 13, 14]


def test_a_job_with_context_parallelism_records_shards_that_fit_together(
    framework: str, tmp_path: Path, parallel: SimpleNamespace
) -> None:
    args = hooks(framework, custom_generate_function_path="slime_standin.with_a_tool")
    done = Job(tmp_path, args, cp_size=2).roll(2).train(parallel)
    result = done.audit()
    assert found(result) == set()
    shards = [s.shard for s in done.history().scores if s.source == "training"]
    assert len(shards) == 64
    assert {s["rank"] for s in shards if s} == {0, 1}


def test_a_missing_context_rank_is_named(framework: str, tmp_path: Path, parallel: SimpleNamespace) -> None:
    done = Job(tmp_path, hooks(framework), cp_size=2).roll(1)
    parallel.cp_size = 2
    done.writer("training", 0, 2)
    job.Trainer(done.args, 1, 0, 2).train_actor(0, done.train_data[0][2])
    rlk_ledger.close()
    assert "evidence.shards_missing" in found(done.audit())


@pytest.mark.parametrize("total", [9, 16, 27])
@pytest.mark.parametrize("size", [2, 4])
def test_owned_ranges_cover_every_response_position_once(total: int, size: int) -> None:
    for response in range(1, total):
        ranges = [owned_ranges(total, response, Rank(cp=r, cp_size=size)) for r in range(size)]
        positions = sorted(p for held in ranges for a, b in held for p in range(a, b))
        assert positions == list(range(response))
        values = torch.arange(response)
        for rank, held in enumerate(ranges):
            cut = job.Trainer(job.make_args(), 1, rank, size).cut(values, total, response)
            assert cut.tolist() == [p for a, b in held for p in range(a, b)]


def test_tensor_ranks_above_zero_and_earlier_stages_record_no_values(framework: str, parallel: SimpleNamespace) -> None:
    args = hooks(framework)
    data = job.rollout(job.make_args(), 0, job.prompts(0, 2, 4))
    for field, value in (("tp", 1), ("last", False)):
        setattr(parallel, field, value)
        with capture(role="training") as events:
            job.Trainer(args).train_actor(0, data)
        assert [e.type for e in events] == []
        setattr(parallel, field, 0 if field == "tp" else True)


def test_a_resumed_sample_has_positions_under_two_versions(framework: str) -> None:
    base = f"rlk_ledger.integrations.{framework}"
    args = hooks(framework, partial_rollout=True, custom_generate_function_path=f"{base}.generate")
    ((sample,),) = job.prompts(0, 1, 1)
    sample.metadata["abort_after"] = 9
    with capture() as events:
        job.ENGINE.now = job.Engine(version=4)
        asyncio.run(job.one_sample(args, sample, 0))
        assert events.of("rollout.sample") == [], "not finished"
        job.ENGINE.now = job.Engine(version=5)
        asyncio.run(job.one_sample(args, sample, 1))
    (recorded,) = events.of("rollout.sample")
    assert recorded.fields["weight_spans"] == [
        {"version": "4", "start": 0, "end": 9},
        {"version": "5", "start": 9, "end": 24},
    ]
    assert "weight_version" not in events.of("logprobs")[0].fields


def test_aborted_work_that_is_never_resumed_is_recorded_as_aborted(framework: str, tmp_path: Path) -> None:
    args = hooks(framework, custom_generate_function_path=f"rlk_ledger.integrations.{framework}.generate")
    done = Job(tmp_path, args)
    done.writer("rollout")
    job.ENGINE.now = job.Engine()
    ((lost,),) = job.prompts(400, 1, 1)
    lost.metadata["abort_after"] = 5
    asyncio.run(job.one_sample(args, lost, 0))
    rlk_ledger.close()
    result = done.roll(1).train().audit()
    assert found(result) == set()
    assert {s.status for s in done.history().samples} == {"completed", "aborted"}


def test_what_cannot_be_told_of_versions_is_absent_not_guessed(framework: str) -> None:
    sample = job.Sample(0, 7, tokens=[1, 2, 3, 4, 5], response_length=4, rollout_log_probs=[-1.0] * 4)
    sample.weight_versions, sample.status = ["1", "2"], job.Status.COMPLETED  # two calls, one run of trained tokens
    with capture() as events:
        job.load_function(f"rlk_ledger.integrations.{framework}.sample")(hooks(framework), sample, rollout_id=3)
    (recorded,) = events.of("rollout.sample")
    assert "weight_spans" not in recorded.fields
    assert recorded.fields["metadata_source"]["weight_spans"] == "absent"
    assert (recorded.fields["step"], recorded.fields["rollout_id"]) == (3, 3)


def test_turns_under_two_versions_are_told_apart_by_the_mask(framework: str) -> None:
    sample = job.Sample(0, 7, tokens=[1, *range(2, 12)], response_length=10, status=job.Status.COMPLETED)
    sample.loss_mask, sample.weight_versions = [1, 1, 1, 0, 0, 1, 1, 1, 1, 1], ["8", "9"]
    sample.rollout_log_probs = [-0.5, -0.5, -0.5, 0.0, 0.0, *[-0.5] * 5]
    with capture() as events:
        job.load_function(f"rlk_ledger.integrations.{framework}.sample")(hooks(framework), sample)
    spans = events.of("rollout.sample")[0].fields["weight_spans"]
    assert [(s["version"], s["start"], s["end"]) for s in spans] == [("8", 0, 3), ("9", 5, 10)]


def test_segments_of_one_rollout_are_joined_by_their_tokens(framework: str, tmp_path: Path) -> None:
    args = hooks(framework, custom_generate_function_path="slime_standin.two_segments")
    done = Job(tmp_path, args).roll(1).train()
    assert found(done.audit()) == set()
    assert {s.attempt for s in done.history().samples} == {0, 1}
    assert len(done.history().samples) == 32


def test_surplus_and_refused_groups_are_decisions_not_losses(framework: str, tmp_path: Path) -> None:
    base = f"rlk_ledger.integrations.{framework}"
    args = hooks(
        framework,
        custom_generate_function_path=f"{base}.generate",
        dynamic_sampling_filter_path=f"{base}.dynamic_filter",
        rollout_all_samples_process_path=f"{base}.all_samples",
        rlk_dynamic_filter_path="slime_vime_filter.refuse_group_one",
    )
    module = ModuleType("slime_vime_filter")
    module.refuse_group_one = lambda args, samples, **_: SimpleNamespace(  # type: ignore[attr-defined]
        keep=samples[0].group_index != 1, reason="zero_std"
    )
    sys.modules["slime_vime_filter"] = module
    done = Job(tmp_path, args)
    done.writer("rollout")
    job.ENGINE.now = job.Engine()
    data = job.rollout(args, 0, job.prompts(0, 5, 4), keep=3)
    rlk_ledger.close()
    done.train_data = [(0, 1, data)]
    history = done.train().history()
    assert found(audit(history)) == set()
    reasons = [d["reason"] for fact in history.of("batch.layout") for d in fact.fields.get("decisions") or ()]
    assert reasons.count("zero_std") == 4
    assert reasons.count("not in the batch") == 8
    assert len(history.samples) == 20


@pytest.mark.parametrize("at_once", [False, True])
def test_a_removed_sample_is_a_decision(framework: str, tmp_path: Path, at_once: bool) -> None:
    generate = f"rlk_ledger.integrations.{framework}.generate" if at_once else None
    args = hooks(framework, custom_generate_function_path=generate, rollout_sample_filter_path="a.filter")
    done = Job(tmp_path, args)
    done.writer("rollout")
    job.ENGINE.now = job.Engine()
    groups = job.prompts(0, 2, 4)
    groups[0][0].remove_sample = True
    done.train_data = [(0, 1, job.rollout(args, 0, groups))]
    rlk_ledger.close()
    history = done.train().history()
    assert found(audit(history)) == set()
    dropped = [d for f in history.of("batch.layout") for d in f.fields.get("decisions") or ()]
    assert {(d["sample_id"], d["kept"]) for d in dropped} == {("0", False)}


def test_importance_weighting_records_the_update_where_no_pass_came_before(framework: str, tmp_path: Path) -> None:
    args = hooks(framework, custom_tis_function_path=f"rlk_ledger.integrations.{framework}.tis")
    done = Job(tmp_path, args).roll(2).train(reuse=True)
    assert found(done.audit()) == set()
    scores = [s for s in done.history().scores if s.source == "training"]
    assert {s.pass_id for s in scores} == {"update-0"}
    assert len(scores) == 32


def test_importance_weighting_repeats_nothing_and_changes_nothing(framework: str) -> None:
    data = job.rollout(job.make_args(), 0, job.prompts(0, 2, 4))
    bare = job.Trainer(job.make_args(custom_tis_function_path="slime_standin.vanilla_tis_function"))
    bare.train_actor(0, data)
    with capture(role="training") as events:
        args = hooks(framework, custom_tis_function_path=f"rlk_ledger.integrations.{framework}.tis")
        watched = job.Trainer(args)
        watched.train_actor(0, data)
    assert [e.fields["pass_id"] for e in events.of("logprobs")] == ["log_probs"] * 8
    assert all(torch.equal(a, b) for a, b in zip(bare.losses, watched.losses, strict=True))


def test_later_updates_of_one_rollout_have_weights_of_their_own(framework: str) -> None:
    base = f"rlk_ledger.integrations.{framework}"
    data = job.rollout(job.make_args(), 0, job.prompts(0, 2, 4))
    args = hooks(
        framework,
        custom_tis_function_path=f"{base}.tis",
        custom_megatron_before_train_step_hook_path=f"{base}.before_train_step",
    )
    with capture(role="training") as events:
        job.Trainer(args, version=3).train_actor(0, data, reuse=True, steps=2)
    versions = {(e.fields["pass_id"], e.fields["weight_version"]) for e in events.of("logprobs")}
    assert versions == {("update-0", "3"), ("update-1", "3/step1")}


def test_the_precision_in_force_is_read_from_the_model(framework: str) -> None:
    base = f"rlk_ledger.integrations.{framework}"
    args = hooks(framework, custom_megatron_before_log_prob_hook_path=f"{base}.before_log_prob", bf16=False, fp16=True)
    with capture(role="training") as events:
        job.Trainer(args).train_actor(0, job.rollout(job.make_args(), 0, job.prompts(0, 1, 4)))
    (knob,) = events.of("knob.applied")
    assert (knob.fields["requested"], knob.fields["actual"], knob.fields["status"]) == (
        "float16",
        "bfloat16",
        "fallback",
    )
    assert events.of("contract.declared")[0].fields["body"]["compute_dtype"] == "bfloat16"


def test_a_run_that_begins_later_hears_the_precision_again(framework: str) -> None:
    base = f"rlk_ledger.integrations.{framework}"
    args = hooks(framework, custom_megatron_before_log_prob_hook_path=f"{base}.before_log_prob", bf16=True)
    data = job.rollout(job.make_args(), 0, job.prompts(0, 1, 4))
    trainer = job.Trainer(args)
    for rollout_id in (0, 1):
        with capture(role="training") as events:
            for _ in range(2):
                trainer.train_actor(rollout_id, data)
        assert len(events.of("knob.applied")) == 1


def test_a_trainer_that_shows_no_count_leaves_the_version_absent(framework: str) -> None:
    data = job.rollout(job.make_args(), 0, job.prompts(0, 1, 4))
    data["log_probs"] = job.Trainer(job.make_args()).log_probs(data)
    with capture(role="training") as events:
        job.load_function(f"rlk_ledger.integrations.{framework}.postprocess")(hooks(framework), 0, data)
    score = events.of("logprobs")[0].fields
    assert "weight_version" not in score
    assert score["metadata_source"]["weight_version"] == "absent"


@pytest.mark.parametrize("rounds", [1, 3])
def test_rounds_without_an_update_leave_every_engine_behind(framework: str, rounds: int) -> None:
    data = job.rollout(job.make_args(), 0, job.prompts(0, 1, 1))
    actor = job.Trainer(hooks(framework, update_weights_interval=4), version=40 + rounds)
    with capture(role="training") as events:
        for rollout_id in range(rounds):
            actor.train_actor(rollout_id, data)
    versions = [e.fields["weight_version"] for e in events.of("logprobs")]
    assert versions == [str(40 + rounds), *[f"{40 + rounds}+{n}" for n in range(1, rounds)]]


def test_partial_rollouts_pair_only_the_positions_of_the_trainers_weights(framework: str, tmp_path: Path) -> None:
    base = f"rlk_ledger.integrations.{framework}"
    args = hooks(framework, partial_rollout=True, custom_generate_function_path=f"{base}.generate")
    done = Job(tmp_path, args)
    done.writer("rollout")
    groups = job.prompts(0, 4, 4)
    for one in (s for group in groups for s in group):
        one.metadata["abort_after"] = 9
        job.ENGINE.now = job.Engine(version=1, seed=one.index)
        asyncio.run(job.one_sample(args, one, 0))
    job.ENGINE.now = job.Engine(version=2)
    done.train_data = [(1, 2, job.rollout(args, 1, groups))]
    rlk_ledger.close()
    history = done.train().history()
    pairing = pair(history)
    assert found(audit(history, pairing)) == set()
    assert {p.paired.tolist().count(True) for p in pairing.pairs} == {15}
    assert {(o.rollout_version, o.training_version, o.lag, len(o.positions)) for o in pairing.off_policy} == {
        ("1", "2", 1, 9)
    }
