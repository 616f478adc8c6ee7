"""grouped_experts, float32 reference: y_n = sum_t w_nt down_e(silu(gate_e x_n) * up_e x_n), e = experts_nt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rlk_ledger_kernels.ops.grouped_experts.contract import GroupedExpertsContract, checked_routes, checked_weights
from rlk_ledger_kernels.ops.grouped_experts.routes import expert_span, group
from rlk_ledger_kernels.ops.linear.tree import shard_span
from rlk_ledger_kernels.precision import exact_products


@dataclass(frozen=True)
class PackedExperts:
    """float32 weights of the experts `first` and on, of `experts` in the layer."""

    gate_EIH: torch.Tensor
    up_EIH: torch.Tensor
    down_EHI: torch.Tensor
    first: int
    experts: int


def pack_experts(
    gate_EIH: torch.Tensor, up_EIH: torch.Tensor, down_EHI: torch.Tensor, contract: GroupedExpertsContract
) -> PackedExperts:
    """Widen. gate_EIH, up_EIH: [E, I, H]. down_EHI: [E, H, I]. Raises OperandError for other shapes."""
    return pack_expert_shard(gate_EIH, up_EIH, down_EHI, contract)


def pack_expert_shard(
    gate_EIH: torch.Tensor,
    up_EIH: torch.Tensor,
    down_EHI: torch.Tensor,
    contract: GroupedExpertsContract,
    tp: tuple[int, int] = (1, 0),
    ep: tuple[int, int] = (1, 0),
) -> PackedExperts:
    """What one rank holds; tp, ep: (ranks, rank). Raises ContractError as other backends do."""
    experts, inner, _ = checked_weights(gate_EIH, up_EIH, down_EHI)
    first, end = expert_span(experts, *ep)
    start, stop = shard_span(inner, contract.schedule.k_leaf, *tp)
    gate, up = (w_EIH[first:end, start:stop].to(torch.float32) for w_EIH in (gate_EIH, up_EIH))
    return PackedExperts(gate, up, down_EHI[first:end, :, start:stop].to(torch.float32), first, experts)


def grouped_experts(
    x_NH: torch.Tensor, packed: PackedExperts, weights_NT: torch.Tensor, experts_NT: torch.Tensor
) -> torch.Tensor:
    """Run each token through its experts. x_NH: [N, H]. weights_NT, experts_NT: [N, T]. Returns float32 [N, H]."""
    checked_routes(x_NH.shape[0], weights_NT, experts_NT)
    return (expert_partials(x_NH, packed, experts_NT) * weights_NT.to(torch.float32)[:, :, None]).sum(1)


def expert_partials(x_NH: torch.Tensor, packed: PackedExperts, experts_NT: torch.Tensor) -> torch.Tensor:
    """down_e(silu(gate_e x) * up_e x) of every pair whose expert is held, zero elsewhere; float32 [N, T, H]."""
    checked_routes(x_NH.shape[0], None, experts_NT)
    group(experts_NT, packed.experts)  # refuses experts that do not exist
    parts_NTH = torch.zeros((*experts_NT.shape, x_NH.shape[1]), dtype=torch.float32, device=x_NH.device)
    with exact_products(x_NH.device):
        for index in range(packed.gate_EIH.shape[0]):
            rows, columns = (experts_NT == packed.first + index).nonzero(as_tuple=True)
            x_PH = x_NH[rows].to(torch.float32)
            gate_PI, up_PI = x_PH @ packed.gate_EIH[index].T, x_PH @ packed.up_EIH[index].T
            parts_NTH[rows, columns] = (gate_PI * gate_PI.sigmoid() * up_PI) @ packed.down_EHI[index].T
    return parts_NTH


def merge_experts(
    parts: Sequence[torch.Tensor],
    weights_NT: torch.Tensor,
    experts_NT: torch.Tensor,
    contract: GroupedExpertsContract,
    experts: int,
    tp: int = 1,
    ep: int = 1,
) -> torch.Tensor:
    """The sum of all shares, weighted and summed over the experts of each row; float32 [N, H]."""
    return (torch.stack(list(parts)).sum(0) * weights_NT.to(torch.float32)[:, :, None]).sum(1)


def grouped_experts_backward(
    grad_NH: torch.Tensor,
    x_NH: torch.Tensor,
    packed: PackedExperts,
    weights_NT: torch.Tensor,
    experts_NT: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients by autograd through the equation: (dx, dweights, dgate, dup, ddown), float32."""
    with exact_products(x_NH.device), torch.enable_grad():
        leaves = (x_NH, weights_NT, packed.gate_EIH, packed.up_EIH, packed.down_EHI)
        x, weights, gate, up, down = (leaf.detach().to(torch.float32).clone().requires_grad_() for leaf in leaves)
        y_NH = grouped_experts(x, PackedExperts(gate, up, down, packed.first, packed.experts), weights, experts_NT)
        grads = torch.autograd.grad(y_NH, (x, weights, gate, up, down), grad_NH.to(torch.float32))
    return grads[0], grads[1], grads[2], grads[3], grads[4]
