"""Settings of a model that need reading with care: numbers, rotary embeddings, windows, experts.

Nothing is guessed: a value that is not valid is named, and so is a setting that is not implemented.

    CheckpointError (ValueError)      files, tensors or shapes are not what the config says
      UnknownArchitectureError        no decoder exists for this architecture or setting
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlk_ledger_kernels.ops.rope.scaling import SCALINGS, RopeScaling


class CheckpointError(ValueError):
    """Files, tensors or shapes are not what the config says."""


class UnknownArchitectureError(CheckpointError):
    """No decoder exists for this architecture or for one of its settings."""


@dataclass(frozen=True)
class ExpertConfig:
    """A mixture of experts. layers: those that have one; renormalise: the weights of the chosen experts sum to one."""

    count: int
    top_k: int
    intermediate: int
    renormalise: bool
    layers: tuple[int, ...]


def positive(raw: Mapping[str, Any], name: str, where: str, default: int | None = None) -> int:
    value = raw.get(name)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointError(f"{where}: {name} is {value!r}, expected a whole number of at least 1")
    return value


def number(raw: Mapping[str, Any], name: str, where: str, default: float) -> float:
    value = raw.get(name)
    if value is None:
        return default
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
        raise CheckpointError(f"{where}: {name} is {value!r}, expected a finite number above 0")
    return float(value)


def rope_settings(raw: Mapping[str, Any], where: str) -> tuple[float, RopeScaling]:
    """theta and scaling, from `rope_parameters` (transformers 5) or `rope_theta` with `rope_scaling` (before)."""
    fields: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        given = raw.get(name) or {}
        if not isinstance(given, Mapping):
            raise CheckpointError(f"{where}: {name} is {given!r}, expected an object")
        fields.update(given)
    theta = number(fields, "rope_theta", where, number(raw, "rope_theta", where, 10000.0))
    kind = str(fields.get("rope_type", fields.get("type", "default")))
    if kind not in SCALINGS:
        raise UnknownArchitectureError(
            f"{where}: rope scaling {kind!r} is not implemented; known: {', '.join(SCALINGS)}"
        )
    return theta, _scaling(kind, fields, _trained_positions(kind, raw, fields, where), where)


def _trained_positions(kind: str, raw: Mapping[str, Any], fields: Mapping[str, Any], where: str) -> int:
    """The context length of pretraining: of the model itself for `dynamic`, else what the scaling says."""
    default = 8192 if kind == "llama3" else positive(raw, "max_position_embeddings", where)
    if kind == "dynamic":
        return default
    given = raw.get("original_max_position_embeddings", default)
    return positive(fields, "original_max_position_embeddings", where, default=given)


def _scaling(kind: str, fields: Mapping[str, Any], trained: int, where: str) -> RopeScaling:
    optional = {
        name: None if fields.get(name) is None else number(fields, name, where, 1.0)
        for name in ("attention_factor", "mscale", "mscale_all_dim")
    }
    return RopeScaling(
        kind=kind,
        factor=number(fields, "factor", where, 1.0),
        low_freq_factor=number(fields, "low_freq_factor", where, 1.0),
        high_freq_factor=number(fields, "high_freq_factor", where, 4.0),
        original_max_position=trained,
        beta_fast=number(fields, "beta_fast", where, 32.0),
        beta_slow=number(fields, "beta_slow", where, 1.0),
        truncate=bool(fields.get("truncate", True)),
        **optional,
    )


def window_settings(raw: Mapping[str, Any], family: str, layers: int, where: str) -> tuple[int | None, ...]:
    """The window of each layer, or None where a layer sees all positions.

    Llama has none. Mistral has one on every layer when `sliding_window` is set. Qwen needs `use_sliding_window`, and
    then has it on the layers that `layer_types` names, else from `max_window_layers` on (Qwen3-MoE: on all).
    Raises UnknownArchitectureError for a layer type that is not known.
    """
    on = family == "mistral" or (family.startswith("qwen") and raw.get("use_sliding_window", False))
    if family == "llama" and raw.get("sliding_window"):
        raise UnknownArchitectureError(f"{where}: sliding_window has no meaning in a {family} decoder")
    kinds = raw.get("layer_types")
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != layers:
            raise CheckpointError(f"{where}: layer_types is {kinds!r}, expected one name for each of {layers} layers")
        unknown = [kind for kind in kinds if kind not in ("full_attention", "sliding_attention")]
        if unknown:
            raise UnknownArchitectureError(f"{where}: layer type {unknown[0]!r} is not implemented")
    if not on or raw.get("sliding_window") is None:
        if kinds is not None and "sliding_attention" in kinds:
            raise CheckpointError(f"{where}: layer_types names sliding_attention, but no sliding_window is in force")
        return (None,) * layers
    window = positive(raw, "sliding_window", where)
    if kinds is not None:
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    first = 0
    if family in ("qwen2", "qwen3"):
        first = _count(raw, "max_window_layers", where, 28)
    return tuple(window if index >= first else None for index in range(layers))


def expert_settings(raw: Mapping[str, Any], layers: int, where: str) -> ExpertConfig | None:
    """The mixture of experts of a Qwen3-MoE model; None when no layer has one.

    Layer i has experts when i + 1 is a multiple of `decoder_sparse_step` and `mlp_only_layers` does not name it.
    """
    name = "num_experts" if raw.get("num_experts") is not None else "num_local_experts"
    count = _count(raw, name, where, 128)
    if _count(raw, "num_local_experts", where, count) != count:
        raise CheckpointError(f"{where}: num_experts is {count}, num_local_experts {raw['num_local_experts']}")
    step = positive(raw, "decoder_sparse_step", where, default=1)
    dense = raw.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(index, int) for index in dense):
        raise CheckpointError(f"{where}: mlp_only_layers is {dense!r}, expected a list of layer numbers")
    sparse = tuple(index for index in range(layers) if count and index not in dense and (index + 1) % step == 0)
    if not sparse:
        return None
    top_k = positive(raw, "num_experts_per_tok", where, default=8)
    if top_k > count:
        raise CheckpointError(f"{where}: num_experts_per_tok is {top_k} of num_experts {count}")
    return ExpertConfig(
        count=count,
        top_k=top_k,
        intermediate=positive(raw, "moe_intermediate_size", where, default=768),
        renormalise=bool(raw.get("norm_topk_prob", False)),
        layers=sparse,
    )


def _count(raw: Mapping[str, Any], name: str, where: str, default: int) -> int:
    value = raw.get(name)
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise CheckpointError(f"{where}: {name} is {value!r}, expected a whole number of at least 0")
    return value
