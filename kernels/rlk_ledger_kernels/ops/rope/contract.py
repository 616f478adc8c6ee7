"""The numeric contract of rope: dtypes and rounding points; the order of sums is the `Schedule`."""

from __future__ import annotations

from dataclasses import dataclass

from rlk_ledger_kernels.dtypes import DType, torch_dtype


@dataclass(frozen=True)
class RopeContract:
    """Rotation of the two halves of a head; angles in float32, the table rounded to `table`.

    arithmetic: dtype in which the two products and their sum are each rounded.
    """

    table: DType = "float32"
    arithmetic: DType = "float32"

    def __post_init__(self) -> None:
        """Refuse unknown names."""
        torch_dtype(self.table)
        torch_dtype(self.arithmetic)
