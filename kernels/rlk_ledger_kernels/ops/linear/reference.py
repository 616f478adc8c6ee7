"""linear, float32 reference: y = x W^T + b."""

from __future__ import annotations

import torch


def linear(x_NK: torch.Tensor, weight_OK: torch.Tensor, bias_O: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply.

    x_NK: [N, K]. weight_OK: [O, K]. bias_O: [O] or None. Returns float32 [N, O].
    """
    y_NO = x_NK.to(torch.float32) @ weight_OK.to(torch.float32).T
    return y_NO if bias_O is None else y_NO + bias_O.to(torch.float32)
