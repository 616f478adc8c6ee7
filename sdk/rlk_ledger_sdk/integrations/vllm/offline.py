"""LLM and LLMEngine: the methods through which requests, outputs and weights pass."""

from collections.abc import Callable
from typing import Any

from rlk_ledger_sdk.guard import guarded
from rlk_ledger_sdk.integrations.vllm.calls import finishes, load_path, moves_weights
from rlk_ledger_sdk.integrations.vllm.names import request_of
from rlk_ledger_sdk.integrations.vllm.watch import Watch


def wrap(watch: Watch) -> None:
    """Wraps the engine object's own methods; each calls the original first and returns what it returned."""
    engine, put = watch.front.engine, watch.wraps.put
    put(engine, "add_request", lambda original: _adding(watch, original))
    put(engine, "step", lambda original: _stepping(watch, original))
    put(engine, "abort_request", lambda original: _aborting(watch, original))
    put(engine, "collective_rpc", lambda original: _calling(watch, original))
    put(engine, "add_lora", lambda original: _adapting(watch, original))
    put(engine, "remove_lora", lambda original: _unadapting(watch, original))
    put(engine, "set_weight_version", lambda original: _naming(watch, original))
    put(engine, "reset_prefix_cache", lambda original: _flushing(watch, original))
    if watch.front.core is not None:
        put(watch.front.core.scheduler, "schedule", watch.steps.wrap)


def _adding(watch: Watch, original: Callable[..., Any]) -> Callable[..., Any]:
    def add_request(request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        with guarded("vllm engine"):
            watch.begin()
        with guarded("vllm request"):
            if hasattr(params, "output_kind"):
                watch.in_flight.add(request_id, watch.request(params))
        try:
            return original(request_id, prompt, params, *args, **kwargs)
        except Exception:  # the engine took nothing in
            watch.in_flight.drop(request_id)
            raise

    return add_request


def _stepping(watch: Watch, original: Callable[..., Any]) -> Callable[..., Any]:
    def step(*args: Any, **kwargs: Any) -> Any:
        outputs = original(*args, **kwargs)
        if outputs:
            with guarded("vllm engine"):
                watch.notice()
                if not watch.ready:
                    watch.begin()
            for output in outputs:
                with guarded("vllm outputs"):
                    if type(output).__name__ == "RequestOutput":
                        watch.take(output)
            with guarded("vllm weights"):
                if watch.versions.unsettled and watch.adapters:
                    watch.begin()  # an adapter is loaded by the first request that names it
        return outputs

    return step


def _aborting(watch: Watch, original: Callable[..., Any]) -> Callable[..., Any]:
    def abort_request(request_ids: Any, *args: Any, **kwargs: Any) -> Any:
        with guarded("vllm request"):
            internal = args[0] if args else kwargs.get("internal", False)
            for request_id in request_ids:
                watch.in_flight.drop(request_of(request_id) if internal else request_id)
        return original(request_ids, *args, **kwargs)

    return abort_request


def _calling(watch: Watch, original: Callable[..., Any]) -> Callable[..., Any]:
    def collective_rpc(method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None) -> Any:
        if not moves_weights(method):
            return original(method, timeout, args, kwargs)
        with guarded("vllm weights"):
            if watch.versions.must_settle_first:
                watch.begin()
        result = original(method, timeout, args, kwargs)
        with guarded("vllm weights"):
            watch.versions.loaded(load_path(kwargs), finishing=finishes(method))
        return result

    return collective_rpc


def _adapting(watch: Watch, original: Callable[..., Any]) -> Callable[..., Any]:
    def add_lora(lora_request: Any) -> Any:
        done = original(lora_request)
        watch.adapter_loaded(lora_request)
        return done

    return add_lora


def _unadapting(watch: Watch, original: Callable[..., Any]) -> Callable[..., Any]:
    def remove_lora(lora_id: int) -> Any:
        done = original(lora_id)
        watch.adapter_removed(lora_id)
        return done

    return remove_lora


def _naming(watch: Watch, original: Callable[..., Any]) -> Callable[..., Any]:
    def set_weight_version(weight_version: str) -> Any:
        result = original(weight_version)
        watch.versions.named(weight_version)
        return result

    return set_weight_version


def _flushing(watch: Watch, original: Callable[..., Any]) -> Callable[..., Any]:
    def reset_prefix_cache(*args: Any, **kwargs: Any) -> Any:
        done = original(*args, **kwargs)
        if done:
            watch.versions.flushed()
        return done

    return reset_prefix_cache
