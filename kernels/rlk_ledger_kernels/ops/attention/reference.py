"""attention, float32 reference: softmax(q k^T * scale + mask) v, one sequence at a time, all keys at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rlk_ledger_kernels.ops.attention.cache import KVCache
from rlk_ledger_kernels.ops.attention.contract import AttentionContract
from rlk_ledger_kernels.ops.attention.operands import check, check_whole
from rlk_ledger_kernels.ops.attention.partials import BlockPartials, Owned, collected, entries
from rlk_ledger_kernels.ops.attention.plan import AttentionPlan
from rlk_ledger_kernels.precision import exact_products


def attention(
    q_NHD: torch.Tensor, cache: KVCache, plan: AttentionPlan, contract: AttentionContract
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend causally from the plan's rows to the cache, which already holds their own keys and values.

    q_NHD: [N, heads, D]; head h reads kv head h // (heads / kv heads). Returns the output, float32 [N, heads, D], and
    the log-sum-exp of the scaled scores, float32 [N, heads]; zero and minus infinity where a row sees nothing.
    """
    check(q_NHD, cache, plan, contract)
    out_NHD = q_NHD.new_zeros(q_NHD.shape, dtype=torch.float32)
    lse_NH = out_NHD.new_zeros(out_NHD.shape[:2])
    row = 0
    with exact_products(q_NHD.device):
        for chunk in plan.chunks:
            rows = slice(row, row + chunk.count)
            k_SKD, v_SKD = _sequence(cache, plan, chunk.blocks, chunk.first + chunk.count)
            out_NHD[rows], lse_NH[rows] = causal_attention(
                q_NHD[rows], k_SKD, v_SKD, contract.scale, chunk.first, contract.window
            )
            row = rows.stop
    return out_NHD, lse_NH


def causal_attention(
    q_THD: torch.Tensor,
    k_SKD: torch.Tensor,
    v_SKD: torch.Tensor,
    scale: float,
    first: int = 0,
    window: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition for one sequence.

    q_THD: queries of positions first..first+T-1. k_SKD, v_SKD: keys and values of positions 0..S-1; key j is visible
    to position i when i - window < j <= i. Returns float32 [T, heads, D] and [T, heads].
    """
    group = q_THD.shape[1] // k_SKD.shape[1]
    q = q_THD.to(torch.float32)
    k = k_SKD.to(torch.float32).repeat_interleave(group, dim=1)
    v = v_SKD.to(torch.float32).repeat_interleave(group, dim=1)
    scores_HTS = torch.einsum("thd,shd->hts", q, k) * scale
    behind_TS = (first + torch.arange(q.shape[0], device=q.device))[:, None] - torch.arange(k.shape[0], device=q.device)
    scores_HTS = scores_HTS.masked_fill(_hidden(behind_TS, window), float("-inf"))
    lse_HT = scores_HTS.logsumexp(-1)
    weights_HTS = scores_HTS.sub(lse_HT.masked_fill(lse_HT == float("-inf"), 0.0)[..., None]).exp()
    return torch.einsum("hts,shd->thd", weights_HTS, v), lse_HT.transpose(0, 1)


def attention_backward(
    grad_NHD: torch.Tensor,
    grad_lse_NH: torch.Tensor,
    q_NHD: torch.Tensor,
    out_NHD: torch.Tensor,
    lse_NH: torch.Tensor,
    cache: KVCache,
    plan: AttentionPlan,
    contract: AttentionContract,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of whole sequences by differentiating the definition; float32 dq [N, heads, D] and dk, dv.

    out_NHD and lse_NH are what the forward pass gave; the definition needs neither.
    """
    check(q_NHD, cache, plan, contract)
    check_whole(plan)
    grads: list[tuple[torch.Tensor, ...]] = []
    row = 0
    with exact_products(q_NHD.device), torch.enable_grad():
        for chunk in plan.chunks:
            rows = slice(row, row + chunk.count)
            operands = [q_NHD[rows], *_sequence(cache, plan, chunk.blocks, chunk.count)]
            leaves = [operand.detach().to(torch.float32).requires_grad_() for operand in operands]
            q, k, v = leaves
            out, lse = causal_attention(q, k, v, contract.scale, 0, contract.window)
            received = [grad_NHD[rows].to(torch.float32), grad_lse_NH[rows].to(torch.float32)]
            grads.append(torch.autograd.grad([out, lse], leaves, received))
            row = rows.stop
    dq, dk, dv = (torch.cat(part) for part in zip(*grads))
    return dq, dk, dv


def attention_partials(
    q_NHD: torch.Tensor, cache: KVCache, plan: AttentionPlan, contract: AttentionContract, owned: Owned
) -> BlockPartials:
    """Maximum, denominator and numerator of every (tile, owned logical block), straight from their definitions."""
    check(q_NHD, cache, plan, contract)
    tile_E, block_E = entries(plan, owned)
    heads, kv_heads, tile = q_NHD.shape[1], cache.keys.shape[1], plan.q_tile
    shape = (len(tile_E), kv_heads, heads // kv_heads * tile)
    m_EKM = q_NHD.new_full(shape, float("-inf"), dtype=torch.float32)
    l_EKM, o_EKMD = torch.zeros_like(m_EKM), m_EKM.new_zeros((*shape, cache.head_dim))
    with exact_products(q_NHD.device):
        for e, (t, block) in enumerate(zip(tile_E.tolist(), block_E.tolist())):
            q_QHD = q_NHD[plan.gather_R[t * tile : (t + 1) * tile]].to(torch.float32) * contract.scale
            page = plan.chunks[plan.chunk_T[t]].blocks[block]
            q_KMD = q_QHD.view(tile, kv_heads, -1, cache.head_dim).permute(1, 2, 0, 3).flatten(1, 2)
            scores = q_KMD @ cache.keys[page].to(torch.float32).transpose(1, 2)
            key_B = block * plan.kv_block + torch.arange(plan.kv_block, device=q_NHD.device)
            behind_QB = int(plan.start_T[t]) + torch.arange(tile, device=q_NHD.device)[:, None] - key_B
            scores = scores.view(kv_heads, -1, tile, plan.kv_block)
            scores = scores.masked_fill(_hidden(behind_QB, contract.window), float("-inf")).flatten(1, 2)
            m_EKM[e] = scores.amax(-1)
            weights = (scores - m_EKM[e].masked_fill(m_EKM[e] == float("-inf"), 0.0)[..., None]).exp()
            l_EKM[e] = weights.sum(-1)
            o_EKMD[e] = weights @ cache.values[page, ..., : cache.head_dim].to(torch.float32)
    return BlockPartials(len(q_NHD), tile_E, block_E, m_EKM, l_EKM, o_EKMD)


def merge_partials(
    parts: Sequence[BlockPartials], plan: AttentionPlan, contract: AttentionContract
) -> tuple[torch.Tensor, torch.Tensor]:
    """out = sum_b exp(m_b - m) o_b / sum_b exp(m_b - m) l_b with m the maximum over all blocks of a row."""
    at_V = collected(parts, plan).to(parts[0].m_EKM.device)
    m_VKM, l_VKM, o_VKMD = (torch.cat([getattr(part, n) for part in parts])[at_V] for n in ("m_EKM", "l_EKM", "o_EKMD"))
    tile_V = torch.cat([torch.arange(step.begin, step.end) for step in plan.steps]).tolist()
    top_TKM = m_VKM.new_full((plan.tiles, *m_VKM.shape[1:]), float("-inf"))
    for visit, t in enumerate(tile_V):
        top_TKM[t] = torch.maximum(top_TKM[t], m_VKM[visit])
    base_TKM = top_TKM.masked_fill(top_TKM == float("-inf"), 0.0)
    l_TKM, o_TKMD = torch.zeros_like(top_TKM), o_VKMD.new_zeros((*top_TKM.shape, o_VKMD.shape[-1]))
    for visit, t in enumerate(tile_V):
        share = (m_VKM[visit] - base_TKM[t]).exp()
        l_TKM[t] += share * l_VKM[visit]
        o_TKMD[t] += share[..., None] * o_VKMD[visit]
    out_TKMD = o_TKMD / l_TKM.masked_fill(l_TKM == 0.0, 1.0)[..., None]
    by_row = (plan.tiles, l_TKM.shape[1], -1, plan.q_tile)
    out_RHD = out_TKMD.view(*by_row, out_TKMD.shape[-1]).permute(0, 3, 1, 2, 4)
    lse_RH = (top_TKM + l_TKM.log()).view(by_row).permute(0, 3, 1, 2)
    at_N = plan.scatter_P[: parts[0].rows]
    return out_RHD.flatten(2, 3).flatten(0, 1)[at_N], lse_RH.flatten(2, 3).flatten(0, 1)[at_N]


def _hidden(behind: torch.Tensor, window: int | None) -> torch.Tensor:
    """Whether a key that lies `behind` positions before the query is invisible to it."""
    return behind < 0 if window is None else (behind < 0) | (behind >= window)


def _sequence(
    cache: KVCache, plan: AttentionPlan, blocks: Sequence[int], length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of positions 0..length-1, [S, kv heads, D]."""
    pages = torch.as_tensor(list(blocks)[: -(-length // plan.kv_block)], device=cache.keys.device)
    keys, values = cache.keys[pages], cache.values[pages][..., : cache.head_dim]
    k_SKD, v_SKD = (x.transpose(1, 2).flatten(0, 1)[:length] for x in (keys, values))
    return k_SKD, v_SKD
