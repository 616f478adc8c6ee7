"""swiglu, float32 reference: y = gate * sigmoid(gate) * up (Shazeer 2020)."""

from __future__ import annotations

import torch


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Gate. gate, up: same shape. Returns float32 of that shape."""
    wide = gate.to(torch.float32)
    return wide * torch.sigmoid(wide) * up.to(torch.float32)
