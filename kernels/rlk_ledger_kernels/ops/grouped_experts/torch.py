"""grouped_experts, torch: one expert after the other through `linear`, then each token's results by rising expert.

An expert's rows run in the fixed row tiles of linear, so how many other tokens share the expert changes no bit.

N tokens, T columns (top_k), E experts, I inner width, H hidden, P pairs of a token and an expert.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from rlk_ledger_kernels.errors import OperandError
from rlk_ledger_kernels.ops.grouped_experts.contract import (
    GroupedExpertsContract,
    checked_routes,
    checked_weights,
    checked_x,
)
from rlk_ledger_kernels.ops.grouped_experts.gradients import Gradients, gradients
from rlk_ledger_kernels.ops.grouped_experts.routes import combine, expert_span, group, merge_shares
from rlk_ledger_kernels.ops.linear import torch as linear_torch
from rlk_ledger_kernels.ops.linear.torch import PackedLinear, linear, linear_partial, pack_linear, pack_row_shard
from rlk_ledger_kernels.ops.linear.tree import shard_span
from rlk_ledger_kernels.ops.swiglu import torch as swiglu_torch


@dataclass(frozen=True)
class PackedExperts:
    """The experts of a layer, or a rank's share of them, made ready for one schedule.

    gate_up: gate above up, [2 I, H] of each held expert. down: [H, I]. first: the first expert held. experts: of the
    whole layer. whole: whether this is no share.
    """

    gate_up: tuple[PackedLinear, ...]
    down: tuple[PackedLinear, ...]
    first: int
    experts: int
    hidden: int
    whole: bool
    contract: GroupedExpertsContract


def pack_experts(
    gate_EIH: torch.Tensor, up_EIH: torch.Tensor, down_EHI: torch.Tensor, contract: GroupedExpertsContract
) -> PackedExperts:
    """Widen and cut the weights of all experts once.

    gate_EIH, up_EIH: [E, I, H]. down_EHI: [E, H, I]. Raises OperandError when they do not belong together.
    """
    return pack_expert_shard(gate_EIH, up_EIH, down_EHI, contract)


def pack_expert_shard(
    gate_EIH: torch.Tensor,
    up_EIH: torch.Tensor,
    down_EHI: torch.Tensor,
    contract: GroupedExpertsContract,
    tp: tuple[int, int] = (1, 0),
    ep: tuple[int, int] = (1, 0),
) -> PackedExperts:
    """Pack what one rank holds: an equal run of experts (ep) and of each a node of the inner tree (tp).

    The weights are those of the whole layer; only the rank's part is read. tp, ep: (ranks, rank).
    Raises ContractError when experts or inner width do not divide so, OperandError for weights that do not fit.
    """
    experts, inner, hidden = checked_weights(gate_EIH, up_EIH, down_EHI)
    first, end = expert_span(experts, *ep)
    start, stop = shard_span(inner, contract.schedule.k_leaf, *tp)
    gate_up = tuple(
        pack_linear(torch.cat((gate_EIH[e, start:stop], up_EIH[e, start:stop])), contract.linear())
        for e in range(first, end)
    )
    down = tuple(pack_row_shard(down_EHI[e], contract.linear("float32"), *tp) for e in range(first, end))
    return PackedExperts(gate_up, down, first, experts, hidden, tp[0] == ep[0] == 1, contract)


def grouped_experts(
    x_NH: torch.Tensor, packed: PackedExperts, weights_NT: torch.Tensor, experts_NT: torch.Tensor
) -> torch.Tensor:
    """y_n = sum over the experts e of row n, by rising e, of w_ne down_e(silu(gate_e x_n) * up_e x_n).

    x_NH: [N, H]. weights_NT: [N, T], any float dtype. experts_NT: int64 [N, T]. Returns [N, H] in `contract.output`.
    Raises OperandError for a share of the experts, or operands that do not fit.
    """
    if not packed.whole:
        raise OperandError("grouped_experts: the weights are a rank's share; use expert_partials and merge_experts")
    checked_routes(x_NH.shape[0], weights_NT, experts_NT)
    return combine(expert_partials(x_NH, packed, experts_NT), weights_NT, experts_NT, packed.contract)


def expert_partials(x_NH: torch.Tensor, packed: PackedExperts, experts_NT: torch.Tensor) -> torch.Tensor:
    """The results of down for each pair, as far as this rank holds them: no weight, no rounding.

    Returns float32 [N, T, H]; zero where the expert is on another rank. Raises OperandError as grouped_experts does.
    """
    checked_x(x_NH, packed.hidden)
    checked_routes(x_NH.shape[0], None, experts_NT)
    rows, columns = experts_NT.shape
    parts_PH = torch.zeros((rows * columns, packed.hidden), dtype=torch.float32, device=x_NH.device)
    for index, pairs_P in _held(packed, experts_NT):
        gate_PI, up_PI = linear(x_NH[pairs_P // columns], packed.gate_up[index]).chunk(2, dim=1)
        activated_PI = swiglu_torch.swiglu(gate_PI, up_PI, packed.contract.swiglu())
        parts_PH[pairs_P] = linear_partial(activated_PI, packed.down[index])
    return parts_PH.view(rows, columns, packed.hidden)


def merge_experts(
    parts: Sequence[torch.Tensor],
    weights_NT: torch.Tensor,
    experts_NT: torch.Tensor,
    contract: GroupedExpertsContract,
    experts: int,
    tp: int = 1,
    ep: int = 1,
) -> torch.Tensor:
    """Merge the shares of all ranks and combine: the bits of `grouped_experts` on the whole layer.

    parts: float32 [N, T, H] of rank ep_rank * tp + tp_rank at that place. experts: of the whole layer.
    Returns [N, H] in `contract.output`. Raises OperandError for shares that do not belong together.
    """
    parts_NTH = merge_shares(parts, experts_NT, experts, tp, ep)
    checked_routes(parts_NTH.shape[0], weights_NT, experts_NT)
    return combine(parts_NTH, weights_NT, experts_NT, contract)


def grouped_experts_backward(
    grad_NH: torch.Tensor,
    x_NH: torch.Tensor,
    packed: PackedExperts,
    weights_NT: torch.Tensor,
    experts_NT: torch.Tensor,
) -> Gradients:
    """Gradients with respect to x, the weights of the routes, gate, up and down; all float32.

    A row of the first two depends on its own row alone, a token's dx adding its experts by rising index. Gradients of
    an expert's weights sum its tokens in index order, in blocks of `k_leaf` along the binary tree over the blocks;
    they are zero for an expert without tokens. Roundings inside the forward pass count as the identity.
    Returns (dx [N, H], dweights [N, T], dgate [E, I, H], dup [E, I, H], ddown [E, H, I]).
    Raises OperandError for a share of the experts, or operands that do not fit.
    """
    if not packed.whole:
        raise OperandError("grouped_experts: the gradient of a rank's share is not defined; pass the whole layer")
    checked_x(x_NH, packed.hidden)
    checked_routes(x_NH.shape[0], weights_NT, experts_NT)
    modules = linear_torch, swiglu_torch
    routed = weights_NT, experts_NT
    return gradients(modules, grad_NH, x_NH, packed.gate_up, packed.down, *routed, packed.contract)


def _held(packed: PackedExperts, experts_NT: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """(place in the pack, its pairs by rising token) of every held expert that has tokens."""
    routes = group(experts_NT, packed.experts)
    start = sum(routes.counts[: packed.first])
    for index in range(len(packed.down)):
        count = routes.counts[packed.first + index]
        if count:
            yield index, routes.pairs_P[start : start + count]
        start += count
