"""linear, vLLM's batch-invariant product: y = x W^T + b, one Triton kernel with fixed tiles and no split of K.

Opportunistic: K is summed in blocks of that kernel's own, not along this project's tree, so its bits are those of the
contract only where the bitwise probe says so. CUDA only, and no shards: it would round a partial before the merge.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rlk_ledger_kernels.dtypes import torch_dtype
from rlk_ledger_kernels.native_operands import function, library, on_cuda, refused, same_dtype
from rlk_ledger_kernels.ops.linear.contract import LinearContract, checked_rows, checked_weight

_MODULE = "vllm.model_executor.determinism.batch_invariant"

pack_row_shard = refused("vllm", "linear", "pack_row_shard")
linear_partial = refused("vllm", "linear", "linear_partial")
merge_partials = refused("vllm", "linear", "merge_partials")
linear_backward = refused("vllm", "linear", "linear_backward")


@dataclass(frozen=True)
class PackedLinear:
    """The weight as it came, [O, K], in the dtype of the products; bias in that dtype or None."""

    weight_OK: torch.Tensor
    bias_O: torch.Tensor | None
    contract: LinearContract


def pack_linear(weight_OK: torch.Tensor, contract: LinearContract, bias_O: torch.Tensor | None = None) -> PackedLinear:
    """Cast to `contract.operands`. weight_OK: [O, K] on CUDA. bias_O: [O] or None.

    Raises OperandError for other shapes, ContractError when the output is of another dtype than the operands,
    BackendError without vLLM or off CUDA.
    """
    checked_weight(weight_OK)
    on_cuda("vllm", "linear", weight_OK)
    weight = weight_OK if contract.operands is None else weight_OK.to(torch_dtype(contract.operands))
    same_dtype("linear with vllm", contract.output, weight)
    function("vllm", library("vllm", _MODULE), "linear_batch_invariant")
    return PackedLinear(weight, None if bias_O is None else bias_O.to(weight.dtype), contract)


def linear(x_NK: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
    """y = x W^T + b. x_NK: [N, K]. Returns [N, O] in `contract.output`. Raises OperandError for another K or dtype."""
    checked_rows(x_NK, packed.weight_OK.shape[1])
    x = x_NK if packed.contract.operands is None else x_NK.to(packed.weight_OK.dtype)
    same_dtype("linear with vllm", packed.contract.output, x, packed.weight_OK)
    if not x.shape[0]:
        return x.new_empty((0, packed.weight_OK.shape[0]))
    product = function("vllm", library("vllm", _MODULE), "linear_batch_invariant")
    return torch.as_tensor(product(x, packed.weight_OK, packed.bias_O))
