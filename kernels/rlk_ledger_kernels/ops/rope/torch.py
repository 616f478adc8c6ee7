"""rope, torch: two products and a sum per element, each rounded where declared, over tables made once."""

from __future__ import annotations

import torch

from rlk_ledger_kernels.dtypes import torch_dtype
from rlk_ledger_kernels.ops.rope.contract import RopeContract
from rlk_ledger_kernels.ops.rope.table import RopeTable, check_operands


def rope(x_NHD: torch.Tensor, rows: RopeTable, contract: RopeContract) -> torch.Tensor:
    """Rotate every head: x * cos + partner(x) * sin, each of the three operations rounded.

    x_NHD: [N, heads, D]. rows: the table at the N positions. Returns [N, heads, D] in the contract's output dtype.
    Raises OperandError when the table's rows are not [N, R].
    """
    return _rotate(x_NHD, rows, contract, inverse=False).to(torch_dtype(contract.output_dtype))


def rope_backward(grad_NHD: torch.Tensor, rows: RopeTable, contract: RopeContract) -> torch.Tensor:
    """Gradient: the rotation by the opposite angle, in the contract's arithmetic.

    grad_NHD: [N, heads, D]. Returns [N, heads, D] in `grad_NHD`'s dtype.
    """
    return _rotate(grad_NHD, rows, contract, inverse=True).to(grad_NHD.dtype)


def _rotate(x_NHD: torch.Tensor, rows: RopeTable, contract: RopeContract, inverse: bool) -> torch.Tensor:
    turned = check_operands(x_NHD, rows, contract)
    dtype = torch_dtype(contract.arithmetic)
    x = x_NHD.to(dtype)
    part = x[..., :turned]
    if contract.style == "half":
        partner = torch.cat((part[..., turned // 2 :], part[..., : turned // 2]), dim=-1)
    else:
        partner = part.reshape(*part.shape[:-1], turned // 2, 2).flip(-1).flatten(-2)
    cos_N1D = rows.cos_PD.to(dtype)[:, None, :]
    sin_N1D = rows.sin_PD.to(dtype)[:, None, :]
    turned_part = (part * cos_N1D).add_(partner.mul_(-sin_N1D if inverse else sin_N1D))
    return turned_part if turned == x.shape[-1] else torch.cat((turned_part, x[..., turned:]), dim=-1)
