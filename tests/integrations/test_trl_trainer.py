"""A real GRPOTrainer on the shipped model, on the CPU: what it sampled, scored and held is recorded as it was."""

import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rlk_ledger
from rlk_ledger.audit import audit
from rlk_ledger.history import load_history
from rlk_ledger.integrations.trl import attach_trainer
from rlk_ledger_schemas.errors import UsageError
from rlk_ledger_sdk.testing import Recording, capture

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # TRL and accelerate warn about themselves, differently in every version
]
os.environ["HF_HUB_OFFLINE"] = "1"
torch = pytest.importorskip("torch")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("trl", reason="needs trl; `pip install trl datasets accelerate` beside a CPU build of torch")
    from datasets import Dataset
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM
    from transformers.convert_slow_tokenizer import bytes_to_unicode
    from trl import GRPOConfig, GRPOTrainer

MODEL = Path(__file__).parent.parent.parent / "replay" / "rlk_ledger_replay" / "model"
PROMPTS = ["def close(self):\n    ", "import os\nimport ", "while True:\n    ", "    return "]


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    rlk_ledger.close(timeout=0)


def byte_tokenizer() -> Any:
    """Token ids 0 to 255 are bytes, 256 begins a text, 257 ends one, 258 pads."""
    tokenizer = Tokenizer(models.BPE(vocab={char: byte for byte, char in bytes_to_unicode().items()}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<begin>", "<end>", "<pad>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<begin> $A", special_tokens=[("<begin>", 256)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<begin>", eos_token="<end>", pad_token="<pad>"
    )


def lowercase(completions: list[str], **_: Any) -> list[float]:
    return [sum(c.islower() for c in text) / max(1, len(text)) for text in completions]


def trainer(folder: Path, dtype: Any = None, **settings: Any) -> Any:
    given: dict[str, Any] = {
        "output_dir": str(folder / "out"),
        "use_cpu": True,
        "bf16": False,
        "max_steps": 2,
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "gradient_accumulation_steps": 2,
        "max_completion_length": 12,
        "temperature": 0.7,
        "learning_rate": 1e-3,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "seed": 3,
        **settings,
    }
    return GRPOTrainer(
        model=Qwen3ForCausalLM.from_pretrained(str(MODEL), dtype=dtype or torch.bfloat16),
        reward_funcs=lowercase,
        args=GRPOConfig(**given),
        train_dataset=Dataset.from_dict({"prompt": PROMPTS * 2}),
        processing_class=byte_tokenizer(),
    )


def weights(one: Any) -> list[Any]:
    return [p.detach().clone() for p in one.model.parameters()]


def scores(events: Recording, source: str) -> list[Any]:
    return [e for e in events.of("logprobs") if e.fields["source"] == source]


def test_recording_changes_no_bit_of_what_the_trainer_learns(tmp_path: Path) -> None:
    plain = trainer(tmp_path)
    plain.train()
    with capture() as events:
        watched = trainer(tmp_path)
        handle = attach_trainer(watched)
        watched.train()
        handle.detach()
    assert all(torch.equal(a, b) for a, b in zip(weights(plain), weights(watched)))
    assert len(events.of("rollout.sample")) == 16
    assert "compute_loss" not in vars(watched)


def test_every_sample_is_scored_as_it_was_drawn_through_shuffling_and_splitting(tmp_path: Path) -> None:
    with capture() as events:
        one = trainer(tmp_path, torch.float32, learning_rate=0.0)
        attach_trainer(one)
        one.train()
    drawn = {e.fields["sample_id"]: e for e in scores(events, "rollout")}
    scored = {e.fields["sample_id"]: e for e in scores(events, "training")}
    assert drawn.keys() == scored.keys()
    assert len(drawn) == 16
    for name, event in scored.items():
        assert event.arrays["values"] == pytest.approx(drawn[name].arrays["values"], abs=3e-4)
        assert event.fields["token_digest"] == drawn[name].fields["token_digest"]
        assert event.fields["mask_digest"] == drawn[name].fields["mask_digest"]
        assert len(event.arrays["entropy"]) == len(event.arrays["values"])
    samples = events.of("rollout.sample")
    assert len({s.fields["group_id"] for s in samples}) == 4
    assert all(s.fields["reward"] is not None for s in samples)
    assert [e.fields["step"] for e in samples] == [0] * 8 + [1] * 8
    layouts = [e.fields for e in events.of("batch.layout")]
    assert len({one["layout_id"] for one in layouts}) == len(layouts) == 6
    assert {one["layout_id"] for one in layouts} == {e.fields["layout_id"] for e in events.of("logprobs")}


def test_inner_epochs_are_named_passes_under_the_weights_they_ran_on(tmp_path: Path) -> None:
    with capture() as events:
        one = trainer(tmp_path, num_iterations=2, beta=0.1)
        attach_trainer(one)
        one.train()
    passes = [(e.fields["pass_id"], e.fields["weight_version"]) for e in scores(events, "training")]
    assert {p: passes.count(p) for p in set(passes)} == {("old", "v0"): 8, ("update-0", "v0"): 8, ("update-1", "v1"): 8}
    assert {e.fields["pass_id"] for e in scores(events, "reference")} == {"reference"}
    published = [e.fields["weight_version"] for e in events.of("weights.published")]
    assert published == ["v0", "v1", "v2"]
    assert len({e.fields["digest"] for e in events.of("weights.published")}) == 3
    loaded = {e.fields["weight_version"]: e.fields["digest"] for e in events.of("weights.loaded")}
    assert loaded == {"v0": events.of("weights.published")[0].fields["digest"]}


def test_truncated_responses_that_leave_the_loss_keep_their_tokens(tmp_path: Path) -> None:
    with capture() as events:
        one = trainer(tmp_path, mask_truncated_completions=True)
        attach_trainer(one)
        one.train()
    truncated = [s for s in events.of("rollout.sample") if s.fields["finish_reason"] == "length"]
    assert truncated
    assert {len(s.arrays["response_token_ids"]) for s in truncated} == {12}
    assert not any(any(s.arrays["loss_mask"]) for s in truncated)


def test_log_probabilities_of_a_rollout_function_are_the_rollout_side(tmp_path: Path) -> None:
    def rollout(prompts: list[str], one: Any) -> dict[str, Any]:
        ids = one.processing_class(prompts)["input_ids"]
        made = [[100, 101, 257] for _ in prompts]
        values = [[-1.0, -2.0, -0.5 - i] for i, _ in enumerate(prompts)]
        return {"prompt_ids": ids, "completion_ids": made, "logprobs": values}

    with capture() as events:
        one = trainer(tmp_path, max_steps=1)
        one.rollout_func = rollout
        attach_trainer(one)
        one.train()
    values = {e.fields["sample_id"]: e.arrays["values"] for e in scores(events, "rollout")}
    assert values == {f"0-0-{i}": [-1.0, -2.0, -0.5 - i] for i in range(8)}
    assert {s.fields["finish_reason"] for s in events.of("rollout.sample")} == {"stop"}


@pytest.mark.parametrize("fault", [None, "rollout-temperature"])
def test_a_run_audits_clean_and_a_temperature_of_one_side_is_named(tmp_path: Path, fault: str | None) -> None:
    ledger = tmp_path / "l"
    rlk_ledger.init(ledger, run_id="r", role="training", roles={"training": 1}, spool=tmp_path / "s", shipper="inline")
    one = trainer(tmp_path)
    if fault is not None:
        one.generation_config.temperature = 1.0
    attach_trainer(one, requested={"model.dtype": "bfloat16"})
    one.train()
    rlk_ledger.close()
    found = audit(load_history(rlk_ledger.open(ledger), "r"))
    named = {(f.finding_id, f.where.get("field")) for f in found.findings if f.severity != "info"}
    if fault is None:
        assert found.verdict == "pass", found
    else:
        assert found.verdict == "not_comparable"
        assert named == {("contract.differs", "temperature")}


def test_with_recording_off_nothing_is_wrapped(tmp_path: Path) -> None:
    one = trainer(tmp_path)
    before = len(one.callback_handler.callbacks)
    attach_trainer(one)
    assert "compute_loss" not in vars(one)
    assert len(one.callback_handler.callbacks) == before


def test_a_trainer_without_the_methods_is_refused_in_one_sentence() -> None:
    attach_trainer(object()).detach()  # off: not even looked at
    with capture(), pytest.raises(UsageError, match="has no _generate_and_score_completions"):
        attach_trainer(object())


def test_attached_twice_it_records_once_and_detached_it_is_as_it_was(tmp_path: Path) -> None:
    one = trainer(tmp_path, max_steps=1)
    own = one.compute_loss = one.compute_loss  # a wrapper of the job's own
    before = list(one.callback_handler.callbacks)
    with capture() as events:
        handle = attach_trainer(one)
        assert attach_trainer(one) is handle
        one.train()
        recorded = len(events.of("rollout.sample"))
        assert recorded == len({e.fields["sample_id"] for e in events.of("rollout.sample")}) == 8
        ours, one.compute_loss = one.compute_loss, lambda *args, **more: ours(*args, **more)
        theirs = one.compute_loss
        handle.detach()
        assert one.compute_loss is theirs
        one.compute_loss = own
        assert one.callback_handler.callbacks == before
        handle.detach()
        count = len(list(events))
        one.train()
        assert len(list(events)) == count, "a detached trainer records nothing"
    assert [name for name in vars(one) if name.startswith("_generate") or name == "_calculate_rewards"] == []
