"""A Megatron-core GPT model of the Llama, Qwen2 and Qwen3 family built from a Hugging Face folder, on any device.

The local layer specification is used: nothing fused, nothing of Transformer Engine, so that it runs on a CPU over gloo.
Legend: G query groups, D head dimension, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import torch

from rlk_ledger_replay.checkpoint import Checkpoint, ModelConfig
from rlk_ledger_replay.scorers.protocol import Unsupported

Shard = Callable[[torch.Tensor, int, int], torch.Tensor]
"""(whole tensor, rank, ranks) -> this rank's part."""


def on_cpu() -> None:
    """Lets Megatron-core's device look-ups and random-state forks pass where there is no GPU, in this process only."""
    from megatron.core.tensor_parallel import random

    def forked(*_: Any, **__: Any) -> Any:
        return nullcontext()

    device = torch.device("cpu")
    torch.cuda.current_device = lambda: device  # type: ignore[assignment,return-value]
    random.CudaRNGStatesTracker.fork = forked


def check(config: ModelConfig, ranks: int) -> None:
    """Raises Unsupported for what this model cannot express."""
    if config.kv_heads % ranks:
        raise Unsupported(f"{config.kv_heads} key heads cannot be split over {ranks} tensor-parallel ranks")
    if config.output_bias or config.rope_scaling.kind == "linear":
        raise Unsupported("a bias on the output projection or linear rope scaling is not mapped to Megatron-core")
    scaling = config.rope_scaling
    fixed = (scaling.low_freq_factor, scaling.high_freq_factor, scaling.original_max_position)
    if scaling.kind == "llama3" and fixed != (1.0, 4.0, 8192):
        raise Unsupported(f"Megatron-core's llama3 rope is fixed at factors 1 and 4 and 8192 positions, not {fixed}")
    if config.rope_theta != int(config.rope_theta):
        raise Unsupported(f"Megatron-core takes a whole rope theta, not {config.rope_theta}")


def build(config: ModelConfig, dtype: torch.dtype, ranks: int, device: torch.device) -> Any:
    """An uninitialised model of this tensor-parallel rank."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    spec = get_gpt_layer_local_spec(qk_layernorm=config.qk_norm, normalization="RMSNorm")
    scaled = config.rope_scaling.kind == "llama3"
    model = GPTModel(
        config=_transformer(config, dtype, ranks),
        transformer_layer_spec=spec,
        vocab_size=-(-config.vocabulary // ranks) * ranks,
        max_sequence_length=config.positions,
        parallel_output=True,
        share_embeddings_and_output_weights=config.tied,
        position_embedding_type="rope",
        rotary_base=int(config.rope_theta),
        rope_scaling=scaled,
        rope_scaling_factor=config.rope_scaling.factor if scaled else 8.0,
    )
    return model.to(device=device, dtype=dtype).eval()


def _transformer(config: ModelConfig, dtype: torch.dtype, ranks: int) -> Any:
    from megatron.core.transformer import TransformerConfig

    return TransformerConfig(
        num_layers=config.layers,
        hidden_size=config.hidden,
        ffn_hidden_size=config.intermediate,
        num_attention_heads=config.heads,
        num_query_groups=config.kv_heads,
        kv_channels=config.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=config.eps,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=config.qkv_bias,
        qk_layernorm=config.qk_norm,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        tensor_model_parallel_size=ranks,
        use_cpu_initialization=not torch.cuda.is_available(),
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
    )


def load(model: Any, checkpoint: Checkpoint, rank: int, ranks: int) -> None:
    """Copies this rank's part of every tensor into the model; raises KeyError when a parameter gets none."""
    parameters = dict(model.named_parameters())
    for name, whole, shard in _mapped(checkpoint.config, checkpoint.tensors, ranks):
        parameter = parameters.pop(name)
        parameter.data.copy_(shard(whole, rank, ranks))
    if parameters:
        raise KeyError(f"no tensor of the checkpoint belongs to {sorted(parameters)[0]}")


def held(model: Any, config: ModelConfig, gather: Callable[[torch.Tensor], list[torch.Tensor]]) -> dict[str, Any]:
    """The model's weights by Hugging Face name, put together from every rank's part.

    gather: all ranks' parts of a parameter, in rank order.
    """
    parts = {name: gather(parameter.detach()) for name, parameter in model.named_parameters()}
    out = {"model.embed_tokens.weight": torch.cat(parts["embedding.word_embeddings.weight"])[: config.vocabulary]}
    out["model.norm.weight"] = parts["decoder.final_layernorm.weight"][0]
    if not config.tied:
        out["lm_head.weight"] = torch.cat(parts["output_layer.weight"])[: config.vocabulary]
    for index in range(config.layers):
        out |= _held_layer(parts, config, index)
    return out


def _held_layer(parts: Mapping[str, list[torch.Tensor]], config: ModelConfig, index: int) -> dict[str, torch.Tensor]:
    ours, theirs = f"decoder.layers.{index}", f"model.layers.{index}"
    out = {f"{theirs}.{to}": parts[f"{ours}.{name}"][0] for name, to in _norms(config)}
    for kind in ("weight", "bias") if config.qkv_bias else ("weight",):
        fused = torch.cat(parts[f"{ours}.self_attention.linear_qkv.{kind}"])
        rows = fused.view(config.kv_heads, -1, config.head_dim, *fused.shape[1:])
        queries = config.heads // config.kv_heads
        pieces = {"q_proj": rows[:, :queries], "k_proj": rows[:, queries], "v_proj": rows[:, queries + 1]}
        for name, piece in pieces.items():
            out[f"{theirs}.self_attn.{name}.{kind}"] = piece.reshape(-1, *fused.shape[1:])
    halves = [part.chunk(2) for part in parts[f"{ours}.mlp.linear_fc1.weight"]]
    out[f"{theirs}.mlp.gate_proj.weight"] = torch.cat([gate for gate, _ in halves])
    out[f"{theirs}.mlp.up_proj.weight"] = torch.cat([up for _, up in halves])
    out[f"{theirs}.self_attn.o_proj.weight"] = torch.cat(parts[f"{ours}.self_attention.linear_proj.weight"], dim=1)
    out[f"{theirs}.mlp.down_proj.weight"] = torch.cat(parts[f"{ours}.mlp.linear_fc2.weight"], dim=1)
    return out


def _norms(config: ModelConfig) -> list[tuple[str, str]]:
    pairs = [
        ("input_layernorm.weight", "input_layernorm.weight"),
        ("pre_mlp_layernorm.weight", "post_attention_layernorm.weight"),
    ]
    if config.qk_norm:
        pairs += [(f"self_attention.{x}_layernorm.weight", f"self_attn.{x}_norm.weight") for x in "qk"]
    return pairs


def _mapped(
    config: ModelConfig, tensors: Mapping[str, torch.Tensor], ranks: int
) -> Iterator[tuple[str, torch.Tensor, Shard]]:
    """(Megatron name, whole tensor in Megatron's layout, how it is cut)."""
    padding = -config.vocabulary % ranks

    def padded(name: str) -> torch.Tensor:
        return torch.nn.functional.pad(tensors[name], (0, 0, 0, padding))

    yield "embedding.word_embeddings.weight", padded("model.embed_tokens.weight"), rows
    yield "decoder.final_layernorm.weight", tensors["model.norm.weight"], whole
    if not config.tied:
        yield "output_layer.weight", padded("lm_head.weight"), rows
    for index in range(config.layers):
        ours, theirs = f"decoder.layers.{index}", f"model.layers.{index}"
        for to, name in _norms(config):
            yield f"{ours}.{to}", tensors[f"{theirs}.{name}"], whole
        for kind in ("weight", "bias") if config.qkv_bias else ("weight",):
            yield f"{ours}.self_attention.linear_qkv.{kind}", _fused(config, tensors, theirs, kind), rows
        gate, up = tensors[f"{theirs}.mlp.gate_proj.weight"], tensors[f"{theirs}.mlp.up_proj.weight"]
        yield f"{ours}.mlp.linear_fc1.weight", torch.cat([gate, up]), halves_of_rows
        yield f"{ours}.self_attention.linear_proj.weight", tensors[f"{theirs}.self_attn.o_proj.weight"], columns
        yield f"{ours}.mlp.linear_fc2.weight", tensors[f"{theirs}.mlp.down_proj.weight"], columns


def _fused(config: ModelConfig, tensors: Mapping[str, torch.Tensor], layer: str, kind: str) -> torch.Tensor:
    """Query, key and value rows interleaved by group: [G x (queries of the group, key, value) x D, ...]."""
    parts = [tensors[f"{layer}.self_attn.{name}.{kind}"] for name in ("q_proj", "k_proj", "v_proj")]
    grouped = [part.view(config.kv_heads, -1, config.head_dim, *part.shape[1:]) for part in parts]
    return torch.cat(grouped, dim=1).reshape(-1, *parts[0].shape[1:])


def whole(tensor: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """Replicated."""
    return tensor


def rows(tensor: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """Cut along the first dimension."""
    return tensor.chunk(ranks)[rank]


def columns(tensor: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """Cut along the second dimension."""
    return tensor.chunk(ranks, dim=1)[rank]


def halves_of_rows(tensor: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """Two stacked tensors, each cut along the first dimension."""
    return torch.cat([half.chunk(ranks)[rank] for half in tensor.chunk(2)])
