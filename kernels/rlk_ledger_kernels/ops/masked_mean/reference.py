"""masked_mean, reference: sum(x * mask) / sum(mask)."""

from __future__ import annotations

import torch


def masked_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Average the active values; float32 scalar, NaN where none is active."""
    active = values.to(torch.float32)[mask.to(torch.bool)]
    return active.mean()
