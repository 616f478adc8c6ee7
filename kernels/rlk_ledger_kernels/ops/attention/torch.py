"""attention, torch: one online-softmax step per logical KV block, over all tiles that still see it.

The batched product runs at one shape per (q_tile, kv_block); a row's sums depend on its own query and on the
blocks in the order of the schedule, never on how queries were cut into calls. Masked scores are minus
infinity *before* the exponential, so a masked key weighs exactly zero; nothing is masked by arithmetic.
"""

from __future__ import annotations

import torch

from rlk_ledger_kernels.dtypes import torch_dtype
from rlk_ledger_kernels.errors import OperandError
from rlk_ledger_kernels.ops.attention.cache import KVCache
from rlk_ledger_kernels.ops.attention.contract import AttentionContract
from rlk_ledger_kernels.ops.attention.plan import AttentionPlan, Step


def attention(
    q_NHD: torch.Tensor, cache: KVCache, plan: AttentionPlan, contract: AttentionContract
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend causally from the plan's rows to the cache, which already holds their own keys and values.

    q_NHD: [N, heads, D]; head h reads kv head h // (heads / kv heads). N is the plan's rows, or those padded to
    a multiple of the smallest row tile; what comes back for padding means nothing.
    Returns the output [N, heads, D] in `contract.output` and the log-sum-exp, float32 [N, heads], of the
    scaled scores. Raises OperandError when shapes do not fit the cache or the plan.
    """
    rows, heads, head_dim = q_NHD.shape
    kv_heads = cache.keys.shape[1]
    if rows not in (plan.rows, plan.scatter_P.numel()) or head_dim != cache.head_dim or heads % kv_heads:
        raise OperandError(
            f"attention: q is {tuple(q_NHD.shape)}; the plan has {plan.rows} rows, the cache {kv_heads} heads "
            f"of {cache.head_dim}"
        )
    if contract.schedule.kv_block != cache.keys.shape[2]:
        raise OperandError(
            f"attention: the schedule's kv_block is {contract.schedule.kv_block}, the cache's {cache.keys.shape[2]}"
        )
    group = heads // kv_heads
    shape = (plan.tiles, kv_heads, group, plan.q_tile)
    q = q_NHD.to(torch.float32).mul(contract.scale).index_select(0, plan.gather_R)
    q = q.view(plan.tiles, plan.q_tile, kv_heads, group, head_dim).permute(0, 2, 3, 1, 4)
    q_TKMD = q.reshape(plan.tiles, kv_heads, group * plan.q_tile, head_dim).contiguous()
    top_TKM = torch.full(q_TKMD.shape[:3], float("-inf"))
    total_TKMV = torch.zeros((*q_TKMD.shape[:3], cache.values.shape[-1]))
    for step in plan.steps:
        _visit(q_TKMD, top_TKM, total_TKMV, cache, step, shape)
    denominator_TKM = total_TKMV[..., cache.ones_at]
    # Adding +0 turns a negative zero, whose sign may depend on masked keys, into a positive one.
    out_TKMD = total_TKMV[..., :head_dim].div(denominator_TKM[..., None]).add_(0.0)
    lse_TKM = top_TKM + denominator_TKM.log()
    out_RHD = out_TKMD.view(*shape, head_dim).permute(0, 3, 1, 2, 4).reshape(-1, heads, head_dim)
    lse_RH = lse_TKM.view(shape).permute(0, 3, 1, 2).reshape(-1, heads)
    at_N = plan.scatter_P[:rows]
    out_NHD = out_RHD.index_select(0, at_N).to(torch_dtype(contract.output))
    return out_NHD, lse_RH.index_select(0, at_N)


def _visit(
    q_TKMD: torch.Tensor,
    top_TKM: torch.Tensor,
    total_TKMV: torch.Tensor,
    cache: KVCache,
    step: Step,
    shape: tuple[int, int, int, int],
) -> None:
    """Merge one logical block into (m, [o, l]) of the first `step.active` tiles, in place."""
    active, kv_heads = step.active, shape[1]
    rows, head_dim = q_TKMD.shape[2:]
    k = cache.keys.index_select(0, step.blocks_A).view(active * kv_heads, -1, head_dim)
    v = cache.values.index_select(0, step.blocks_A).view(active * kv_heads, -1, total_TKMV.shape[-1])
    scores = torch.bmm(q_TKMD[:active].view(-1, rows, head_dim), k.transpose(1, 2))
    if step.masked:
        ending = scores.view(active, kv_heads, shape[2], shape[3], -1)[active - step.masked :]
        ending.masked_fill_(step.hidden_MQB[:, None, None], float("-inf"))
    top = top_TKM[:active].view(-1, rows)
    new_top = torch.maximum(top, scores.amax(-1))
    scores.sub_(new_top[..., None]).exp_()
    decay = top.sub_(new_top).exp_()
    total = total_TKMV[:active].view(active * kv_heads, rows, -1)
    total.mul_(decay[..., None]).add_(torch.bmm(scores, v))
    top.copy_(new_top)
