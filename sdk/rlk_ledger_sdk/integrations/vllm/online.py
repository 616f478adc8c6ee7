"""AsyncLLM, and with it the OpenAI server."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from rlk_ledger_sdk.guard import guarded
from rlk_ledger_sdk.integrations.vllm.calls import finishes, load_path, moves_weights
from rlk_ledger_sdk.integrations.vllm.watch import Watch


class _Starting:
    """Reads the engine before its first request, and records what is held before the first use of a new version."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._lock: asyncio.Lock | None = None

    async def __call__(self) -> None:
        watch = self._watch
        if not watch.behind:
            return
        self._lock = self._lock or asyncio.Lock()
        async with self._lock:
            with guarded("vllm engine"):
                await watch.begin_async()


def wrap(watch: Watch) -> None:
    """Wraps the engine object's own methods; each calls the original and passes on what it gave."""
    engine, put = watch.front.engine, watch.wraps.put
    started = _Starting(watch)
    put(engine, "generate", lambda original: _generating(watch, started, original))
    put(engine, "collective_rpc", lambda original: _calling(watch, started, original))
    put(engine, "add_lora", lambda original: _adapting(watch, original))
    put(engine, "remove_lora", lambda original: _unadapting(watch, original))
    put(engine, "update_weight_version", lambda original: _naming(watch, original))
    put(engine, "reset_prefix_cache", lambda original: _flushing(watch, original))


def _generating(watch: Watch, started: _Starting, original: Callable[..., Any]) -> Callable[..., Any]:
    async def generate(
        prompt: Any, sampling_params: Any, request_id: str, *args: Any, **kwargs: Any
    ) -> AsyncIterator[Any]:
        await started()
        with guarded("vllm request"):
            watch.in_flight.add(request_id, watch.request(sampling_params))
        outputs = original(prompt, sampling_params, request_id, *args, **kwargs)
        last = None
        try:
            async for output in outputs:
                watch.notice()
                if not watch.ready:
                    await started()
                with guarded("vllm outputs"):
                    watch.take(output)
                last = output
                yield output
        finally:
            with guarded("vllm outputs"):
                if last is not None and not last.finished:
                    watch.cut(last)
                watch.in_flight.drop(request_id)
            await outputs.aclose()

    return generate


def _calling(watch: Watch, started: _Starting, original: Callable[..., Any]) -> Callable[..., Any]:
    async def collective_rpc(method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None) -> Any:
        if not moves_weights(method):
            return await original(method, timeout, args, kwargs)
        if watch.versions.must_settle_first:
            await started()
        result = await original(method, timeout, args, kwargs)
        with guarded("vllm weights"):
            watch.versions.loaded(load_path(kwargs), finishing=finishes(method))
        return result

    return collective_rpc


def _adapting(watch: Watch, original: Callable[..., Any]) -> Callable[..., Any]:
    async def add_lora(lora_request: Any) -> Any:
        done = await original(lora_request)
        watch.adapter_loaded(lora_request)
        return done

    return add_lora


def _unadapting(watch: Watch, original: Callable[..., Any]) -> Callable[..., Any]:
    async def remove_lora(lora_id: int) -> Any:
        done = await original(lora_id)
        watch.adapter_removed(lora_id)
        return done

    return remove_lora


def _naming(watch: Watch, original: Callable[..., Any]) -> Callable[..., Any]:
    async def update_weight_version(new_version: str) -> Any:
        result = await original(new_version)
        watch.versions.named(new_version)
        return result

    return update_weight_version


def _flushing(watch: Watch, original: Callable[..., Any]) -> Callable[..., Any]:
    async def reset_prefix_cache(*args: Any, **kwargs: Any) -> Any:
        done = await original(*args, **kwargs)
        if done:
            watch.versions.flushed()
        return done

    return reset_prefix_cache
