"""A Hugging Face checkpoint read without transformers: `config.json` and `*.safetensors`.

An architecture that is not known is refused by name, and so is a known one with a setting that is not
implemented; nothing is guessed.

    CheckpointError (ValueError)      files, tensors or shapes are not what the config says
      UnknownArchitectureError        no decoder exists for this architecture or setting
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from rlk_ledger_kernels.ops.rope.table import RopeScaling

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}


class CheckpointError(ValueError):
    """Files, tensors or shapes are not what the config says."""


class UnknownArchitectureError(CheckpointError):
    """No decoder exists for this architecture or for one of its settings."""


@dataclass(frozen=True)
class ModelConfig:
    """The shapes and constants of one decoder of the Llama family."""

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
    heads = _positive(raw, "num_attention_heads", where)
    hidden = _positive(raw, "hidden_size", where)
    kv_heads = _positive(raw, "num_key_value_heads", where, default=heads)
    head_dim = _positive(raw, "head_dim", where, default=hidden // heads)
    if heads % kv_heads:
        raise CheckpointError(
            f"{where}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
        )
    if head_dim % 2 or head_dim > 256:
        raise UnknownArchitectureError(
            f"{where}: head_dim {head_dim} is not implemented; it must be even and at most 256"
        )
    theta, scaling = _rope(raw, where)
    biased = bool(raw.get("attention_bias", False))
    return ModelConfig(
        architecture=family,
        vocabulary=_positive(raw, "vocab_size", where),
        hidden=hidden,
        intermediate=_positive(raw, "intermediate_size", where),
        layers=_positive(raw, "num_hidden_layers", where),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        positions=_positive(raw, "max_position_embeddings", where),
        eps=_number(raw, "rms_norm_eps", where, 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        qkv_bias=family == "qwen2" or biased,
        output_bias=family != "qwen2" and biased,
        qk_norm=family == "qwen3",
        tied=bool(raw.get("tie_word_embeddings", False)),
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
        shapes[f"{at}.mlp.gate_proj.weight"] = (config.intermediate, h)
        shapes[f"{at}.mlp.up_proj.weight"] = (config.intermediate, h)
        shapes[f"{at}.mlp.down_proj.weight"] = (h, config.intermediate)
    return shapes


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
    windowed = raw.get("use_sliding_window", False) if family.startswith("qwen") else raw.get("sliding_window")
    if windowed:
        raise UnknownArchitectureError(f"{where}: sliding-window attention is not implemented")
    if raw.get("mlp_bias", False):
        raise UnknownArchitectureError(f"{where}: mlp_bias is not implemented")
    if raw.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise UnknownArchitectureError(f"{where}: partial_rotary_factor is not implemented")
    if raw.get("quantization_config"):
        raise UnknownArchitectureError(f"{where}: quantised weights are not implemented")
    return family


def _positive(raw: Mapping[str, Any], name: str, where: str, default: int | None = None) -> int:
    value = raw.get(name)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointError(f"{where}: {name} is {value!r}, expected a whole number of at least 1")
    return value


def _number(raw: Mapping[str, Any], name: str, where: str, default: float) -> float:
    value = raw.get(name)
    if value is None:
        return default
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
        raise CheckpointError(f"{where}: {name} is {value!r}, expected a finite number above 0")
    return float(value)


def _rope(raw: Mapping[str, Any], where: str) -> tuple[float, RopeScaling]:
    """theta and scaling, from `rope_parameters` (transformers 5) or `rope_theta` with `rope_scaling` (before)."""
    fields: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        given = raw.get(name) or {}
        if not isinstance(given, Mapping):
            raise CheckpointError(f"{where}: {name} is {given!r}, expected an object")
        fields.update(given)
    theta = _number(fields, "rope_theta", where, _number(raw, "rope_theta", where, 10000.0))
    kind = str(fields.get("rope_type", fields.get("type", "default")))
    if kind not in ("default", "linear", "llama3"):
        raise UnknownArchitectureError(
            f"{where}: rope scaling {kind!r} is not implemented; known: default, linear, llama3"
        )
    scaling = RopeScaling(
        kind=kind,
        factor=_number(fields, "factor", where, 1.0),
        low_freq_factor=_number(fields, "low_freq_factor", where, 1.0),
        high_freq_factor=_number(fields, "high_freq_factor", where, 4.0),
        original_max_position=_positive(fields, "original_max_position_embeddings", where, default=8192),
    )
    return theta, scaling


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
