"""Digests of a sharded model without Megatron: whatever the cut, the sums of all ranks are the checkpoint's digest."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlk_ledger_sdk.integrations.megatron.modules import Stage
from rlk_ledger_sdk.integrations.megatron.place import Axis, Place
from rlk_ledger_sdk.integrations.megatron.weights import held_by_group, held_by_rank, packed
from rlk_ledger_sdk.weights import state_digest, sum64x2, sum64x2_columns

H, HEADS, GROUPS, WIDTH, INNER, VOCAB = 16, 4, 2, 4, 24, 10
LAYER = "model.layers.3."


def checkpoint() -> dict[str, torch.Tensor]:
    """One layer, number 3, an embedding and an untied head."""
    torch.manual_seed(0)
    shapes = {
        "model.embed_tokens.weight": (VOCAB, H),
        "lm_head.weight": (VOCAB, H),
        "model.norm.weight": (H,),
        f"{LAYER}input_layernorm.weight": (H,),
        f"{LAYER}post_attention_layernorm.weight": (H,),
        f"{LAYER}self_attn.q_proj.weight": (HEADS * WIDTH, H),
        f"{LAYER}self_attn.k_proj.weight": (GROUPS * WIDTH, H),
        f"{LAYER}self_attn.v_proj.weight": (GROUPS * WIDTH, H),
        f"{LAYER}self_attn.q_proj.bias": (HEADS * WIDTH,),
        f"{LAYER}self_attn.k_proj.bias": (GROUPS * WIDTH,),
        f"{LAYER}self_attn.v_proj.bias": (GROUPS * WIDTH,),
        f"{LAYER}self_attn.o_proj.weight": (H, HEADS * WIDTH),
        f"{LAYER}mlp.gate_proj.weight": (INNER, H),
        f"{LAYER}mlp.up_proj.weight": (INNER, H),
        f"{LAYER}mlp.down_proj.weight": (H, INNER),
    }
    return {name: torch.randn(shape).bfloat16() for name, shape in shapes.items()}


def fused(parts: list[torch.Tensor]) -> torch.Tensor:
    """Head by head: the queries of a group, its key, its value."""
    rows = []
    for group in range(GROUPS):
        for part in parts:
            each = len(part) // GROUPS
            rows += list(part[group * each : (group + 1) * each])
    return torch.stack(rows)


def parameters(tp: Axis, transformer_engine: bool, padded: int) -> dict[str, torch.Tensor]:
    """What one tensor rank holds, cut from the checkpoint by hand."""
    hf = checkpoint()

    def rows(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.chunk(tp.size)[tp.rank].contiguous()

    def vocabulary(tensor: torch.Tensor) -> torch.Tensor:
        return rows(torch.cat([tensor, torch.full((padded - VOCAB, H), 7.0).bfloat16()]))

    norms = ("self_attention.linear_qkv.layer_norm_weight", "mlp.linear_fc1.layer_norm_weight")
    if not transformer_engine:
        norms = ("input_layernorm.weight", "pre_mlp_layernorm.weight")
    qkv = [[hf[f"{LAYER}self_attn.{one}_proj.{leaf}"] for one in "qkv"] for leaf in ("weight", "bias")]
    gate_up = [rows(hf[f"{LAYER}mlp.{one}_proj.weight"]) for one in ("gate", "up")]
    layer = {
        norms[0]: hf[f"{LAYER}input_layernorm.weight"],
        norms[1]: hf[f"{LAYER}post_attention_layernorm.weight"],
        "self_attention.linear_qkv.weight": rows(fused(qkv[0])),
        "self_attention.linear_qkv.bias": rows(fused([one[:, None] for one in qkv[1]]))[:, 0],
        "self_attention.linear_proj.weight": hf[f"{LAYER}self_attn.o_proj.weight"].chunk(tp.size, 1)[tp.rank],
        "mlp.linear_fc1.weight": torch.cat(gate_up),
        "mlp.linear_fc2.weight": hf[f"{LAYER}mlp.down_proj.weight"].chunk(tp.size, 1)[tp.rank],
    }
    return {
        "embedding.word_embeddings.weight": vocabulary(hf["model.embed_tokens.weight"]),
        **{f"decoder.layers.0.{name}": tensor for name, tensor in layer.items()},
        "decoder.final_layernorm.weight": hf["model.norm.weight"],
        "output_layer.weight": vocabulary(hf["lm_head.weight"]),
    }


class Chunk:
    """A model chunk as far as its weights are read."""

    def __init__(self, held: dict[str, torch.Tensor], tied: bool = False) -> None:
        self._held = held
        self.share_embeddings_and_output_weights = tied
        self.config = SimpleNamespace(
            num_query_groups=GROUPS, num_attention_heads=HEADS, kv_channels=WIDTH, gated_linear_unit=True
        )
        self.decoder = SimpleNamespace(layers=[SimpleNamespace(layer_number=4)])

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._held.items()


def place(tp: Axis) -> Place:
    one = Axis(0, 1)
    return Place(tp.rank, tp.size, tp, one, one, one, one)


def gathered(size: int, **options: Any) -> Any:
    """The sums of all ranks, as the first one adds them."""
    parts = []
    for rank in range(size):
        tp = Axis(rank, size)
        chunk = Chunk(parameters(tp, options.get("te", False), options.get("padded", VOCAB + 6)))
        chunk._held |= options.get("more", {})
        parts.append(packed(held_by_rank(Stage((chunk,), ()), place(tp), VOCAB, options.get("dtype"))))
    return held_by_group(parts)


@pytest.mark.parametrize("te", [False, True], ids=["local", "transformer engine"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_sums_of_all_ranks_are_the_digest_of_the_checkpoint(size: int, te: bool) -> None:
    """Claim: at tp 1, 2 and 4 (twice the query groups) every tensor has its file's digest, padding left out."""
    held = gathered(size, te=te)
    digest, each = state_digest(checkpoint())
    assert {t["name"]: t["digest"] for t in held.listed()} == each
    assert {t["name"]: tuple(t["shape"]) for t in held.listed()} == {n: t.shape for n, t in checkpoint().items()}
    assert held.digest == digest
    assert held.skipped == ()


def test_a_rank_that_holds_one_other_element_is_seen() -> None:
    """Claim: a single changed weight on a single rank changes the digest of its tensor and of no other."""
    changed = parameters(Axis(1, 2), False, VOCAB + 6)
    changed["decoder.layers.0.mlp.linear_fc2.weight"] = changed["decoder.layers.0.mlp.linear_fc2.weight"].clone()
    changed["decoder.layers.0.mlp.linear_fc2.weight"][3, 5] += 1
    ranks = [parameters(Axis(0, 2), False, VOCAB + 6), changed]
    stages = [Stage((Chunk(held),), ()) for held in ranks]
    held = held_by_group(packed(held_by_rank(s, place(Axis(r, 2)), VOCAB)) for r, s in enumerate(stages))
    _, each = state_digest(checkpoint())
    assert {t["name"] for t in held.listed() if t["digest"] != each[t["name"]]} == {f"{LAYER}mlp.down_proj.weight"}


def test_a_tied_head_is_an_alias_and_an_expert_is_skipped() -> None:
    """Claim: a tied output layer adds nothing; what has no canonical name is listed."""
    tied = Chunk(parameters(Axis(0, 1), False, VOCAB), tied=True)
    held = held_by_rank(Stage((tied,), ()), place(Axis(0, 1)), VOCAB)
    assert "lm_head.weight" not in held.tensors
    expert = {"decoder.layers.0.mlp.experts.linear_fc1.weight0": torch.zeros(2, 2)}
    assert gathered(2, more=expert).skipped == tuple(expert)


def test_the_wire_dtype_is_the_export_s() -> None:
    """Claim: with a dtype the sums are those of the tensors cast to it."""
    wide = {name: tensor.float() for name, tensor in checkpoint().items()}
    assert gathered(2, dtype=torch.float32).digest == state_digest(wide)[0]


@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_columns_of_a_matrix_add_up(kind: str) -> None:
    """Claim: the sums over any columns of a matrix are those of its elements at their places in the whole."""
    whole = torch.randn(7, 9)
    cut = [whole[:, :2], whole[:, 2:3], whole[:, 3:]]
    sums = [0, 0]
    for part, start in zip(cut, (0, 2, 3)):
        pair = sum64x2_columns("w", part if kind == "torch" else part.numpy(), start, 9)
        sums = [(a + b) % 2**64 for a, b in zip(sums, pair)]
    assert tuple(sums) == sum64x2("w", whole)
