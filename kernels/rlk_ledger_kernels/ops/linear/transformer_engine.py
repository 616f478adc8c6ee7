"""linear, transformer_engine's module: y = x W^T + b by cuBLASLt, which chooses its algorithm by shape.

Opportunistic: K is summed in an order of the library's own, which may change with the number of rows, so its bits are
those of the contract only where the bitwise probe says so, for those very inputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from rlk_ledger_kernels.dtypes import torch_dtype
from rlk_ledger_kernels.native_operands import function, library, on_cuda, refused, same_dtype
from rlk_ledger_kernels.ops.linear.contract import LinearContract, checked_rows, checked_weight

pack_row_shard = refused("transformer_engine", "linear", "pack_row_shard")
linear_partial = refused("transformer_engine", "linear", "linear_partial")
merge_partials = refused("transformer_engine", "linear", "merge_partials")
linear_backward = refused("transformer_engine", "linear", "linear_backward")


@dataclass(frozen=True)
class PackedLinear:
    """A `transformer_engine.pytorch.Linear` that holds a copy of the weight [O, K] and of the bias."""

    module: Any
    outputs: int
    k: int
    dtype: torch.dtype
    contract: LinearContract


def pack_linear(weight_OK: torch.Tensor, contract: LinearContract, bias_O: torch.Tensor | None = None) -> PackedLinear:
    """Copy into a module. weight_OK: [O, K] on CUDA. bias_O: [O] or None.

    Raises OperandError for other shapes, ContractError when the output is of another dtype than the operands,
    BackendError without transformer_engine or off CUDA.
    """
    outputs, k = checked_weight(weight_OK)
    on_cuda("transformer_engine", "linear", weight_OK)
    weight = weight_OK if contract.operands is None else weight_OK.to(torch_dtype(contract.operands))
    same_dtype("linear with transformer_engine", contract.output, weight)
    kind = function("transformer_engine", library("transformer_engine", "transformer_engine.pytorch"), "Linear")
    with torch.no_grad():
        module = kind(k, outputs, bias=bias_O is not None, params_dtype=weight.dtype, device=weight.device)
        module.weight.copy_(weight)
        if bias_O is not None:
            module.bias.copy_(bias_O)
    return PackedLinear(module, outputs, k, weight.dtype, contract)


def linear(x_NK: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
    """y = x W^T + b. x_NK: [N, K]. Returns [N, O] in `contract.output`. Raises OperandError for another K or dtype."""
    checked_rows(x_NK, packed.k)
    x = x_NK if packed.contract.operands is None else x_NK.to(packed.dtype)
    same_dtype("linear with transformer_engine", packed.contract.output, x)
    if not x.shape[0]:
        return x.new_empty((0, packed.outputs))
    with torch.no_grad():
        return torch.as_tensor(packed.module(x.contiguous()))
