"""Numeric contracts: what each operator promises about dtypes and the places where it rounds.

A contract says *what* is computed; the order of the sums is the `Schedule`. All operators accumulate in
float32. Dtypes are named by strings, so that a contract can be written into an event as it stands.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch

from rlk_ledger_kernels.errors import ContractError
from rlk_ledger_kernels.schedule import Schedule

DType = Literal["float32", "bfloat16", "float16"]
RoundingOrder = Literal["hf", "kernel"]

_TORCH = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a contract's dtype name; raises ContractError for any other name."""
    try:
        return _TORCH[name]
    except KeyError:
        raise ContractError(f"dtype {name!r} has no contract; choose one of {', '.join(_TORCH)}") from None


def one_of(where: str, value: object, allowed: tuple[str, ...]) -> None:
    """Raise ContractError naming the field when `value` is not one of `allowed`."""
    if value not in allowed:
        raise ContractError(f"{where} is {value!r}; choose one of {', '.join(allowed)}")


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


@dataclass(frozen=True)
class LogprobContract:
    """log softmax(z / temperature) at the selected token, z rounded to `logits` and then widened to float32.

    head: dtype the hidden state and the head's weight are rounded to before the product; None keeps them.
    """

    temperature: float = 1.0
    logits: DType = "float32"
    head: DType | None = None
    schedule: Schedule = field(default_factory=Schedule)

    def __post_init__(self) -> None:
        """Refuse unknown names and temperatures at which the softmax is undefined."""
        torch_dtype(self.logits)
        if self.head is not None:
            torch_dtype(self.head)
        number = isinstance(self.temperature, int | float)
        if not number or not 0.0 < self.temperature < float("inf"):
            raise ContractError(f"logprob.temperature is {self.temperature!r}; choose a finite number above 0")
