"""moe_router, float32 reference: the top_k largest logits of a row, w = softmax(l) over all or over the chosen."""

from __future__ import annotations

import torch

from rlk_ledger_kernels.ops.moe_router.contract import MoeRouterContract, checked_experts, checked_logits


def moe_router(logits_NE: torch.Tensor, contract: MoeRouterContract) -> tuple[torch.Tensor, torch.Tensor]:
    """Route. logits_NE: [N, E]. Returns (weights float32 [N, T], experts int64 [N, T]); ties to the lowest index."""
    checked_logits(logits_NE, contract)
    key_NE = logits_NE.to(torch.float32).nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    experts_NT = key_NE.sort(dim=1, descending=True, stable=True).indices[:, : contract.top_k].contiguous()
    return routed_weights(logits_NE, experts_NT, contract), experts_NT


def routed_weights(logits_NE: torch.Tensor, experts_NT: torch.Tensor, contract: MoeRouterContract) -> torch.Tensor:
    """Weights of given routes. experts_NT: int64 [N, T] without repetition. Returns float32 [N, T]."""
    checked_logits(logits_NE, contract)
    checked_experts(experts_NT, logits_NE, contract)
    wide_NE = logits_NE.to(torch.float32)
    if contract.weighting == "softmax_of_top_k":
        weights_NT = wide_NE.gather(1, experts_NT).softmax(1)
        return weights_NT.masked_fill(wide_NE.isnan().any(1, keepdim=True), torch.nan)
    weights_NT = wide_NE.softmax(1).gather(1, experts_NT)
    return weights_NT if contract.weighting == "softmax" else weights_NT / weights_NT.sum(1, keepdim=True)


def moe_router_backward(
    grad_NT: torch.Tensor, logits_NE: torch.Tensor, experts_NT: torch.Tensor, contract: MoeRouterContract
) -> torch.Tensor:
    """dl_j = p_j (g_j - sum_t g_t w_t), the routes being constants; float32 [N, E].

    p is the softmax over all experts, or over the chosen ones when the weights sum to one.
    """
    weights_NT = routed_weights(logits_NE, experts_NT, contract)
    grad_NT = grad_NT.to(torch.float32)
    inner_N1 = (grad_NT * weights_NT).sum(1, keepdim=True)
    grad_NE = torch.zeros(logits_NE.shape, dtype=torch.float32, device=logits_NE.device)
    if contract.weighting == "softmax":
        grad_NE = grad_NE.scatter(1, experts_NT, grad_NT)
        return logits_NE.to(torch.float32).softmax(1) * (grad_NE - inner_N1)
    return grad_NE.scatter(1, experts_NT, weights_NT * (grad_NT - inner_N1))
