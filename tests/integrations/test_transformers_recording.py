"""The transformers integration on the shipped model: what is recorded is what the live model did."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rlk_ledger
from rlk_ledger.audit import audit
from rlk_ledger.history import load_history
from rlk_ledger.integrations import transformers as hf
from rlk_ledger_replay.demo.network import held_tensors as demo_tensors
from rlk_ledger_schemas.errors import UsageError
from rlk_ledger_schemas.fingerprints import mask_digest, token_digest
from rlk_ledger_schemas.metrics import VALUE_CLASSES
from rlk_ledger_sdk.integrations.transformers.held import canonical_name
from rlk_ledger_sdk.integrations.transformers.numerics import norm_body, rounding_order
from rlk_ledger_sdk.testing import Recording, capture
from rlk_ledger_sdk.weights import state_digest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

MODEL = Path(__file__).parent.parent.parent / "replay" / "rlk_ledger_replay" / "model"
BEGIN, END, PAD = 256, 257, 258
PROMPTS = ([BEGIN, *b"def "], [BEGIN, *b"import os\nimport "], [BEGIN])


def opened(dtype: Any, attention: str = "sdpa") -> Any:
    transformers.utils.logging.disable_progress_bar()
    model = transformers.Qwen3ForCausalLM.from_pretrained(str(MODEL), dtype=dtype, attn_implementation=attention)
    return model.eval()


@pytest.fixture(scope="module")
def model32() -> Any:
    return opened(torch.float32)


@pytest.fixture
def model16() -> Any:
    return opened(torch.bfloat16)


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    rlk_ledger.close(timeout=0)


def padded(rows: Any, side: str = "left") -> tuple[Any, Any]:
    """(ids, attention mask), padded on one side."""
    width = max(map(len, rows))
    fill = [[PAD] * (width - len(row)) for row in rows]
    gone = [[0] * (width - len(row)) for row in rows]
    ids = [f + list(r) if side == "left" else list(r) + f for r, f in zip(rows, fill)]
    mask = [g + [1] * len(r) if side == "left" else [1] * len(r) + g for r, g in zip(rows, gone)]
    return torch.tensor(ids), torch.tensor(mask)


def draw(model: Any, generate: Any = None, **more: Any) -> Any:
    ids, mask = padded(PROMPTS)
    torch.manual_seed(3)
    fixed = {"do_sample": True, "temperature": 0.7, "top_k": 0, "max_new_tokens": 16, "pad_token_id": PAD}
    return (generate or model.generate)(input_ids=ids, attention_mask=mask, **{**fixed, **more})


def samples_of(events: Recording) -> dict[str, tuple[list[int], list[int]]]:
    return {
        e.fields["sample_id"]: (e.arrays["prompt_token_ids"], e.arrays["response_token_ids"])
        for e in events.of("rollout.sample")
    }


def values_of(events: Recording, source: str) -> dict[str, list[float]]:
    return {e.fields["sample_id"]: e.arrays["values"] for e in events.of("logprobs") if e.fields["source"] == source}


def body_of(events: Recording, event: Any) -> dict[str, Any]:
    bodies = {e.fields["contract_id"]: e.fields["body"] for e in events.of("contract.declared")}
    return bodies[event.fields["contract_id"]]


# -- generation ---


def test_recording_changes_no_token_and_draws_no_random_number(model16: Any) -> None:
    plain = draw(model16)
    state = torch.get_rng_state()
    with capture():
        watched = hf.attach(model16, engine="hf-0")
        recorded = draw(model16, watched.generate, sample_ids=["a", "b", "c"])
    assert torch.equal(plain, recorded)
    assert torch.equal(state, torch.get_rng_state())
    assert "generate" not in vars(model16)
    assert "_get_logits_processor" not in vars(model16)


@pytest.mark.parametrize("mode", ["processed", "raw"])
def test_values_are_those_of_the_models_own_scores_or_logits(model16: Any, mode: str) -> None:
    more = {"top_p": 0.9, "repetition_penalty": 1.1}
    output = draw(model16, return_dict_in_generate=True, output_scores=True, output_logits=True, **more)
    with capture() as events:
        draw(model16, hf.attach(model16).generate, sample_ids=["a", "b", "c"], mode=mode, **more)
    steps = output.scores if mode == "processed" else output.logits
    ids = output.sequences[:, -len(steps) :]
    for row, values in enumerate(values_of(events, "rollout").values()):
        want = [torch.log_softmax(s[row].float(), -1)[ids[row, i]].item() for i, s in enumerate(steps)]
        assert values == want[: len(values)]
    body = body_of(events, events.of("logprobs")[0])
    assert (body["mode"], body["temperature"], body["top_p"]) == (mode, 0.7, 0.9)
    assert body["penalties"] == {"repetition": pytest.approx(1.1)}


def test_a_dict_output_the_user_kept_gives_the_same_record_as_listening(model16: Any) -> None:
    with capture() as listened:
        draw(model16, hf.attach(model16).generate, sample_ids=["a", "b", "c"])
    output = draw(model16, return_dict_in_generate=True, output_scores=True)
    ids, mask = padded(PROMPTS)
    config = transformers.GenerationConfig(
        do_sample=True, temperature=0.7, top_k=0, max_new_tokens=16, eos_token_id=END
    )
    with capture() as kept:
        generation = hf.generation_of(output, config, prompt_width=ids.shape[1], attention_mask=mask)
        hf.attach(model16).recorded(generation, ["a", "b", "c"])
    assert samples_of(kept) == samples_of(listened)
    assert values_of(kept, "rollout") == values_of(listened, "rollout")


def test_raw_logits_alone_are_declared_raw(model16: Any) -> None:
    output = draw(model16, return_dict_in_generate=True, output_logits=True)
    config = transformers.GenerationConfig(do_sample=True, temperature=0.7, top_k=0, max_new_tokens=16)
    assert hf.generation_of(output, config, prompt_width=15).mode == "raw"


def test_padding_is_no_part_of_a_prompt_and_ends_are_told_apart(model16: Any) -> None:
    ends = int(draw(model16)[0, 20])
    with capture() as events:
        output = draw(model16, hf.attach(model16).generate, sample_ids=["a", "b", "c"], eos_token_id=[END, ends])
    prompts = [prompt for prompt, _ in samples_of(events).values()]
    assert prompts == [list(p) for p in PROMPTS]
    width = max(map(len, PROMPTS))
    for (_, tokens), event, row in zip(samples_of(events).values(), events.of("rollout.sample"), output.tolist()):
        assert tokens == row[width : width + len(tokens)]
        stopped = tokens[-1] in (END, ends)
        assert (event.fields["finish_reason"], event.fields["status"]) == (
            ("stop", "completed") if stopped else ("length", "truncated")
        )
        assert not set(tokens[:-1]) & {END, ends}
    assert events.of("batch.layout")[0].fields["padding_side"] == "left"


def test_a_writer_that_begins_later_hears_what_the_model_is(model16: Any) -> None:
    with capture() as first:
        watched = hf.attach(model16, engine="hf-0")
        watched.published("v0")
    with capture() as second:
        watched.published("v0")
        draw(model16, watched.generate, sample_ids=["a", "b", "c"])
    kinds = ("knob.applied", "contract.declared")

    def said(events: Recording) -> list[Any]:
        return [e.fields.get("path", e.fields.get("contract_id")) for e in events.of(*kinds)]

    assert said(second)[: len(said(first))] == said(first)
    assert second.of("logprobs")[0].fields["contract_id"] in said(second)
    assert second[0].type == "knob.applied"


def test_greedy_decoding_applies_no_temperature_and_the_contract_says_so(model16: Any) -> None:
    with capture() as events:
        ids, mask = padded(PROMPTS)
        watched = hf.attach(model16)
        watched.generate(
            input_ids=ids, attention_mask=mask, sample_ids=["a", "b", "c"], do_sample=False, max_new_tokens=4
        )
    assert body_of(events, events.of("logprobs")[0])["temperature"] == 1.0
    assert events.of("rollout.sample")[0].fields["sampling"]["temperature"] == 0.0


def test_several_returned_sequences_a_prompt_keep_their_prompts(model16: Any) -> None:
    names = [f"{p}{k}" for p in "abc" for k in range(2)]
    with capture() as events:
        draw(model16, hf.attach(model16).generate, sample_ids=names, num_return_sequences=2)
    assert [prompt for prompt, _ in samples_of(events).values()] == [list(p) for p in PROMPTS for _ in range(2)]


def test_beam_search_has_samples_and_says_that_values_are_absent(model16: Any) -> None:
    with capture() as events:
        draw(
            model16, hf.attach(model16).generate, sample_ids=["a", "b", "c"], num_beams=2, do_sample=False,
            temperature=None,
        )  # fmt: skip
    assert len(samples_of(events)) == 3
    assert not events.of("logprobs")
    assert events.of("rollout.sample")[0].fields["metadata_source"]["logprobs"] == "absent"


def test_a_call_that_fails_leaves_the_model_as_it_was(model16: Any) -> None:
    with capture() as events, pytest.raises(ValueError, match="max_new_tokens"):
        draw(model16, hf.attach(model16).generate, sample_ids=["a"], max_new_tokens=-1)
    assert not events.of("rollout.sample")
    assert "generate" not in vars(model16)


def test_wrong_sample_ids_cost_a_gap_not_the_generation(model16: Any, tmp_path: Path) -> None:
    rlk_ledger.init(tmp_path / "l", run_id="r", role="rollout", spool=tmp_path / "s", shipper="inline", on_error="warn")
    watched = hf.attach(model16)
    output = draw(model16, watched.generate, sample_ids=["only one"])
    rlk_ledger.close()
    assert torch.equal(output, draw(model16))
    gaps = [e for _, _, e, _ in rlk_ledger.open(tmp_path / "l").read_events("r", types=["gap"])]
    assert [g["kind"] for g in gaps] == ["internal"]


def test_listeners_of_one_model_come_off_one_by_one(model16: Any) -> None:
    with capture(), hf.listening(model16) as outer:
        with hf.listening(model16, "raw") as inner:
            draw(model16)
        draw(model16)
    assert [(len(inner), inner[0].mode), (len(outer), outer[0].mode)] == [(1, "raw"), (2, "processed")]
    assert "generate" not in vars(model16)


def test_a_model_that_cannot_be_wrapped_generates_all_the_same(tmp_path: Path) -> None:
    class Plain(torch.nn.Module):
        def generate(self, start: int) -> list[int]:
            return [start, start + 1]

    rlk_ledger.init(tmp_path / "l", run_id="r", role="rollout", spool=tmp_path / "s", shipper="inline", on_error="warn")
    assert hf.attach(Plain()).generate(3, sample_ids=["a"]) == [3, 4]


def test_with_recording_off_the_models_own_method_runs(model16: Any) -> None:
    watched = hf.attach(model16)
    assert not watched.on
    assert torch.equal(draw(model16, watched.generate, sample_ids=["a", "b", "c"]), draw(model16))


# -- scores ---


def scored_rows(model: Any, events_of: str = "left") -> tuple[Recording, dict[str, Any]]:
    """Generated in float32, then scored by one forward pass over rows padded as named."""
    with capture() as events:
        watched = hf.attach(model, engine="hf")
        watched.loaded("v0")
        draw(model, watched.generate, sample_ids=["a", "b", "c"])
        rows = samples_of(events)
        score(watched, rows, events_of)
    return events, rows


def score(watched: Any, rows: dict[str, Any], side: str, temperature: float = 0.7) -> None:
    texts = [prompt + tokens for prompt, tokens in rows.values()]
    where = [[0] * len(prompt) + [1] * len(tokens) for prompt, tokens in rows.values()]
    more: dict[str, Any] = {}
    if side == "packed":
        ids = torch.tensor([[t for text in texts for t in text]])
        positions = torch.tensor([[i for text in texts for i in range(len(text))]])
        response = torch.tensor([[m for mask in where for m in mask]])
        more = {"position_ids": positions}
        with torch.no_grad():
            parts = [watched.model(input_ids=torch.tensor([text])).logits for text in texts]
        logits = torch.cat(parts, 1)
    else:
        ids, mask = padded(texts, side)
        response = torch.stack([torch.tensor(w) for w in padded_masks(where, side)])
        more = {"attention_mask": mask}
        with torch.no_grad():
            logits = watched.model(input_ids=ids, attention_mask=mask).logits
    watched.scored(ids, sample_ids=list(rows), response_mask=response, logits=logits, temperature=temperature, **more)


def padded_masks(masks: Any, side: str) -> list[list[int]]:
    width = max(map(len, masks))
    return [[0] * (width - len(m)) + m if side == "left" else m + [0] * (width - len(m)) for m in masks]


@pytest.mark.parametrize("side", ["left", "right", "packed"])
def test_scores_of_a_forward_pass_agree_with_generation_whatever_the_layout(model32: Any, side: str) -> None:
    events, rows = scored_rows(model32, side)
    drawn, scored = values_of(events, "rollout"), values_of(events, "training")
    assert drawn.keys() == scored.keys() == {"a", "b", "c"}
    for name in drawn:
        assert scored[name] == pytest.approx(drawn[name], abs=2e-4)
        assert scored[name][1:] != pytest.approx(drawn[name][:-1], abs=2e-4)
    digests = {e.fields["sample_id"]: e.fields["token_digest"] for e in events.of("logprobs")}
    assert digests == {name: token_digest(tokens) for name, (_, tokens) in rows.items()}
    layout = events.of("batch.layout")[-1].fields
    assert (layout["padding_side"], layout["packing"]) == {
        "left": ("left", False), "right": ("right", False), "packed": ("none", True),
    }[side]  # fmt: skip


def test_a_prompt_of_one_token_is_scored_and_the_first_token_of_a_sequence_is_missing() -> None:
    ids = torch.tensor([[1, 2, 3], [1, 2, 3]])
    logits = torch.randn(2, 3, 8)
    values = hf.token_logprobs(logits, ids)
    whole = [hf.Response("one", 0, 0, 1, 3), hf.Response("none", 1, 0, 0, 3)]
    with capture() as events:
        hf.record_scores(values, ids, whole, contract_id="c")
    one, none = events.of("logprobs")
    exact = torch.log_softmax(logits.double(), -1)
    assert one.arrays["values"] == pytest.approx([exact[0, 0, 2].item(), exact[0, 1, 3].item()], abs=1e-6)
    assert "value_class" not in one.arrays
    assert [VALUE_CLASSES[c] for c in none.arrays["value_class"]] == ["missing", "finite", "finite"]
    assert none.arrays["values"][0] != none.arrays["values"][0]


def test_an_empty_response_is_recorded_as_empty() -> None:
    ids = torch.tensor([[5, 6], [5, 6]])
    where = hf.responses_of(["empty", "full"], torch.tensor([[0, 0], [0, 1]]))
    with capture() as events:
        hf.record_scores(torch.zeros(2, 2), ids, where, contract_id="c")
    assert [e.arrays["values"] for e in events.of("logprobs")] == [[], [0.0]]


def test_tool_tokens_stay_in_the_response_and_leave_the_loss() -> None:
    ids = torch.tensor([[9, 1, 2, 3, 4]])
    where = hf.responses_of(["s"], torch.tensor([[0, 1, 1, 1, 1]]))
    with capture() as events:
        hf.record_scores(torch.zeros(1, 5), ids, where, contract_id="c", loss_mask=torch.tensor([[0, 1, 0, 0, 1]]))
    event = events.of("logprobs")[0]
    assert event.fields["mask_digest"] == mask_digest([1, 0, 0, 1])
    assert event.fields["token_digest"] == token_digest([1, 2, 3, 4])


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: hf.responses_of(["s"], torch.tensor([[0, 1, 0, 1]])), "in several pieces"),
        (lambda: hf.responses_of(["s", "t"], torch.tensor([[0, 1]])), "2 sample ids for 1 rows"),
        (
            lambda: hf.packed_responses(["s"], torch.tensor([[0, 1, 0, 1]]), torch.tensor([[0, 1, 0, 1]])),
            "1 sample ids for 2 packed",
        ),
    ],
)
def test_masks_that_name_no_response_are_refused_in_one_sentence(call: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        call()


# -- weights, contracts, settings ---


def test_a_tied_head_is_one_tensor_and_digests_are_those_of_the_live_parameters(model16: Any) -> None:
    with capture() as events:
        watched = hf.attach(model16, engine="hf-0")
        watched.published("v0")
        watched.loaded("v0")
        with torch.no_grad():
            model16.model.norm.weight[3] += 1
        watched.loaded("v1")
    published, first, second = events.of("weights.published", "weights.loaded")
    names = [t["name"] for t in published.fields["tensors"]]
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names
    assert first.fields["digest"] == published.fields["digest"] != second.fields["digest"]
    assert second.fields["digest"] == state_digest(demo_tensors(model16))[0]
    assert first.fields["what"] == "holds"


def test_the_wire_dtype_of_published_weights_is_what_a_loader_then_holds(model32: Any, model16: Any) -> None:
    with capture() as events:
        hf.attach(model32).published("v0", dtype=torch.bfloat16)
        hf.attach(model16).loaded("v0")
    published, loaded = events.of("weights.published", "weights.loaded")
    assert published.fields["digest"] == loaded.fields["digest"]


@pytest.mark.parametrize(
    "name",
    ["module.model.norm.weight", "_orig_mod.model.norm.weight", "base_model.model.model.norm.base_layer.weight"],
)
def test_wrappers_leave_no_trace_in_names(name: str) -> None:
    assert canonical_name(name) == "model.norm.weight"


@pytest.mark.parametrize(
    ("family", "norm", "order"),
    [("qwen3", "Qwen3RMSNorm", "hf"), ("olmo2", "Olmo2RMSNorm", "kernel"), ("gemma2", "Gemma2RMSNorm", "kernel")],
)
def test_the_rounding_order_of_a_norm_is_measured_not_assumed(family: str, norm: str, order: str) -> None:
    module = __import__(f"transformers.models.{family}.modeling_{family}", fromlist=[norm])
    live = getattr(module, norm)(96).to(torch.bfloat16)
    before = live.weight.detach().clone()
    assert rounding_order(live) == order
    assert torch.equal(live.weight, before)


def test_a_norm_that_does_neither_has_no_declared_order() -> None:
    class OddRMSNorm(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.eps = torch.nn.Parameter(torch.ones(8)), 1e-6

        def forward(self, x: Any) -> Any:
            return x * 1.5 * self.weight

    assert norm_body(torch.nn.Sequential(OddRMSNorm()))["rounding_order"] is None


@pytest.mark.parametrize(("dtype", "said"), [("bfloat16", "bfloat16"), ("float32", "float32")])
def test_head_and_logits_dtypes_are_what_the_live_head_makes(dtype: str, said: str) -> None:
    model = opened(torch.bfloat16)
    if dtype == "float32":  # a head kept in float32, fed by a bf16 body
        head = model.lm_head
        head.weight = torch.nn.Parameter(head.weight.detach().float())
        head.forward = lambda x: torch.nn.functional.linear(x.float(), head.weight)
    with capture() as events:
        hf.attach(model).contract(mode="raw")
    body = next(e.fields["body"] for e in events.of("contract.declared") if e.fields["kind"] == "logprob")
    assert (body["head_dtype"], body["logits_dtype"]) == (said, said)


def test_autocast_is_the_dtype_that_is_computed_in(model32: Any) -> None:
    with capture() as events, torch.autocast("cpu", dtype=torch.bfloat16):
        hf.attach(model32).contract(mode="raw")
    body = next(e.fields["body"] for e in events.of("contract.declared") if e.fields["kind"] == "logprob")
    assert (body["compute_dtype"], body["logits_dtype"]) == ("bfloat16", "bfloat16")


def test_a_request_the_model_did_not_grant_is_a_fallback() -> None:
    model = opened(torch.bfloat16, "eager")
    with capture() as events:
        hf.attach(model, requested={"model.dtype": torch.float32, "model.attention": "sdpa"})
    knobs = {e.fields["path"]: e.fields for e in events.of("knob.applied")}
    assert {p: (knobs[p]["actual"], knobs[p]["status"]) for p in ("model.dtype", "model.attention")} == {
        "model.dtype": ("bfloat16", "fallback"),
        "model.attention": ("eager", "fallback"),
    }
    assert knobs["model.training_mode"]["actual"] is False


# -- the whole path ---


@pytest.mark.parametrize(("temperature", "verdict"), [(0.7, "pass"), (1.0, "not_comparable")])
def test_a_whole_run_is_clean_and_a_forgotten_temperature_is_named(
    tmp_path: Path, model16: Any, temperature: float, verdict: str
) -> None:
    ledger, roles = tmp_path / "l", {"rollout": 1, "training": 1}
    rows: dict[str, Any] = {}
    for side in roles:
        rlk_ledger.init(ledger, run_id="r", role=side, roles=roles, spool=tmp_path / side, shipper="inline")
        watched = hf.attach(model16, engine=f"{side}-0", requested={"model.dtype": "bfloat16"})
        with rlk_ledger.scope(step=0):
            if side == "rollout":
                watched.loaded("v0")
                heard: list[Any] = []
                listener = hf.Listener(model16, heard.append)
                draw(model16)
                listener.detach()
                watched.recorded(heard[0], ["a", "b", "c"])
                rows = {n: (row.prompt, row.tokens) for n, row in zip("abc", heard[0].rows)}
            else:
                watched.published("v0")
                score(watched, rows, "right", temperature)
        rlk_ledger.close()
    found = audit(load_history(rlk_ledger.open(ledger), "r"))
    assert found.verdict == verdict, found
    if verdict != "pass":
        assert {f.where.get("field") for f in found.findings} >= {"temperature"}


# -- the callback ---


def test_the_callback_scopes_steps_and_publishes_at_its_cadence(model16: Any) -> None:
    from transformers.trainer_callback import CallbackHandler, TrainerControl, TrainerState

    with capture() as events:
        callback = hf.trainer_callback(hf.attach(model16), every=2)
        assert isinstance(callback, transformers.TrainerCallback)
        handler = CallbackHandler([callback], model16, None, None, None)
        args, state, control = None, TrainerState(), TrainerControl()
        handler.on_train_begin(args, state, control)
        for step in range(3):
            handler.on_step_begin(args, state, control)
            rlk_ledger.record("prompt.recorded", prompt_id=f"p{step}", token_ids=[1])
            state.global_step += 1
            handler.on_step_end(args, state, control)
        handler.on_train_end(args, state, control)
        rlk_ledger.record("prompt.recorded", prompt_id="after", token_ids=[1])
    assert [e.fields.get("step") for e in events.of("prompt.recorded")] == [0, 1, 2, None]
    published = [(e.fields["weight_version"], e.fields["step"]) for e in events.of("weights.published")]
    assert published == [("v0", 0), ("v2", 2), ("v3", 3)]
