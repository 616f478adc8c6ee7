"""A Megatron rank's place, and the response positions that are its own under context parallelism."""

import sys
from typing import Any

import msgspec

from rlk_ledger_sdk.ring import ring_chunks


class Rank(msgspec.Struct, frozen=True):
    """Tensor, context and data ranks; `last_stage` says whether this pipeline stage holds log-probabilities."""

    tp: int = 0
    tp_size: int = 1
    cp: int = 0
    cp_size: int = 1
    dp: int = 0
    dp_size: int = 1
    last_stage: bool = True


def this_rank() -> Rank:
    """This process's place, as megatron.core.parallel_state says; a lone rank where Megatron is not in use."""
    state: Any = sys.modules.get("megatron.core.parallel_state")
    if state is None or not state.model_parallel_is_initialized():
        return Rank()
    return Rank(
        tp=state.get_tensor_model_parallel_rank(),
        tp_size=state.get_tensor_model_parallel_world_size(),
        cp=state.get_context_parallel_rank(),
        cp_size=state.get_context_parallel_world_size(),
        dp=state.get_data_parallel_rank(),
        dp_size=state.get_data_parallel_world_size(),
        last_stage=bool(state.is_pipeline_last_stage()),
    )


def owned_ranges(total: int, response: int, rank: Rank, padded: int | None = None) -> list[tuple[int, int]]:
    """Half-open response ranges whose log-probabilities context rank `rank.cp` holds, in the order it holds them.

    A sequence of `total` tokens (its last `response` are the response) is cut as `ring_chunks` says. The logit at
    position p scores the token at p + 1. `padded` is the length the framework pads to, where that is not `total`.
    """
    if rank.cp_size == 1:
        return [(0, response)]
    first = total - response - 1  # the logit that scores the first response token
    ranges = []
    for low, high in ring_chunks(padded or total, rank.cp, rank.cp_size):
        start, end = max(low, first), min(high, total - 1)
        if start < end:
            ranges.append((start - first, end - first))
    return ranges
