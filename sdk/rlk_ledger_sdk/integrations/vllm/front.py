"""What the front end of a vLLM engine shows of itself, for both kinds: LLM/LLMEngine and AsyncLLM."""

from typing import Any

from rlk_ledger_schemas.errors import UsageError
from rlk_ledger_sdk.integrations.vllm import plugin, worker
from rlk_ledger_sdk.integrations.vllm.scheduler import settings_in_force

_BY_NAME = {"weights": "rlk_ledger_weights", "describe": "rlk_ledger_describe"}
_SCHEDULER = "rlk_ledger_scheduler"
_BY_FUNCTION = {"weights": worker.weights_held, "describe": worker.worker_described}


class Front:
    """One engine as handed to `attach`: its object to wrap, its configuration, its workers."""

    def __init__(self, given: Any) -> None:
        """Raises UsageError for anything that is no vLLM engine."""
        self.engine = getattr(given, "llm_engine", given)
        self.is_async = hasattr(self.engine, "output_handler")
        if not hasattr(self.engine, "vllm_config") or not hasattr(self.engine, "engine_core"):
            kind = type(given)
            raise UsageError(
                f"vllm: attach() takes an LLM, LLMEngine or AsyncLLM, got {kind.__module__}.{kind.__name__}."
            )
        self.config = self.engine.vllm_config
        self.collective_rpc = self.engine.collective_rpc

    @property
    def core(self) -> Any | None:
        """The engine core when it runs in this process, else None."""
        return getattr(self.engine.engine_core, "engine_core", None)

    @property
    def workers_answer(self) -> bool:
        """Whether workers can be asked: they live here, or the plugin or the worker extension is in them."""
        named = str(self.config.parallel_config.worker_extension_cls or "")
        return self.core is not None or plugin.active() or named.endswith("vllm.worker.LedgerExtension")

    def given(self) -> dict[str, Any]:
        """The engine arguments the user gave, when the plugin was there to see them."""
        if not plugin.active():
            return {}
        from rlk_ledger_sdk.integrations.vllm import automatic

        return automatic.requested(self.config)

    def scheduler(self) -> dict[str, Any]:
        """Settings in force in the engine core's scheduler; empty where it cannot be asked (LLM, LLMEngine)."""
        if self.core is not None:
            return settings_in_force(self.core)
        return dict(self.engine.engine_core.call_utility(_SCHEDULER)) if plugin.active() else {}

    async def scheduler_async(self) -> dict[str, Any]:
        """The same of an AsyncLLM."""
        return dict(await self.engine.engine_core.call_utility_async(_SCHEDULER)) if plugin.active() else {}

    def call(self, question: str) -> tuple[Any, ...]:
        """What to pass to `collective_rpc` to ask every worker `weights` or `describe`."""
        return (_BY_FUNCTION[question],) if self.core is not None else (_BY_NAME[question],)

    @property
    def model(self) -> str:
        """The model's name or path, as configured."""
        return str(self.config.model_config.model)

    @property
    def block_size(self) -> int | None:
        """Tokens in a block of the prefix cache; None when it is off."""
        cache = self.config.cache_config
        return int(cache.block_size) if cache.enable_prefix_caching and cache.block_size else None
