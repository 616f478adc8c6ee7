"""The numeric contract of attention: dtypes and rounding points; the order of sums is the `Schedule`."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlk_ledger_kernels.dtypes import DType, torch_dtype
from rlk_ledger_kernels.errors import ContractError
from rlk_ledger_kernels.schedule import Schedule


@dataclass(frozen=True)
class AttentionContract:
    """Causal grouped-query attention with float32 (m, l, o) over logical KV blocks, rounded once at the end.

    Each block is reduced alone, under its own maximum; the block results are merged one after the other in the
    schedule's block order. So whoever computes a block, and when, changes no bit (context parallelism, split KV).
    The scale multiplies the query before the product. head_dim is one leaf, at most 256.
    window: key j is visible to query i when i - window < j <= i, as in Mistral and Qwen2; None sees all j <= i.
    """

    scale: float
    output: DType = "float32"
    schedule: Schedule = field(default_factory=Schedule)
    window: int | None = None

    def __post_init__(self) -> None:
        """Refuse unknown names and an empty window."""
        torch_dtype(self.output)
        if self.window is not None and self.window < 1:
            raise ContractError(f"attention.window is {self.window}; choose at least 1, or None for full attention")
