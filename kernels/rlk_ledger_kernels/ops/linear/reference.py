"""linear, float32 reference: y = x W^T + b."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rlk_ledger_kernels.errors import OperandError
from rlk_ledger_kernels.ops.linear.contract import LinearContract, checked_bias, checked_rows, checked_weight
from rlk_ledger_kernels.ops.linear.tree import shard_span
from rlk_ledger_kernels.precision import exact_products


@dataclass(frozen=True)
class PackedLinear:
    """A float32 weight [O, K], or the columns of it that one row-parallel shard owns."""

    weight_OK: torch.Tensor
    bias_O: torch.Tensor | None
    shard: tuple[int, int] | None = None


def pack_linear(weight_OK: torch.Tensor, contract: LinearContract, bias_O: torch.Tensor | None = None) -> PackedLinear:
    """Widen. weight_OK: [O, K]. bias_O: [O] or None. Raises OperandError for other shapes."""
    outputs, _ = checked_weight(weight_OK)
    return PackedLinear(weight_OK.to(torch.float32), checked_bias(bias_O, outputs))


def pack_row_shard(weight_OK: torch.Tensor, contract: LinearContract, ranks: int, rank: int) -> PackedLinear:
    """The columns `rank` of `ranks` owns. weight_OK: the whole weight. Raises ContractError as other backends do."""
    _, k = checked_weight(weight_OK)
    start, end = shard_span(k, contract.schedule.k_leaf, ranks, rank)
    return PackedLinear(weight_OK[:, start:end].to(torch.float32), None, shard=(ranks, rank))


def linear(x_NK: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
    """y = x W^T + b. x_NK: [N, K]. Returns float32 [N, O]. Raises OperandError for another K, or a shard."""
    if packed.shard is not None:
        raise OperandError("linear: the weight is a shard; use linear_partial and merge_partials")
    y_NO = linear_partial(x_NK, packed)
    return y_NO if packed.bias_O is None else y_NO + packed.bias_O


def linear_partial(x_NS: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
    """x W^T over the columns of one shard. x_NS: [N, S]. Returns float32 [N, O]. Raises OperandError for another S."""
    checked_rows(x_NS, packed.weight_OK.shape[1])
    with exact_products(x_NS.device):
        return x_NS.to(torch.float32) @ packed.weight_OK.T


def merge_partials(
    parts_NO: Sequence[torch.Tensor], contract: LinearContract, bias_O: torch.Tensor | None = None
) -> torch.Tensor:
    """The sum of all shares, plus the bias. parts_NO: float32 [N, O] of each rank. Returns float32 [N, O]."""
    y_NO = torch.stack(list(parts_NO)).sum(0)
    bias = checked_bias(bias_O, y_NO.shape[1])
    return y_NO if bias is None else y_NO + bias


def linear_backward(
    grad_NO: torch.Tensor, x_NK: torch.Tensor, packed: PackedLinear
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """dx = g W, dW = g^T x, db = sum over tokens of g; float32 [N, K], [O, K], and [O] or None without a bias."""
    grad = grad_NO.to(torch.float32)
    with exact_products(grad.device):
        grad_x_NK, grad_weight_OK = grad @ packed.weight_OK, grad.T @ x_NK.to(torch.float32)
    return grad_x_NK, grad_weight_OK, None if packed.bias_O is None else grad.sum(0)
