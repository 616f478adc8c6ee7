"""Records what vLLM did: samples, log-probabilities, settings in force, weights held.

    watch = attach(llm, engine="rollout-0")          # an LLM, LLMEngine or AsyncLLM
    llm.generate(...)                                 # recorded
    watch.weights_loaded("step-7")                    # digest of what the workers hold

Nothing is imported until a name is used: vLLM loads this package's plugin entry point in every one of its processes.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlk_ledger_sdk.integrations.vllm.attach import attach
    from rlk_ledger_sdk.integrations.vllm.plugin import enable
    from rlk_ledger_sdk.integrations.vllm.watch import Watch

__all__ = ["Watch", "attach", "enable"]

_PLACES = {"attach": "attach", "enable": "plugin", "Watch": "watch"}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    module = importlib.import_module(f"{__name__}.{_PLACES[name]}")
    return getattr(module, name)
