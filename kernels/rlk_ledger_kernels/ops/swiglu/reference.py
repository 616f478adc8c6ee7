"""swiglu, float32 reference: y = gate * sigmoid(gate) * up (Shazeer 2020)."""

from __future__ import annotations

import torch

from rlk_ledger_kernels.ops.swiglu.contract import SwigluContract, check_operands


def swiglu(gate: torch.Tensor, up: torch.Tensor, contract: SwigluContract) -> torch.Tensor:
    """Gate. gate, up: same shape. Returns float32 of that shape; the contract's roundings are not applied."""
    check_operands(gate, up)
    wide = gate.to(torch.float32)
    return wide * torch.sigmoid(wide) * up.to(torch.float32)
