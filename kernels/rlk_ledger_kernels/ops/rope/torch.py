"""rope, torch: two products and a sum per element, each rounded where declared, over tables made once."""

from __future__ import annotations

import torch

from rlk_ledger_kernels.dtypes import torch_dtype
from rlk_ledger_kernels.errors import OperandError
from rlk_ledger_kernels.ops.rope.contract import RopeContract
from rlk_ledger_kernels.ops.rope.table import RopeTable


def rope(x_NHD: torch.Tensor, rows: RopeTable, contract: RopeContract) -> torch.Tensor:
    """Rotate every head: x * cos + swap_halves(x) * sin, each of the three operations rounded.

    x_NHD: [N, heads, D]. rows: the table at the N positions. Returns [N, heads, D] in `contract.arithmetic`.
    Raises OperandError when the table's rows are not [N, D].
    """
    if rows.cos_PD.shape != (x_NHD.shape[0], x_NHD.shape[2]):
        raise OperandError(f"rope: x is {tuple(x_NHD.shape)}, the table's rows are {tuple(rows.cos_PD.shape)}")
    dtype = torch_dtype(contract.arithmetic)
    x = x_NHD.to(dtype)
    half = x.shape[-1] // 2
    swapped = torch.cat((x[..., half:], x[..., :half]), dim=-1)
    cos_N1D = rows.cos_PD.to(dtype)[:, None, :]
    sin_N1D = rows.sin_PD.to(dtype)[:, None, :]
    return (x * cos_N1D).add_(swapped.mul_(sin_N1D))
