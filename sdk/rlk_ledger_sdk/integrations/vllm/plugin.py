"""The entry point that vLLM calls in its main process, engine core and workers."""

import os


def register() -> None:
    """Does nothing, and imports nothing, unless the environment variable RLK_VLLM asks for it."""
    if os.environ.get("RLK_VLLM") in (None, "", "0"):
        return
