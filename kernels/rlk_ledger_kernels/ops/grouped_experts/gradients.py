"""The backward pass of the experts, one expert after the other, over any backend of linear and swiglu."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch

from rlk_ledger_kernels.ops.grouped_experts.contract import GroupedExpertsContract
from rlk_ledger_kernels.ops.grouped_experts.routes import combine, group

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""(dx [N, H], dweights [N, T], dgate [E, I, H], dup [E, I, H], ddown [E, H, I]), all float32."""


def gradients(
    modules: tuple[ModuleType, ModuleType],
    grad_NH: torch.Tensor,
    x_NH: torch.Tensor,
    gate_up: Sequence[Any],
    down: Sequence[Any],
    weights_NT: torch.Tensor,
    experts_NT: torch.Tensor,
    contract: GroupedExpertsContract,
) -> Gradients:
    """Gradients of the whole layer; an expert's pairs run together, by rising token.

    modules: backends of linear and swiglu. gate_up, down: the packed weights of each expert, of that linear.
    Operands were checked. Roundings inside the forward pass count as the identity.
    """
    linear, swiglu = modules
    (rows, columns), hidden = experts_NT.shape, x_NH.shape[1]
    grad, weights_P = grad_NH.to(torch.float32), weights_NT.to(torch.float32).reshape(-1)
    grad_x_PH = torch.zeros((rows * columns, hidden), dtype=torch.float32, device=x_NH.device)
    grad_weights_P = torch.zeros(rows * columns, dtype=torch.float32, device=x_NH.device)
    grad_gate_up: list[torch.Tensor | None] = [None] * len(down)
    grad_down: list[torch.Tensor | None] = [None] * len(down)
    routes = group(experts_NT, len(down))
    for expert, pairs_P in enumerate(torch.split(routes.pairs_P, list(routes.counts))):
        if not len(pairs_P):
            continue
        x_PH, grad_PH = x_NH[pairs_P // columns], grad[pairs_P // columns]
        gate_PI, up_PI = linear.linear(x_PH, gate_up[expert]).chunk(2, dim=1)
        activated_PI = swiglu.swiglu(gate_PI, up_PI, contract.swiglu())
        result_PH = linear.linear_partial(activated_PI, down[expert])
        grad_weights_P[pairs_P] = linear.row_sum(grad_PH * result_PH, contract.schedule)
        grad_result_PH = grad_PH * weights_P[pairs_P, None]
        grad_activated_PI, grad_down[expert], _ = linear.linear_backward(grad_result_PH, activated_PI, down[expert])
        wide = gate_PI.to(torch.float32), up_PI.to(torch.float32)
        grad_PJ = torch.cat(swiglu.swiglu_backward(grad_activated_PI, *wide, contract.swiglu()), dim=1)
        grad_x_PH[pairs_P], grad_gate_up[expert], _ = linear.linear_backward(grad_PJ, x_PH, gate_up[expert])
    exact = GroupedExpertsContract(schedule=contract.schedule)
    grad_x_NTH = grad_x_PH.view(rows, columns, hidden)
    grad_x_NH = combine(
        grad_x_NTH, torch.ones(experts_NT.shape, dtype=torch.float32, device=x_NH.device), experts_NT, exact
    )
    return grad_x_NH, grad_weights_P.view(rows, columns), *_stacked(grad_gate_up, grad_down, x_NH, down)


def _stacked(
    gate_up: list[torch.Tensor | None], down: list[torch.Tensor | None], x_NH: torch.Tensor, packed: Sequence[Any]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dgate, dup, ddown) of all experts, zero where an expert had no tokens."""
    hidden, inner = x_NH.shape[1], packed[0].k
    nothing_JH = torch.zeros((2 * inner, hidden), dtype=torch.float32, device=x_NH.device)
    nothing_HI = torch.zeros((hidden, inner), dtype=torch.float32, device=x_NH.device)
    gate_EIH, up_EIH = torch.stack([nothing_JH if one is None else one for one in gate_up]).chunk(2, dim=1)
    return gate_EIH, up_EIH, torch.stack([nothing_HI if one is None else one for one in down])
