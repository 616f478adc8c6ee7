"""The numeric contract of linear, and the checks of its operands that every backend shares.

Dtypes and rounding points stand in the contract; the order of sums is the `Schedule`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch

from rlk_ledger_kernels.dtypes import DType, one_of, torch_dtype
from rlk_ledger_kernels.errors import OperandError
from rlk_ledger_kernels.schedule import Schedule


@dataclass(frozen=True)
class LinearContract:
    """y = x W^T + b: operands widened to float32 (exact), float32 sums, one rounding to `output`.

    operands: dtype x and W are rounded to before they are widened; None keeps them as they come.
    """

    output: DType = "float32"
    operands: DType | None = None
    accumulate: Literal["float32"] = "float32"
    schedule: Schedule = field(default_factory=Schedule)

    def __post_init__(self) -> None:
        """Refuse unknown names."""
        torch_dtype(self.output)
        if self.operands is not None:
            torch_dtype(self.operands)
        one_of("linear.accumulate", self.accumulate, ("float32",))


def checked_weight(weight_OK: torch.Tensor) -> tuple[int, int]:
    """(outputs, K) of a weight; raises OperandError for one that is empty or no matrix."""
    if weight_OK.dim() != 2 or 0 in weight_OK.shape:
        raise OperandError(f"linear: a weight is a matrix [out, in], got shape {tuple(weight_OK.shape)}")
    return weight_OK.shape[0], weight_OK.shape[1]


def checked_bias(bias_O: torch.Tensor | None, outputs: int) -> torch.Tensor | None:
    """The bias in float32; raises OperandError for another length than [outputs]."""
    if bias_O is None:
        return None
    if bias_O.shape != (outputs,):
        raise OperandError(f"linear: bias has shape {tuple(bias_O.shape)}, expected ({outputs},)")
    return bias_O.to(torch.float32).contiguous()


def checked_rows(x_NK: torch.Tensor, k: int, what: str = "x") -> None:
    """Raise OperandError when `x_NK` is not [rows, k]."""
    if x_NK.dim() != 2 or x_NK.shape[1] != k:
        raise OperandError(f"linear: {what} has shape {tuple(x_NK.shape)}, the weight needs [rows, {k}]")
