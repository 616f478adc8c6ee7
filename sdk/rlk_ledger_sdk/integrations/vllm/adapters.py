"""LoRA adapters as a vLLM worker holds them, by PEFT's names; runs inside the worker."""

from collections.abc import Iterator, Sequence
from typing import Any

from rlk_ledger_schemas.fingerprints import sum64x2_digest
from rlk_ledger_sdk.weights import sum64x2

PREFIX = "base_model.model."
SCALED = "sum64x2scaled"
"""Digest algorithm of an adapter whose scale cannot be taken out exactly: it compares with nothing published."""


def held(worker: Any, wire_dtype: Any | None) -> dict[str, str]:
    """Digest by adapter id of every adapter registered in this worker; empty without LoRA.

    vLLM multiplies `lora_B` by alpha / rank as it loads it; that is divided out again, which is exact for powers of
    two, so that the digest equals `state_digest` of the adapter file's tensors.
    """
    manager = getattr(getattr(worker.model_runner, "lora_manager", None), "_adapter_manager", None)
    if manager is None:
        return {}
    fused = getattr(worker.model_runner.get_model(), "packed_modules_mapping", None) or {}
    return {str(number): _digest(adapter, fused, wire_dtype) for number, adapter in manager.list_adapters().items()}


def _digest(adapter: Any, fused: dict[str, list[str]], wire_dtype: Any | None) -> str:
    sums, exact = [], True
    for module, layer in adapter.loras.items():
        for name, a, b, alpha in _parts(module, layer, fused):
            scale = alpha / adapter.rank if alpha else 1.0
            exact = exact and scale.hex().partition("p")[0] == "0x1.0000000000000"
            for leaf, tensor in (("lora_A", a), ("lora_B", b / scale if scale != 1.0 else b)):
                tensor = tensor if wire_dtype is None else tensor.to(wire_dtype)
                sums.append(sum64x2(f"{PREFIX}{name}.{leaf}.weight", tensor))
    digest = sum64x2_digest(sums)
    return digest if exact else f"{SCALED}:{digest.partition(':')[2]}"


def _parts(module: str, layer: Any, fused: dict[str, list[str]]) -> Iterator[tuple[str, Any, Any, float]]:
    """(canonical module, A, B, alpha) of a layer; a fused one holds a list with None where the adapter has none."""
    if not isinstance(layer.lora_a, list):
        yield module, layer.lora_a, layer.lora_b, layer.lora_alpha
        return
    parent, _, last = module.rpartition(".")
    names: Sequence[str] = fused.get(last, [last])
    for name, a, b, alpha in zip(names, layer.lora_a, layer.lora_b, layer.lora_alphas):
        if a is not None and b is not None:
            yield f"{parent}.{name}" if parent else name, a, b, alpha
