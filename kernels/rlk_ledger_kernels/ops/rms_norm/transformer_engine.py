"""rms_norm, transformer_engine's module: y = x / sqrt(mean(x^2) + eps) * w, rounded where that build rounds.

Opportunistic: the order of the square sum is the library's own, so the contract is kept only where the bitwise probe
says so. It has no fused addition: the sum is torch's, rounded to the operands' dtype and then normalised.
"""

from __future__ import annotations

import torch

from rlk_ledger_kernels.errors import ContractError
from rlk_ledger_kernels.native_operands import function, library, on_cuda, same_dtype
from rlk_ledger_kernels.ops.rms_norm.contract import RmsNormContract, check_operands


def rms_norm(x: torch.Tensor, weight: torch.Tensor, contract: RmsNormContract) -> torch.Tensor:
    """Normalise over the last dimension.

    x: [..., W] or [..., heads, W], on CUDA. weight: [W] or [heads, W], of x's dtype. Returns x's shape and dtype.
    Raises OperandError for shapes or dtypes that do not belong together, ContractError for another output dtype,
    BackendError without transformer_engine or off CUDA.
    """
    check_operands(x, weight)
    same_dtype("rms_norm with transformer_engine", contract.output, x, weight)
    on_cuda("transformer_engine", "rms_norm", x)
    kind = function("transformer_engine", library("transformer_engine", "transformer_engine.pytorch"), "RMSNorm")
    if weight.dim() == 2:
        heads = [rms_norm(x[..., head, :], weight[head], contract) for head in range(weight.shape[0])]
        return torch.stack(heads, dim=-2)
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    if not rows.shape[0]:
        return torch.empty_like(x)
    with torch.no_grad():
        module = kind(x.shape[-1], eps=contract.eps, device=x.device, dtype=x.dtype)
        module.weight.copy_(weight)
        return torch.as_tensor(module(rows)).view(x.shape)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, contract: RmsNormContract
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add, round the sum to x's dtype, normalise it.

    x, residual: [..., W]. Returns (normalised, sum) in x's dtype. Raises as `rms_norm` does, and ContractError for a
    contract that normalises the unrounded sum.
    """
    check_operands(x, weight, residual)
    same_dtype("add_rms_norm with transformer_engine", contract.output, x, residual, weight)
    same_dtype("add_rms_norm with transformer_engine", contract.residual_dtype, x)
    if contract.normalises != "rounded":
        raise ContractError("add_rms_norm with transformer_engine: it normalises the rounded sum; choose torch")
    total = x + residual
    return rms_norm(total, weight, contract), total
