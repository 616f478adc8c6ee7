"""A Hugging Face checkpoint read without transformers: `config.json` and `*.safetensors`.

An architecture that is not known is refused by name, and so is a known one with a setting that is not
implemented; nothing is guessed.

Errors: CheckpointError and its child UnknownArchitectureError, from `model_settings`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from rlk_ledger_kernels.ops.rope.scaling import RopeScaling
from rlk_ledger_replay.model_settings import (
    CheckpointError,
    ExpertConfig,
    UnknownArchitectureError,
    expert_settings,
    number,
    positive,
    rope_settings,
    window_settings,
)

__all__ = [
    "ARCHITECTURES",
    "Checkpoint",
    "CheckpointError",
    "ModelConfig",
    "UnknownArchitectureError",
    "checked_tensors",
    "expected_shapes",
    "load_checkpoint",
    "parse_config",
]

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}


@dataclass(frozen=True)
class ModelConfig:
    """The shapes and constants of one decoder of the Llama family.

    windows: for each layer how many positions a query sees, itself included, or None for all. experts: None in a dense
    model.
    """

    architecture: str
    vocabulary: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    positions: int
    eps: float
    rope_theta: float
    rope_scaling: RopeScaling
    qkv_bias: bool
    output_bias: bool
    qk_norm: bool
    tied: bool
    windows: tuple[int | None, ...]
    experts: ExpertConfig | None = None


@dataclass(frozen=True)
class Checkpoint:
    """A config and its tensors under Hugging Face names, checked against each other."""

    config: ModelConfig
    tensors: Mapping[str, torch.Tensor]


def parse_config(raw: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
    """Read the dictionary of a `config.json`.

    Raises UnknownArchitectureError for an architecture, activation, window or rope scaling without an
    implementation, CheckpointError naming a field that is missing or has no valid value.
    """
    family = _family(raw, where)
    heads = positive(raw, "num_attention_heads", where)
    hidden = positive(raw, "hidden_size", where)
    kv_heads = positive(raw, "num_key_value_heads", where, default=heads)
    head_dim = positive(raw, "head_dim", where, default=hidden // heads)
    if heads % kv_heads:
        raise CheckpointError(
            f"{where}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
        )
    if head_dim % 2 or head_dim > 256:
        raise UnknownArchitectureError(
            f"{where}: head_dim {head_dim} is not implemented; it must be even and at most 256"
        )
    layers = positive(raw, "num_hidden_layers", where)
    theta, scaling = rope_settings(raw, where)
    biased = bool(raw.get("attention_bias", False))
    return ModelConfig(
        architecture=family,
        vocabulary=positive(raw, "vocab_size", where),
        hidden=hidden,
        intermediate=positive(raw, "intermediate_size", where),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        positions=positive(raw, "max_position_embeddings", where),
        eps=number(raw, "rms_norm_eps", where, 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        qkv_bias=family == "qwen2" or biased,
        output_bias=family != "qwen2" and biased,
        qk_norm=family.startswith("qwen3"),
        tied=bool(raw.get("tie_word_embeddings", False)),
        windows=window_settings(raw, family, layers, where),
        experts=expert_settings(raw, layers, where) if family == "qwen3_moe" else None,
    )


def load_checkpoint(path: str | Path) -> Checkpoint:
    """Read a folder that holds config.json and model.safetensors, or shards with model.safetensors.index.json.

    Raises CheckpointError naming the file that is missing or unreadable, and what parse_config and
    checked_tensors raise.
    """
    folder = Path(path)
    config_path = folder / "config.json"
    config = parse_config(_object(config_path), str(config_path))
    tensors: dict[str, torch.Tensor] = {}
    for file in _weight_files(folder):
        try:
            tensors.update(load_file(file))
        except Exception as error:
            raise CheckpointError(f"{file}: cannot be read as safetensors ({error})") from None
    return checked_tensors(config, tensors, str(folder))


def checked_tensors(config: ModelConfig, tensors: Mapping[str, torch.Tensor], where: str = "tensors") -> Checkpoint:
    """Check that every tensor the config needs is there with its shape, and that no other is.

    Raises CheckpointError naming the first tensor that is missing, misshapen, integer or unknown, or a tied
    head that differs from the embedding.
    """
    wanted = expected_shapes(config)
    tensors = _separate_experts(config, tensors)
    for name, shape in wanted.items():
        if name not in tensors:
            raise CheckpointError(f"{where}: tensor {name} is missing; the config needs it with shape {list(shape)}")
        found = tensors[name]
        if tuple(found.shape) != shape:
            raise CheckpointError(f"{where}: tensor {name} has shape {list(found.shape)}, expected {list(shape)}")
        if not found.is_floating_point():
            raise CheckpointError(f"{where}: tensor {name} is {found.dtype}; only floating-point weights are read")
    for name in tensors:
        if name == "lm_head.weight" and config.tied:
            if not torch.equal(tensors[name], tensors["model.embed_tokens.weight"]):
                raise CheckpointError(f"{where}: lm_head.weight differs from the embedding it is declared tied to")
        elif name not in wanted and not name.endswith("rotary_emb.inv_freq"):
            raise CheckpointError(f"{where}: tensor {name} has no place in a {config.architecture} decoder")
    return Checkpoint(config=config, tensors={name: tensors[name] for name in wanted})


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of a decoder, by Hugging Face name."""
    h, d = config.hidden, config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocabulary, h),
        "model.norm.weight": (h,),
    }
    if not config.tied:
        shapes["lm_head.weight"] = (config.vocabulary, h)
    widths = {"q_proj": config.heads * d, "k_proj": config.kv_heads * d, "v_proj": config.kv_heads * d}
    for index in range(config.layers):
        at = f"model.layers.{index}"
        shapes[f"{at}.input_layernorm.weight"] = (h,)
        shapes[f"{at}.post_attention_layernorm.weight"] = (h,)
        for name, width in widths.items():
            shapes[f"{at}.self_attn.{name}.weight"] = (width, h)
            if config.qkv_bias:
                shapes[f"{at}.self_attn.{name}.bias"] = (width,)
        shapes[f"{at}.self_attn.o_proj.weight"] = (h, config.heads * d)
        if config.output_bias:
            shapes[f"{at}.self_attn.o_proj.bias"] = (h,)
        if config.qk_norm:
            shapes[f"{at}.self_attn.q_norm.weight"] = (d,)
            shapes[f"{at}.self_attn.k_norm.weight"] = (d,)
        shapes |= _mlp_shapes(config, index, f"{at}.mlp")
    return shapes


def _mlp_shapes(config: ModelConfig, index: int, at: str) -> dict[str, tuple[int, ...]]:
    experts, h = config.experts, config.hidden
    if experts is None or index not in experts.layers:
        places, inner = [at], config.intermediate
        shapes: dict[str, tuple[int, ...]] = {}
    else:
        places, inner = [f"{at}.experts.{expert}" for expert in range(experts.count)], experts.intermediate
        shapes = {f"{at}.gate.weight": (experts.count, h)}
    for place in places:
        shapes[f"{place}.gate_proj.weight"] = (inner, h)
        shapes[f"{place}.up_proj.weight"] = (inner, h)
        shapes[f"{place}.down_proj.weight"] = (h, inner)
    return shapes


def _separate_experts(config: ModelConfig, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Experts stored as one tensor per layer ([E, 2 I, H] and [E, H, I]) under the names of separate ones, as views."""
    separate = dict(tensors)
    experts = config.experts
    for index in experts.layers if experts is not None else ():
        at = f"model.layers.{index}.mlp.experts"
        gate_up_EJH, down_EHI = separate.get(f"{at}.gate_up_proj"), separate.get(f"{at}.down_proj")
        if experts is None or gate_up_EJH is None or down_EHI is None or not gate_up_EJH.dim() == down_EHI.dim() == 3:
            continue
        del separate[f"{at}.gate_up_proj"], separate[f"{at}.down_proj"]
        for expert, gate_up_JH in enumerate(gate_up_EJH):
            half = gate_up_JH.shape[0] // 2
            separate[f"{at}.{expert}.gate_proj.weight"] = gate_up_JH[:half]
            separate[f"{at}.{expert}.up_proj.weight"] = gate_up_JH[half:]
        for expert, down_HI in enumerate(down_EHI):
            separate[f"{at}.{expert}.down_proj.weight"] = down_HI
    return separate


def _family(raw: Mapping[str, Any], where: str) -> str:
    names = raw.get("architectures") or []
    if not isinstance(names, list):
        raise CheckpointError(f"{where}: architectures is {names!r}, expected a list of names")
    family = next((ARCHITECTURES[name] for name in names if name in ARCHITECTURES), None)
    if family is None:
        known = ", ".join(ARCHITECTURES)
        raise UnknownArchitectureError(f"{where}: architecture {names or 'none'} has no decoder; known are {known}")
    if raw.get("hidden_act", "silu") != "silu":
        raise UnknownArchitectureError(f"{where}: hidden_act {raw['hidden_act']!r} is not implemented, only silu")
    if raw.get("mlp_bias", False):
        raise UnknownArchitectureError(f"{where}: mlp_bias is not implemented")
    if raw.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise UnknownArchitectureError(f"{where}: partial_rotary_factor is not implemented")
    if raw.get("quantization_config"):
        raise UnknownArchitectureError(f"{where}: quantised weights are not implemented")
    return family


def _object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; raises CheckpointError."""
    try:
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}); pass a model folder") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: is not JSON ({error})") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: holds a {type(found).__name__}, expected an object")
    return found


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        shards = _object(index).get("weight_map")
        if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
            raise CheckpointError(f"{index}: weight_map is not an object of file names by tensor")
        return [folder / name for name in sorted(set(shards.values()))]
    single = folder / "model.safetensors"
    if not single.exists():
        raise CheckpointError(f"{folder}: holds neither model.safetensors nor model.safetensors.index.json")
    return [single]
