"""The parts of the vLLM integration that need no vLLM."""

import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import rlk_ledger
from rlk_ledger.integrations.vllm import Watch, attach
from rlk_ledger_schemas.errors import UsageError
from rlk_ledger_schemas.fingerprints import sum64x2_digest
from rlk_ledger_schemas.metrics import VALUE_CLASSES
from rlk_ledger_sdk.integrations.vllm import names
from rlk_ledger_sdk.integrations.vllm.calls import finishes, moves_weights
from rlk_ledger_sdk.integrations.vllm.held import Piece, Unread, pieces, sums
from rlk_ledger_sdk.integrations.vllm.loads import added_up
from rlk_ledger_sdk.integrations.vllm.requests import InFlight
from rlk_ledger_sdk.integrations.vllm.samples import Finished, Identity, Request, record_completion
from rlk_ledger_sdk.integrations.vllm.sampling import KEPT, LogprobContracts
from rlk_ledger_sdk.integrations.vllm.steps import Steps
from rlk_ledger_sdk.integrations.vllm.values import classes, numbers, sampled
from rlk_ledger_sdk.integrations.vllm.versions import Versions
from rlk_ledger_sdk.integrations.vllm.wraps import Wraps
from rlk_ledger_sdk.testing import capture
from rlk_ledger_sdk.weights import state_digest


def entry(value: float) -> SimpleNamespace:
    return SimpleNamespace(logprob=value)


def parameters(**changes: Any) -> SimpleNamespace:
    plain = {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "n": 1,
        "output_kind": SimpleNamespace(name="DELTA"),
    }
    return SimpleNamespace(**{**plain, **changes})


def test_the_plugin_does_nothing_unless_asked() -> None:
    code = """
import os, sys
for name in ("RLK_VLLM", "RLK_VLLM_WORKERS"):
    os.environ.pop(name, None)
from rlk_ledger_sdk.integrations.vllm.plugin import active, register
before = set(sys.modules)
register()
mine = [m for m in sys.modules if m.startswith("rlk_ledger_sdk.integrations.vllm.")]
print(active(), set(sys.modules) - before, mine, "vllm" in sys.modules, "torch" in sys.modules)
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "False set() ['rlk_ledger_sdk.integrations.vllm.plugin'] False False"


def test_engines_of_forked_workers_name_their_requests_apart(tmp_path: Path) -> None:
    """Each counts its requests from 0."""
    rlk_ledger.init(tmp_path / "l", run_id="r", role="rollout", spool=tmp_path / "s", shipper="off")
    config = SimpleNamespace(model_config=SimpleNamespace(logprobs_mode="raw_logprobs"))
    front: Any = SimpleNamespace(config=config, model="m", block_size=None)
    named = dict.fromkeys(("sample_id", "group_id", "loss_mask", "weight_version", "wire_dtype"))
    mine = Watch(front, "e", requested={}, **named).writer_id
    child = os.fork()
    if not child:
        os._exit(0 if Watch(front, "e", requested={}, **named).writer_id not in ("", mine) else 1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    rlk_ledger.close(timeout=0)
    assert (code, mine != "") == (0, True)


def test_what_is_no_engine_is_answered_in_one_sentence() -> None:
    with pytest.raises(UsageError, match=r"attach\(\) takes an LLM, LLMEngine or AsyncLLM, got builtins\.dict\."):
        attach({})


def test_the_sampled_token_is_found_in_every_container() -> None:
    dicts = [{5: entry(-1.0), 9: entry(-0.5)}, {7: entry(-2.0)}]
    flat = SimpleNamespace(start_indices=[0, 2], logprobs=[-1.0, -0.5, -2.0])
    assert sampled(dicts, [5, 7]) == sampled(flat, [5, 7]) == [-1.0, -2.0]


def test_a_value_the_engine_did_not_give_is_missing_not_zero() -> None:
    values = sampled([None, {7: entry(-2.0)}, {8: entry(-1.0)}], [5, 7, 9, 4])
    assert values == [None, -2.0, None, None]
    assert [VALUE_CLASSES[c] for c in classes(values) or []] == ["missing", "finite", "missing", "missing"]
    assert [math.isnan(v) for v in numbers(values)] == [True, False, True, True]


def test_what_is_no_number_gets_a_class_and_numbers_need_none() -> None:
    found = classes([-1.0, math.nan, math.inf, -math.inf])
    assert [VALUE_CLASSES[c] for c in found or []] == ["finite", "nan", "pos_inf", "neg_inf"]
    assert classes([-1.0, -2.0]) is None
    assert classes([math.inf, -math.inf]) is not None


def test_raw_values_are_before_temperature_filters_and_penalties() -> None:
    sampling = parameters(temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, presence_penalty=1.0)
    raw = LogprobContracts({"head_dtype": "bfloat16"}, "raw_logprobs").body(sampling)
    processed = LogprobContracts({"head_dtype": "bfloat16"}, "processed_logprobs").body(sampling)
    assert (raw["mode"], raw["temperature"], raw["top_p"], raw["top_k"]) == ("raw", 1.0, 1.0, -1)
    assert "min_p" not in raw
    assert "penalties" not in raw
    assert (processed["mode"], processed["temperature"], processed["top_p"], processed["top_k"]) == (
        "processed",
        0.7,
        0.9,
        5,
    )
    assert processed["penalties"] == {"presence": 1.0, "frequency": 0.0, "repetition": 1.0}


def test_a_processor_that_changes_the_distribution_is_declared() -> None:
    contracts = LogprobContracts({}, "processed_logprobs")
    assert contracts.body(parameters(logit_bias={1: 2.0}))["logits_processors"] == ["logit_bias"]
    assert "logits_processors" not in contracts.body(parameters(logit_bias=None))


def test_a_processor_of_the_whole_engine_is_in_every_processed_contract() -> None:
    given = ["mine.Ban"]
    assert LogprobContracts({}, "processed_logprobs", given).body(parameters())["logits_processors"] == given
    assert "logits_processors" not in LogprobContracts({}, "raw_logprobs", given).body(parameters())


def test_each_contract_is_declared_once() -> None:
    with capture() as events:
        contracts = LogprobContracts({}, "processed_logprobs")
        ids = [contracts.of(parameters(temperature=t)) for t in (0.7, 1.0, 0.7, 1.0)]
    assert ids[:2] == ids[2:]
    assert len(events.of("contract.declared")) == 2


def test_logits_under_the_name_of_logprobs_are_not_scores() -> None:
    assert not LogprobContracts({}, "raw_logits").scores
    assert not LogprobContracts({}, "processed_logits").scores
    assert LogprobContracts({}, "raw_logprobs").scores


def test_a_name_given_after_a_load_labels_it_and_the_reset_between_flushed_its_cache() -> None:
    versions = Versions("v0")
    versions.unsettled = False
    versions.loaded("/ckpt/1")
    versions.flushed()
    versions.named("v1")
    assert (versions.current, versions.cache_writer, versions.caches_flushed) == ("v1", "v1", True)
    assert versions.path == "/ckpt/1"


def test_a_name_given_before_its_load_is_the_same_generation() -> None:
    versions = Versions("v0")
    versions.unsettled = False
    versions.named("v1")
    assert not versions.must_settle_first
    versions.loaded(None)
    versions.flushed()
    assert (versions.current, versions.cache_writer) == ("v1", "v1")


def test_without_a_reset_the_cache_may_be_of_the_oldest_weights() -> None:
    versions = Versions("v0")
    for name in ("v1", "v2"):
        versions.loaded(None)
        versions.named(name)
    assert (versions.cache_writer, versions.caches_flushed) == ("v0", False)


def test_a_load_nobody_named_hides_the_version() -> None:
    versions = Versions("v0")
    versions.unsettled = False
    versions.loaded(None)
    assert versions.current is None


def test_an_update_in_several_calls_is_one_version_and_its_cache_its_own() -> None:
    versions = Versions("v0")
    versions.unsettled = False
    for method in ("start_weight_update", "update_weights", "update_weights", "reset", "finish_weight_update"):
        if method == "reset":
            versions.flushed()
        elif moves_weights(method):
            assert not versions.must_settle_first
            versions.loaded(None, finishing=finishes(method))
    versions.named("v1")
    assert (versions.current, versions.cache_writer, versions.caches_flushed) == ("v1", "v1", True)


def test_calls_that_move_no_weights_are_not_taken_for_loads() -> None:
    assert not any(
        moves_weights(m) for m in ("start_weight_update", "get_model_inspection", "rlk_ledger_weights", print)
    )
    assert moves_weights("update_weights_from_ipc")


@pytest.mark.parametrize(
    ("internal", "name"),
    [
        ("0-1a2b3c4d", "w-0-0"),
        ("2_17-1a2b3c4d", "w-17-2"),
        ("cmpl-b83a5495e64d449e-0-deadbeef", "cmpl-b83a5495e64d449e-0-0"),
        ("1_cmpl-b83a5495e64d449e-0-deadbeef", "cmpl-b83a5495e64d449e-0-1"),
    ],
)
def test_the_engine_core_and_the_front_end_name_a_completion_alike(internal: str, name: str) -> None:
    assert names.of_internal(internal, "w") == name


def test_deltas_are_joined_and_what_the_caller_holds_is_left_alone() -> None:
    flight = InFlight()
    flight.add("r", Request(parameters()))
    first = SimpleNamespace(index=0, token_ids=[5], logprobs=[{5: entry(-1.0)}], finish_reason=None)
    last = SimpleNamespace(
        index=0, token_ids=[6, 7], logprobs=[{6: entry(-2.0)}, {7: entry(-3.0)}], finish_reason="stop"
    )
    assert list(flight.finished(SimpleNamespace(request_id="r", outputs=[first], finished=False))) == []
    ((whole, _),) = flight.finished(SimpleNamespace(request_id="r", outputs=[last], finished=True))
    assert (whole.token_ids, sampled(whole.logprobs, whole.token_ids)) == ([5, 6, 7], [-1.0, -2.0, -3.0])
    assert last.token_ids == [6, 7]
    assert len(flight) == 0


def test_what_had_arrived_of_a_request_cut_short_is_an_abort() -> None:
    flight = InFlight()
    flight.add("r", Request(parameters()))
    part = SimpleNamespace(index=0, token_ids=[5, 6], logprobs=[{5: entry(-1.0)}, {6: entry(-2.0)}], finish_reason=None)
    output = SimpleNamespace(request_id="r", outputs=[part], finished=False)
    assert list(flight.finished(output)) == []
    ((cut, _),) = flight.unfinished(output)
    assert (cut.token_ids, cut.finish_reason, part.finish_reason) == ([5, 6], "abort", None)


def test_a_request_that_was_under_way_before_gives_no_part_of_itself() -> None:
    last = SimpleNamespace(index=0, token_ids=[6], logprobs=[{6: entry(-2.0)}], finish_reason="stop")
    assert list(InFlight().finished(SimpleNamespace(request_id="r", outputs=[last], finished=True))) == []


def test_contracts_of_a_job_that_gives_every_request_its_own_are_not_kept_for_ever() -> None:
    contracts = LogprobContracts({}, "processed_logprobs")
    with capture() as events:
        for i in range(2 * KEPT):
            contracts.of(parameters(temperature=1 + i / 1000))
    assert len(events.of("contract.declared")) == 2 * KEPT
    assert len(contracts._ids) <= KEPT


def test_what_only_some_engines_expose_is_recorded_where_it_is_exposed() -> None:
    experts = np.arange(6 * 2 * 2, dtype=np.uint8).reshape(6, 2, 2)
    spec = SimpleNamespace(histogram=[1, 2, 3], num_draft_tokens=12)
    completion = SimpleNamespace(
        index=0,
        token_ids=[5, 6, 7],
        logprobs=None,
        finish_reason="stop",
        spec_decode_metrics=spec,
        routed_experts=experts,
        sampling_mask=SimpleNamespace(token_ids=[[5], [6, 9], [7]]),
        weight_versions=None,
    )
    output = SimpleNamespace(request_id="7", prompt_token_ids=[1, 2, 3, 4], outputs=[completion], num_cached_tokens=2)
    who = Identity("e", "m", 16, lambda o, c: "s", lambda o, c: None, lambda o, c: [1, 0, 1])
    with capture() as events:
        record_completion(Finished(output, completion, Request(), None, "w-7-0"), who, None, {})
    (event,) = events.of("rollout.sample")
    assert event.fields["spec"] == {"drafted": 12, "accepted": 8}
    assert {k: event.fields["routed_experts"][k] for k in ("coverage", "layers", "top_k")} == {
        "coverage": 1.0,
        "layers": 2,
        "top_k": 2,
    }
    assert event.arrays["routed_experts.array"] == list(range(24))
    assert (event.arrays["support"], event.arrays["support_offsets"]) == ([5, 6, 9, 7], [0, 1, 3, 4])
    assert event.arrays["loss_mask"] == [1, 0, 1]
    assert event.fields["cache"] == {"cached_tokens": 2, "block_size": 16}
    assert event.fields["labels"] == {"request": "w-7-0"}


def decided(new: Any = (), cached: Any = (), tokens: Any = None, gone: Any = (), resumed: Any = ()) -> SimpleNamespace:
    going = SimpleNamespace(
        req_ids=[r for r, _ in cached], num_computed_tokens=[n for _, n in cached], resumed_req_ids=set(resumed)
    )
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(req_id=r, prompt_token_ids=[0] * prompt, num_computed_tokens=computed)
            for r, prompt, computed in new
        ],
        scheduled_cached_reqs=going,
        num_scheduled_tokens=tokens or {},
        finished_req_ids=set(gone),
    )


def test_a_prefill_in_pieces_ends_where_its_chunks_ended() -> None:
    steps = Steps("e", "w")
    one, other = "0-00000000", "1-00000001"
    with capture() as events:
        steps.look(decided(new=[(one, 100, 32)], tokens={one: 40}))
        steps.look(decided(new=[(other, 10, 0)], cached=[(one, 72)], tokens={one: 28, other: 10}))
        steps.look(decided(cached=[(one, 100), (other, 10)], tokens={one: 1, other: 1}, gone=["x"]))
    assert steps.take("w-0-0") == (32, [72, 100])
    assert steps.take("w-1-0") == (0, [10])
    assert steps.take("w-1-0") is None
    layouts = [(e.fields["sample_order"], e.arrays["sequence_lengths"], e.arrays["offsets"]) for e in events]
    assert layouts == [(["w-0-0"], [40], [0]), (["w-0-0", "w-1-0"], [28, 10], [0, 28])]


@pytest.mark.parametrize("at", [40, 103])
def test_chunks_of_a_request_that_was_computed_again_are_absent(at: int) -> None:
    steps = Steps("e", "w")
    one = "0-00000000"
    with capture() as events:
        steps.look(decided(new=[(one, 100, 0)], tokens={one: 40}))
        if at > 40:
            steps.look(decided(cached=[(one, 40)], tokens={one: 60}))
        layouts = len(events)
        steps.look(decided(cached=[(one, 0)], tokens={one: at}, resumed=[one]))
    assert steps.take("w-0-0") == (0, None)
    assert len(events) == layouts + 1  # the step in which it was computed again


def test_wrapping_is_of_the_object_and_is_undone() -> None:
    class Engine:
        def step(self) -> int:
            return 1

    engine, other, wraps = Engine(), Engine(), Wraps()
    wraps.put(engine, "step", lambda original: lambda: original() + 1)
    assert wraps.put(engine, "absent", lambda original: original) is None
    assert (engine.step(), other.step()) == (2, 1)
    wraps.undo()
    assert (engine.step(), vars(engine)) == (1, {})


class LinearBase(torch.nn.Module):
    """What the reader looks at in vLLM's linear layers."""

    def __init__(self, weight: torch.Tensor, **fields: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        self.params_dtype = weight.dtype
        self.quant_method: Any = None
        for name, value in fields.items():
            setattr(self, name, value)


class ColumnParallelLinear(LinearBase): ...


class MergedColumnParallelLinear(ColumnParallelLinear): ...


class QKVParallelLinear(ColumnParallelLinear): ...


class RowParallelLinear(LinearBase): ...


class VocabParallelEmbedding(torch.nn.Module):
    def __init__(self, weight: torch.Tensor, **fields: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        for name, value in fields.items():
            setattr(self, name, value)


class ParallelLMHead(VocabParallelEmbedding): ...


FUSED: Any = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
HEADS, KV, SIZE, HIDDEN, INNER, VOCABULARY, PADDED = 4, 2, 4, 16, 24, 10, 16


def whole_model() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "embed_tokens.weight": (VOCABULARY, HIDDEN),
        "attn.q_proj.weight": (HEADS * SIZE, HIDDEN),
        "attn.k_proj.weight": (KV * SIZE, HIDDEN),
        "attn.v_proj.weight": (KV * SIZE, HIDDEN),
        "attn.o_proj.weight": (HIDDEN, HEADS * SIZE),
        "mlp.gate_proj.weight": (INNER, HIDDEN),
        "mlp.up_proj.weight": (INNER, HIDDEN),
        "mlp.down_proj.weight": (HIDDEN, INNER),
        "norm.weight": (HIDDEN,),
    }
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}


def rank_model(whole: dict[str, torch.Tensor], size: int, rank: int) -> torch.nn.Module:
    """One tensor rank's modules, cut as vLLM's loader cuts them: more ranks than KV heads share a head."""
    copies = max(1, size // KV)
    kv_heads = max(1, KV // size)

    def rows(name: str, parts: int, index: int) -> torch.Tensor:
        return whole[name].chunk(parts, dim=0)[index]

    qkv = torch.cat(
        [
            rows("attn.q_proj.weight", size, rank),
            rows("attn.k_proj.weight", size // copies, rank // copies),
            rows("attn.v_proj.weight", size // copies, rank // copies),
        ]
    )
    gate_up = torch.cat([rows("mlp.gate_proj.weight", size, rank), rows("mlp.up_proj.weight", size, rank)])
    share = PADDED // size
    start, end = min(rank * share, VOCABULARY), min((rank + 1) * share, VOCABULARY)
    embedding = torch.full((share, HIDDEN), 7.0, dtype=torch.bfloat16)
    embedding[: end - start] = whole["embed_tokens.weight"][start:end]
    both = {"tp_size": size, "tp_rank": rank}
    attn, mlp, model = torch.nn.Module(), torch.nn.Module(), torch.nn.Module()
    attn.qkv_proj = QKVParallelLinear(
        qkv,
        **both,
        num_heads=HEADS // size,
        num_kv_heads=kv_heads,
        total_num_heads=HEADS,
        total_num_kv_heads=KV,
        head_size=SIZE,
        v_head_size=SIZE,
        num_kv_head_replicas=copies,
    )
    attn.o_proj = RowParallelLinear(
        whole["attn.o_proj.weight"].chunk(size, dim=1)[rank], **both, output_size=HIDDEN, input_size=HEADS * SIZE
    )
    mlp.gate_up_proj = MergedColumnParallelLinear(gate_up, **both, output_sizes=[INNER, INNER])
    mlp.down_proj = RowParallelLinear(
        whole["mlp.down_proj.weight"].chunk(size, dim=1)[rank], **both, output_size=HIDDEN, input_size=INNER
    )
    model.embed_tokens = VocabParallelEmbedding(
        embedding,
        **both,
        org_vocab_size=VOCABULARY,
        shard_indices=SimpleNamespace(num_org_elements=end - start, org_vocab_start_index=start),
    )
    model.attn, model.mlp, model.norm = attn, mlp, torch.nn.Module()
    model.norm.weight = torch.nn.Parameter(whole["norm.weight"].clone(), requires_grad=False)
    model.packed_modules_mapping = {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }
    return model


def answer(model: Any, rank: int, stage: int = 0) -> dict[str, Any]:
    out: dict[str, Any] = {"replica": 0, "stage": stage, "sums": {}, "copies": {}, "shapes": {}, "unread": {}}
    for piece in pieces(model, rank):
        if isinstance(piece, Unread):
            out["unread"][piece.name] = piece.reason
        else:
            out["sums" if piece.counted else "copies"][piece.name] = list(sums(piece))
            out["shapes"][piece.name] = ["bfloat16", *piece.shape]
    return out


@pytest.mark.parametrize("size", [1, 2, 4])
def test_shards_fusions_copies_and_padding_add_up_to_the_whole(size: int) -> None:
    whole = whole_model()
    held = added_up([answer(rank_model(whole, size, rank), rank) for rank in range(size)])
    digest, each = state_digest(whole)
    assert {t["name"]: t["digest"] for t in held.tensors} == each
    assert held.digest == digest
    assert {t["name"]: tuple(t["shape"]) for t in held.tensors} == {n: tuple(t.shape) for n, t in whole.items()}
    assert (held.differing, held.unread) == ([], {})


def test_data_parallel_replicas_are_not_added_up() -> None:
    whole = whole_model()
    first = answer(rank_model(whole, 1, 0), 0)
    assert added_up([first, {**first, "replica": 1}]).digest == state_digest(whole)[0]


def stages(whole: dict[str, torch.Tensor], size: int) -> list[tuple[Any, int, int]]:
    """(model, tensor rank, stage): the second of two pipeline stages holds the embedding again, for its tied head."""
    models = [(rank_model(whole, size, rank), rank) for rank in range(size)]
    lasts = []
    for model, rank in models:
        last = torch.nn.Module()
        last.embed_tokens = VocabParallelEmbedding(
            model.embed_tokens.weight.data.clone(),  # type: ignore[operator, union-attr]
            **{k: getattr(model.embed_tokens, k) for k in ("tp_size", "tp_rank", "org_vocab_size", "shard_indices")},
        )
        lasts.append((last, rank))
    return [(m, r, 0) for m, r in models] + [(m, r, 1) for m, r in lasts]


@pytest.mark.parametrize("size", [1, 2])
def test_an_embedding_on_two_pipeline_stages_counts_once_and_is_compared(size: int) -> None:
    held = stages(whole_model(), size)
    found = added_up([answer(*one) for one in held])
    assert (found.digest, found.differing) == (state_digest(whole_model())[0], [])
    last: Any = held[-1][0]
    last.embed_tokens.weight.data[0, 0] += 1
    assert added_up([answer(*one) for one in held]).differing == ["embed_tokens.weight"]


class Packed:
    """The method of a layer whose kernel multiplies by a copy made when the weights were loaded."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.copy = weight.clone()

    def apply(self, layer: Any, x: torch.Tensor, bias: Any) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.copy)


class UnquantizedPacked(Packed): ...


@pytest.mark.parametrize("module", ["attn.o_proj", "attn.qkv_proj", "mlp.gate_up_proj", "head"])
def test_a_weight_written_beside_its_packed_copy_is_not_what_the_layer_holds(module: str) -> None:
    whole = whole_model()
    model = rank_model(whole, 1, 0)
    places = SimpleNamespace(num_org_elements=VOCABULARY, org_vocab_start_index=0)
    model.head = ParallelLMHead(
        whole["embed_tokens.weight"].clone(), tp_size=1, tp_rank=0, org_vocab_size=VOCABULARY, shard_indices=places
    )
    before = added_up([answer(model, 0)])
    layer: Any = model.get_submodule(module)
    layer.quant_method, layer.cpu_linear = UnquantizedPacked(layer.weight.data), object()
    assert added_up([answer(model, 0)]).digest == before.digest
    layer.weight.data += 1  # loaded in place: the kernel's copy is what it was
    assert added_up([answer(model, 0)]).digest == before.digest


@pytest.mark.parametrize(("module", "size"), [("attn.qkv_proj", 1), ("mlp.down_proj", 2), ("embed_tokens", 4)])
def test_one_changed_value_on_one_rank_changes_the_digest(module: str, size: int) -> None:
    whole = whole_model()
    models = [rank_model(whole, size, rank) for rank in range(size)]
    weight: Any = models[0].get_submodule(module).weight
    weight.data[0, 1] += 1
    held = added_up([answer(model, rank) for rank, model in enumerate(models)])
    assert held.digest != state_digest(whole_model())[0]


def test_a_replica_that_differs_is_named() -> None:
    whole = whole_model()
    models = [rank_model(whole, 2, rank) for rank in range(2)]
    norm: Any = models[1].norm
    norm.weight.data[0] += 1
    held = added_up([answer(model, rank) for rank, model in enumerate(models)])
    assert held.digest == state_digest(whole)[0]
    assert held.differing == ["norm.weight"]


def test_what_cannot_be_read_back_is_said_not_left_out() -> None:
    model = rank_model(whole_model(), 1, 0)
    quantised: Any = model.get_submodule("attn.o_proj")
    quantised.quant_method = type("Fp8LinearMethod", (), {})()
    found = {p.name: p.reason for p in pieces(model, 0) if isinstance(p, Unread)}
    assert found == {"attn.o_proj.weight": "it is quantised (Fp8LinearMethod)"}


def test_a_wide_column_shard_is_summed_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    from rlk_ledger_sdk.integrations.vllm import held

    tensor = torch.randn(9, 6).bfloat16()
    parts = [Piece("w", tensor[:, :2], (9, 6), 0, 0, True), Piece("w", tensor[:, 2:], (9, 6), 0, 2, True)]
    monkeypatch.setattr(held, "ROWS", 12)
    assert sum64x2_digest(sums(p) for p in parts) == state_digest({"w": tensor})[0]
