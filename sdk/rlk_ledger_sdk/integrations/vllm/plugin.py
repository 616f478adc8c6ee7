"""The entry point that vLLM calls in its main process, engine core and workers."""

import os

VARIABLE = "RLK_VLLM"
"""0 or unset: nothing. Anything else: record every engine of the process; other than 1 it is the engine's name."""
WORKERS = "RLK_VLLM_WORKERS"
"""Set by `enable()` to the engine's name or 1: prepare engine cores and workers, attach to nothing by itself."""
_active = False


def register() -> None:
    """Does nothing, and imports nothing, unless RLK_VLLM or `enable()` asks for it."""
    global _active
    asked = os.environ.get(VARIABLE) not in (None, "", "0")
    if _active or not (asked or os.environ.get(WORKERS)):
        return
    from rlk_ledger_sdk.integrations.vllm import automatic

    _active = True
    automatic.install(VARIABLE if asked else WORKERS, attach_all=asked)


def enable(engine: str | None = None) -> None:
    """Prepares this process, and those vLLM starts from it, for `attach`: call it before the engine is built.

    An engine whose workers are other processes cannot be asked for digests and settings without it. engine: the
    instance name given to `attach`, for what an engine core in a process of its own records.
    """
    os.environ[WORKERS] = engine or "1"
    register()


def active() -> bool:
    """Whether the plugin has been asked for in this process, and so in the processes vLLM started from it."""
    return _active
