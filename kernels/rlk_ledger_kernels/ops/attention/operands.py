"""What every backend of attention checks before it computes."""

from __future__ import annotations

import torch

from rlk_ledger_kernels.errors import OperandError
from rlk_ledger_kernels.ops.attention.cache import KVCache
from rlk_ledger_kernels.ops.attention.contract import AttentionContract
from rlk_ledger_kernels.ops.attention.plan import AttentionPlan


def check(q_NHD: torch.Tensor, cache: KVCache, plan: AttentionPlan, contract: AttentionContract) -> None:
    """Raise OperandError when query, cache, plan and contract do not speak of the same thing."""
    rows, heads, head_dim = q_NHD.shape
    kv_heads, block = cache.keys.shape[1:3]
    if rows not in (plan.rows, plan.scatter_P.numel()) or head_dim != cache.head_dim or heads % kv_heads:
        raise OperandError(
            f"attention: q is {tuple(q_NHD.shape)}; the plan has {plan.rows} rows, the cache {kv_heads} heads "
            f"of {cache.head_dim}"
        )
    if not 1 <= head_dim <= 256:
        raise OperandError(f"attention: head_dim is {head_dim}; it must be 1 to 256")
    for name, got in (("cache", block), ("plan", plan.kv_block)):
        if got != contract.schedule.kv_block:
            raise OperandError(
                f"attention: the schedule's kv_block is {contract.schedule.kv_block}, the {name}'s {got}"
            )
    if plan.window != contract.window:
        raise OperandError(f"attention: the contract's window is {contract.window}, the plan's {plan.window}")
    if not q_NHD.device == cache.keys.device == plan.gather_R.device:
        raise OperandError(
            f"attention: q is on {q_NHD.device}, the cache on {cache.keys.device}, the plan on {plan.gather_R.device}; "
            "move them to one device"
        )


def check_whole(plan: AttentionPlan) -> None:
    """Raise OperandError when a chunk starts behind position 0: gradients of cached keys would be lost."""
    for index, chunk in enumerate(plan.chunks):
        if chunk.first:
            raise OperandError(
                f"attention: chunk {index} starts at position {chunk.first}; the backward pass needs whole sequences"
            )
