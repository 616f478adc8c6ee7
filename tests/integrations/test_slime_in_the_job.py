"""slime's and vime's hooks as guests: off they are the job's own function; bad input is one sentence, no error."""

import asyncio
import importlib.util
import logging
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import rlk_ledger
from rlk_ledger.history import load_history
from rlk_ledger_schemas.errors import ConfigError
from rlk_ledger_sdk import api
from rlk_ledger_sdk.integrations import opening, vime
from rlk_ledger_sdk.integrations.slime import framework as frameworks
from rlk_ledger_sdk.integrations.slime import generate, log_rollout, postprocess, tis
from rlk_ledger_sdk.integrations.slime.samples import reward_of, rollout_contract
from rlk_ledger_sdk.testing import capture

_spec = importlib.util.spec_from_file_location("slime_standin", Path(__file__).with_name("slime_standin.py"))
assert _spec is not None
assert _spec.loader is not None
job = importlib.util.module_from_spec(_spec)
sys.modules.setdefault("slime_standin", job)
job = sys.modules["slime_standin"]
if not hasattr(job, "Sample"):
    _spec.loader.exec_module(job)


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test decides anew whether its process records."""
    for name in list(os.environ):
        if name.startswith("RLK_") or name in ("WORLD_SIZE", "RANK"):
            monkeypatch.delenv(name)
    monkeypatch.setattr(opening, "_decided", set())
    module = ModuleType("slime.rollout.sglang_rollout")
    module.generate = job.generate  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)


def a_sample(**changes: Any) -> Any:
    given = {"tokens": [1, 2, 3, 4], "response_length": 2, "loss_mask": [1, 1], "rollout_log_probs": [-1.0, -2.0]}
    given |= {"status": job.Status.COMPLETED, "weight_versions": ["1"]}
    return job.Sample(0, 5, **{**given, **changes})


def test_off_a_hook_is_the_jobs_own_function_and_keeps_nothing() -> None:
    sample = job.prompts(0, 1, 1)[0][0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rlk_ledger_sdk.integrations.slime.rollout.record_sample", None)  # calling it would fail
        job.ENGINE.now = job.Engine()
        assert asyncio.run(generate(job.make_args(), sample, {"max_new_tokens": 4})) is sample
        assert log_rollout(0, job.make_args(), [sample], {}, 0.0) is False
        assert postprocess(job.make_args(), 0, {"log_probs": []}) is None
    assert not api.current().enabled


def test_a_ray_worker_opens_its_writer_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("LEDGER", tmp_path / "l"), ("RUN_ID", "r"), ("SPOOL", tmp_path / "s"), ("SHIPPER", "inline")):
        monkeypatch.setenv(f"RLK_{name}", str(value))
    args = job.make_args(actor_num_nodes=2, actor_num_gpus_per_node=8)
    assert log_rollout(0, args, [a_sample()], {}, 0.0) is False
    rlk_ledger.close()
    history = load_history(rlk_ledger.open(tmp_path / "l"), "r")
    (opened,) = history.writers.values()
    assert (opened["role"], opened["engine"]["name"]) == ("rollout", "sglang")
    assert next(history.of("run.opened")).fields["roles"] == {"rollout": 1, "training": 16}
    assert len(history.samples) == 1


def test_without_a_run_id_nothing_is_recorded_and_one_sentence_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RLK_LEDGER", str(tmp_path / "l"))
    for _ in range(3):
        log_rollout(0, job.make_args(), [a_sample()], {}, 0.0)
    assert caplog.text.count("RLK_RUN_ID") == 1
    assert not (tmp_path / "l").exists()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"loss_mask": [1]}, "1 loss_mask entries for 2 response tokens"),
        ({"response_length": 9}, "4 tokens for a response_length of 9"),
        ({"tokens": None}, "no tokens for a response_length of 2"),
        ({"rollout_log_probs": [-1.0]}, "1 rollout_log_probs for 2 response tokens"),
        ({"index": None}, "without `index`"),
        ({"tokens": ["a", "b", "c", "d"]}, "rollout.sample"),
    ],
)
def test_a_malformed_sample_is_one_sentence_and_a_gap_never_an_exception(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, change: dict[str, Any], sentence: str
) -> None:
    where = {"spool": tmp_path / "s", "shipper": "inline", "on_error": "warn"}
    rlk_ledger.init(tmp_path / "l", run_id="r", role="rollout", **where)
    sample = a_sample()
    for name, value in change.items():
        setattr(sample, name, value)
    caplog.set_level(logging.WARNING)
    hook = job.load_function("rlk_ledger.integrations.slime.sample")
    hook(job.make_args(), sample, rollout_id=1)
    hook(job.make_args(), a_sample(), rollout_id=1)
    rlk_ledger.close()
    assert sentence in caplog.text
    history = load_history(rlk_ledger.open(tmp_path / "l"), "r")
    assert len(list(history.of("gap"))) >= 1
    assert [s.sample_id for s in history.samples][-1] == "5", "what came after is recorded"


@pytest.mark.parametrize(
    "change",
    [
        {"sample_indices": None},
        {"loss_masks": []},
        {"tokens": 3},
        {"log_probs": [[-1.0]]},
        {"sample_indices": [None]},
    ],
)
def test_a_malformed_batch_never_reaches_the_trainer_as_an_exception(tmp_path: Path, change: dict[str, Any]) -> None:
    where = {"spool": tmp_path / "s", "shipper": "inline", "on_error": "warn"}
    rlk_ledger.init(tmp_path / "l", run_id="r", role="training", **where)
    data = {"sample_indices": [5], "tokens": [[1, 2, 3, 4]], "response_lengths": [2], "loss_masks": [[1, 1]]}
    postprocess(job.make_args(), 0, {**data, "log_probs": [[-1.0, -2.0]], **change})
    postprocess(job.make_args(), [a_sample()])  # the older form of the hook
    postprocess(job.make_args(), 1, {**data, "log_probs": [[-1.0, -2.0]]})
    rlk_ledger.close()
    history = load_history(rlk_ledger.open(tmp_path / "l"), "r")
    assert sum(f.fields["last"] - f.fields["first"] + 1 for f in history.of("gap")) >= 2
    assert [(s.sample_id, s.values.tolist()) for s in history.scores] == [("5", [-1.0, -2.0])]


def test_a_mask_of_weights_has_no_digest_and_costs_nothing_else() -> None:
    data = {"sample_indices": [5], "tokens": [[1, 2, 3]], "response_lengths": [2], "loss_masks": [[0.5, 1.0]]}
    with capture(role="training") as events:
        postprocess(job.make_args(), 0, {**data, "log_probs": [[-1.0, -2.0]]})
    score = events.of("logprobs")[0].fields
    assert "mask_digest" not in score
    assert score["token_digest"] == rlk_ledger.token_digest([2, 3])


def test_importance_weighting_without_the_postprocess_hook_is_one_sentence(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = {"spool": tmp_path / "s", "shipper": "inline", "on_error": "warn"}
    rlk_ledger.init(tmp_path / "l", run_id="r", role="training", **where)
    monkeypatch.setenv("RLK_TIS_FUNCTION_PATH", "slime_standin.make_args")
    for _ in range(3):
        tis(train_log_probs=[[-1.0]], rollout_log_probs=[[-1.0]])
    rlk_ledger.close()
    assert caplog.text.count("--rollout-data-postprocess-path") == 1


def test_a_missing_own_function_stops_the_job_it_belongs_to() -> None:
    args = job.make_args(rlk_generate_function_path="no_such_module.generate")
    with pytest.raises(ModuleNotFoundError):
        asyncio.run(generate(args, a_sample(), {}))
    args = job.make_args(rlk_generate_function_path="rlk_ledger.integrations.slime.generate")
    with pytest.raises(ConfigError, match="own hook"):
        asyncio.run(generate(args, a_sample(), {}))


def test_an_error_of_the_jobs_own_function_is_the_jobs() -> None:
    async def broken(*_: Any) -> None:
        raise ZeroDivisionError

    with pytest.MonkeyPatch.context() as patch, capture() as events:
        patch.setattr(sys.modules["slime.rollout.sglang_rollout"], "generate", broken)
        with pytest.raises(ZeroDivisionError):
            asyncio.run(generate(job.make_args(), a_sample(), {}))
    assert events == []


def test_evaluation_is_not_training_data() -> None:
    job.ENGINE.now = job.Engine()
    with capture() as events:
        asyncio.run(generate(job.make_args(), job.prompts(0, 1, 1)[0][0], {"max_new_tokens": 3}, evaluation=True))
    assert events == []


def test_fields_of_other_versions_are_ignored_or_absent() -> None:
    bare = SimpleNamespace(index=1, tokens=[1, 2, 3], response_length=2)  # nothing else is there
    rich = a_sample(rollout_top_p_token_ids=[3, 9, 4], rollout_top_p_token_offsets=[0, 2, 3])
    rich.a_field_of_next_year = object()
    with capture() as events:
        log_rollout(3, job.make_args(), [bare, rich], {}, 0.0)
    first, second = events.of("rollout.sample")
    assert first.arrays["loss_mask"] == [1, 1]
    assert first.fields["metadata_source"]["loss_mask"] == "derived"
    assert {"reward", "weight_spans"} <= {k for k, v in first.fields["metadata_source"].items() if v == "absent"}
    assert second.arrays["support_offsets"] == [0, 2, 3]
    assert len(events.of("logprobs")) == 1, "no log-probabilities are not zero log-probabilities"


@pytest.mark.parametrize(
    ("reward", "key", "value"),
    [(1.5, None, 1.5), ({"score": 2, "x": 1}, "score", 2.0), ({"score": 2}, None, None), (True, None, 1.0)],
)
def test_the_reward_is_the_one_the_job_trains_on(reward: Any, key: str | None, value: float | None) -> None:
    assert reward_of(job.make_args(reward_key=key), a_sample(reward=reward)) == value


def test_what_enters_a_rollout_log_probability_is_the_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    args = job.make_args(rollout_top_p=0.9, vllm_logprobs_mode="raw_logprobs")
    sglang = rollout_contract(frameworks.SLIME, args, None)
    assert (sglang["mode"], sglang["temperature"], sglang.get("top_p")) == ("processed", 0.7, None)
    assert rollout_contract(frameworks.VIME, args, None)["top_p"] == 0.9
    assert rollout_contract(frameworks.VIME, args, None)["mode"] == "processed", "vime's own default"
    args._vllm_user_provided = {"vllm_logprobs_mode"}
    assert rollout_contract(frameworks.VIME, args, None)["mode"] == "raw"
    assert rollout_contract(frameworks.SLIME, args, {"temperature": 0.3})["temperature"] == 0.3


class Unavailable(RuntimeError):
    linear_logp_provider_unavailable = True


def test_the_linear_logp_provider_states_what_ran_once(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[Any] = [SimpleNamespace(logp=1, backend_id="fused.sm90"), {"logp": 1, "backend_id": "fused.sm90"}]

    def provider(request: Any) -> Any:
        if request == "unsupported":
            raise Unavailable("vocabulary is not padded")
        return answers[request]

    module = ModuleType("a_provider")
    provider.__module__, provider.__qualname__ = "a_provider", "provider"
    module.provider = provider  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "a_provider", module)
    with pytest.raises(vime.ProviderUnavailable):
        vime.logp_provider(0)
    monkeypatch.setenv("RLK_LINEAR_LOGP_PROVIDER_PATH", "a_provider.provider")
    with capture(role="training") as events:
        assert vime.LogpProvider()(0) is answers[0]
        watched = vime.LogpProvider()
        assert [watched(i) for i in (0, 1, 0)] == [answers[0], answers[1], answers[0]]
        with pytest.raises(Unavailable):
            watched("unsupported")
    stated = [(e.fields["actual_backend"], e.fields["fallback"]) for e in events.of("operator.decided")]
    assert stated == [("fused.sm90", False), ("fused.sm90", False), ("native", True)]
