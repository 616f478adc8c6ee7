"""rms_norm, torch: the square sum as a product with ones, so it has leaves and a tree like any contraction.

Everything else is one correctly rounded operation per element and cannot depend on its place.
"""

from __future__ import annotations

import torch

from rlk_ledger_kernels.dtypes import torch_dtype
from rlk_ledger_kernels.errors import OperandError
from rlk_ledger_kernels.ops.linear.torch import row_sum
from rlk_ledger_kernels.ops.rms_norm.contract import RmsNormContract


def rms_norm(x: torch.Tensor, weight: torch.Tensor, contract: RmsNormContract) -> torch.Tensor:
    """Normalise over the last dimension.

    x: [..., W]. weight: broadcasts against x, last dimension W (one weight per head is [heads, W]).
    Returns [..., W] in `contract.output`.
    Raises OperandError when the last dimensions differ.
    """
    width = x.shape[-1]
    if weight.shape[-1] != width:
        raise OperandError(f"rms_norm: x ends in {width}, weight in {weight.shape[-1]}; they must be equal")
    output = torch_dtype(contract.output)
    wide = x.to(torch.float32)
    sums = row_sum(wide.square().reshape(-1, width), contract.schedule)
    scale = torch.rsqrt(sums.div_(width).add_(contract.eps)).reshape(*x.shape[:-1], 1)
    normal = wide * scale
    if contract.rounding_order == "hf":
        return normal.to(output) * weight.to(output)
    return (normal * weight.to(torch.float32)).to(output)
