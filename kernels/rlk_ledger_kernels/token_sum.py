"""Sums over tokens, as weight gradients need them: one fixed tree over the global order of tokens.

Every node adds at most `FAN_IN` children from the first to the last, starting at +0; the children of the lowest nodes
are tokens in index order, so the tree depends on nothing but how many tokens there are, and rows of zeros at the end
change no bit. Only elementwise additions are used, which are the same on every device.

Legend: N tokens, W width, G groups, B nodes of one level.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

FAN_IN = 32


@dataclass(frozen=True)
class TokenLevel:
    """One level of the tree. order_N: rows in the order they are added. first_B, length_B: where each node's children
    lie in that order (at most FAN_IN of them). group_B: the group each node belongs to, ascending."""

    order_N: torch.Tensor
    first_B: torch.Tensor
    length_B: torch.Tensor
    group_B: torch.Tensor


Adder = Callable[[torch.Tensor, TokenLevel], torch.Tensor]
"""(rows [N, W], level) -> float32 [B, W], each node the sum of its children in order."""


def token_sum(rows_NW: torch.Tensor) -> torch.Tensor:
    """sum over n of rows[n], in float32 along the fixed tree.

    rows_NW: [N, W], any float dtype. Returns float32 [W]; zeros when there is no row.
    """
    nodes_NW = rows_NW.to(torch.float32)
    while True:
        count, width = nodes_NW.shape
        blocks = max(1, -(-count // FAN_IN))
        padded = torch.nn.functional.pad(nodes_NW, (0, 0, 0, blocks * FAN_IN - count)).view(blocks, FAN_IN, width)
        total_BW = padded.new_zeros((blocks, width))
        for child in range(FAN_IN):
            total_BW += padded[:, child]
        if blocks == 1:
            return total_BW[0]
        nodes_NW = total_BW


def grouped_token_sum(rows_NW: torch.Tensor, groups_N: torch.Tensor, add: Adder) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum the rows of each group along the fixed tree over the group's own tokens.

    rows_NW: [N, W]. groups_N: int64 [N]. add: how one level is added. Returns (groups_G ascending, float32 [G, W]).
    """
    groups_sorted_N, order_N = torch.sort(groups_N, stable=True)
    nodes_NW = rows_NW
    while True:
        level = _level(groups_sorted_N, order_N)
        nodes_NW = add(nodes_NW, level)
        groups_sorted_N = level.group_B
        order_N = torch.arange(len(groups_sorted_N), device=groups_N.device)
        if len(groups_sorted_N) < 2 or bool((groups_sorted_N[1:] != groups_sorted_N[:-1]).all()):
            return groups_sorted_N, nodes_NW


def add_level(rows_NW: torch.Tensor, level: TokenLevel) -> torch.Tensor:
    """Add one level in plain torch."""
    total_BW = torch.zeros((len(level.first_B), rows_NW.shape[1]), dtype=torch.float32, device=rows_NW.device)
    for child in range(FAN_IN):
        has_B = (level.length_B > child).nonzero()[:, 0]
        if not has_B.numel():
            break
        rows_at_B = level.order_N[level.first_B[has_B] + child]
        total_BW[has_B] = total_BW[has_B] + rows_NW[rows_at_B].to(torch.float32)
    return total_BW


def _level(groups_sorted_N: torch.Tensor, order_N: torch.Tensor) -> TokenLevel:
    count = len(groups_sorted_N)
    index_N = torch.arange(count, device=order_N.device)
    starts_N = torch.ones(count, dtype=torch.bool, device=order_N.device)
    starts_N[1:] = groups_sorted_N[1:] != groups_sorted_N[:-1]
    start_of_group_N = torch.cummax(torch.where(starts_N, index_N, 0), 0).values if count else index_N
    first_B = ((index_N - start_of_group_N) % FAN_IN == 0).nonzero()[:, 0]
    end_B = torch.cat((first_B[1:], first_B.new_full((min(1, count),), count)))
    return TokenLevel(order_N, first_B, end_B - first_B, groups_sorted_N[first_B])
