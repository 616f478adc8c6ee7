"""The numeric contract of rope: which elements turn together, dtypes and rounding points."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rlk_ledger_kernels.dtypes import DType, one_of, torch_dtype
from rlk_ledger_kernels.errors import ContractError


@dataclass(frozen=True)
class RopeContract:
    """Rotation of pairs of elements; angles in float32, the table rounded to `table`.

    style: `half` turns (x[i], x[i + R/2]) together (Llama, Qwen in Hugging Face's layout), `interleaved`
        (x[2i], x[2i+1]) (GPT-J, the paper).
    rotary: R, how many leading dimensions of a head turn; None is all of them. The rest passes unchanged.
    arithmetic: dtype in which the two products and their sum are each rounded.
    output: dtype of the result, to which the sum is rounded once more; None is `arithmetic`.
    """

    table: DType = "float32"
    arithmetic: DType = "float32"
    style: Literal["half", "interleaved"] = "half"
    rotary: int | None = None
    output: DType | None = None

    def __post_init__(self) -> None:
        """Refuse unknown names and a part of a head that has no pairs."""
        torch_dtype(self.table)
        torch_dtype(self.arithmetic)
        torch_dtype(self.output_dtype)
        one_of("rope.style", self.style, ("half", "interleaved"))
        if self.rotary is not None and (self.rotary < 2 or self.rotary % 2):
            raise ContractError(f"rope.rotary is {self.rotary}; choose an even number of at least 2, or None")

    @property
    def output_dtype(self) -> DType:
        """dtype of the result."""
        return self.output or self.arithmetic
