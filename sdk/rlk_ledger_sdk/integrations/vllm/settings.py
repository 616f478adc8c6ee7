"""Settings of a vLLM engine as requested, materialised in its configuration, and in force."""

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from rlk_ledger_sdk.knobs import UNOBSERVABLE, read_back

WORKER = "read in the worker"
SCHEDULER = "read from the running scheduler"
_NOWHERE = "the engine shows it nowhere"


class Setting(NamedTuple):
    """One setting: vLLM's name for it among engine arguments, the part of the configuration that holds it."""

    path: str
    argument: str
    part: str
    field: str
    lifecycle: str = "engine"


IN_WORKERS = (
    Setting("model.dtype", "dtype", "model_config", "dtype"),
    Setting("model.quantization", "quantization", "model_config", "quantization"),
    Setting("model.max_model_len", "max_model_len", "model_config", "max_model_len"),
    Setting("sampling.logprobs_mode", "logprobs_mode", "model_config", "logprobs_mode"),
    Setting("attention.backend", "attention_backend", "attention_config", "backend"),
    Setting("kv_cache.dtype", "kv_cache_dtype", "cache_config", "cache_dtype"),
    Setting("kv_cache.block_size", "block_size", "cache_config", "block_size"),
    Setting("compilation.enforce_eager", "enforce_eager", "model_config", "enforce_eager"),
    Setting("parallel.tensor", "tensor_parallel_size", "parallel_config", "tensor_parallel_size", "process_group"),
    Setting(
        "parallel.pipeline", "pipeline_parallel_size", "parallel_config", "pipeline_parallel_size", "process_group"
    ),
    Setting("parallel.data", "data_parallel_size", "parallel_config", "data_parallel_size", "process_group"),
)
IN_SCHEDULER = (
    Setting("scheduler.chunked_prefill", "enable_chunked_prefill", "scheduler_config", "enable_chunked_prefill"),
    Setting("scheduler.max_num_seqs", "max_num_seqs", "scheduler_config", "max_num_seqs"),
    Setting("scheduler.max_num_batched_tokens", "max_num_batched_tokens", "scheduler_config", "max_num_batched_tokens"),
    Setting("scheduler.async", "async_scheduling", "scheduler_config", "async_scheduling"),
    Setting("kv_cache.prefix_caching", "enable_prefix_caching", "cache_config", "enable_prefix_caching"),
)
_SAME = {"bfloat16": ("torch.bfloat16",), "float16": ("torch.float16", "half"), "float32": ("torch.float32", "float")}


def record_all(config: Any, requested: Mapping[str, Any], seen: Mapping[str, Any]) -> None:
    """Records every setting.

    config: vLLM's. requested: engine arguments the user gave, by vLLM's names. seen: what is in force by path, from one
    worker and the scheduler; what is missing there is unobservable.
    """
    for setting in IN_WORKERS:
        _one(config, setting, requested, seen.get(setting.path, UNOBSERVABLE), WORKER)
    _special(config, requested, seen)
    for setting in IN_SCHEDULER:
        _one(config, setting, requested, seen.get(setting.path, UNOBSERVABLE), SCHEDULER)


def _one(config: Any, setting: Setting, requested: Mapping[str, Any], actual: Any, evidence: str) -> None:
    materialised = _plain(getattr(getattr(config, setting.part, None), setting.field, None))
    wanted = _plain(requested.get(setting.argument))
    if actual is not UNOBSERVABLE and _same(wanted, actual):
        wanted = actual
    read_back(
        setting.path,
        requested=wanted,
        materialized=materialised,
        actual=actual,
        evidence=_NOWHERE if actual is UNOBSERVABLE else evidence,
        lifecycle=setting.lifecycle,
    )


def _special(config: Any, requested: Mapping[str, Any], seen: Mapping[str, Any]) -> None:
    """Settings whose request, configuration and actual value are of different shapes."""
    parallel = config.parallel_config
    wanted = requested.get("disable_custom_all_reduce")
    rows = (
        (
            "parallel.custom_all_reduce",
            None if wanted is None else not wanted,
            not parallel.disable_custom_all_reduce,
            "process_group",
        ),
        (
            "speculative.enabled",
            None if requested.get("speculative_config") is None else True,
            config.speculative_config is not None,
            "engine",
        ),
        ("batch_invariant", _asked("VLLM_BATCH_INVARIANT"), _asked("VLLM_BATCH_INVARIANT"), "process"),
    )
    for path, asked, materialised, lifecycle in rows:
        read_back(
            path,
            requested=asked,
            materialized=materialised,
            actual=seen.get(path, UNOBSERVABLE),
            evidence=WORKER if path in seen else _NOWHERE,
            lifecycle=lifecycle,
        )
    read_back(
        "sampling.seed",
        requested=requested.get("seed"),
        materialized=config.model_config.seed,
        actual=UNOBSERVABLE,
        evidence=_NOWHERE,
        lifecycle="engine",
    )


def _asked(variable: str) -> bool:
    return os.environ.get(variable, "0").lower() in ("1", "true")


def _same(wanted: Any, actual: Any) -> bool:
    return wanted == actual or wanted in _SAME.get(str(actual), ())


def _plain(value: Any) -> Any:
    """A setting as JSON holds it: enums by name, dtypes without their module."""
    if value is None or isinstance(value, bool | int | float):
        return value
    name = getattr(value, "name", None)
    return name if isinstance(name, str) else str(value).removeprefix("torch.")
