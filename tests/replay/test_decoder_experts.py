"""Claim: a mixture of experts is scored as transformers scores it, in every arrangement of sparse and dense layers, and
along recorded routes when there are any; coverage and agreement of those are counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from rlk_ledger_kernels.bits import same_bits
from rlk_ledger_kernels.errors import OperandError
from rlk_ledger_replay.checkpoint import CheckpointError, parse_config
from rlk_ledger_replay.decoder import Decoder
from rlk_ledger_replay.layout import Layout
from rlk_ledger_replay.numerics import Numerics

SIZES = {
    "vocab_size": 150,
    "hidden_size": 48,
    "intermediate_size": 80,
    "moe_intermediate_size": 40,
    "num_experts": 7,
    "num_experts_per_tok": 3,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "initializer_range": 0.1,
}
IDS = torch.randint(0, 150, (60,), generator=torch.Generator().manual_seed(2)).tolist()


def made(**changes: Any) -> Qwen3MoeForCausalLM:
    torch.manual_seed(1)
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **changes)).eval()


def configuration(model: Qwen3MoeForCausalLM) -> dict[str, Any]:
    return model.config.to_dict() | {"architectures": ["Qwen3MoeForCausalLM"]}


def theirs(model: Qwen3MoeForCausalLM, start: int) -> torch.Tensor:
    with torch.no_grad():
        logits_TV = model(input_ids=torch.tensor([IDS])).logits[0, :-1].float()
    return torch.log_softmax(logits_TV, -1).gather(1, torch.tensor(IDS[1:])[:, None])[start - 1 :, 0]


@pytest.mark.parametrize(
    ("changes", "sparse"),
    [
        ({"norm_topk_prob": True}, (0, 1, 2)),
        ({"norm_topk_prob": False, "decoder_sparse_step": 2}, (1,)),
        ({"norm_topk_prob": True, "mlp_only_layers": [1]}, (0, 2)),
        ({"use_sliding_window": True, "sliding_window": 11}, (0, 1, 2)),
    ],
    ids=["all-renormalised", "every-second", "one-dense", "window"],
)
def test_float32_agrees_with_transformers_to_1e5(
    changes: dict[str, Any], sparse: tuple[int, ...], tmp_path: Path
) -> None:
    model = made(**changes)
    decoder = Decoder.from_tensors(configuration(model), model.state_dict())
    assert decoder.checkpoint.config.experts is not None
    assert decoder.checkpoint.config.experts.layers == sparse
    scores = decoder.prefill_logprobs(IDS, 1)
    torch.testing.assert_close(scores, theirs(model, 1), atol=1e-5, rtol=0)
    assert same_bits(decoder.decode_logprobs(IDS, 20), scores[19:])
    assert same_bits(decoder.chunked(IDS, 1, [1, 16, 17, 40]), scores)
    model.save_pretrained(tmp_path)
    assert same_bits(Decoder.load(tmp_path).prefill_logprobs(IDS, 1), scores)


def test_bfloat16_is_as_near_to_float32_as_transformers_is() -> None:
    model = made(norm_topk_prob=True).to(torch.bfloat16)
    exact = Decoder.from_tensors(configuration(model), model.state_dict())
    ours = exact.with_numerics(Numerics(compute="bfloat16")).prefill_logprobs(IDS, 1)
    reference, found = exact.prefill_logprobs(IDS, 1), theirs(model, 1)
    our_error, their_error = float((ours - reference).abs().mean()), float((found - reference).abs().mean())
    assert 0.0005 < their_error < 0.06
    assert our_error < 1.5 * their_error
    assert float((ours - found).abs().max()) < 0.06


def test_routes_are_told_replayed_and_counted() -> None:
    model = made(norm_topk_prob=True, decoder_sparse_step=2)
    decoder = Decoder.from_tensors(configuration(model), model.state_dict())
    samples = [(IDS, 10), (IDS[:7], 3)]
    own = decoder.prefill_routed(samples)
    assert all(same_bits(a, b) for a, b in zip(own.scores, decoder.prefill_logprobs_batch(samples)))
    assert [tuple(one.shape) for one in own.chosen] == [(59, 1, 3), (6, 1, 3)]
    assert (own.covered, own.agreeing) == (0, 0)

    replayed = decoder.prefill_routed(samples, [one.flip(2) for one in own.chosen])
    assert all(same_bits(a, b) for a, b in zip(replayed.scores, own.scores))
    assert (replayed.covered, replayed.agreeing) == (65, 65)

    other = [one.clone() for one in own.chosen]
    other[0][20] = (
        torch.tensor([0, 1, 2]) if set(own.chosen[0][20, 0].tolist()) != {0, 1, 2} else torch.tensor([3, 4, 5])
    )
    other[0][40:] = -1
    moved = decoder.prefill_routed(samples, other)
    assert (moved.covered, moved.agreeing) == (46, 45)
    assert same_bits(moved.scores[0][:10], own.scores[0][:10])
    assert not same_bits(moved.scores[0][10:12], own.scores[0][10:12])


def test_routes_that_do_not_fit_are_refused() -> None:
    model = made()
    decoder = Decoder.from_tensors(configuration(model), model.state_dict())
    good = torch.zeros((59, 3, 3), dtype=torch.int64) + torch.arange(3)
    for given, message in (
        ([], "given for 0 samples of 1"),
        ([good[:58]], r"sample 0 are \(58, 3, 3\); pass \[59 inputs, 3 layers"),
        ([good[..., :2]], r"pass \[rows, 3\] experts"),
        ([good + 5], "expert outside 0..6"),
        ([torch.zeros_like(good)], "names one expert twice"),
    ):
        with pytest.raises(OperandError, match=message):
            decoder.prefill_routed([(IDS, 1)], given)
    with pytest.raises(OperandError, match="one cp rank"):
        Decoder(decoder.checkpoint, layout=Layout(cp=2)).prefill_routed([(IDS, 1)])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts_per_tok": 9}, "num_experts_per_tok is 9 of num_experts 7"),
        ({"num_experts": 6, "num_local_experts": 7}, "num_experts is 6, num_local_experts 7"),
        ({"mlp_only_layers": "1"}, "mlp_only_layers is '1', expected a list"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        ({"moe_intermediate_size": None, "num_local_experts": -1}, "num_local_experts is -1"),
    ],
)
def test_settings_of_experts_that_are_not_valid_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        parse_config(configuration(made()) | change)


def test_experts_that_are_missing_or_misshapen_are_named() -> None:
    model = made()
    tensors = dict(model.state_dict())
    for name, changed, message in (
        ("model.layers.1.mlp.gate.weight", None, "tensor model.layers.1.mlp.gate.weight is missing"),
        ("model.layers.1.mlp.experts.down_proj", torch.zeros(6, 48, 40), r"experts\.6\.down_proj\.weight is missing"),
        (
            "model.layers.1.mlp.experts.gate_up_proj",
            torch.zeros(7, 80, 44),
            r"0\.gate_proj\.weight has shape \[40, 44\]",
        ),
    ):
        given = {key: value for key, value in tensors.items() if key != name}
        with pytest.raises(CheckpointError, match=message):
            Decoder.from_tensors(configuration(model), given if changed is None else given | {name: changed})
