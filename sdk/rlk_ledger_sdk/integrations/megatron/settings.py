"""Settings of a Megatron job as requested, materialised and actually in force, and its collectives."""

import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from rlk_ledger_sdk.api import record
from rlk_ledger_sdk.integrations.megatron.contracts import core_attention
from rlk_ledger_sdk.integrations.megatron.modules import Stage, dtypes_of, name_of
from rlk_ledger_sdk.integrations.megatron.place import Place
from rlk_ledger_sdk.knobs import UNOBSERVABLE, read_back

VARIABLES = (
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO",
    "NVTE_FLASH_ATTN",
    "NVTE_FUSED_ATTN",
    "NVTE_UNFUSED_ATTN",
    "NCCL_ALGO",
    "NCCL_PROTO",
    "NCCL_NVLS_ENABLE",
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_DEVICE_MAX_CONNECTIONS",
)
"""Variables that choose kernels or their order. A variable that is set is a request, not evidence."""


class Reading(NamedTuple):
    """One setting: its path, what the configuration holds, what the running engine shows, and where that was read."""

    path: str
    configured: Any
    actual: Any
    evidence: str
    lifecycle: str = "engine"


def record_settings(stage: Stage, place: Place, requested: Mapping[str, Any]) -> None:
    """Records every setting this rank can read; `requested` holds what the user asked for, by path."""
    known = set()
    for reading in readings(stage, place):
        known.add(reading.path)
        read_back(
            reading.path,
            requested=requested.get(reading.path, reading.configured),
            materialized=reading.configured,
            actual=reading.actual,
            evidence=reading.evidence,
            lifecycle=reading.lifecycle,
        )
    for path in sorted(requested.keys() - known):
        where = "asked for by the job; nothing in the engine shows it"
        read_back(path, requested=requested[path], actual=UNOBSERVABLE, evidence=where, lifecycle="engine")


def readings(stage: Stage, place: Place) -> Iterator[Reading]:
    """The settings of this rank, in a fixed order."""
    model = stage.first
    config = model.config
    yield Reading("model.dtype", name_of(config.params_dtype), dtypes_of(model), "dtypes of the live parameters")
    yield Reading("model.training_mode", None, bool(model.training), "module.training")
    for name in ("tp", "cp", "pp", "dp", "ep"):
        size = getattr(place, name).size
        yield Reading(f"parallel.{name}", _size(config, name), size, "megatron.core.parallel_state", "process_group")
    yield from _layers(stage, config)
    yield from _determinism(config)
    yield from _wrapping(stage)


def _size(config: Any, name: str) -> int | None:
    words = {"tp": "tensor_model", "cp": "context", "pp": "pipeline_model", "ep": "expert_model"}
    return getattr(config, f"{words[name]}_parallel_size", None) if name in words else None


def _layers(stage: Stage, config: Any) -> Iterator[Reading]:
    layer = next(iter(getattr(stage.first.decoder, "layers", ())), None)
    qkv = getattr(getattr(layer, "self_attention", None), "linear_qkv", None)
    for path, name in (
        ("sequence_parallel", "sequence_parallel"),
        ("gradient_accumulation_fusion", "gradient_accumulation_fusion"),
    ):
        actual = getattr(qkv, name, UNOBSERVABLE)
        where = f"linear_qkv.{name} of the first layer"
        yield Reading(path, getattr(config, name, None), actual if isinstance(actual, bool) else UNOBSERVABLE, where)
    core = core_attention(stage.first)
    backend = getattr(config, "attention_backend", None)
    yield Reading(
        "attention.module", None, UNOBSERVABLE if core is None else type(core).__name__, "class of core_attention"
    )
    yield Reading(
        "attention.backend",
        getattr(backend, "name", backend),
        "unfused" if type(core).__name__ == "DotProductAttention" else UNOBSERVABLE,
        "megatron.core's own DotProductAttention has one path; Transformer Engine chooses a kernel inside each call",
    )
    softmax = getattr(core, "scale_mask_softmax", None)
    yield Reading(
        "masked_softmax_fusion",
        getattr(config, "masked_softmax_fusion", None),
        getattr(softmax, "scaled_masked_softmax_fusion", UNOBSERVABLE),
        "core_attention.scale_mask_softmax of the first layer",
    )
    for name in ("bias_dropout_fusion", "bias_activation_fusion", "apply_rope_fusion", "cross_entropy_loss_fusion"):
        where = "the engine decides inside each call"
        yield Reading(name, getattr(config, name, None), UNOBSERVABLE, where)


def _determinism(config: Any) -> Iterator[Reading]:
    torch = sys.modules["torch"]
    actual = bool(torch.are_deterministic_algorithms_enabled())
    asked = bool(getattr(config, "deterministic_mode", False))
    yield Reading(
        "deterministic_mode", asked or None, actual, "torch.are_deterministic_algorithms_enabled()", "process"
    )
    for variable in VARIABLES:
        if variable in os.environ:
            where = "set in the environment; no engine call shows what it did"
            yield Reading(f"env.{variable}", os.environ[variable], UNOBSERVABLE, where, "process")


def _wrapping(stage: Stage) -> Iterator[Reading]:
    for wrapper in stage.wrappers:
        ddp = getattr(wrapper, "ddp_config", None)
        if ddp is None:
            continue
        fp32 = bool(ddp.grad_reduce_in_fp32)
        buffers = getattr(wrapper, "buffers", None)
        listed = buffers if isinstance(buffers, list | tuple) else ()
        held = sorted({name_of(one.grad_dtype) for one in listed if hasattr(one, "grad_dtype")})
        wanted = "float32" if fp32 else name_of(stage.first.config.params_dtype)
        actual = "+".join(held) if held else UNOBSERVABLE
        yield Reading("gradients.reduce_dtype", wanted, actual, "grad_dtype of DistributedDataParallel's buffers")
        for name in ("use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather"):
            yield Reading(f"ddp.{name}", None, bool(getattr(ddp, name, False)), "DistributedDataParallel.ddp_config")


def record_collectives(stage: Stage, place: Place, groups: Mapping[str, Any]) -> None:
    """Records the collectives a forward and a gradient reduction enter; `groups` maps tp, cp, dp to process groups.

    A gradient reduction is claimed where Megatron's own DistributedDataParallel wraps the model, and nowhere else.
    Neither gloo nor NCCL promises an order of summation: what is recorded claims none.
    """
    config = stage.first.config
    dtype = name_of(config.params_dtype)
    ops: list[tuple[str, str, int, str]] = []
    if place.tp.size > 1:
        kind = "reduce_scatter" if getattr(config, "sequence_parallel", False) else "all_reduce"
        ops.append((f"row_parallel.{kind}", "tp", place.tp.size, dtype))
        if place.last_stage:
            ops.append(("vocab_parallel_cross_entropy.all_reduce", "tp", place.tp.size, "float32"))
    if place.cp.size > 1:
        ops.append((f"attention.kv_exchange.{getattr(config, 'cp_comm_type', None)}", "cp", place.cp.size, dtype))
    reduced = any(getattr(wrapper, "ddp_config", None) is not None for wrapper in stage.wrappers)
    if reduced and place.dp.size * place.cp.size > 1:
        ops.append(("gradients.reduce", "dp", place.dp.size * place.cp.size, _gradient_dtype(stage, dtype)))
    for op, group, size, accumulate in ops:
        backend = _backend(groups[group])
        record(
            "collective.observed",
            op=op,
            group=group,
            group_size=size,
            reduction_order="nccl_algorithm" if backend == "nccl" else "arrival",
            accumulate_dtype=accumulate,
            backend=backend,
        )


def _gradient_dtype(stage: Stage, dtype: str) -> str:
    configs = [getattr(wrapper, "ddp_config", None) for wrapper in stage.wrappers]
    return "float32" if any(ddp is not None and ddp.grad_reduce_in_fp32 for ddp in configs) else dtype


def _backend(group: Any) -> str:
    return str(sys.modules["torch"].distributed.get_backend(group))
