"""Low-rank adapters (LoRA) as PEFT stores them: `adapter_config.json` and `adapter_model.safetensors`.

Merged, W' = W + s B A is rounded to one dtype before anything is computed; unmerged, y = W x + s B (A x), each product
rounded to the compute dtype, as engines that serve adapters do. s = alpha / r, or alpha / sqrt(r) (rslora).

Anything that would need other arithmetic (DoRA, trained biases, other kinds of adapters) is refused by name. Written
after the file format of PEFT 0.17 and Hu et al. 2021, Kalajdzievski 2023 (rslora).

r rank, O outputs, K contraction of the adapted projection.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file

from rlk_ledger_kernels.dtypes import DType, torch_dtype
from rlk_ledger_kernels.probe import using_threads
from rlk_ledger_replay.checkpoint import Checkpoint, CheckpointError, ModelConfig, expected_shapes
from rlk_ledger_sdk.weights import state_digest

How = Literal["merged", "unmerged"]

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_NAME = re.compile(r"(?:base_model\.model\.)?(model\.layers\.\d+\.[\w.]+)\.lora_([AB])\.weight")
_TOLD = frozenset(
    (
        *("peft_type", "r", "lora_alpha", "use_rslora", "target_modules", "bias", "base_model_name_or_path"),
        *("revision", "task_type", "inference_mode", "auto_mapping", "lora_dropout", "peft_version", "layers_pattern"),
        *("runtime_config", "megatron_config", "megatron_core", "qalora_group_size", "init_lora_weights"),
        *("layers_to_transform", "exclude_modules", "loftq_config", "eva_config", "corda_config", "arrow_config"),
        *("lora_ga_config", "ensure_weight_tying"),
    )
)
"""Fields that are read, or that change no number once the adapter is trained."""
_SHIFTED = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Initialisations that change the base weights: the published base is then not what the adapter belongs to."""


@dataclass(frozen=True)
class LowRank:
    """One projection's pair: a_rK [r, K], b_Or [O, r]."""

    a_rK: torch.Tensor
    b_Or: torch.Tensor


@dataclass(frozen=True)
class Adapter:
    """A checked adapter: pairs by the name of the projection (`model.layers.0.self_attn.q_proj`), and their scale s."""

    pairs: Mapping[str, LowRank]
    scale: float
    digests: frozenset[str]
    """`sum64x2` over its tensors, under each way their names are written."""

    @property
    def live(self) -> str:
        """One digest of what was read, to compare another reading with."""
        return min(self.digests)


@dataclass(frozen=True)
class Adapted:
    """Which adapter, and how it is applied. dtype: what merged weights are rounded to; None for the base's own.

    digest: `Adapter.live` as checked before, None where nobody checked.
    """

    folder: Path
    how: How
    dtype: DType | None = None
    digest: str | None = None

    def load(self, config: ModelConfig) -> Adapter:
        """Reads it; raises CheckpointError, also when it changed since it was checked."""
        adapter = load_adapter(self.folder, config)
        if self.digest is not None and adapter.live != self.digest:
            raise CheckpointError(f"{self.folder}: the adapter changed after it was checked; nothing is computed on it")
        return adapter


def load_adapter(folder: Path, config: ModelConfig, name: str = "default") -> Adapter:
    """Reads and checks an adapter for the projections of `config`; name: what its tensors are called in live models.

    Raises CheckpointError naming the field that is not implemented, or the tensor that is missing, misshapen or has no
    place.
    """
    settings = _settings(folder / "adapter_config.json")
    rank, scale = _scale(settings, folder)
    file = folder / "adapter_model.safetensors"
    try:
        tensors = load_file(file)
    except Exception as error:
        raise CheckpointError(f"{file}: cannot be read as safetensors ({error})") from None
    halves: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        found = _NAME.fullmatch(key)
        if found is None:
            raise CheckpointError(f"{file}: tensor {key} is no lora_A or lora_B weight of a projection")
        halves.setdefault(found[1], {})[found[2]] = tensor
    pairs = {place: _pair(place, two, rank, config, file) for place, two in halves.items()}
    _complete(settings, pairs, config, file)
    return Adapter(pairs, scale, _digests(tensors, name))


def apply_adapter(checkpoint: Checkpoint, adapter: Adapter, dtype: DType | None = None) -> Checkpoint:
    """The checkpoint with W + s B A in every adapted projection.

    The product is computed in float32, rounded to `dtype` (the weight's own when None) and added in it, as a trainer
    that merges does. Tensors that are not adapted are shared with the base.
    """
    tensors = dict(checkpoint.tensors)
    with using_threads(1), torch.no_grad():
        for place, pair in adapter.pairs.items():
            weight_OK = tensors[f"{place}.weight"]
            wanted = weight_OK.dtype if dtype is None else torch_dtype(dtype)
            delta_OK = (pair.b_Or.float() @ pair.a_rK.float()) * adapter.scale
            tensors[f"{place}.weight"] = weight_OK.to(wanted) + delta_OK.to(wanted)
    return Checkpoint(checkpoint.config, tensors)


def _settings(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}); pass an adapter folder of PEFT") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: is not JSON ({error})") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: holds a {type(found).__name__}, expected an object")
    if found.get("peft_type") != "LORA":
        raise CheckpointError(f"{path}: peft_type {found.get('peft_type')!r} is not implemented, only LORA")
    if found.get("bias", "none") != "none":
        raise CheckpointError(f"{path}: bias {found['bias']!r} is not implemented, only none")
    if found.get("use_dora"):
        raise CheckpointError(f"{path}: use_dora (DoRA) is not implemented, only plain and rank-stabilised LoRA")
    started = found.get("init_lora_weights")
    if isinstance(started, str) and started.lower().startswith(_SHIFTED):
        raise CheckpointError(f"{path}: init_lora_weights {started!r} changes the base weights; it is not implemented")
    for field, value in found.items():
        if field not in _TOLD and value not in (None, False, "none") and value not in ([], {}, ""):
            raise CheckpointError(f"{path}: {field} {value!r} is not implemented")
    return found


def _scale(settings: Mapping[str, Any], folder: Path) -> tuple[int, float]:
    rank, alpha = settings.get("r"), settings.get("lora_alpha", 8)
    if type(rank) is not int or rank < 1:
        raise CheckpointError(f"{folder}/adapter_config.json: r is {rank!r}, expected a positive integer")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise CheckpointError(f"{folder}/adapter_config.json: lora_alpha is {alpha!r}, expected a number")
    return rank, alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)


def _pair(place: str, halves: Mapping[str, torch.Tensor], rank: int, config: ModelConfig, file: Path) -> LowRank:
    wanted = expected_shapes(config).get(f"{place}.weight")
    if wanted is None or place.rpartition(".")[2] not in PROJECTIONS or ".experts." in place:
        raise CheckpointError(f"{file}: {place} is no projection an adapter is implemented for in this model")
    shapes = {"A": (rank, wanted[1]), "B": (wanted[0], rank)}
    for half, shape in shapes.items():
        if half not in halves:
            raise CheckpointError(f"{file}: tensor {place}.lora_{half}.weight is missing")
        found = halves[half]
        if tuple(found.shape) != shape or not found.is_floating_point():
            told = f"{found.dtype} {list(found.shape)}"
            raise CheckpointError(f"{file}: tensor {place}.lora_{half}.weight is {told}, expected {list(shape)}")
    return LowRank(halves["A"], halves["B"])


def _complete(settings: Mapping[str, Any], pairs: Mapping[str, LowRank], config: ModelConfig, file: Path) -> None:
    """Refuses an adapter that lacks a projection its own configuration targets, or holds one it does not."""
    targets = settings.get("target_modules")
    if not pairs:
        raise CheckpointError(f"{file}: holds no adapted projection")
    if not isinstance(targets, list) or settings.get("layers_to_transform") is not None:
        return  # a pattern or a choice of layers: what is there was checked, what else was meant cannot be known
    for name in expected_shapes(config):
        place = name.removesuffix(".weight")
        targeted = any(place == one or place.endswith(f".{one}") for one in targets)
        excluded = settings.get("exclude_modules")
        if targeted and not excluded and place not in pairs and place.rpartition(".")[2] in PROJECTIONS:
            raise CheckpointError(f"{file}: {place} is in target_modules and has no lora_A and lora_B")
        if place in pairs and not targeted:
            raise CheckpointError(f"{file}: {place} is adapted and not in target_modules")


def _digests(tensors: Mapping[str, torch.Tensor], name: str) -> frozenset[str]:
    """Digests under the names of the file, and under those a live model has, with and without PEFT's wrapper."""
    live = {re.sub(r"\.lora_([AB])\.", rf".lora_\1.{name}.", key): tensor for key, tensor in tensors.items()}
    bare = {key.removeprefix("base_model.model."): tensor for key, tensor in live.items()}
    short = {key.removeprefix("base_model.model."): tensor for key, tensor in tensors.items()}
    return frozenset(state_digest(named)[0] for named in (dict(tensors), live, bare, short))
