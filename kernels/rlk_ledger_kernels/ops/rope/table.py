"""The table of cosines and sines a rotation reads, by position."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rlk_ledger_kernels.dtypes import torch_dtype
from rlk_ledger_kernels.errors import OperandError
from rlk_ledger_kernels.ops.rope.contract import RopeContract
from rlk_ledger_kernels.ops.rope.scaling import RopeScaling, attention_factor, frequencies

__all__ = ["RopeScaling", "RopeTable", "attention_factor", "check_operands", "frequencies", "rope_table"]


@dataclass(frozen=True)
class RopeTable:
    """Cosines and sines by position, each [positions, R], in the contract's style.

    Every element has its own entry (both of a pair hold the pair's cosine), and the sine of a pair's first element
    is negated, so a rotation is x * cos + partner(x) * sin.
    """

    cos_PD: torch.Tensor
    sin_PD: torch.Tensor

    def at(self, positions_N: torch.Tensor) -> RopeTable:
        """The rows of these positions, in their order; raises OperandError for one outside the table."""
        limit = self.cos_PD.shape[0]
        if positions_N.numel():
            low, high = (int(edge) for edge in torch.aminmax(positions_N))
            if not 0 <= low <= high < limit:
                raise OperandError(f"rope: positions must lie in 0..{limit - 1}, got up to {high if low >= 0 else low}")
        return RopeTable(self.cos_PD.index_select(0, positions_N), self.sin_PD.index_select(0, positions_N))

    def to(self, device: torch.device | str) -> RopeTable:
        """The same table on another device."""
        return RopeTable(self.cos_PD.to(device), self.sin_PD.to(device))


def rope_table(
    frequencies_F: torch.Tensor, positions: int, contract: RopeContract, attention_factor: float = 1.0
) -> RopeTable:
    """Tabulate positions 0..positions-1 in `contract.table`, on the CPU.

    The angle is a float32 product, as engines compute it; its cosine is taken in float64 and rounded once to float32,
    so an entry does not depend on the length of the table; then `attention_factor` multiplies it in float32 and the
    product is rounded to the table's dtype. Raises OperandError when R is not twice the number of frequencies.
    """
    if contract.rotary not in (None, 2 * len(frequencies_F)):
        raise OperandError(
            f"rope: {len(frequencies_F)} frequencies turn {2 * len(frequencies_F)} dimensions, "
            f"the contract's rotary is {contract.rotary}"
        )
    frequencies_F = frequencies_F.cpu()
    angle_PF = (torch.arange(positions, dtype=torch.float32)[:, None] * frequencies_F[None, :]).to(torch.float64)
    dtype = torch_dtype(contract.table)
    cos_PF = (angle_PF.cos().to(torch.float32) * attention_factor).to(dtype)
    sin_PF = (angle_PF.sin().to(torch.float32) * attention_factor).to(dtype)
    if contract.style == "half":
        return RopeTable(torch.cat((cos_PF, cos_PF), -1), torch.cat((-sin_PF, sin_PF), -1))
    return RopeTable(cos_PF.repeat_interleave(2, -1), torch.stack((-sin_PF, sin_PF), -1).flatten(-2))


def check_operands(x_NHD: torch.Tensor, rows: RopeTable, contract: RopeContract) -> int:
    """R, how many leading dimensions turn; raises OperandError when the table's rows are not [N, R]."""
    turned = contract.rotary or x_NHD.shape[-1]
    fits = x_NHD.dim() == 3 and turned <= x_NHD.shape[2] and turned % 2 == 0
    if not fits or rows.cos_PD.shape != (x_NHD.shape[0], turned) or rows.sin_PD.shape != rows.cos_PD.shape:
        raise OperandError(f"rope: x is {tuple(x_NHD.shape)}, the table's rows are {tuple(rows.cos_PD.shape)}")
    return turned


def compact(rows: RopeTable, contract: RopeContract) -> torch.Tensor:
    """The table as inference engines keep it: [positions, R], the R/2 cosines of the pairs and then their sines."""
    half = rows.cos_PD.shape[1] // 2
    if contract.style == "half":
        return torch.cat((rows.cos_PD[:, :half], rows.sin_PD[:, half:]), dim=-1).contiguous()
    return torch.cat((rows.cos_PD[:, 0::2], rows.sin_PD[:, 1::2]), dim=-1).contiguous()
