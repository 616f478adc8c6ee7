"""Operators in plain tensor operations whose order is spelled out: the right twins of the wrong ones.

Every operation is elementwise and rounds once, so an element's bits depend on its own operands on any device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def draw(seed: int, *shape: int) -> torch.Tensor:
    """Standard normal float32 on the CPU, the same for the same seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)


def summed(terms_NK: torch.Tensor, leaf: int | None = None) -> torch.Tensor:
    """The last dimension added one element after the other within leaves, then leaf after leaf; float32 [N]."""
    width = terms_NK.shape[-1]
    total = torch.zeros_like(terms_NK[..., 0])
    for start in range(0, width, leaf or width):
        part = torch.zeros_like(total)
        for k in range(start, min(start + (leaf or width), width)):
            part = part + terms_NK[..., k]
        total = total + part
    return total


def product(x_NK: torch.Tensor, weight_OK: torch.Tensor, leaf: int | None = None) -> torch.Tensor:
    """x W^T in float32 with K added in leaves; [N, O]."""
    x, weight = x_NK.to(torch.float32), weight_OK.to(x_NK.device, torch.float32)
    return summed(x[:, None, :] * weight[None, :, :], leaf)


def log_sum_exp(logits_NV: torch.Tensor, cuts: Sequence[int]) -> torch.Tensor:
    """log sum exp over vocabulary tiles that end at `cuts`, merged in order by (max, sum); float32 [N]."""
    top = torch.full_like(logits_NV[:, 0], float("-inf"))
    total = torch.zeros_like(top)
    start = 0
    for end in cuts:
        tile = logits_NV[:, start:end]
        new = torch.maximum(top, tile.amax(-1))
        total = total * (top - new).exp() + summed((tile - new[:, None]).exp())
        top, start = new, end
    return top + total.log()
