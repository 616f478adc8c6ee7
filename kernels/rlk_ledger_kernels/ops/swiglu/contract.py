"""The numeric contract of swiglu: dtypes and rounding points; the order of sums is the `Schedule`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rlk_ledger_kernels.dtypes import DType, one_of, torch_dtype


@dataclass(frozen=True)
class SwigluContract:
    """y = silu(gate) * up in float32.

    materialise: `activation` rounds silu(gate) to `output` before the product (as Hugging Face does),
        `product` rounds once at the end. They are the same in float32.
    """

    output: DType = "float32"
    materialise: Literal["activation", "product"] = "activation"

    def __post_init__(self) -> None:
        """Refuse unknown names."""
        torch_dtype(self.output)
        one_of("swiglu.materialise", self.materialise, ("activation", "product"))
