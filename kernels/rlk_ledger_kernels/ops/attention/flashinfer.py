"""attention, flashinfer: prefill, chunks and decode by its paged FA2 prefill kernel, with split-KV switched off.

Opportunistic: blocks are merged inside the kernel in tiles of its own, so the contract is kept only where the bitwise
probe says so. Without split-KV a row's sums do not depend on how many rows there are; decode is a prefill of one row,
since the decode kernel sums in another order.
"""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Any

import torch

from rlk_ledger_kernels.errors import ContractError
from rlk_ledger_kernels.native_operands import function, library, on_cuda, same_dtype
from rlk_ledger_kernels.ops.attention.cache import KVCache
from rlk_ledger_kernels.ops.attention.contract import AttentionContract
from rlk_ledger_kernels.ops.attention.operands import check
from rlk_ledger_kernels.ops.attention.plan import AttentionPlan

_WORKSPACE_BYTES = 128 << 20


def attention(
    q_NHD: torch.Tensor, cache: KVCache, plan: AttentionPlan, contract: AttentionContract
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend causally from the plan's rows to the cache, which already holds their own keys and values.

    q_NHD: [N, heads, D], bfloat16 or float16, on CUDA, and the cache of that dtype. Returns the output [N, heads, D] in
    that dtype and the log-sum-exp, float32 [N, heads]; padding rows hold zeros. Raises OperandError for operands that
    do not belong together, ContractError for a dtype the kernel lacks, BackendError without flashinfer or off CUDA.
    """
    check(q_NHD, cache, plan, contract)
    if q_NHD.dtype not in (torch.bfloat16, torch.float16) or cache.dtype != q_NHD.dtype:
        raise ContractError(
            f"attention with flashinfer: q is {q_NHD.dtype}, the cache {cache.dtype}; it needs bfloat16 or float16 in "
            "both, choose torch or triton"
        )
    same_dtype("attention with flashinfer", contract.output, q_NHD)
    on_cuda("flashinfer", "attention", q_NHD)
    keys = cache.keys.to(cache.dtype).contiguous()
    values = cache.values[..., : cache.head_dim].to(cache.dtype).contiguous()
    wrapper = _planned(q_NHD, cache, plan, contract)
    out_RHD, lse_RH = wrapper.run(q_NHD[: plan.rows].contiguous(), (keys, values), return_lse=True)
    out_NHD = torch.zeros_like(q_NHD)
    lse_NH = torch.zeros(q_NHD.shape[:2], dtype=torch.float32, device=q_NHD.device)
    out_NHD[: plan.rows] = out_RHD
    lse_NH[: plan.rows] = lse_RH * math.log(2.0)  # the kernel counts in powers of two
    return out_NHD, lse_NH


def _planned(q_NHD: torch.Tensor, cache: KVCache, plan: AttentionPlan, contract: AttentionContract) -> Any:
    """flashinfer's wrapper, laid out for the plan's chunks."""
    kind = function("flashinfer", library("flashinfer", "flashinfer"), "BatchPrefillWithPagedKVCacheWrapper")
    device, block = q_NHD.device, plan.kv_block
    ends = [chunk.first + chunk.count for chunk in plan.chunks]
    pages = [list(chunk.blocks[: -(-end // block)]) for chunk, end in zip(plan.chunks, ends)]

    def starts(lengths: list[int]) -> torch.Tensor:
        return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)

    wrapper = kind(torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device), "HND", backend="fa2")
    wrapper.plan(
        qo_indptr=starts([chunk.count for chunk in plan.chunks]),
        paged_kv_indptr=starts([len(one) for one in pages]),
        paged_kv_indices=torch.tensor([page for one in pages for page in one], dtype=torch.int32, device=device),
        paged_kv_last_page_len=torch.tensor([(end - 1) % block + 1 for end in ends], dtype=torch.int32, device=device),
        num_qo_heads=q_NHD.shape[1],
        num_kv_heads=cache.keys.shape[1],
        head_dim_qk=cache.head_dim,
        page_size=block,
        causal=True,
        sm_scale=contract.scale,
        window_left=-1 if contract.window is None else contract.window - 1,
        q_data_type=q_NHD.dtype,
        kv_data_type=cache.dtype,
        disable_split_kv=True,
    )
    return wrapper
