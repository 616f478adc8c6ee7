"""rms_norm, flashinfer: y = x / sqrt(mean(x^2) + eps) * w, rounded where this build of flashinfer rounds.

Opportunistic: the order of the square sum is flashinfer's own, so the contract is kept only where the bitwise probe
says so. Programmatic dependent launch is off: it lets a kernel start before the one that wrote its operands has ended.
"""

from __future__ import annotations

import torch

from rlk_ledger_kernels.native_operands import function, library, on_cuda, same_dtype
from rlk_ledger_kernels.ops.rms_norm.contract import RmsNormContract, check_operands


def rms_norm(x: torch.Tensor, weight: torch.Tensor, contract: RmsNormContract) -> torch.Tensor:
    """Normalise over the last dimension.

    x: [..., W] or [..., heads, W], on CUDA. weight: [W] or [heads, W], of x's dtype. Returns x's shape and dtype.
    Raises OperandError for shapes or dtypes that do not belong together, ContractError for another output dtype,
    BackendError without flashinfer or off CUDA.
    """
    check_operands(x, weight)
    same_dtype("rms_norm with flashinfer", contract.output, x, weight)
    on_cuda("flashinfer", "rms_norm", x)
    kernel = function("flashinfer", library("flashinfer", "flashinfer.norm"), "rmsnorm")
    if weight.dim() == 2:
        heads = [rms_norm(x[..., head, :], weight[head], contract) for head in range(weight.shape[0])]
        return torch.stack(heads, dim=-2)
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    out = torch.empty_like(rows)
    if rows.shape[0]:
        kernel(rows, weight.contiguous(), eps=contract.eps, out=out, enable_pdl=False)
    return out.view(x.shape)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, contract: RmsNormContract
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add, then normalise the sum; the operands are left as they are.

    x, residual: [..., W]. weight: [W]. Returns (normalised, sum) in x's dtype. Raises as `rms_norm` does.
    """
    check_operands(x, weight, residual)
    same_dtype("add_rms_norm with flashinfer", contract.output, x, residual, weight)
    same_dtype("add_rms_norm with flashinfer", contract.residual_dtype, x)
    on_cuda("flashinfer", "add_rms_norm", x)
    kernel = function("flashinfer", library("flashinfer", "flashinfer.norm"), "fused_add_rmsnorm")
    if weight.dim() == 2:
        total = x + residual
        return rms_norm(total, weight, contract), total
    rows = x.reshape(-1, x.shape[-1]).clone(memory_format=torch.contiguous_format)
    total = residual.reshape(-1, x.shape[-1]).clone(memory_format=torch.contiguous_format)
    if rows.shape[0]:
        kernel(rows, total, weight.contiguous(), eps=contract.eps, enable_pdl=False)
    return rows.view(x.shape), total.view(x.shape)
