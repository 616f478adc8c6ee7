"""Which (token, column) pairs go to which expert, which rank holds which expert, and the order of the combination."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rlk_ledger_kernels.dtypes import torch_dtype
from rlk_ledger_kernels.errors import ContractError, OperandError
from rlk_ledger_kernels.ops.grouped_experts.contract import GroupedExpertsContract, checked_routes, outside
from rlk_ledger_kernels.ops.linear.tree import merge_tree


@dataclass(frozen=True)
class Routes:
    """Pairs grouped by expert, by rising token within an expert.

    pairs_P: int64, for each place its pair, token * T + column. counts: pairs of each expert.
    """

    pairs_P: torch.Tensor
    counts: tuple[int, ...]


def group(experts_NT: torch.Tensor, experts: int) -> Routes:
    """Sort pairs by expert, keeping the order of tokens. Raises OperandError for an expert outside 0..experts - 1."""
    flat_P = experts_NT.reshape(-1)
    if flat_P.numel() and (int(flat_P.min()) < 0 or int(flat_P.max()) >= experts):
        raise outside(experts)
    counts = torch.bincount(flat_P, minlength=experts).tolist()
    return Routes(flat_P.argsort(stable=True), tuple(int(count) for count in counts))


def expert_span(experts: int, ranks: int, rank: int) -> tuple[int, int]:
    """The first expert and the end of those that `rank` of `ranks` holds: equal runs in rank order.

    Raises ContractError when the experts do not divide by the ranks, or the rank is none of them.
    """
    if ranks < 1 or not 0 <= rank < ranks or experts % ranks:
        raise ContractError(f"grouped_experts: {experts} experts give no equal run to rank {rank} of {ranks}")
    return rank * experts // ranks, (rank + 1) * experts // ranks


def combine(
    parts_NTH: torch.Tensor, weights_NT: torch.Tensor, experts_NT: torch.Tensor, contract: GroupedExpertsContract
) -> torch.Tensor:
    """Weigh the results of each row's experts and add them by rising expert index.

    parts_NTH: float32 results of down, unrounded. Returns [N, H] in `contract.output`.
    """
    output = torch_dtype(contract.output)
    order_NT = experts_NT.argsort(dim=1, stable=True)
    total_NH: torch.Tensor | None = None
    for column in range(experts_NT.shape[1]):
        place_N1 = order_NT[:, column : column + 1]
        part_NH = parts_NTH.gather(1, place_N1[:, :, None].expand(-1, -1, parts_NTH.shape[2]))[:, 0]
        if contract.weighted == "hf":
            part_NH = part_NH.to(output).to(torch.float32)
        part_NH = part_NH * weights_NT.gather(1, place_N1).to(torch.float32)
        if contract.weighted != "float32":
            part_NH = part_NH.to(output).to(torch.float32)
        total_NH = part_NH if total_NH is None else total_NH + part_NH
        if contract.combine == "output":
            total_NH = total_NH.to(output).to(torch.float32)
    if total_NH is None:
        return torch.zeros((parts_NTH.shape[0], parts_NTH.shape[2]), dtype=output, device=parts_NTH.device)
    return total_NH.to(output)


def merge_shares(
    parts: Sequence[torch.Tensor], experts_NT: torch.Tensor, experts: int, tp: int, ep: int
) -> torch.Tensor:
    """The float32 [N, T, H] results of down from the shares of tp x ep ranks.

    parts: share of rank ep_rank * tp + tp_rank at that place. Shares of one expert meet along the tree of linear; a
    pair is copied from the ranks that hold its expert. Raises OperandError for a wrong number of shares.
    """
    if len(parts) != tp * ep:
        raise OperandError(f"grouped_experts: {len(parts)} shares for tp {tp} x ep {ep}; pass one per rank")
    checked_routes(parts[0].shape[0], None, experts_NT)
    merged = merge_tree(list(parts[:tp]))
    for owner in range(1, ep):
        start, end = expert_span(experts, ep, owner)
        held_NT1 = ((experts_NT >= start) & (experts_NT < end))[:, :, None]
        merged = torch.where(held_NT1, merge_tree(list(parts[owner * tp : (owner + 1) * tp])), merged)
    return merged
