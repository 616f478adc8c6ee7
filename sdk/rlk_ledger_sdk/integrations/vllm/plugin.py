"""The entry point that vLLM calls in its main process, engine core and workers."""

import os

VARIABLE = "RLK_VLLM"
_active = False


def register() -> None:
    """Does nothing, and imports nothing, unless the environment variable RLK_VLLM asks for it (any value but 0)."""
    global _active
    if _active or os.environ.get(VARIABLE) in (None, "", "0"):
        return
    from rlk_ledger_sdk.integrations.vllm import automatic

    _active = True
    automatic.install()


def enable() -> None:
    """Asks for the plugin in this process and in the processes vLLM starts from now on: call it before the engine."""
    os.environ[VARIABLE] = "1"
    register()


def active() -> bool:
    """Whether the plugin has been asked for in this process, and so in the processes vLLM started from it."""
    return _active
