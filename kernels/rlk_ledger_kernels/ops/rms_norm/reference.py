"""rms_norm, float32 reference: y = x / sqrt(mean(x^2) + eps) * w (Zhang and Sennrich 2019)."""

from __future__ import annotations

import torch

from rlk_ledger_kernels.ops.rms_norm.contract import RmsNormContract, check_operands


def rms_norm(x: torch.Tensor, weight: torch.Tensor, contract: RmsNormContract) -> torch.Tensor:
    """Normalise over the last dimension.

    x: [..., W] or [..., heads, W]. weight: [W] or [heads, W]. Returns float32 of x's shape.
    """
    check_operands(x, weight)
    wide = x.to(torch.float32)
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + contract.eps)
    return wide * scale * weight.to(torch.float32)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, contract: RmsNormContract
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add, then normalise the sum; returns (normalised, sum), both float32 and nowhere rounded further."""
    check_operands(x, weight, residual)
    total = x.to(torch.float32) + residual.to(torch.float32)
    return rms_norm(total, weight, contract), total
