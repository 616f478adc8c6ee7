"""What a vLLM worker really runs, read from its live model, groups and kernels; runs inside the worker."""

import sys
from collections.abc import Iterator
from typing import Any

from rlk_ledger_sdk.integrations.vllm.rounding import norm_contract


def describe(worker: Any) -> dict[str, Any]:
    """Contracts, settings and collectives of one worker, as plain values; what is not visible is left out.

    Returns {rank, tp_rank, logprob, contracts: {kind: body}, settings: {path: value}, collectives: [fields]}.
    """
    runner = worker.model_runner
    model = runner.get_model()
    return {
        "rank": worker.rank,
        "logprob": _logprob(worker, model),
        "contracts": _contracts(worker, model),
        "settings": _settings(worker, model),
        "collectives": _collectives(),
    }


def dtype_name(dtype: Any) -> str:
    """`bfloat16` for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def first(model: Any, *fields: str) -> Any | None:
    """The first module of `model` that has all `fields`."""
    return next((m for m in model.modules() if all(hasattr(m, f) for f in fields)), None)


def _logprob(worker: Any, model: Any) -> dict[str, Any]:
    """The part of the logprob contract that the live model decides."""
    compute = dtype_name(worker.model_runner.dtype)
    out: dict[str, Any] = {"compute_dtype": compute}
    processor = first(model, "org_vocab_size", "logits_as_input", "soft_cap")
    if processor is not None:
        processor = getattr(processor, "base_layer", processor)  # a LoRA wrapper shows some of its fields only
        head = dtype_name(getattr(processor, "head_dtype", None) or compute)
        out.update(head_dtype=head, logits_dtype=head)
        # The processor cuts the padded columns off before any softmax sees them.
        out.update(padded_vocab=int(processor.org_vocab_size), padded_vocab_policy="include")
        if processor.soft_cap is not None:
            out["logits_soft_cap"] = float(processor.soft_cap)
        if processor.scale != 1.0:
            out["logits_scale"] = float(processor.scale)
    return out


def _contracts(worker: Any, model: Any) -> dict[str, dict[str, Any]]:
    out: dict[str, dict[str, Any]] = {}
    eager = int(worker.vllm_config.compilation_config.mode or 0) == 0
    norm = next((m for m in model.modules() if type(m).__name__ == "RMSNorm"), None)
    if norm is not None:
        out["norm"] = norm_contract(norm, worker.model_runner.dtype, probe=eager)
    attention = _attention_layer(model)
    if attention is not None:
        body = {
            "mode": "causal" if getattr(attention, "attn_type", "decoder") == "decoder" else None,
            "softmax_scale": float(attention.impl.scale),
            "output_dtype": dtype_name(worker.model_runner.dtype),
        }
        out["attention"] = {name: value for name, value in body.items() if value is not None}
    rope = first(model, "rotary_dim", "cos_sin_cache", "is_neox_style", "base")
    if rope is not None:
        out["rope"] = {
            "theta": float(rope.base),
            "rotary_dim": int(rope.rotary_dim),
            "layout": "half" if rope.is_neox_style else "interleaved",
            "table_dtype": dtype_name(rope.cos_sin_cache.dtype),
        }
    return out


def _attention_layer(model: Any) -> Any | None:
    return first(model, "impl", "kv_cache_dtype", "num_kv_heads")


def _settings(worker: Any, model: Any) -> dict[str, Any]:
    """Settings in force, each from the object that acts on it."""
    runner, config = worker.model_runner, worker.vllm_config
    dtypes = sorted({dtype_name(p.dtype) for p in model.parameters()})
    out: dict[str, Any] = {
        "model.dtype": "+".join(dtypes),
        "model.quantization": _quantisation(model),
        "model.max_model_len": int(runner.max_model_len),
        "scheduler.max_num_batched_tokens": int(runner.max_num_tokens),
        "speculative.enabled": hasattr(runner, "drafter"),
        "compilation.enforce_eager": _eager(config, model),
        "batch_invariant": _batch_invariant(),
    }
    mode = getattr(getattr(runner, "sampler", None), "logprobs_mode", None)
    if mode is not None:
        out["sampling.logprobs_mode"] = str(mode)
    attention = _attention_layer(model)
    if attention is not None:
        out["attention.backend"] = getattr(getattr(attention, "backend", None), "name", type(attention.impl).__name__)
        cache = attention.kv_cache
        if hasattr(cache, "dtype"):
            out["kv_cache.dtype"] = dtype_name(cache.dtype)
    groups = getattr(getattr(runner, "kv_cache_config", None), "kv_cache_groups", None) or ()
    sizes = sorted({int(group.kv_cache_spec.block_size) for group in groups})
    if len(sizes) == 1:
        out["kv_cache.block_size"] = sizes[0]
    out.update(_parallel())
    return out


def _quantisation(model: Any) -> str:
    names = {type(m.quant_method).__name__ for m in model.modules() if getattr(m, "quant_method", None) is not None}
    active = sorted(name for name in names if not name.startswith("Unquantized"))
    return "+".join(active) or "none"


def _eager(config: Any, model: Any) -> bool:
    compiled = [m for m in model.modules() if getattr(m, "do_not_compile", True) is False]
    return not compiled and int(config.compilation_config.mode or 0) == 0


def _groups() -> Iterator[tuple[str, Any]]:
    state = sys.modules["vllm.distributed.parallel_state"]
    for name, get in (("tp", state.get_tp_group), ("pp", state.get_pp_group), ("dp", state.get_dp_group)):
        yield name, get()


def _parallel() -> dict[str, Any]:
    groups = dict(_groups())
    out: dict[str, Any] = {
        "parallel.tensor": groups["tp"].world_size,
        "parallel.pipeline": groups["pp"].world_size,
        "parallel.data": groups["dp"].world_size,
    }
    custom = getattr(groups["tp"].device_communicator, "ca_comm", None)
    out["parallel.custom_all_reduce"] = custom is not None and not custom.disabled
    return out


def _collectives() -> list[dict[str, Any]]:
    """One entry per group with more than one rank: the collectives vLLM's layers issue on it."""
    out: list[dict[str, Any]] = []
    for name, group in _groups():
        if group.world_size < 2:
            continue
        communicator = group.device_communicator
        custom = getattr(communicator, "ca_comm", None)
        if custom is not None and not custom.disabled:
            backend, order = "custom_all_reduce", "global_rank_index"
        elif type(getattr(communicator, "dist_module", None)).__name__ == "_CPUSHMDistributed":
            # Two summands have one order; of more, the shared-memory kernel does not promise one.
            backend, order = "cpu_shared_memory", "global_rank_index" if group.world_size == 2 else "arrival"
        else:
            backend = sys.modules["torch"].distributed.get_backend(group.device_group)
            order = "nccl_algorithm" if backend == "nccl" else "arrival"
        fields = {"op": "all_reduce", "group": name, "group_size": group.world_size, "reduction_order": order}
        out.append({**fields, "backend": str(backend)})
    return out


def _batch_invariant() -> bool:
    """Whether products really do not depend on the batch: the mode is on, and rows of a product agree.

    The flag alone is no evidence: on devices its kernels do not cover, it is accepted and nothing changes.
    """
    module = sys.modules.get("vllm.model_executor.determinism.batch_invariant")
    if module is None or not getattr(module, "_batch_invariant_MODE", False):
        return False
    torch = sys.modules["torch"]
    device = dict(_groups())["tp"].device
    values = torch.arange(64 * 512, device=device, dtype=torch.float32)
    try:
        return all(_rows_agree(values, dtype) for dtype in (torch.float32, torch.bfloat16))
    except Exception:  # a mode that its kernels cannot serve is not in force
        return False


def _rows_agree(values: Any, dtype: Any) -> bool:
    """Whether each of some rows of a product is the same computed alone."""
    torch = sys.modules["torch"]
    left = torch.sin(values).reshape(64, 512).to(dtype)
    right = torch.cos(values * 0.37).reshape(512, 64).to(dtype)
    whole = torch.mm(left, right)
    return all(torch.equal(whole[i : i + 1], torch.mm(left[i : i + 1], right)) for i in (0, 7, 63))
