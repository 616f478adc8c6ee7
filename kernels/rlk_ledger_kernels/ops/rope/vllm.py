"""rope, vLLM's own kernel: x * cos + partner(x) * sin, rounded where this build of vLLM rounds.

Opportunistic: whether products are rounded to the operands' dtype or fused is vLLM's own choice, so `arithmetic` is
kept only where the bitwise probe says so. The kernel reads a table by position; here position n is row n.
"""

from __future__ import annotations

import torch

from rlk_ledger_kernels.errors import OperandError
from rlk_ledger_kernels.native_operands import function, library, same_dtype
from rlk_ledger_kernels.ops.rope.contract import RopeContract
from rlk_ledger_kernels.ops.rope.table import RopeTable, check_operands, compact


def rope(x_NHD: torch.Tensor, rows: RopeTable, contract: RopeContract) -> torch.Tensor:
    """Rotate every head.

    x_NHD: [N, heads, D]. rows: the table at the N positions, of x's dtype. Returns [N, heads, D] in that dtype. Raises
    OperandError for a table of another shape or dtype and for rotations vLLM's CPU kernel ends the process on,
    ContractError for another output, BackendError without vLLM.
    """
    turned = check_operands(x_NHD, rows, contract)
    same_dtype("rope with vllm", contract.output_dtype, x_NHD, rows.cos_PD)
    if _crashes(x_NHD, turned, contract):
        raise OperandError(
            f"rope with vllm: its CPU kernel crashes on {turned} rotated dimensions of 16 bits in the half style; "
            "they must be a multiple of 16"
        )
    kernel = function("vllm", library("vllm", "vllm._custom_ops"), "rotary_embedding")
    count, _, head_dim = x_NHD.shape
    out = x_NHD.clone(memory_format=torch.contiguous_format)
    if out.numel():
        positions_N = torch.arange(count, device=x_NHD.device)
        kernel(positions_N, out.view(count, -1), None, head_dim, compact(rows, contract), contract.style == "half")
    return out


def _crashes(x_NHD: torch.Tensor, turned: int, contract: RopeContract) -> bool:
    """Whether vLLM's CPU kernel (seen with 0.32) ends in a segmentation fault: halves that fill no vector."""
    return x_NHD.device.type == "cpu" and x_NHD.element_size() == 2 and contract.style == "half" and turned % 16 != 0
