"""Weights a live model holds: canonical names, digests, and the events that name them."""

import sys
from collections.abc import Mapping
from typing import Any

from rlk_ledger_sdk.api import record
from rlk_ledger_sdk.integrations.fsdp import is_sharded, record_weights
from rlk_ledger_sdk.integrations.torch import short_dtype
from rlk_ledger_sdk.weights import state_digest

_WRAPPERS = frozenset({"_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "base_layer"})
_ADAPTER_MARKS = ("lora_", "modules_to_save")


def canonical_name(name: str) -> str:
    """A parameter's Hugging Face name, without the parts that compile, data-parallel and PEFT wrappers add."""
    parts = [part for part in name.removeprefix("base_model.model.").split(".") if part not in _WRAPPERS]
    return ".".join(parts)


def held_tensors(model: Any) -> dict[str, Any]:
    """The tensors `model` holds now, by canonical name: a tied tensor once, under the first of its names.

    Adapter tensors of PEFT are left out (see `adapters`).
    """
    return {name: tensor for name, tensor in _named(model).items() if not _is_adapter(name)}


def adapters(model: Any) -> list[dict[str, str]]:
    """Name and digest of every adapter of a PEFT model, in order of name."""
    by_adapter: dict[str, dict[str, Any]] = {}
    for name, tensor in _named(model).items():
        if _is_adapter(name):
            parts = name.split(".")
            mark = next((i for i, part in enumerate(parts) if part.startswith(_ADAPTER_MARKS)), len(parts) - 2)
            adapter = parts[mark + 1] if mark + 1 < len(parts) - 1 else "default"
            by_adapter.setdefault(adapter, {})[name] = tensor
    return [{"name": name, "digest": state_digest(tensors)[0]} for name, tensors in sorted(by_adapter.items())]


def published(model: Any, weight_version: str, *, dtype: Any = None, **fields: Any) -> str | None:
    """Records `weights.published` with the digests of what `model` holds; returns the digest of all.

    dtype: the wire dtype floating tensors are sent in, when it is not the one they are held in. fields: more fields
    of the event (`path`, `stamp_rule` ...). Of a model that FSDP shards every rank must call it; rank 0 records.
    """
    if is_sharded(model):
        return record_weights("weights.published", model, weight_version, **fields)
    held = _in_wire_dtype(held_tensors(model), dtype)
    digest, each = state_digest(held)
    tensors = [
        {"name": name, "digest": each[name], "dtype": short_dtype(tensor.dtype), "shape": list(tensor.shape)}
        for name, tensor in held.items()
    ]
    record(
        "weights.published",
        weight_version=weight_version,
        digest=digest,
        tensor_count=len(held),
        tensors=tensors,
        adapters=adapters(model) or None,
        **fields,
    )
    return digest


def loaded(model: Any, weight_version: str, *, engine: str, **fields: Any) -> str | None:
    """Records `weights.loaded` with the digest of what `model` holds, read back; returns it.

    Of a model that FSDP shards every rank must call it; rank 0 records.
    """
    if is_sharded(model):
        return record_weights("weights.loaded", model, weight_version, engine=engine, **fields)
    held = held_tensors(model)
    digest, _ = state_digest(held)
    record(
        "weights.loaded",
        weight_version=weight_version,
        digest=digest,
        tensor_count=len(held),
        engine=engine,
        what="holds",
        adapters=adapters(model) or None,
        **fields,
    )
    return digest


def _named(model: Any) -> dict[str, Any]:
    seen: set[tuple[Any, ...]] = set()
    out: dict[str, Any] = {}
    for name, tensor in model.state_dict().items():
        if not hasattr(tensor, "detach"):
            continue
        place = (tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tuple(tensor.shape), tensor.dtype)
        if place[0] and tensor.numel() and place in seen:
            continue
        seen.add(place)
        out[canonical_name(name)] = tensor.detach()
    return out


def _is_adapter(name: str) -> bool:
    return any(part.startswith(_ADAPTER_MARKS) for part in name.split("."))


def _in_wire_dtype(held: Mapping[str, Any], dtype: Any) -> Mapping[str, Any]:
    if dtype is None:
        return held
    wire = getattr(sys.modules["torch"], dtype) if isinstance(dtype, str) else dtype
    return {name: tensor.to(wire) if tensor.is_floating_point() else tensor for name, tensor in held.items()}
