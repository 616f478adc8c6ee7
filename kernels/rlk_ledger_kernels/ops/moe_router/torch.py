"""moe_router, torch: a stable sort of exact keys, and sums over experts as products with ones.

Experts are chosen by logit and not by probability: rounding in the exponential can then make no tie that the logits
do not have. Sums run over all experts by index, those not chosen being exact zeros.

N tokens, E experts, T = top_k columns.
"""

from __future__ import annotations

import torch

from rlk_ledger_kernels.dtypes import torch_dtype
from rlk_ledger_kernels.ops.linear.torch import row_sum
from rlk_ledger_kernels.ops.moe_router.contract import MoeRouterContract, checked_experts, checked_logits


def moe_router(logits_NE: torch.Tensor, contract: MoeRouterContract) -> tuple[torch.Tensor, torch.Tensor]:
    """The top_k experts of each row by falling logit, ties to the lowest index, and their weights.

    logits_NE: [N, E], any float dtype. Returns (weights [N, T] in `contract.output`, experts int64 [N, T]).
    Raises OperandError for fewer than top_k experts.
    """
    checked_logits(logits_NE, contract)
    key_NE = _rounded(logits_NE, contract)
    key_NE = torch.where(key_NE.isnan(), -torch.inf, key_NE) + 0.0  # -0 becomes +0: they tie
    experts_NT = key_NE.sort(dim=1, descending=True, stable=True).indices[:, : contract.top_k].contiguous()
    return _weights(logits_NE, experts_NT, contract), experts_NT


def routed_weights(logits_NE: torch.Tensor, experts_NT: torch.Tensor, contract: MoeRouterContract) -> torch.Tensor:
    """The weights of given routes, as recorded by another engine: w[n, t] of expert experts_NT[n, t].

    experts_NT: int64 [N, T], the experts of a row in any order. Returns [N, T] in `contract.output`.
    Raises OperandError for a route outside the experts, or one that a row names twice.
    """
    checked_logits(logits_NE, contract)
    checked_experts(experts_NT, logits_NE, contract)
    return _weights(logits_NE, experts_NT, contract)


def moe_router_backward(
    grad_NT: torch.Tensor, logits_NE: torch.Tensor, experts_NT: torch.Tensor, contract: MoeRouterContract
) -> torch.Tensor:
    """Gradient with respect to the logits, the routes being constants: dl_j = p_j (g_j - sum_t g_t w_t).

    p is the softmax over all experts, or over the chosen ones when the weights sum to one. grad_NT: [N, T].
    Returns float32 [N, E]; a row depends on its own row alone.
    """
    chosen_NE = _chosen(logits_NE, experts_NT)
    mask_NE = None if contract.weighting == "softmax" else chosen_NE
    p_NE = _softmax(logits_NE, mask_NE, contract)
    grad_NE = torch.zeros_like(p_NE).scatter_(1, experts_NT, grad_NT.to(torch.float32))
    inner_N = row_sum(torch.where(chosen_NE, grad_NE * p_NE, 0.0), contract.schedule)
    full_NE = p_NE * (grad_NE - inner_N[:, None])
    return full_NE if mask_NE is None else torch.where(chosen_NE, full_NE, 0.0)


def _weights(logits_NE: torch.Tensor, experts_NT: torch.Tensor, contract: MoeRouterContract) -> torch.Tensor:
    precision = torch_dtype(contract.router_precision)
    chosen_NE = _chosen(logits_NE, experts_NT)
    mask_NE = chosen_NE if contract.weighting == "softmax_of_top_k" else None
    p_NE = _softmax(logits_NE, mask_NE, contract).to(precision).to(torch.float32)
    if contract.weighting == "softmax_renormalised":
        p_NE = p_NE / row_sum(torch.where(chosen_NE, p_NE, 0.0), contract.schedule)[:, None]
    return p_NE.gather(1, experts_NT).to(precision).to(torch_dtype(contract.output))


def _softmax(logits_NE: torch.Tensor, mask_NE: torch.Tensor | None, contract: MoeRouterContract) -> torch.Tensor:
    """float32 softmax over the experts of the mask (all without one); a row with a NaN logit is NaN throughout."""
    wide_NE = _rounded(logits_NE, contract)
    seen_NE = wide_NE if mask_NE is None else torch.where(mask_NE | wide_NE.isnan(), wide_NE, -torch.inf)
    weight_NE = (seen_NE - seen_NE.amax(1, keepdim=True)).exp_()
    return weight_NE / row_sum(weight_NE, contract.schedule)[:, None]


def _chosen(logits_NE: torch.Tensor, experts_NT: torch.Tensor) -> torch.Tensor:
    return torch.zeros(logits_NE.shape, dtype=torch.bool, device=logits_NE.device).scatter_(1, experts_NT, True)


def _rounded(logits_NE: torch.Tensor, contract: MoeRouterContract) -> torch.Tensor:
    return logits_NE.to(torch_dtype(contract.router_precision)).to(torch.float32)
