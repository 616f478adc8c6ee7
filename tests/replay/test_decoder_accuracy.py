"""Claim: the decoder computes what transformers computes: rounding apart in float32, no farther from the float32
value than transformers itself in bf16, for every architecture it accepts."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import rlk_ledger_replay
from rlk_ledger_replay.decoder import Decoder
from rlk_ledger_replay.numerics import Numerics

MODEL = Path(rlk_ledger_replay.__file__).parent / "model"
TEXT = Path(textwrap.__file__).read_bytes()
SAMPLES = [([256, *TEXT[i * 601 : i * 601 + 40 + 50 * i]], 10) for i in range(8)]

ODD = {
    "vocab_size": 101,
    "hidden_size": 60,
    "intermediate_size": 92,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
WINDOW = {"use_sliding_window": True, "sliding_window": 17, "max_window_layers": 1}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def configuration(model: PreTrainedModel) -> dict[str, Any]:
    """What `save_pretrained` would write."""
    return model.config.to_dict() | {"architectures": [type(model).__name__]}


def transformers_logprobs(model: PreTrainedModel, ids: list[int], start: int) -> torch.Tensor:
    with torch.no_grad():
        logits_TV = model(input_ids=torch.tensor([ids])).logits[0, :-1]
    logits_TV = logits_TV if logits_TV.dtype == torch.float64 else logits_TV.float()
    return torch.log_softmax(logits_TV, -1).gather(1, torch.tensor(ids[1:])[:, None])[start - 1 :, 0]


def test_the_shipped_model_in_float32_agrees_with_transformers() -> None:
    """Against transformers in float64 every token is within 1e-5, and the decoder is nearer to it than transformers in
    float32, whose own distance (up to 1.3e-5 on these tokens) bounds how near the two can be."""
    model = Qwen3ForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    ours = torch.cat(Decoder.load(MODEL).prefill_logprobs_batch(SAMPLES)).double()
    theirs = torch.cat([transformers_logprobs(model, *sample) for sample in SAMPLES]).double()
    model.double()
    exact = torch.cat([transformers_logprobs(model, *sample) for sample in SAMPLES])
    our_error, their_error, distance = (ours - exact).abs(), (theirs - exact).abs(), (ours - theirs).abs()
    assert float(our_error.max()) <= 1e-5
    assert float(our_error.mean()) <= 0.85 * float(their_error.mean())
    assert bool((distance <= 1e-5 + their_error).all())
    assert float(distance.mean()) <= 1e-6
    assert float(distance.quantile(0.99)) <= 1e-5


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_fresh_models_in_float32_agree_with_transformers_to_1e5(kind: str, seed: int) -> None:
    torch.manual_seed(seed)
    sizes = ODD | {"vocab_size": 997, "hidden_size": 96, "initializer_range": 0.05, "num_hidden_layers": 4}
    if kind == "qwen3":
        model: PreTrainedModel = Qwen3ForCausalLM(Qwen3Config(**sizes, head_dim=32)).eval()
    else:
        model = LlamaForCausalLM(LlamaConfig(**sizes, rope_parameters=LLAMA3)).eval()
    decoder = Decoder.from_tensors(configuration(model), model.state_dict())
    ids = torch.randint(0, 997, (120,)).tolist()
    torch.testing.assert_close(
        decoder.prefill_logprobs(ids, 1), transformers_logprobs(model, ids, 1), atol=1e-5, rtol=0
    )


def test_the_shipped_model_in_bfloat16_is_as_near_to_float32_as_transformers_is() -> None:
    model = Qwen3ForCausalLM.from_pretrained(MODEL, dtype=torch.bfloat16).eval()
    decoder = Decoder.load(MODEL)
    reference = torch.cat(decoder.prefill_logprobs_batch(SAMPLES))
    ours = torch.cat(decoder.with_numerics(Numerics(compute="bfloat16")).prefill_logprobs_batch(SAMPLES))
    theirs = torch.cat([transformers_logprobs(model, *sample) for sample in SAMPLES])
    our_error, their_error = (ours - reference).abs().mean(), (theirs - reference).abs().mean()
    assert 0.001 < float(their_error) < 0.03
    assert 0.8 < float(our_error / their_error) < 1.25
    assert float((ours - theirs).abs().mean()) < 1.25 * float(their_error)


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (LlamaConfig(**ODD), LlamaForCausalLM),
        (LlamaConfig(**ODD, rope_parameters=LLAMA3, attention_bias=True, tie_word_embeddings=True), LlamaForCausalLM),
        (
            LlamaConfig(**ODD, rope_parameters=LINEAR),
            LlamaForCausalLM,
        ),
        (LlamaConfig(**ODD, rope_parameters=DYNAMIC), LlamaForCausalLM),
        (MistralConfig(**ODD, sliding_window=None), MistralForCausalLM),
        (MistralConfig(**ODD, sliding_window=20), MistralForCausalLM),
        (Qwen2Config(**ODD, **WINDOW, rope_parameters=YARN), Qwen2ForCausalLM),
        (Qwen3Config(**ODD, **WINDOW, head_dim=32), Qwen3ForCausalLM),
        (
            Qwen3Config(
                **ODD,
                head_dim=32,
                use_sliding_window=True,
                sliding_window=9,
                layer_types=["sliding_attention", "full_attention"],
            ),
            Qwen3ForCausalLM,
        ),
        (Qwen2Config(**ODD), Qwen2ForCausalLM),
        (Qwen3Config(**ODD, head_dim=14), Qwen3ForCausalLM),
        (Qwen3Config(**ODD, head_dim=32, attention_bias=True), Qwen3ForCausalLM),
    ],
    ids=[
        "llama",
        "llama3-bias-tied",
        "llama-linear-rope",
        "llama-dynamic-rope",
        "mistral",
        "mistral-window",
        "qwen2-window-yarn",
        "qwen3-window",
        "qwen3-layer-types",
        "qwen2",
        "qwen3",
        "qwen3-bias",
    ],
)
def test_every_architecture_agrees_with_transformers_at_odd_shapes(config: object, kind: type, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = kind(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(tmp_path)
    decoder = Decoder.load(tmp_path)
    ids = torch.randint(0, 101, (70,), generator=torch.Generator().manual_seed(1)).tolist()
    theirs = transformers_logprobs(model, ids, 5)
    torch.testing.assert_close(decoder.prefill_logprobs(ids, 5), theirs, atol=3e-5, rtol=1e-5)
    assert torch.equal(decoder.decode_logprobs(ids, 40), decoder.prefill_logprobs(ids, 40))
