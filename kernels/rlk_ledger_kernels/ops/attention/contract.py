"""The numeric contract of attention: dtypes and rounding points; the order of sums is the `Schedule`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from rlk_ledger_kernels.dtypes import DType, one_of, torch_dtype
from rlk_ledger_kernels.errors import ContractError
from rlk_ledger_kernels.schedule import Schedule

ScaleAt = Literal["query", "score"]


@dataclass(frozen=True)
class AttentionContract:
    """Causal grouped-query attention with float32 (m, l, o) over logical KV blocks, rounded once at the end.

    Each block is reduced alone, under its own maximum; the block results are merged one after the other in the
    schedule's block order. So whoever computes a block, and when, changes no bit (context parallelism, split KV).
    head_dim is one leaf, at most 256.
    scale_at: the scale multiplies the float32 `query` before the product, or each float32 `score` after it.
    weights: dtype each block's exp(score - maximum) is rounded to before it multiplies the values and is summed into
    the denominator. Tensor cores want bfloat16 or float16 operands: there `score` and a narrow `weights` are fast.
    window: key j is visible to query i when i - window < j <= i, as in Mistral and Qwen2; None sees all j <= i.
    """

    scale: float
    output: DType = "float32"
    schedule: Schedule = field(default_factory=Schedule)
    window: int | None = None
    scale_at: ScaleAt = "query"
    weights: DType = "float32"

    def __post_init__(self) -> None:
        """Refuse unknown names and an empty window."""
        torch_dtype(self.output)
        torch_dtype(self.weights)
        one_of("attention.scale_at", self.scale_at, ("query", "score"))
        if self.window is not None and self.window < 1:
            raise ContractError(f"attention.window is {self.window}; choose at least 1, or None for full attention")
