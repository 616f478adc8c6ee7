"""A verdict for every built-in factor: runs of an altered decoder in which it is the cause and in which it is not."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import EntryPoint
from types import ModuleType

import numpy as np
import pytest
import torch
from explain_rate import ENGINES, NOTHING, Bench, deepened, judged

from rlk_ledger_kernels.errors import ContractError
from rlk_ledger_kernels.probe import using_threads
from rlk_ledger_kernels.schedule import Schedule
from rlk_ledger_replay.decoder import Decoder
from rlk_ledger_replay.explain.answer import Answer
from rlk_ledger_replay.explain.family import family
from rlk_ledger_replay.explain.result import Explanation
from rlk_ledger_replay.explain.variant import Variant
from rlk_ledger_replay.factors import registry
from rlk_ledger_replay.factors.factor import Factor, Judged
from rlk_ledger_replay.factors.registry import factors
from rlk_ledger_replay.factors.verdict import judge
from rlk_ledger_replay.gates import Gate
from rlk_ledger_replay.numerics import Numerics
from rlk_ledger_replay.semantics import Side
from rlk_ledger_schemas.errors import UsageError

CAUSES = {
    "attn.rope_fusion": ("float32", "rope table=bfloat16"),
    "attn.cp_merge": ("float32", "context-parallel outputs merged in bfloat16"),
    "attn.split_kv": ("float32", "split-KV state merged in bfloat16"),
    "attn.precision_downcast": ("float32", "kv_cache=bfloat16"),
    "gemm.forward_reduce": ("float32", "partial sums of 2 ranks merged in bfloat16"),
    "gemm.ffn_implementation": ("bfloat16", "swiglu materialises the product"),
    "norm.rounding_order": ("bfloat16", "rms_norm rounds as kernel"),
    "logp.lse_merge_order": ("float32", "log-sum-exp merged in bfloat16"),
    "logp.head_dtype": ("float32", "lm_head=bfloat16"),
    "logp.downcast_placement": ("float32", "logits=bfloat16"),
    "moe.router_precision": ("experts", "router=bfloat16"),
}
FACTORS = {one.factor: one for one in factors()}


class WithExperts(Bench):
    """A tiny random mixture of experts declared in float32."""

    def __init__(self, count: int) -> None:
        super().__init__(2, "float32", count)
        h, d, experts, inner = 64, 16, 8, 32
        generator = torch.Generator().manual_seed(3)

        def normal(*shape: int) -> torch.Tensor:
            return (torch.randn(*shape, generator=generator) / shape[-1] ** 0.5).to(torch.bfloat16)

        tensors = {"model.embed_tokens.weight": normal(272, h) * 3, "model.norm.weight": torch.ones(h)}
        for index in range(2):
            at = f"model.layers.{index}"
            tensors |= {f"{at}.{n}.weight": torch.ones(h) for n in ("input_layernorm", "post_attention_layernorm")}
            tensors |= {f"{at}.self_attn.{n}_norm.weight": torch.ones(d) for n in "qk"}
            tensors |= {
                f"{at}.self_attn.{n}_proj.weight": normal(rows, columns)
                for n, rows, columns in (("q", 4 * d, h), ("k", 2 * d, h), ("v", 2 * d, h), ("o", h, 4 * d))
            }
            tensors[f"{at}.mlp.gate.weight"] = normal(experts, h)
            for expert in range(experts):
                tensors |= {f"{at}.mlp.experts.{expert}.{n}_proj.weight": normal(inner, h) for n in ("gate", "up")}
                tensors[f"{at}.mlp.experts.{expert}.down_proj.weight"] = normal(h, inner) * 4
        config = deepened(2, 7)[0] | {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "num_experts": experts,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": inner,
            "norm_topk_prob": True,
        }
        self.models = {"v1": Decoder.from_tensors(config, tensors)}
        wanted = ("router=bfloat16", "logits=bfloat16", "kv_cache=bfloat16", "rope table=bfloat16", "lm_head=bfloat16")
        self.variants = {one.name: one for one in family([0.8], {0: "v1"}, [0]) if one.name in wanted}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Small products lose more to synchronisation than they gain."""
    with using_threads(1):
        yield


@pytest.fixture(scope="module")
def benches() -> dict[str, Bench]:
    return {
        "float32": Bench(2, "float32", 16),
        "bfloat16": Bench(2, "bfloat16", 16),
        "experts": WithExperts(16),
    }


def explained(bench: Bench, cause: Variant, side: Side, seed: int = 0) -> Explanation:
    schedule = ENGINES[seed % len(ENGINES)]
    if "attention_merge" in cause.changes:
        # What a merge rounds depends on where the keys are cut: a side that cuts elsewhere cannot be imitated.
        schedule = replace(schedule, kv_block=Schedule().kv_block, kv_order=Schedule().kv_order)
    answer = judged(bench, bench.values(cause, schedule), seed)
    return made(bench, answer, side)


def made(bench: Bench, answer: Answer, side: Side) -> Explanation:
    variants = dict(bench.variants)
    for name in answer.named:
        if name not in variants:
            left, right = name.split(" + ")
            pair = variants[left].with_(variants[right])
            assert pair is not None
            variants[name] = pair
    unmet = {} if "router=bfloat16" in variants else {"router=bfloat16": "the model has no experts"}
    owners = dict.fromkeys(unmet, "moe.router_precision")
    return Explanation("r", "replay-1", side, answer, variants=variants, unmet=unmet, unmet_factors=owners)


def verdicts(rollout: Explanation, training: Explanation) -> dict[str, Judged]:
    return {name: judge(one, {"rollout": rollout, "training": training}) for name, one in FACTORS.items()}


def test_every_factor_of_the_list_is_built_in() -> None:
    assert set(FACTORS) == set(CAUSES)


@pytest.mark.parametrize("factor", CAUSES)
def test_a_factor_is_named_where_it_is_the_cause_and_only_there(factor: str, benches: dict[str, Bench]) -> None:
    declared, cause = CAUSES[factor]
    bench = benches[declared]
    clean = explained(bench, NOTHING, "rollout")
    found = verdicts(clean, explained(bench, bench.variants[cause], "training"))
    assert found[factor].verdict == "caused_by_training_side", found[factor].reason
    others = {one.verdict for name, one in found.items() if name != factor}
    assert others <= {"not_this_factor", "insufficient_evidence"}
    swapped = verdicts(explained(bench, bench.variants[cause], "rollout", 1), replace(clean, side="training"))
    assert swapped[factor].verdict == "caused_by_rollout_side"


@pytest.mark.parametrize("factor", CAUSES)
def test_a_factor_is_not_the_cause_where_another_is(factor: str, benches: dict[str, Bench]) -> None:
    bench = benches[CAUSES[factor][0]]
    other = next(cause for name, (declared, cause) in CAUSES.items() if name != factor and cause in bench.variants)
    found = verdicts(explained(bench, NOTHING, "rollout"), explained(bench, bench.variants[other], "training"))
    assert found[factor].verdict == "not_this_factor", found[factor].reason


def test_both_sides_can_have_one_cause(benches: dict[str, Bench]) -> None:
    bench = benches["float32"]
    cause = bench.variants["kv_cache=bfloat16"]
    found = verdicts(explained(bench, cause, "rollout", 0), explained(bench, cause, "training", 1))
    assert found["attn.precision_downcast"].verdict == "caused_by_both_sides"


def test_two_causes_at_once_are_coupled(benches: dict[str, Bench]) -> None:
    bench = benches["float32"]
    pair = bench.variants["logits=bfloat16"].with_(bench.variants["rope table=bfloat16"])
    assert pair is not None
    found = verdicts(explained(bench, NOTHING, "rollout"), explained(bench, pair, "training"))
    coupled = {name for name, one in found.items() if one.verdict == "coupled_with_other_factors"}
    assert coupled == {"logp.downcast_placement", "attn.rope_fusion"}
    assert found["attn.rope_fusion"].suspects == ("logp.downcast_placement",)


def test_a_clean_run_blames_no_factor(benches: dict[str, Bench]) -> None:
    for bench in benches.values():
        found = verdicts(explained(bench, NOTHING, "rollout", 0), explained(bench, NOTHING, "training", 1))
        blamed = [one for one in found.values() if one.verdict.startswith(("caused", "coupled"))]
        assert not blamed


def named(side: Side, gates: tuple[Gate, ...] = (), **changes: object) -> Explanation:
    """An explanation that names the split-KV state."""
    variant = next(one for one in family([1.0], {0: "v0"}, [0]) if one.factor == "attn.split_kv")
    answer = Answer("reproduced", "it follows it.", named=(variant.name,), members=(variant.name,))
    found = Explanation("r", "replay-1", side, answer, gates=gates, variants={variant.name: variant})
    return replace(found, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["reference_itself_is_broken", "variant_did_not_apply"])
def test_a_broken_reference_and_a_silent_fallback_name_no_factor(name: str) -> None:
    for broken in ("rollout", "training"):
        sides = {side: named(side) for side in ("rollout", "training")}
        sides[broken] = replace(sides[broken], answer=Answer(name, "it is not to be believed."))  # type: ignore[arg-type]
        for factor in FACTORS.values():
            assert judge(factor, sides).verdict == name  # type: ignore[arg-type]


def test_missing_evidence_names_no_factor() -> None:
    missing = named("rollout", answer=Answer("insufficient_evidence", "dtypes are undeclared."))
    for factor in FACTORS.values():
        assert judge(factor, {"rollout": missing, "training": named("training")}).verdict == "insufficient_evidence"
        assert judge(factor, {"training": named("training")}).verdict == "insufficient_evidence"


@pytest.mark.parametrize("status", ["failed", "unknown"])
def test_an_unsound_guard_leaves_its_factor_undecided_and_no_other(status: str) -> None:
    guard = Gate("live.vllm.splits", status, "num_splits was chosen by the engine")  # type: ignore[arg-type]
    clean = named("rollout", answer=Answer("no_excess", "nothing."), gates=())
    factor = FACTORS["attn.split_kv"]
    assert judge(factor, {"rollout": clean, "training": named("training")}).verdict == "caused_by_training_side"
    unsound = judge(factor, {"rollout": clean, "training": named("training", (guard,))})
    assert unsound.verdict == "insufficient_evidence"
    assert "num_splits" in unsound.reason
    other = replace(factor, guards=("collective.pinned",))
    assert judge(other, {"rollout": clean, "training": named("training", (guard,))}).verdict.startswith("caused")


def test_a_factor_it_cannot_be_told_from_leaves_it_undecided() -> None:
    both = family([1.0], {0: "v0"}, [0])
    alike = {one.name: one for one in both if one.factor in ("attn.split_kv", "attn.cp_merge")}
    answer = Answer("reproduced", "it follows them.", named=(next(iter(alike)),), members=tuple(alike))
    clean = named("rollout", answer=Answer("no_excess", "nothing."))
    found = judge(
        FACTORS[next(iter(alike.values())).factor],
        {"rollout": clean, "training": named("training", answer=answer, variants=alike)},
    )
    assert found.verdict == "insufficient_evidence"
    assert "cannot tell" in found.reason


def test_a_plugin_adds_a_factor_and_a_wrong_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("a_plugin")
    module.FACTOR = Factor("a.factor", "a factor", "nothing", "align it")  # type: ignore[attr-defined]
    module.TAKEN = FACTORS["attn.split_kv"]  # type: ignore[attr-defined]
    module.NOT = "a factor"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "a_plugin", module)

    def found(name: str) -> None:
        point = EntryPoint("it", f"a_plugin:{name}", registry.GROUP)
        monkeypatch.setattr(registry, "entry_points", lambda group: [point])

    found("FACTOR")
    assert {one.factor for one in factors()} - set(FACTORS) == {"a.factor"}
    for name in ("TAKEN", "NOT"):
        found(name)
        with pytest.raises(UsageError):
            factors()


def test_numerics_that_contradict_themselves_are_refused() -> None:
    for bad in ({"reduce_ranks": 2}, {"reduce_dtype": "bfloat16"}, {"attention_merge": "half"}, {"softmax": "int8"}):
        with pytest.raises(ContractError):
            Numerics(**bad)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changes",
    [
        {"attention_merge": "state"},
        {"reduce_ranks": 2, "reduce_dtype": "bfloat16"},
        {"lse_state": "bfloat16"},
        {"residual": "bfloat16"},
        {"softmax": "bfloat16"},
        {"rope_arithmetic": "bfloat16"},
        {"attention_merge": "output"},
    ],
)
def test_a_variant_decodes_to_the_bits_it_prefills(changes: dict[str, object], benches: dict[str, Bench]) -> None:
    bench = benches["float32"]
    decoder = bench.models["v1"].with_numerics(replace(bench.numerics, **changes))  # type: ignore[arg-type]
    prefill = torch.cat(decoder.prefill_logprobs_batch(bench.samples[:3]))
    decode = torch.cat(decoder.decode_logprobs_batch(bench.samples[:3]))
    assert np.array_equal(prefill.numpy().view(np.uint32), decode.numpy().view(np.uint32))
    plain = torch.cat(bench.models["v1"].with_numerics(bench.numerics).prefill_logprobs_batch(bench.samples[:3]))
    assert not torch.equal(prefill, plain), "the variant applied"
