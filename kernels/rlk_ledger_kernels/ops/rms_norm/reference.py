"""rms_norm, float32 reference: y = x / sqrt(mean(x^2) + eps) * w (Zhang and Sennrich 2019)."""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight_W: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise over the last dimension.

    x: [..., W]. weight_W: [W]. Returns float32 [..., W].
    """
    wide = x.to(torch.float32)
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight_W.to(torch.float32)
