"""The numeric contract of rms_norm: dtypes and rounding points; the order of sums is the `Schedule`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

import torch

from rlk_ledger_kernels.dtypes import DType, one_of, torch_dtype
from rlk_ledger_kernels.errors import ContractError, OperandError
from rlk_ledger_kernels.schedule import Schedule

RoundingOrder = Literal["hf", "kernel"]


@dataclass(frozen=True)
class RmsNormContract:
    """y = x / sqrt(mean(x^2) + eps) * w with the square sum in float32.

    rounding_order: `hf` rounds the normalised value to `output` and then multiplies by w in that dtype;
        `kernel` multiplies in float32 and rounds once. They are the same in float32.
    residual: dtype in which `add_rms_norm` returns x + residual; None is `output`.
    normalises: what `add_rms_norm` normalises: the sum as it was `rounded` to `residual` (separate operators, as in
        Hugging Face, and vLLM's CUDA kernel) or the `unrounded` float32 sum (vLLM's plain-torch form).
    """

    eps: float = 1e-6
    rounding_order: RoundingOrder = "hf"
    output: DType = "float32"
    residual: DType | None = None
    normalises: Literal["rounded", "unrounded"] = "rounded"
    schedule: Schedule = field(default_factory=Schedule)

    def __post_init__(self) -> None:
        """Refuse unknown names and an eps that is no number."""
        torch_dtype(self.output)
        torch_dtype(self.residual_dtype)
        one_of("rms_norm.rounding_order", self.rounding_order, ("hf", "kernel"))
        one_of("rms_norm.normalises", self.normalises, ("rounded", "unrounded"))
        if not math.isfinite(self.eps) or self.eps < 0:
            raise ContractError(f"rms_norm.eps is {self.eps}; choose a finite number that is not negative")

    @property
    def residual_dtype(self) -> DType:
        """dtype of the returned sum."""
        return self.residual or self.output


def check_operands(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None = None) -> None:
    """Raise OperandError when the shapes do not belong together: x [..., W] or [..., heads, W], weight [W] or
    [heads, W], residual like x."""
    if x.dim() < 1 or x.shape[-1] == 0:
        raise OperandError(f"rms_norm: x is {tuple(x.shape)}; its last dimension must hold at least one element")
    width = x.shape[-1]
    if weight.dim() not in (1, 2) or weight.shape[-1] != width:
        last = weight.shape[-1] if weight.dim() else "nothing"
        raise OperandError(f"rms_norm: x ends in {width}, weight in {last}; they must be equal")
    if weight.dim() == 2 and (x.dim() < 2 or x.shape[-2] != weight.shape[0]):
        raise OperandError(f"rms_norm: weight is {tuple(weight.shape)} per head, x is {tuple(x.shape)}")
    if residual is not None and residual.shape != x.shape:
        raise OperandError(f"add_rms_norm: x is {tuple(x.shape)}, residual is {tuple(residual.shape)}; make them equal")
