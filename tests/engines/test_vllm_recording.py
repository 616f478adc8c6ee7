"""One unmodified vLLM engine in this process, recorded: what it gave, what it runs, what it holds."""

import gc
import importlib.resources
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import rlk_ledger
from rlk_ledger.integrations.vllm import Watch, attach
from rlk_ledger_sdk.testing import Recording, capture

pytestmark = [
    pytest.mark.engines,
    pytest.mark.filterwarnings("ignore:.*reduce_op.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

SHIPPED = Path(str(importlib.resources.files("rlk_ledger_replay") / "model"))
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}
PROMPTS = [[256, 70, 80, 90], [256, 71, 81]]
# Seeded requests cannot be chunked on a CPU: vLLM then asks the generator for what it does not have.
LONG = [256, *[65 + (7 * i) % 50 for i in range(150)]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped model with its head as a tensor of its own: a reload moves all of it."""
    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("model")
    config = json.loads((SHIPPED / "config.json").read_text()) | {"tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(SHIPPED / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        torch.cpu._init_amx()
        from vllm import LLM
        from vllm.distributed import cleanup_dist_env_and_memory

        engine = LLM(
            str(model),
            enforce_eager=True,
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=512,
            max_num_batched_tokens=64,
            block_size=32,
            logprobs_mode="processed_logprobs",
            enable_lora=True,
            max_lora_rank=8,
        )
        yield engine
        engine.llm_engine.engine_core.shutdown()
        del engine
        gc.collect()
        cleanup_dist_env_and_memory()


@pytest.fixture(autouse=True)
def unnamed(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test finds an empty cache and weights nobody named."""
    yield
    engine = request.getfixturevalue("llm")
    engine.reset_prefix_cache()
    engine.llm_engine.set_weight_version("default")


@pytest.fixture
def restored(llm: Any, model: Path) -> Iterator[None]:
    """Puts the first weights back after a test that moves them."""
    yield
    llm.collective_rpc("reload_weights", kwargs={"weights_path": str(model)})


def params(**changes: Any) -> Any:
    from vllm import SamplingParams

    plain = {"temperature": 0.7, "max_tokens": 6, "seed": 11, "logprobs": 0, "detokenize": False, "ignore_eos": True}
    return SamplingParams(**{**plain, **changes})


def generate(llm: Any, prompts: list[list[int]], sampling: Any, **more: Any) -> list[Any]:
    outputs: list[Any] = llm.generate([{"prompt_token_ids": p} for p in prompts], sampling, use_tqdm=False, **more)
    return outputs


def given(outputs: list[Any]) -> list[tuple[list[int], list[float]]]:
    return [
        (list(c.token_ids), [d[t].logprob for d, t in zip(c.logprobs, c.token_ids, strict=True)])
        for o in outputs
        for c in o.outputs
    ]


def samples(events: Recording) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    return [(e.fields, e.arrays) for e in events.of("rollout.sample")]


def held(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    tensors: dict[str, torch.Tensor] = load_file(folder / "model.safetensors")
    return tensors


def moved(model: Path, folder: Path, seed: int) -> tuple[Path, str]:
    """A checkpoint with other weights, and the digest a trainer publishes for it."""
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: (tensor.float() + 0.01 * torch.randn(tensor.shape, generator=generator)).to(tensor.dtype)
        for name, tensor in held(model).items()
    }
    folder.mkdir()
    shutil.copyfile(model / "config.json", folder / "config.json")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder, rlk_ledger.state_digest(tensors)[0]


def sync(llm: Any, folder: Path, version: str) -> None:
    llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
    llm.reset_prefix_cache()
    llm.llm_engine.set_weight_version(version)


def test_with_recording_off_nothing_is_wrapped(llm: Any) -> None:
    before = (dict(vars(llm.llm_engine)), dict(vars(llm.llm_engine.engine_core.engine_core.scheduler)))
    attach(llm)
    assert dict(vars(llm.llm_engine)) == before[0]
    assert dict(vars(llm.llm_engine.engine_core.engine_core.scheduler)) == before[1]


def test_recording_changes_no_bit_and_detaching_puts_everything_back(llm: Any) -> None:
    off = given(generate(llm, PROMPTS, params(n=2)))
    llm.reset_prefix_cache()
    kept = dict(vars(llm.llm_engine))
    with capture():
        watch = attach(llm)
        on = given(generate(llm, PROMPTS, params(n=2)))
        watch.detach()
    assert on == off
    assert {k: v for k, v in vars(llm.llm_engine).items() if not k.startswith("_rlk")} == kept
    assert "schedule" not in vars(llm.llm_engine.engine_core.engine_core.scheduler)


def test_a_sample_and_its_values_are_what_the_engine_gave(llm: Any) -> None:
    sampling = params(n=2, temperature=0.7, top_k=40, top_p=0.95, min_p=0.01, frequency_penalty=0.25)
    with capture() as events:
        watch = attach(llm, engine="rollout-3")
        outputs = generate(llm, PROMPTS, sampling)
    recorded = {f["sample_id"]: (f, a) for f, a in samples(events)}
    values = {e.fields["sample_id"]: (e.fields, e.arrays["values"]) for e in events.of("logprobs")}
    contracts = {e.fields["contract_id"]: e.fields["body"] for e in events.of("contract.declared")}
    assert len(recorded) == 4
    for output in outputs:
        for completion in output.outputs:
            name = watch.sample_id(output, completion)
            fields, arrays = recorded[name]
            assert arrays["response_token_ids"] == list(completion.token_ids)
            assert arrays["loss_mask"] == [1] * len(completion.token_ids)
            assert (fields["engine"], fields["finish_reason"], fields["status"]) == ("rollout-3", "length", "truncated")
            assert fields["group_id"] == name.rpartition("-")[0]
            scored, got = values[name]
            wanted = [d[t].logprob for d, t in zip(completion.logprobs, completion.token_ids, strict=True)]
            assert got == pytest.approx(wanted, abs=0, rel=0)
            body = contracts[scored["contract_id"]]
    assert recorded[name][0]["sampling"] == {
        "temperature": 0.7,
        "top_p": 0.95,
        "top_k": 40,
        "min_p": 0.01,
        "n": 2,
        "seed": 12,  # of the second completion
        "penalties": {"presence": 0.0, "frequency": 0.25, "repetition": 1.0},
    }
    assert {k: body[k] for k in ("mode", "temperature", "top_p", "top_k", "min_p")} == {
        "mode": "processed",
        "temperature": 0.7,
        "top_p": 0.95,
        "top_k": 40,
        "min_p": 0.01,
    }
    assert body["head_dtype"] == body["logits_dtype"] == body["compute_dtype"] == "bfloat16"
    assert body["padded_vocab"] == json.loads((SHIPPED / "config.json").read_text())["vocab_size"]


def test_a_prompt_shared_by_samples_is_stored_once(llm: Any) -> None:
    with capture() as events:
        attach(llm)
        generate(llm, [PROMPTS[0], PROMPTS[1], PROMPTS[0]], params(n=2))
        generate(llm, [PROMPTS[0]], params())
    assert [e.arrays["token_ids"] for e in events.of("prompt.recorded")] == PROMPTS
    assert len({f["prompt_id"] for f, _ in samples(events)}) == 2


def test_flat_containers_and_several_candidates_give_the_sampled_token(llm: Any) -> None:
    with capture() as events:
        attach(llm)
        plain = given(generate(llm, PROMPTS, params()))
        for changes in ({"flat_logprobs": True}, {"logprobs": 3}, {"logprobs": 3, "flat_logprobs": True}):
            llm.reset_prefix_cache()
            generate(llm, PROMPTS, params(**changes))
    values = [e.arrays["values"] for e in events.of("logprobs")]
    assert values == [v for _, v in plain] * 4


def test_without_requested_values_the_sample_stands_alone(llm: Any) -> None:
    with capture() as events:
        attach(llm)
        generate(llm, PROMPTS, params(logprobs=None))
    assert len(events.of("rollout.sample")) == 2
    assert events.of("logprobs") == []


def test_greedy_values_are_declared_at_temperature_one(llm: Any) -> None:
    with capture() as events:
        attach(llm)
        generate(llm, PROMPTS[:1], params(temperature=0.0))
    (body,) = [e.fields["body"] for e in events.of("contract.declared") if e.fields["kind"] == "logprob"]
    assert (body["temperature"], samples(events)[0][0]["sampling"]["temperature"]) == (1.0, 0.0)


def test_stop_and_an_explicit_record_without_wrapping(llm: Any) -> None:
    sampling = params(max_tokens=60, stop_token_ids=[32, 69, 84])  # a space, E, T
    with capture() as events:
        watch = attach(llm, wrap=False, sample_id=lambda output, completion: f"mine-{completion.index}")
        outputs = generate(llm, PROMPTS[:1], sampling)
        assert events.of("rollout.sample") == []
        assert watch.record(outputs, sampling) == ["mine-0"]
    ((fields, _),) = samples(events)
    assert (fields["finish_reason"], fields["status"]) == ("stop", "completed")
    assert fields["labels"] == {"request": watch.sample_id(outputs[0], outputs[0].outputs[0])}


@pytest.mark.usefixtures("restored")
def test_what_the_workers_hold_equals_what_a_trainer_publishes(llm: Any, model: Path, tmp_path: Path) -> None:
    first = held(model)
    folder, published = moved(model, tmp_path / "step-1", seed=1)
    with capture() as events:
        attach(llm, weight_version="step-0")
        sync(llm, folder, "step-1")
        generate(llm, PROMPTS, params())
    loads = [e.fields for e in events.of("weights.loaded")]
    assert [(f["weight_version"], f["digest"]) for f in loads] == [
        ("step-0", rlk_ledger.state_digest(first)[0]),
        ("step-1", published),
    ]
    assert {f["tensor_count"] for f in loads} == {len(first)}
    assert {f["what"] for f in loads} == {"holds"}
    assert (loads[1]["caches_flushed"], loads[1]["path"]) == (True, str(folder))
    assert {t["name"] for t in loads[1]["tensors"]} == set(first)
    assert [f["weight_spans"] for f, _ in samples(events)] == [[{"version": "step-1", "start": 0, "end": 6}]] * 2


def test_a_stale_reload_shows_the_old_digest_and_the_audit_names_it(llm: Any, model: Path, tmp_path: Path) -> None:
    _, published = moved(model, tmp_path / "step-1", seed=1)
    place = {"run_id": "stale", "shipper": "inline", "spool": tmp_path / "spool"}
    roles = {"rollout": 1, "training": 1}
    rlk_ledger.init(tmp_path / "ledger", role="rollout", roles=roles, **place)
    watch = attach(llm, weight_version="step-0")
    generate(llm, PROMPTS, params())
    llm.llm_engine.set_weight_version("step-1")  # claimed, never loaded
    generate(llm, PROMPTS, params())
    watch.detach()
    rlk_ledger.close()
    rlk_ledger.init(tmp_path / "ledger", role="training", roles=roles, **place)
    first = rlk_ledger.state_digest(held(model))[0]
    for version, digest in (("step-0", first), ("step-1", published)):
        rlk_ledger.record("weights.published", weight_version=version, digest=digest, tensor_count=len(held(model)))
    rlk_ledger.close()
    ledger = rlk_ledger.open(tmp_path / "ledger")
    loads = [e for _, _, e, _ in ledger.read_events("stale", types=["weights.loaded"])]
    assert [(e["weight_version"], e["digest"]) for e in loads] == [("step-0", first), ("step-1", first)]
    assert "weights.not_loaded" in _found(ledger, "stale")


def _found(ledger: Any, run: str) -> set[str]:
    from rlk_ledger.audit import audit
    from rlk_ledger.history import load_history

    return {finding.finding_id for finding in audit(load_history(ledger, run)).findings}


def test_a_version_that_changes_in_flight_is_two_spans(llm: Any) -> None:
    with capture() as events:
        attach(llm, weight_version="a")
        llm.llm_engine.set_weight_version("a")
        llm.enqueue([{"prompt_token_ids": PROMPTS[0]}], params(max_tokens=8), use_tqdm=False)
        for _ in range(4):
            llm.llm_engine.step()
        llm.llm_engine.set_weight_version("b")
        llm.wait_for_completion(use_tqdm=False)
    ((fields, _),) = samples(events)
    spans = fields["weight_spans"]
    assert [s["version"] for s in spans] == ["a", "b"]
    assert spans[0]["end"] == spans[1]["start"]
    assert spans[1]["end"] == 8
    assert fields["metadata_source"]["weight_spans"] == "measured"


def test_a_version_nobody_named_is_absent_and_one_the_watch_knows_is_derived(llm: Any) -> None:
    with capture() as events:
        attach(llm)
        generate(llm, PROMPTS[:1], params())
        attach(llm, weight_version="known")
        generate(llm, PROMPTS[:1], params())
    (unknown, _), (known, _) = samples(events)
    assert "weight_spans" not in unknown
    assert unknown["metadata_source"]["weight_spans"] == "absent"
    assert known["weight_spans"] == [{"version": "known", "start": 0, "end": 6}]
    assert known["metadata_source"]["weight_spans"] == "derived"


@pytest.mark.usefixtures("restored")
def test_cached_tokens_and_their_writer_belong_to_each_completion(llm: Any, model: Path, tmp_path: Path) -> None:
    folder, _ = moved(model, tmp_path / "step-1", seed=2)
    with capture() as events:
        attach(llm, weight_version="step-0")
        generate(llm, [LONG], params(seed=None))
        generate(llm, [LONG], params(seed=None))
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})  # and the cache is not reset
        llm.llm_engine.set_weight_version("step-1")
        generate(llm, [LONG], params(seed=None))
        llm.reset_prefix_cache()
        generate(llm, [LONG], params(n=2, seed=None))
    caches = [f["cache"] for f, _ in samples(events)]
    assert [c["cached_tokens"] for c in caches] == [0, 128, 128, 0, 128]
    assert [c.get("writer_version") for c in caches] == [None, "step-0", "step-0", None, "step-1"]
    assert [f.get("caches_flushed") for f in (e.fields for e in events.of("weights.loaded"))] == [None, False]


def test_prefill_chunks_and_the_layout_of_their_steps_are_measured(llm: Any) -> None:
    with capture() as events:
        watch = attach(llm)
        outputs = generate(llm, [LONG, PROMPTS[0]], params(seed=None))
    chunked, whole = (f for f, _ in samples(events))
    if chunked["sample_id"] != watch.sample_id(outputs[0], outputs[0].outputs[0]):
        chunked, whole = whole, chunked
    assert chunked["chunks"][-1] == len(LONG)
    assert chunked["chunks"][:2] == [64, 128]
    assert whole["chunks"] == [len(PROMPTS[0])]
    layouts = [(e.fields, e.arrays) for e in events.of("batch.layout")]
    rows = [a["sequence_lengths"][f["sample_order"].index(chunked["sample_id"])] for f, a in layouts]
    assert sum(rows[:3]) == len(LONG)
    assert all(a["offsets"][0] == 0 and len(a["offsets"]) == len(f["sample_order"]) for f, a in layouts)


def test_settings_are_read_from_what_runs(llm: Any) -> None:
    wanted = {"enable_chunked_prefill": True, "max_num_batched_tokens": 64, "dtype": "bfloat16", "block_size": 16}
    with capture() as events:
        attach(llm, requested=wanted)
    knobs = {e.fields["path"]: e.fields for e in events.of("knob.applied")}
    actual = {path: f.get("actual") for path, f in knobs.items()}
    assert actual == {
        "model.dtype": "bfloat16",
        "model.quantization": "none",
        "model.max_model_len": 512,
        "sampling.logprobs_mode": "processed_logprobs",
        "sampling.seed": None,
        "attention.backend": "CPU_ATTN",
        "kv_cache.dtype": "bfloat16",
        "kv_cache.block_size": 32,
        "kv_cache.prefix_caching": True,
        "compilation.enforce_eager": True,
        "parallel.tensor": 1,
        "parallel.pipeline": 1,
        "parallel.data": 1,
        "parallel.custom_all_reduce": False,
        "speculative.enabled": False,
        "batch_invariant": False,
        "scheduler.chunked_prefill": True,
        "scheduler.max_num_seqs": llm.llm_engine.vllm_config.scheduler_config.max_num_seqs,
        "scheduler.max_num_batched_tokens": 64,
        "scheduler.async": False,
    }
    assert knobs["kv_cache.block_size"]["status"] == "fallback"
    assert knobs["sampling.seed"]["status"] == "unobservable"
    assert knobs["scheduler.max_num_batched_tokens"]["status"] == "applied"


def test_batch_invariance_is_asked_of_the_numbers_not_of_the_flag(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.determinism import batch_invariant

    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    monkeypatch.setattr(batch_invariant, "_batch_invariant_MODE", True)  # as it reads on a CPU that accepts the flag
    with capture() as events:
        attach(llm)
    (knob,) = [e.fields for e in events.of("knob.applied") if e.fields["path"] == "batch_invariant"]
    assert (knob["requested"], knob["actual"], knob["status"]) == (True, False, "fallback")


def test_the_norm_is_declared_as_it_rounds(llm: Any) -> None:
    with capture() as events:
        attach(llm)
    bodies = {e.fields["kind"]: e.fields["body"] for e in events.of("contract.declared")}
    assert bodies["norm"] == {
        "eps": 1e-06,
        "rounding_order": "hf",
        "accumulate_dtype": "float32",
        "residual_fusion": "sum_in_float32",
    }
    assert bodies["rope"]["theta"] == 10000.0
    assert bodies["attention"]["softmax_scale"] == pytest.approx(32**-0.5)


def test_an_adapter_is_named_with_the_digest_of_its_file(llm: Any, model: Path, tmp_path: Path) -> None:
    from vllm.lora.request import LoRARequest

    digest = _adapter(tmp_path / "adapter", alpha=16)
    with capture() as events:
        attach(llm, weight_version="step-0")
        base = generate(llm, PROMPTS[:1], params())
        adapted = generate(llm, PROMPTS[:1], params(), lora_request=LoRARequest("style", 1, str(tmp_path / "adapter")))
        llm.llm_engine.remove_lora(1)
        generate(llm, PROMPTS[:1], params())
    assert given(base) != given(adapted)
    assert [f.get("labels") for f, _ in samples(events)] == [None, {"adapter": "style"}, None]
    loads = [e.fields for e in events.of("weights.loaded")]
    assert [f.get("adapters") for f in loads] == [None, [{"name": "style", "digest": digest}], None]
    assert {f["digest"] for f in loads} == {rlk_ledger.state_digest(held(model))[0]}


def test_a_scale_that_cannot_be_taken_out_exactly_compares_with_nothing(llm: Any, tmp_path: Path) -> None:
    from vllm.lora.request import LoRARequest

    _adapter(tmp_path / "adapter", alpha=12)
    with capture() as events:
        attach(llm, weight_version="step-0")
        generate(llm, PROMPTS[:1], params(), lora_request=LoRARequest("odd", 2, str(tmp_path / "adapter")))
        llm.llm_engine.remove_lora(2)
    (adapter,) = events.of("weights.loaded")[-1].fields["adapters"]
    assert adapter["digest"].startswith("sum64x2scaled:")


def test_a_writer_that_begins_later_hears_everything_again(llm: Any) -> None:
    with capture() as first:
        attach(llm, weight_version="step-0")
        generate(llm, PROMPTS, params())
    llm.reset_prefix_cache()
    with capture() as second:  # as a second init() does; nobody attached again
        generate(llm, PROMPTS, params())

    def said(events: Recording) -> list[tuple[str, Any]]:
        kinds = ("contract.declared", "knob.applied", "prompt.recorded", "weights.loaded")
        return [(e.type, e.fields.get("contract_id", e.fields.get("path"))) for e in events.of(*kinds)]

    assert said(second) == said(first)
    assert {f["contract_id"] for f in (e.fields for e in second.of("logprobs"))} <= {
        e.fields["contract_id"] for e in second.of("contract.declared")
    }
    assert second.of("weights.loaded")[0].fields["tensors"]
    assert {f["prompt_id"] for f, _ in samples(second)} == {e.fields["prompt_id"] for e in second.of("prompt.recorded")}


def test_a_writer_that_begins_in_the_middle_of_a_request_knows_what_its_sample_names(llm: Any) -> None:
    with capture():
        attach(llm)
        llm.enqueue([{"prompt_token_ids": PROMPTS[0]}], params(), use_tqdm=False)
        llm.llm_engine.step()
    with capture() as events:
        llm.wait_for_completion(use_tqdm=False)
    (scored,) = events.of("logprobs")
    assert scored.fields["contract_id"] in {e.fields["contract_id"] for e in events.of("contract.declared")}
    ((fields, _),) = samples(events)
    assert fields["prompt_id"] == events.of("prompt.recorded")[0].fields["prompt_id"]


def test_an_engine_that_cannot_be_read_is_asked_once_a_version(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def broken(self: Watch, question: str) -> list[dict[str, Any]]:
        asked.append(question)
        raise RuntimeError("a worker that has no digests")

    monkeypatch.setattr(Watch, "ask", broken)
    with capture(on_error="warn") as events:
        attach(llm, weight_version="step-0")
        for _ in range(3):
            generate(llm, PROMPTS[:1], params())
        llm.llm_engine.set_weight_version("step-1")
        for _ in range(3):
            generate(llm, PROMPTS[:1], params())
    assert asked == ["describe", "weights"]
    assert len(samples(events)) == len(events.of("logprobs")) == 6


def test_with_recording_off_an_attached_engine_is_asked_nothing(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = attach(llm)
    sampling = params()
    outputs = generate(llm, PROMPTS, sampling)
    monkeypatch.setattr(Watch, "ask", lambda self, question: pytest.fail(f"asked for {question}"))
    watch.weights_loaded("step-1")
    assert watch.record(outputs, sampling) == [watch.sample_id(o, o.outputs[0]) for o in outputs]


def test_a_request_that_the_engine_refuses_is_not_kept(llm: Any) -> None:
    with capture():
        watch = attach(llm)
        with pytest.raises(Exception, match="maximum context length"):
            llm.llm_engine.add_request("long", {"prompt_token_ids": [70] * 600}, params())
    assert len(watch.in_flight) == 0


@pytest.mark.parametrize("internal", [False, True])
def test_an_aborted_request_is_not_kept(llm: Any, internal: bool) -> None:
    with capture() as events:
        watch = attach(llm)
        known = llm.llm_engine.output_processor.request_states
        (name,) = llm.enqueue([{"prompt_token_ids": PROMPTS[0]}], params(), use_tqdm=False)
        llm.llm_engine.step()
        assert len(watch.in_flight) == 1
        llm.llm_engine.abort_request(list(known) if internal else [known[name].external_req_id], internal=internal)
        llm.llm_engine.step()
    assert len(watch.in_flight) == 0
    assert samples(events) == []


def _adapter(folder: Path, alpha: int) -> str:
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(alpha)
    tensors = {}
    for layer in range(4):
        for module, width in (("q_proj", 128), ("v_proj", 64)):
            stem = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            tensors[f"{stem}.lora_A.weight"] = (torch.randn((8, 128), generator=generator) * 0.1).bfloat16()
            tensors[f"{stem}.lora_B.weight"] = (torch.randn((width, 8), generator=generator) * 0.1).bfloat16()
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": alpha, "target_modules": ["q_proj", "v_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return rlk_ledger.state_digest(tensors)[0]


def test_a_mistake_of_the_recorder_never_reaches_the_job(
    llm: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(self: Watch, output: Any) -> list[str]:
        raise RuntimeError("ours")

    place = {"run_id": "r", "shipper": "inline", "spool": tmp_path / "spool", "on_error": "warn"}
    rlk_ledger.init(tmp_path / "ledger", role="rollout", **place)
    watch = attach(llm)
    monkeypatch.setattr(Watch, "take", broken)
    outputs = generate(llm, PROMPTS, params())
    watch.detach()
    rlk_ledger.close()
    assert [len(o.outputs[0].token_ids) for o in outputs] == [6, 6]
    assert caplog.text.count("vllm outputs") == 1
