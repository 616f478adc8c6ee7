"""rope, float32 reference: (a, b) -> (a cos - b sin, b cos + a sin) for every pair (Su et al. 2021)."""

from __future__ import annotations

import torch

from rlk_ledger_kernels.ops.rope.contract import RopeContract
from rlk_ledger_kernels.ops.rope.table import RopeTable, check_operands


def rope(x_NHD: torch.Tensor, rows: RopeTable, contract: RopeContract) -> torch.Tensor:
    """Rotate every head in float32 by the table as it stands.

    x_NHD: [N, heads, D]. rows: the table at the N positions. Returns float32 [N, heads, D].
    """
    turned = check_operands(x_NHD, rows, contract)
    wide = x_NHD.to(torch.float32)
    first, second = _pairs(turned, contract)
    cos_N1F = rows.cos_PD.to(torch.float32)[:, None, second]
    sin_N1F = rows.sin_PD.to(torch.float32)[:, None, second]
    a, b = wide[..., first], wide[..., second]
    out = wide.clone()
    out[..., first] = a * cos_N1F - b * sin_N1F
    out[..., second] = b * cos_N1F + a * sin_N1F
    return out


def _pairs(turned: int, contract: RopeContract) -> tuple[slice, slice]:
    """Where the first and the second element of each pair are."""
    if contract.style == "half":
        return slice(0, turned // 2), slice(turned // 2, turned)
    return slice(0, turned, 2), slice(1, turned, 2)
