"""The numeric contract of linear: dtypes and rounding points; the order of sums is the `Schedule`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from rlk_ledger_kernels.dtypes import DType, one_of, torch_dtype
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
