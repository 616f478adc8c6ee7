"""The numeric contract of the experts of a mixture, and the checks that every backend shares."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch

from rlk_ledger_kernels.dtypes import DType, one_of
from rlk_ledger_kernels.errors import OperandError
from rlk_ledger_kernels.ops.linear.contract import LinearContract
from rlk_ledger_kernels.ops.swiglu.contract import SwigluContract
from rlk_ledger_kernels.schedule import Schedule


@dataclass(frozen=True)
class GroupedExpertsContract:
    """y_n = sum over the experts e of row n, by rising e, of w_ne down_e(silu(gate_e x_n) * up_e x_n).

    Gate, up and the activation are rounded to `output`. weighted: `hf` rounds the result of down, multiplies by the
    weight and rounds again (Hugging Face); `kernel` multiplies in float32 and rounds once (vLLM's fused kernel);
    `float32` does not round before the sum. combine: dtype of the running sum, `float32` with one rounding at the end
    (Hugging Face's grouped_mm, its default) or `output`, rounding after every expert (its eager loop).
    """

    output: DType = "float32"
    operands: DType | None = None
    materialise: Literal["activation", "product"] = "activation"
    weighted: Literal["hf", "kernel", "float32"] = "hf"
    combine: Literal["float32", "output"] = "float32"
    schedule: Schedule = field(default_factory=Schedule)

    def __post_init__(self) -> None:
        """Refuse unknown names."""
        one_of("grouped_experts.weighted", self.weighted, ("hf", "kernel", "float32"))
        one_of("grouped_experts.combine", self.combine, ("float32", "output"))
        self.linear()
        self.swiglu()

    def linear(self, output: DType | None = None) -> LinearContract:
        """The contract of one projection, rounding to `output` or to the dtype given."""
        return LinearContract(output=output or self.output, operands=self.operands, schedule=self.schedule)

    def swiglu(self) -> SwigluContract:
        """The contract of the activation."""
        return SwigluContract(output=self.output, materialise=self.materialise)


def checked_weights(gate_EIH: torch.Tensor, up_EIH: torch.Tensor, down_EHI: torch.Tensor) -> tuple[int, int, int]:
    """(experts, inner, hidden); raises OperandError when the three do not belong together."""
    shapes = tuple(gate_EIH.shape), tuple(up_EIH.shape), tuple(down_EHI.shape)
    good = gate_EIH.dim() == 3 and 0 not in shapes[0] and shapes[0] == shapes[1]
    if not good or shapes[2] != (shapes[0][0], shapes[0][2], shapes[0][1]):
        raise OperandError(
            f"grouped_experts: gate {shapes[0]}, up {shapes[1]} and down {shapes[2]} do not belong together; "
            "pass [experts, inner, hidden] twice and [experts, hidden, inner]"
        )
    return shapes[0][0], shapes[0][1], shapes[0][2]


def checked_x(x_NH: torch.Tensor, hidden: int) -> None:
    """Raise OperandError when `x_NH` is not [rows, hidden]."""
    if x_NH.dim() != 2 or x_NH.shape[1] != hidden:
        raise OperandError(f"grouped_experts: x is {tuple(x_NH.shape)}, the experts need [rows, {hidden}]")


def checked_routes(rows: int, weights_NT: torch.Tensor | None, experts_NT: torch.Tensor) -> None:
    """Raise OperandError unless experts are int64 [rows, T] with weights of the same shape."""
    if experts_NT.dim() != 2 or experts_NT.shape[0] != rows or experts_NT.dtype != torch.int64:
        raise OperandError(
            f"grouped_experts: experts are {experts_NT.dtype} {tuple(experts_NT.shape)}; pass int64 [{rows}, top_k]"
        )
    if weights_NT is not None and weights_NT.shape != experts_NT.shape:
        raise OperandError(
            f"grouped_experts: weights are {tuple(weights_NT.shape)}, experts {tuple(experts_NT.shape)}; "
            "they must be equal"
        )


def outside(experts: int) -> OperandError:
    """The error for a route that names an expert that does not exist."""
    return OperandError(f"grouped_experts: a route names an expert outside 0..{experts - 1}; check the routes")
