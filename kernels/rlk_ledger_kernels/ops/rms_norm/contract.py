"""The numeric contract of rms_norm: dtypes and rounding points; the order of sums is the `Schedule`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from rlk_ledger_kernels.dtypes import DType, one_of, torch_dtype
from rlk_ledger_kernels.schedule import Schedule

RoundingOrder = Literal["hf", "kernel"]


@dataclass(frozen=True)
class RmsNormContract:
    """y = x / sqrt(mean(x^2) + eps) * w with the square sum in float32.

    rounding_order: `hf` rounds the normalised value to `output` and then multiplies by w in that dtype;
        `kernel` multiplies in float32 and rounds once. They are the same in float32.
    """

    eps: float = 1e-6
    rounding_order: RoundingOrder = "hf"
    output: DType = "float32"
    schedule: Schedule = field(default_factory=Schedule)

    def __post_init__(self) -> None:
        """Refuse unknown names."""
        torch_dtype(self.output)
        one_of("rms_norm.rounding_order", self.rounding_order, ("hf", "kernel"))
