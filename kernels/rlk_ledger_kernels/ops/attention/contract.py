"""The numeric contract of attention: dtypes and rounding points; the order of sums is the `Schedule`."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlk_ledger_kernels.dtypes import DType, torch_dtype
from rlk_ledger_kernels.schedule import Schedule


@dataclass(frozen=True)
class AttentionContract:
    """Causal grouped-query attention with float32 (m, l, o) over logical KV blocks, rounded once at the end.

    The scale multiplies the query before the product. head_dim is one leaf of at most 256.
    """

    scale: float
    output: DType = "float32"
    schedule: Schedule = field(default_factory=Schedule)

    def __post_init__(self) -> None:
        """Refuse unknown names."""
        torch_dtype(self.output)
