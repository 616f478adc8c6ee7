"""Attaching a recorder to a live vLLM engine: wraps methods of the one object, or nothing when recording is off."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlk_ledger_sdk.api import recording
from rlk_ledger_sdk.guard import guarded
from rlk_ledger_sdk.integrations.vllm import offline, online
from rlk_ledger_sdk.integrations.vllm.front import Front
from rlk_ledger_sdk.integrations.vllm.watch import Watch

_ATTRIBUTE = "_rlk_ledger_watch"


def attach(
    llm: Any,
    engine: str = "rollout-0",
    *,
    sample_id: Callable[[Any, Any], str] | None = None,
    group_id: Callable[[Any, Any], str | None] | None = None,
    loss_mask: Callable[[Any, Any], Sequence[int]] | None = None,
    requested: Mapping[str, Any] | None = None,
    weight_version: str | None = None,
    wire_dtype: str | None = None,
    wrap: bool = True,
) -> Watch:
    """Records what `llm` (LLM, LLMEngine or AsyncLLM) does from now on, under the instance name `engine`.

    sample_id, group_id, loss_mask: called with (RequestOutput, CompletionOutput) for each finished completion; without
    them ids come from the request id, completions of one request are a group, and the mask is all ones. requested: the
    engine arguments the user gave, by vLLM's names, for `knob.applied`. weight_version: what the weights now in the
    engine are called. wire_dtype: the dtype weights are published in, when it is not the engine's. wrap False: only
    `watch.record(outputs)` records.

    When recording is off nothing is wrapped. Attaching again returns a new Watch in place of the first. Raises
    UsageError for what is no vLLM engine.
    """
    on = recording()
    front = Front(llm)
    before = vars(front.engine).get(_ATTRIBUTE)
    if before is not None:
        before.detach()
        front = Front(llm)  # its methods unwrapped
    watch = Watch(
        front,
        engine,
        sample_id=sample_id,
        group_id=group_id,
        loss_mask=loss_mask,
        requested=requested or {},
        weight_version=weight_version,
        wire_dtype=wire_dtype,
    )
    if not on:
        return watch
    if before is not None:
        watch.in_flight = before.in_flight
        if before.writer_id == watch.writer_id:
            watch.take_over(before)
    front.engine.__dict__[_ATTRIBUTE] = watch
    if front.is_async:
        if wrap:
            online.wrap(watch)
        return watch
    with guarded("vllm engine"):
        watch.begin()
    if wrap:
        offline.wrap(watch)
    return watch
