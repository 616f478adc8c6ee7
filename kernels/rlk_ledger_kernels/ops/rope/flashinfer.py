"""rope, flashinfer: x * cos + partner(x) * sin in float32, rounded once to x's dtype.

Opportunistic: whether a product and the sum are fused is flashinfer's own choice, so the contract is kept only where
the bitwise probe says so. The kernel reads a table by position; here position n is row n. It rotates two tensors; the
second one is the first head again and is thrown away.
"""

from __future__ import annotations

import torch

from rlk_ledger_kernels.native_operands import function, library, on_cuda, same_dtype
from rlk_ledger_kernels.ops.rope.contract import RopeContract
from rlk_ledger_kernels.ops.rope.table import RopeTable, check_operands, compact


def rope(x_NHD: torch.Tensor, rows: RopeTable, contract: RopeContract) -> torch.Tensor:
    """Rotate every head.

    x_NHD: [N, heads, D], on CUDA. rows: the table at the N positions, widened to float32. Returns [N, heads, D] in x's
    dtype. Raises OperandError for a table of another shape, ContractError for another output, BackendError without
    flashinfer or off CUDA.
    """
    check_operands(x_NHD, rows, contract)
    same_dtype("rope with flashinfer", contract.output_dtype, x_NHD)
    on_cuda("flashinfer", "rope", x_NHD)
    kernel = function("flashinfer", library("flashinfer", "flashinfer.rope"), "apply_rope_with_cos_sin_cache_inplace")
    count, _, head_dim = x_NHD.shape
    turned = x_NHD.clone(memory_format=torch.contiguous_format)
    if turned.numel():
        kernel(
            torch.arange(count, device=x_NHD.device),
            turned.view(count, -1),
            x_NHD[:, 0].clone(memory_format=torch.contiguous_format),
            head_dim,
            compact(rows, contract).to(torch.float32),
            is_neox=contract.style == "half",
        )
    return turned
