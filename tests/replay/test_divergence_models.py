"""First divergence on a real model: one operator of layer 2 altered on one side, captured by the torch hooks.

The shipped model runs in transformers, bfloat16. A side is a forward pass over some of five texts in a layout of its
own; what is altered is named by the test and by nothing in the record.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import rlk_ledger_replay
from rlk_ledger.build import build, event
from rlk_ledger.cli import main
from rlk_ledger_kernels.bits import same_bits
from rlk_ledger_kernels.probe import using_threads
from rlk_ledger_kernels.schedule import Schedule
from rlk_ledger_replay.decoder import Decoder
from rlk_ledger_replay.divergence import reference_boundaries
from rlk_ledger_replay.numerics import Numerics
from rlk_ledger_sdk.integrations.torch import OPERATORS, capture_boundaries
from rlk_ledger_sdk.testing import capture

transformers = pytest.importorskip("transformers")

MODEL = Path(rlk_ledger_replay.__path__[0]) / "model"
TEXT = b"A ledger records what both engines did; a replay asks which of them was right, and shows why it says so. " * 4
TEXTS = {f"s{i}": list(TEXT[17 * i : 17 * i + 40 + 9 * i]) for i in range(5)}
LAYER = 2

Record = tuple[str, dict[str, Any]]


@pytest.fixture(scope="module")
def model() -> Any:
    loaded = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.bfloat16, attn_implementation="sdpa")
    return loaded.eval()


def passed(
    model: Any, names: Sequence[str], pass_id: str, layout: str, width: int = 0, modules: Any = None
) -> list[Record]:
    """What one forward pass over the named texts, padded on the right to `width`, records."""
    sizes = [len(TEXTS[name]) for name in names]
    width = max(width, *sizes)
    ids = torch.tensor([TEXTS[name] + [258] * (width - len(TEXTS[name])) for name in names])
    mask = (torch.arange(width) < torch.tensor(sizes)[:, None]).long()
    with capture() as events, torch.no_grad(), using_threads(1):
        chosen = modules or OPERATORS
        with capture_boundaries(model, chosen, pass_id=pass_id, tensors=True, layout_id=layout):
            model(input_ids=ids, attention_mask=mask)
    told: Record = (
        "batch.layout",
        {
            "layout_id": layout,
            "sample_order": tuple(names),
            "sequence_lengths": sizes,
            "padding_side": "right",
            "packing": False,
        },
    )
    return [told, *((e.type, {**e.fields, **e.arrays}) for e in events.of("boundary.captured"))]


@pytest.fixture(scope="module")
def honest(model: Any) -> dict[str, list[Record]]:
    """What either side records when nothing is altered."""
    return {side: recorded(model, side) for side in ("rollout", "training")}


def diverged(tmp_path: Path, capsys: Any, sides: dict[str, list[Record]], *options: str) -> dict[str, Any]:
    """What `rlk-ledger divergence --json` says about a run in which each side recorded this."""
    records = []
    for side, told in sides.items():
        engine = {"name": "rlk-ledger" if side == "replay" else "transformers"}
        opened = ("writer.opened", {"role": side, "rank": 0, "world_size": 1, "engine": engine})
        records += [event("r1", side, i, kind, **fields) for i, (kind, fields) in enumerate([opened, *told])]
    url = str(tmp_path / "ledger")
    build(url, "r1", records)
    code = main(["divergence", "r1", "--ledger", url, "--json", *options])
    found = json.loads(capsys.readouterr().out)
    assert found["exit_code"] == code
    return {**found["passes"][0], "code": code}


A, B = ("s0", "s1", "s2"), ("s4", "s2", "s1", "s0", "s3")


def recorded(model: Any, side: str, modules: Any = None) -> list[Record]:
    """A pass in the side's own layout and a placebo of it in another."""
    own, other = (A, B) if side == "rollout" else (B, A)
    first = passed(model, own, "forward", f"{side}-1", modules=modules)
    return first + passed(model, other, "placebo", f"{side}-2", width=90, modules=modules)


def norm_order(model: Any) -> None:
    """The scale is multiplied in float32, before the result is rounded."""
    norm = model.model.layers[LAYER].input_layernorm

    def forward(x: Any) -> Any:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
        return (wide * norm.weight.float()).to(x.dtype)

    norm.forward = forward


def rope_dtype(model: Any) -> None:
    """Angles in bfloat16: positions above 256 fall on each other, smaller ones are off by up to half a per cent."""
    attention = model.model.layers[LAYER].self_attn
    plain, rotary = attention.forward, model.model.rotary_emb

    def forward(hidden_states: Any, position_embeddings: Any = None, **rest: Any) -> Any:
        count = hidden_states.shape[1]
        angles = torch.arange(count).to(torch.bfloat16)[:, None] * rotary.inv_freq.to(torch.bfloat16)[None]
        whole = torch.cat([angles, angles], dim=-1)[None]
        return plain(hidden_states, position_embeddings=(whole.cos(), whole.sin()), **rest)

    attention.forward = forward


def wrong_weight(model: Any) -> None:
    """One tensor is a small step of training ahead."""
    weight = model.model.layers[LAYER].mlp.up_proj.weight
    noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
    weight.data.copy_(weight.float() * (1 + 0.05 * noise))


def head_dtype(model: Any) -> None:
    """Logits are rounded to the eight exponent and three mantissa bits of an fp8 head."""
    plain = model.lm_head.forward
    model.lm_head.forward = lambda x: plain(x.to(torch.float8_e4m3fn).to(x.dtype))


FAULTS: dict[str, tuple[Callable[[Any], None], str, list[str]]] = {
    "norm_order": (norm_order, "layers.2.input_norm", ["layers.2.input_norm"]),
    "rope_dtype": (rope_dtype, "layers.2.attention", ["layers.2.q_rope", "layers.2.k_rope", "layers.2.attention"]),
    "wrong_weight": (wrong_weight, "layers.2.up", ["layers.2.up"]),
    "head_dtype": (head_dtype, "logits", ["logits"]),
}


@pytest.mark.parametrize(
    ("fault", "same_layout"), [*((name, True) for name in FAULTS), ("rope_dtype", False), ("wrong_weight", False)]
)
def test_one_altered_operator_is_the_first_divergence(
    model: Any, honest: dict[str, list[Record]], tmp_path: Path, capsys: Any, fault: str, same_layout: bool
) -> None:
    alter, name, suspects = FAULTS[fault]
    altered = copy.deepcopy(model)
    alter(altered)
    training = recorded(altered, "rollout" if same_layout else "training")
    found = diverged(tmp_path, capsys, {"rollout": honest["rollout"], "training": training})
    assert (found["code"], found["first"]["boundary"], found["suspects"]) == (1, name, suspects)
    assert found["first"]["inputs"] == ("equal" if same_layout else "within_floor")


def test_an_honest_pair_in_two_layouts_is_not_accused(
    honest: dict[str, list[Record]], tmp_path: Path, capsys: Any
) -> None:
    found = diverged(tmp_path, capsys, honest)
    states = {b["status"] for b in found["boundaries"]}
    assert (found["code"], found["first"], states) == (0, None, {"equal", "within_floor"})
    assert sum(b["status"] == "within_floor" for b in found["boundaries"]) > 20, "the layouts must differ in bits"


def test_a_boundary_one_side_hid_is_unknown_and_stays_a_suspect(
    model: Any, honest: dict[str, list[Record]], tmp_path: Path, capsys: Any
) -> None:
    hidden = {"layers.2.input_norm": "input_layernorm", "layers.2.up": "mlp.up_proj"}
    ends = tuple(f"layers.{LAYER}.{module}" for module in hidden.values())
    altered = copy.deepcopy(model)
    FAULTS["wrong_weight"][0](altered)
    seen = {side: told for side, told in honest.items() if side == "rollout"}
    for name, whose in (("honest", model), ("altered", altered)):
        told = [r for r in recorded(whose, "training") if not r[1].get("boundary", "").endswith(ends)]
        found = diverged(tmp_path / name, capsys, {**seen, "training": told})
        unknown = {b["boundary"]: b["reason"] for b in found["boundaries"] if b["status"] == "unknown"}
        assert unknown == dict.fromkeys(hidden, "captured on the left side only")
        if name == "honest":
            assert (found["code"], found["first"]) == (3, None)
        else:
            assert (found["code"], found["first"]["boundary"]) == (1, "layers.2.swiglu")
            assert found["suspects"] == ["layers.2.up", "layers.2.swiglu"]
            assert found["anchor"] == "layers.2.gate"


def test_without_a_second_layout_a_difference_is_named_and_its_floor_is_said_to_be_unknown(
    model: Any, honest: dict[str, list[Record]], tmp_path: Path, capsys: Any
) -> None:
    altered = copy.deepcopy(model)
    norm_order(altered)
    sides = {"rollout": passed(model, A, "forward", "one"), "training": passed(altered, A, "forward", "one")}
    found = diverged(tmp_path, capsys, sides)
    assert (found["code"], found["first"]["boundary"], found["floor_measured"]) == (1, "layers.2.input_norm", False)
    assert found["first"]["reason"].endswith("no floor was measured")


def test_the_reference_shows_its_own_boundaries_and_changes_no_score(
    model: Any, honest: dict[str, list[Record]], tmp_path: Path, capsys: Any
) -> None:
    decoder = Decoder.load(MODEL, Numerics(compute="bfloat16"))
    samples = {name: [*TEXTS[name], 258] for name in B}
    before = decoder.prefill_logprobs(samples["s1"], 5)
    with using_threads(1):
        told = reference_boundaries(decoder, samples)
        assert same_bits(before, decoder.prefill_logprobs(samples["s1"], 5))
        other = Schedule(k_leaf=96, kv_block=16, vocab_tile=48, k_order="descending", kv_order="reverse")
        another_order = Decoder.load(MODEL, Numerics(compute="bfloat16", schedule=other))
        placebo = reference_boundaries(another_order, samples, "placebo", "another order")
    names = [fields["boundary"] for kind, fields in told if kind == "boundary.captured"]
    assert (names[0], names[-1], len(names)) == ("embedding", "final_norm", 2 + 4 * 7)
    wanted = ("--left", "replay:reference", "--right", "training:forward/0")
    for name, whose in (("honest", model), ("altered", copy.deepcopy(model))):
        if name == "altered":
            wrong_weight(whose)
        sides = {"training": recorded(whose, "training"), "replay": [*told, *placebo]}
        found = diverged(tmp_path / name, capsys, sides, *wanted)
        seen = {b["boundary"]: b["status"] for b in found["boundaries"]}
        assert seen["embedding"] == "equal"
        assert seen["layers.1.q"] == "unknown", "the reference computes it inside one call"
        assert (found["code"], found["one_engine"]) == (3, False), "two engines: a lead at most, never an accusation"
        if name == "altered":
            worst = max(found["boundaries"], key=lambda b: (b["rms"] or 0) / (b["floor"] or 1))
            assert worst["boundary"].startswith(("layers.2", "layers.3", "final")), "the numbers still point there"
