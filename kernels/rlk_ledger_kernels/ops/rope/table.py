"""The table of cosines and sines a rotation reads: frequencies, their scaling, positions."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from rlk_ledger_kernels.dtypes import torch_dtype
from rlk_ledger_kernels.errors import ContractError, OperandError
from rlk_ledger_kernels.ops.rope.contract import RopeContract


@dataclass(frozen=True)
class RopeScaling:
    """How frequencies are stretched. kind: `default`, `linear` or `llama3` (fields as in Hugging Face configs)."""

    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


def frequencies(head_dim: int, theta: float, scaling: RopeScaling | None = None) -> torch.Tensor:
    """Angle per position of each pair: theta^(-2i/D), stretched as declared; float32 [head_dim/2].

    Raises ContractError naming a scaling that is not implemented, OperandError for an odd head_dim.
    Formula of `llama3`: the Llama 3.1 release, as in Hugging Face's `_compute_llama3_parameters`.
    """
    if head_dim % 2:
        raise OperandError(f"rope: head_dim is {head_dim}; half-rotation needs an even one")
    scaling = scaling or RopeScaling()
    base_F = 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    if scaling.kind == "default":
        return base_F
    if scaling.kind == "linear":
        return base_F / scaling.factor
    if scaling.kind == "llama3":
        return _llama3(base_F, scaling)
    raise ContractError(f"rope: scaling {scaling.kind!r} is not implemented; known are default, linear and llama3")


def _llama3(base_F: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    wavelength_F = 2 * math.pi / base_F
    slow = scaling.original_max_position / scaling.low_freq_factor
    fast = scaling.original_max_position / scaling.high_freq_factor
    ramp_F = (scaling.original_max_position / wavelength_F - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blended_F = (1 - ramp_F) * base_F / scaling.factor + ramp_F * base_F
    stretched_F = torch.where(wavelength_F > slow, base_F / scaling.factor, blended_F)
    return torch.where(wavelength_F < fast, base_F, stretched_F)


@dataclass(frozen=True)
class RopeTable:
    """Cosines and sines by position, each [positions, head_dim], sines signed for the half rotation."""

    cos_PD: torch.Tensor
    sin_PD: torch.Tensor

    def at(self, positions_N: torch.Tensor) -> RopeTable:
        """The rows of these positions, in their order; raises OperandError for one outside the table."""
        limit = self.cos_PD.shape[0]
        if positions_N.numel() and not 0 <= int(positions_N.min()) <= int(positions_N.max()) < limit:
            raise OperandError(f"rope: positions must lie in 0..{limit - 1}, got up to {int(positions_N.max())}")
        return RopeTable(self.cos_PD.index_select(0, positions_N), self.sin_PD.index_select(0, positions_N))


def rope_table(frequencies_F: torch.Tensor, positions: int, contract: RopeContract) -> RopeTable:
    """Tabulate positions 0..positions-1 in `contract.table`.

    The angle is a float32 product, as engines compute it; its cosine is taken in float64 and rounded once,
    so an entry does not depend on the length of the table.
    """
    angle_PF = (torch.arange(positions, dtype=torch.float32)[:, None] * frequencies_F[None, :]).to(torch.float64)
    dtype = torch_dtype(contract.table)
    cos_PF = angle_PF.cos().to(torch.float32).to(dtype)
    sin_PF = angle_PF.sin().to(torch.float32).to(dtype)
    return RopeTable(torch.cat((cos_PF, cos_PF), -1), torch.cat((-sin_PF, sin_PF), -1))
