"""Claim: an adapter of PEFT's format is applied as its side applied it: unmerged as a model with low-rank branches
computes, merged as the sum of weights, each close to float64; what would need other arithmetic is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rlk_ledger.ledger import Ledger
from rlk_ledger_kernels.bits import same_bits
from rlk_ledger_replay.adapted import AdaptedDecoder
from rlk_ledger_replay.adapters import PROJECTIONS, apply_adapter, load_adapter
from rlk_ledger_replay.checkpoint import CheckpointError, load_checkpoint
from rlk_ledger_replay.decoder import Decoder
from rlk_ledger_replay.numerics import Numerics
from rlk_ledger_replay.preparation import Request
from rlk_ledger_replay.replay_command import parse_ways
from rlk_ledger_replay.run import replay
from rlk_ledger_replay.shelf import adapter_gate
from rlk_ledger_replay.weights import Recorded
from rlk_ledger_schemas.errors import UsageError
from rlk_ledger_sdk.weights import state_digest

RUN, RANK, ALPHA = "r1", 4, 6
Make = Callable[..., Ledger]
IDS = torch.randint(0, 256, (40,), generator=torch.Generator().manual_seed(5))
SETTINGS = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "bias": "none", "target_modules": list(PROJECTIONS)}


def adapter(folder: Path, weights: Path, seed: int = 0, **changes: Any) -> Path:
    """An adapter of every projection, with values large enough to matter."""
    folder.mkdir(parents=True, exist_ok=True)
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, weight in load_file(weights / "v0" / "model.safetensors").items():
        if any(name.endswith(f"{one}.weight") for one in PROJECTIONS):
            at = f"base_model.model.{name.removesuffix('.weight')}"
            shapes = {"A": (RANK, weight.shape[1]), "B": (weight.shape[0], RANK)}
            for half, shape in shapes.items():
                tensors[f"{at}.lora_{half}.weight"] = 0.05 * torch.randn(shape, generator=generator)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(SETTINGS | changes))
    return folder


def float64(weights: Path, folder: Path, scale: float) -> torch.Tensor:
    """Log-probabilities by transformers in float64, low-rank branches added to each projection's output."""
    model = AutoModelForCausalLM.from_pretrained(weights / "v0", dtype=torch.float64).eval()
    tensors = load_file(folder / "adapter_model.safetensors")
    for name, module in model.named_modules():
        at = f"base_model.model.{name}"
        if f"{at}.lora_A.weight" in tensors:
            a, b = (tensors[f"{at}.lora_{half}.weight"].double() for half in "AB")

            def branch(_: Any, x: Any, y: torch.Tensor, a: torch.Tensor = a, b: torch.Tensor = b) -> torch.Tensor:
                return y + scale * (x[0] @ a.T @ b.T)

            module.register_forward_hook(branch)
    with torch.no_grad():
        logits = model(input_ids=IDS[None]).logits[0, :-1]
    return torch.log_softmax(logits, -1).gather(1, IDS[1:, None])[:, 0]


@pytest.mark.parametrize(("stable", "scale"), [(False, ALPHA / RANK), (True, ALPHA / RANK**0.5)])
def test_both_ways_meet_float64_and_the_scale_is_the_declared_one(
    weights: Path, tmp_path: Path, stable: bool, scale: float
) -> None:
    folder = adapter(tmp_path / "a", weights, use_rslora=stable)
    checkpoint = load_checkpoint(weights / "v0")
    found = load_adapter(folder, checkpoint.config)
    wanted = float64(weights, folder, scale)
    unmerged = AdaptedDecoder(checkpoint, found).prefill_logprobs(IDS, 1)
    merged = Decoder(apply_adapter(checkpoint, found, "float32")).prefill_logprobs(IDS, 1)
    base = Decoder(checkpoint).prefill_logprobs(IDS, 1)
    assert (unmerged - wanted).abs().max() < 2e-5
    assert (merged - wanted).abs().max() < 2e-5
    assert (base - wanted).abs().max() > 0.1
    in_bf16 = Decoder(apply_adapter(checkpoint, found)).prefill_logprobs(IDS, 1)
    assert 1e-4 < (in_bf16 - wanted).abs().max() < 1.0


def test_an_unmerged_adapter_keeps_the_decoders_promise(weights: Path, tmp_path: Path) -> None:
    checkpoint = load_checkpoint(weights / "v0")
    found = load_adapter(adapter(tmp_path / "a", weights), checkpoint.config)
    for compute in ("float32", "bfloat16"):
        decoder = AdaptedDecoder(checkpoint, found).with_numerics(Numerics(compute=compute))  # type: ignore[arg-type]
        alone = decoder.prefill_logprobs(IDS, 9)
        assert same_bits(decoder.decode_logprobs(IDS, 9), alone)
        batch = [(IDS[:17], 3), (IDS, 9), (IDS[5:30], 2)]
        assert same_bits(decoder.prefill_logprobs_batch(batch)[1], alone)
        assert same_bits(decoder.chunked(IDS, 9, [4, 20]), alone)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"use_dora": True}, "DoRA"),
        ({"bias": "all"}, "bias 'all'"),
        ({"peft_type": "LOHA"}, "peft_type 'LOHA'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"init_lora_weights": "pissa_niter_4"}, "pissa"),
        ({"r": 8}, r"lora_A.weight is .*\[4, .*expected \[8,"),
        ({"target_modules": ["q_proj"]}, "is adapted and not in target_modules"),
        ({"lora_alpha": None}, "lora_alpha is None"),
    ],
)
def test_what_needs_other_arithmetic_is_refused_by_name(
    weights: Path, tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    folder = adapter(tmp_path / "a", weights, **changes)
    with pytest.raises(CheckpointError, match=named):
        load_adapter(folder, load_checkpoint(weights / "v0").config)


def test_a_projection_without_its_pair_is_named(weights: Path, tmp_path: Path) -> None:
    folder, config = adapter(tmp_path / "a", weights), load_checkpoint(weights / "v0").config
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    lost = "base_model.model.model.layers.0.self_attn.k_proj.lora_B.weight"
    save_file({name: tensor for name, tensor in tensors.items() if name != lost}, file)
    with pytest.raises(CheckpointError, match=r"k_proj.lora_B.weight is missing"):
        load_adapter(folder, config)
    save_file({name: tensor for name, tensor in tensors.items() if "0.self_attn.k_proj" not in name}, file)
    with pytest.raises(CheckpointError, match=r"k_proj is in target_modules and has no lora_A"):
        load_adapter(folder, config)


def test_a_replay_measures_how_far_apart_the_two_ways_are(make_run: Make, weights: Path, tmp_path: Path) -> None:
    for version in ("v0", "v1"):
        adapter(tmp_path / "a" / version, weights)
    ledger = make_run(groups=2, attention=None)
    asked = Request(2, adapter=str(tmp_path / "a" / "{version}"))
    result = replay(ledger, RUN, request=asked, keep=False)
    told = result.numbers()["adapters"]
    # the rollout engine took weights and named no adapter: they were merged
    assert {side: one["applied"] for side, one in told.items()} == {"rollout": "merged", "training": "unmerged"}
    assert 1e-4 < told["rollout"]["other_way_rms"] < 1.0
    assert result.scores is not None
    values = result.scores.values
    assert same_bits(torch.from_numpy(values["rollout.decode"]), torch.from_numpy(values["rollout.prefill"]))
    assert np.abs(values["rollout.prefill"] - values["training.prefill"]).max() > 1e-4
    gates = {gate.gate: gate for gate in result.judgement.gates}
    assert gates["weights.adapter.v0"].status == "unknown"
    assert result.exit_code != 0


def test_how_a_side_applied_its_adapter_can_be_said(make_run: Make, weights: Path, tmp_path: Path) -> None:
    for version in ("v0", "v1"):
        adapter(tmp_path / "a" / version, weights)
    ways = parse_ways(("rollout=unmerged", "training=merged"))
    asked = Request(2, adapter=str(tmp_path / "a" / "{version}"), adapter_as=ways)
    result = replay(make_run(groups=1), RUN, request=asked, arms=("both_native",), keep=False)
    assert result.prepared.adapters == {"rollout": "unmerged", "training": "merged"}
    found = {one.name: one.how for one in result.prepared.passes}
    assert found["rollout.floor.0"] == found["rollout.decode"] == found["training.other_way"] == "unmerged"
    assert found["training.floor.0"] == found["training.prefill"] == found["rollout.other_way"] == "merged"


def test_an_adapter_is_the_recorded_one_or_nothing_is_computed(weights: Path, tmp_path: Path) -> None:
    config = load_checkpoint(weights / "v0").config
    found = load_adapter(adapter(tmp_path / "a", weights), config, "policy")
    live = {
        name.replace(".lora_A.", ".lora_A.policy.").replace(".lora_B.", ".lora_B.policy."): tensor
        for name, tensor in load_file(tmp_path / "a" / "adapter_model.safetensors").items()
    }
    wanted = state_digest(live)[0]
    assert adapter_gate(Recorded("v0", adapters={"policy": wanted}), tmp_path / "a", found).status == "passed"
    other = load_adapter(adapter(tmp_path / "b", weights, seed=1), config, "policy")
    refused = adapter_gate(Recorded("v0", adapters={"policy": wanted}), tmp_path / "b", other)
    assert (refused.status, "not the recorded one" in refused.reason) == ("failed", True)


def test_ways_are_checked() -> None:
    with pytest.raises(UsageError, match="rollout=merged"):
        parse_ways(("rollout=somehow",))
