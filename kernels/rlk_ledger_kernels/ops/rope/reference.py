"""rope, float32 reference: rotate (x[i], x[i + D/2]) by position * frequency[i] (Su et al. 2021)."""

from __future__ import annotations

import torch


def rope(x_NHD: torch.Tensor, positions_N: torch.Tensor, frequencies_F: torch.Tensor) -> torch.Tensor:
    """Rotate every head.

    x_NHD: [N, heads, D]. positions_N: int64 [N]. frequencies_F: float32 [D/2]. Returns float32 [N, heads, D].
    """
    low, high = x_NHD.to(torch.float32).chunk(2, dim=-1)
    angle_N1F = (positions_N[:, None].to(torch.float32) * frequencies_F[None, :])[:, None, :]
    cos, sin = angle_N1F.cos(), angle_N1F.sin()
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)
