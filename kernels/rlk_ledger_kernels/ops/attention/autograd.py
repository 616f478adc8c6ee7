"""attention in a graph: packed sequences of a training forward, with the backward pass of the same backend.

    packed = PackedPrefill(lengths, contract, device)                  # once per batch, shared by all layers
    out_NHD, lse_NH = PackedAttention.apply(module, q_NHD, k_NKD, v_NKD, packed, contract)

`module` is a resolved backend (`ops.attention.torch` or `.triton`). Every sequence starts at position 0 and attends
to itself alone; sequences lie next to each other in the packed rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch

from rlk_ledger_kernels.derivative import first_only
from rlk_ledger_kernels.errors import OperandError
from rlk_ledger_kernels.ops.attention.cache import KVCache
from rlk_ledger_kernels.ops.attention.contract import AttentionContract
from rlk_ledger_kernels.ops.attention.plan import PREFILL_TILE, Chunk, plan_attention


class PackedPrefill:
    """The plan and the pages of whole sequences of `lengths` tokens; contracts with another window need their own."""

    def __init__(self, lengths: Sequence[int], contract: AttentionContract, device: torch.device | str = "cpu") -> None:
        """Lay out once; raises OperandError for an empty list or an empty sequence."""
        block = contract.schedule.kv_block
        counts = [-(-length // block) for length in lengths]
        first = [sum(counts[:index]) for index in range(len(counts))]
        chunks = [Chunk(0, length, range(a, a + n)) for length, a, n in zip(lengths, first, counts)]
        tile = min(PREFILL_TILE, block)
        self.blocks = sum(counts)
        self.plan = plan_attention(chunks, contract.schedule, tile, contract.window).to(device)


class PackedAttention(torch.autograd.Function):
    """out, lse = attention(q, k, v) over packed sequences; both are differentiable."""

    @staticmethod
    def forward(
        ctx: Any,
        module: ModuleType,
        q_NHD: torch.Tensor,
        k_NKD: torch.Tensor,
        v_NKD: torch.Tensor,
        packed: PackedPrefill,
        contract: AttentionContract,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """q_NHD: [N, heads, D]; k_NKD, v_NKD: [N, kv heads, D]. Returns the backend's output and log-sum-exp."""
        if len(k_NKD) != packed.plan.rows or k_NKD.shape != v_NKD.shape:
            raise OperandError(
                f"attention: k is {tuple(k_NKD.shape)}, v {tuple(v_NKD.shape)}; "
                f"both need the {packed.plan.rows} rows of the packed sequences"
            )
        cache = KVCache(
            packed.blocks,
            k_NKD.shape[1],
            contract.schedule.kv_block,
            k_NKD.shape[2],
            k_NKD.dtype,
            device=k_NKD.device,
            wide=k_NKD.device.type == "cpu",
        )
        cache.write(k_NKD, v_NKD, packed.plan)
        out_NHD, lse_NH = module.attention(q_NHD, cache, packed.plan, contract)
        ctx.save_for_backward(q_NHD, out_NHD, lse_NH)
        ctx.module, ctx.cache, ctx.plan, ctx.contract = module, cache, packed.plan, contract
        return out_NHD, lse_NH

    @staticmethod
    @first_only
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradients of q, k and v, rounded once to the dtype of each."""
        grad_NHD, grad_lse_NH = grads
        q_NHD, out_NHD, lse_NH = ctx.saved_tensors
        dq, dk, dv = ctx.module.attention_backward(
            grad_NHD, grad_lse_NH, q_NHD, out_NHD, lse_NH, ctx.cache, ctx.plan, ctx.contract
        )
        kept = ctx.cache.dtype
        return None, dq.to(q_NHD.dtype), dk.to(kept), dv.to(kept), None, None
