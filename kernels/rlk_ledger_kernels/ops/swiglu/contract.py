"""The numeric contract of swiglu: how silu is computed, dtypes and rounding points."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from rlk_ledger_kernels.dtypes import DType, one_of, torch_dtype
from rlk_ledger_kernels.errors import OperandError


@dataclass(frozen=True)
class SwigluContract:
    """y = silu(gate) * up in float32.

    activation: `quotient` is gate / (1 + exp(-gate)), one division; `sigmoid` is gate * (1 / (1 + exp(-gate))), which
        rounds the sigmoid first.
    materialise: `activation` rounds silu(gate) to `output` before the product (as Hugging Face does),
        `product` rounds once at the end. They are the same in float32.
    """

    output: DType = "float32"
    materialise: Literal["activation", "product"] = "activation"
    activation: Literal["quotient", "sigmoid"] = "quotient"

    def __post_init__(self) -> None:
        """Refuse unknown names."""
        torch_dtype(self.output)
        one_of("swiglu.materialise", self.materialise, ("activation", "product"))
        one_of("swiglu.activation", self.activation, ("quotient", "sigmoid"))


def check_operands(*operands: torch.Tensor) -> None:
    """Raise OperandError when gate, up (and a gradient) are not of one shape."""
    if len({operand.shape for operand in operands}) > 1:
        names = zip(("gate", "up", "the gradient"), operands, strict=False)
        listed = ", ".join(f"{name} is {tuple(operand.shape)}" for name, operand in names)
        raise OperandError(f"swiglu: {listed}; they must be equal")
