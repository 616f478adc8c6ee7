"""What slime and the frameworks that share its `Sample` differ in: their name, engine, default functions, log-probs."""

import os
from collections.abc import Callable
from typing import Any

import msgspec


class Framework(msgspec.Struct, frozen=True):
    """One framework of the slime family.

    `defaults` maps what a hook stands in for to the framework's own function; `rollout_mode` says from the job's
    arguments whether the engine's log-probabilities are "raw" or "processed", or None where it cannot be told;
    `filters_enter` whether processed values are renormalised after top-p and top-k.
    """

    name: str
    engine: str
    defaults: dict[str, str]
    rollout_mode: Callable[[Any], str | None]
    filters_enter: bool


def sglang_mode(args: Any) -> str | None:
    """SGLang divides by the temperature before it takes log-probabilities, unless SGLANG_RETURN_ORIGINAL_LOGPROB."""
    original = os.environ.get("SGLANG_RETURN_ORIGINAL_LOGPROB", os.environ.get("RETURN_ORIGINAL_LOGPROB", ""))
    return "raw" if original.strip().lower() in ("1", "true") else "processed"


def vllm_mode(args: Any) -> str | None:
    """vime starts `vllm serve` with processed_logprobs unless the user chose --vllm-logprobs-mode."""
    chosen = str(getattr(args, "vllm_logprobs_mode", None) or "raw_logprobs")
    named = getattr(args, "_vllm_user_provided", None) or ()
    if "vllm_logprobs_mode" not in named and chosen == "raw_logprobs":
        return "processed"
    return {"raw_logprobs": "raw", "processed_logprobs": "processed"}.get(chosen)


SLIME = Framework(
    name="slime",
    engine="sglang",
    defaults={
        "generate_function": "slime.rollout.sglang_rollout.generate",
        "tis_function": "slime.backends.megatron_utils.loss.vanilla_tis_function",
    },
    rollout_mode=sglang_mode,
    filters_enter=False,
)
VIME = Framework(
    name="vime",
    engine="vllm",
    defaults={
        "generate_function": "vime.rollout.vllm_rollout.generate",
        "tis_function": "vime.backends.megatron_utils.loss.vanilla_tis_function",
    },
    rollout_mode=vllm_mode,
    filters_enter=True,
)
