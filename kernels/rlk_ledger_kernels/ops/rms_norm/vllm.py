"""rms_norm, vLLM's own kernels: y = x / sqrt(mean(x^2) + eps) * w, rounded where this build of vLLM rounds.

Opportunistic: neither the order of the square sum nor the place of the rounding is declared by vLLM, so the contract's
`rounding_order` and `normalises` are kept only where the bitwise probe says so.
"""

from __future__ import annotations

import torch

from rlk_ledger_kernels.errors import OperandError
from rlk_ledger_kernels.native_operands import function, library, same_dtype
from rlk_ledger_kernels.ops.rms_norm.contract import RmsNormContract, check_operands

_VECTOR = 8
"""Elements vLLM's CPU kernel takes at a time."""


def rms_norm(x: torch.Tensor, weight: torch.Tensor, contract: RmsNormContract) -> torch.Tensor:
    """Normalise over the last dimension.

    x: [..., W] or [..., heads, W]. weight: [W] or [heads, W], of x's dtype. Returns x's shape and dtype. Raises
    OperandError for shapes or dtypes that do not belong together, ContractError for another output dtype,
    BackendError without vLLM.
    """
    check_operands(x, weight)
    same_dtype("rms_norm with vllm", contract.output, x, weight)
    _check_width(x)
    kernel = function("vllm", library("vllm", "vllm._custom_ops"), "rms_norm")
    if weight.dim() == 2:
        heads = [rms_norm(x[..., head, :], weight[head], contract) for head in range(weight.shape[0])]
        return torch.stack(heads, dim=-2)
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    out = torch.empty_like(rows)
    if rows.shape[0]:
        kernel(out, rows, weight.contiguous(), contract.eps)
    return out.view(x.shape)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, contract: RmsNormContract
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add, then normalise the sum; the operands are left as they are.

    x, residual: [..., W]. weight: [W]. Returns (normalised, sum) in x's dtype. Raises as `rms_norm` does.
    """
    check_operands(x, weight, residual)
    same_dtype("add_rms_norm with vllm", contract.output, x, residual, weight)
    same_dtype("add_rms_norm with vllm", contract.residual_dtype, x)
    _check_width(x)
    kernel = function("vllm", library("vllm", "vllm._custom_ops"), "fused_add_rms_norm")
    if weight.dim() == 2:
        total = x + residual
        return rms_norm(total, weight, contract), total
    rows = x.reshape(-1, x.shape[-1]).clone(memory_format=torch.contiguous_format)
    total = residual.reshape(-1, x.shape[-1]).clone(memory_format=torch.contiguous_format)
    if rows.shape[0]:
        kernel(rows, total, weight.contiguous(), contract.eps)
    return rows.view(x.shape), total.view(x.shape)


def _check_width(x: torch.Tensor) -> None:
    """Raise OperandError for rows that vLLM's CPU kernel refuses."""
    if x.device.type == "cpu" and x.shape[-1] % _VECTOR:
        raise OperandError(
            f"rms_norm with vllm: its CPU kernel takes rows of a multiple of {_VECTOR}, got {x.shape[-1]}; choose torch"
        )
