"""rms_norm, torch: row sums in the order of the schedule, everything else one correctly rounded operation per element.

On a CPU a row sum is a product with ones, so it has leaves and a tree like any contraction. On another device the same
leaves and the same tree are added element by element, which gives the same bits: a product with one is exact.
"""

from __future__ import annotations

import torch

from rlk_ledger_kernels.dtypes import torch_dtype
from rlk_ledger_kernels.ops.linear.torch import leaf_spans, row_sum
from rlk_ledger_kernels.ops.rms_norm.contract import RmsNormContract, check_operands
from rlk_ledger_kernels.schedule import Schedule
from rlk_ledger_kernels.token_sum import token_sum


def rms_norm(x: torch.Tensor, weight: torch.Tensor, contract: RmsNormContract) -> torch.Tensor:
    """Normalise over the last dimension: y = x / sqrt(mean(x^2) + eps) * w.

    x: [..., W] or [..., heads, W]. weight: [W] or [heads, W]. Returns x's shape in `contract.output`.
    Raises OperandError when the shapes do not belong together.
    """
    check_operands(x, weight)
    output = torch_dtype(contract.output)
    normal, _ = _normalised(x.to(torch.float32), contract)
    if contract.rounding_order == "hf":
        return normal.to(output) * weight.to(output)
    return (normal * weight.to(torch.float32)).to(output)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, contract: RmsNormContract
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add in float32, round the sum where the contract says, normalise it.

    x, residual: [..., W]. Returns (normalised in `contract.output`, sum in `contract.residual_dtype`).
    Raises OperandError when the shapes do not belong together.
    """
    check_operands(x, weight, residual)
    total, rounded = _sums(x, residual, contract)
    return rms_norm(total, weight, contract), rounded


def rms_norm_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, contract: RmsNormContract
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients: with n = x * s and s = 1 / sqrt(mean(x^2) + eps),
    dx = s * (g w - n * mean(g w n)) and dw = sum over tokens of g n.

    The forward pass's roundings have gradient one. grad: x's shape. Returns (dx in x's dtype, dw in float32, summed
    along the fixed tree of `token_sum`). Raises OperandError when the shapes do not belong together.
    """
    check_operands(x, weight, grad)
    grad_x, grad_weight = _backward(grad, x.to(torch.float32), weight, contract)
    return grad_x.to(x.dtype), grad_weight


def add_rms_norm_backward(
    grad: torch.Tensor,
    grad_sum: torch.Tensor,
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    contract: RmsNormContract,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of `add_rms_norm`: x and the residual have one and the same, the norm's plus `grad_sum`.

    grad, grad_sum: of the two results. Returns (d sum in x's dtype, rounded once; dw in float32).
    """
    check_operands(x, weight, residual)
    check_operands(x, weight, grad)
    total, _ = _sums(x, residual, contract)
    grad_x, grad_weight = _backward(grad, total.to(torch.float32), weight, contract)
    return (grad_x + grad_sum.to(torch.float32)).to(x.dtype), grad_weight


def _sums(x: torch.Tensor, residual: torch.Tensor, contract: RmsNormContract) -> tuple[torch.Tensor, torch.Tensor]:
    """(what is normalised, what is returned)."""
    wide = x.to(torch.float32) + residual.to(torch.float32)
    rounded = wide.to(torch_dtype(contract.residual_dtype))
    return (rounded if contract.normalises == "rounded" else wide), rounded


def _normalised(wide: torch.Tensor, contract: RmsNormContract) -> tuple[torch.Tensor, torch.Tensor]:
    """(x * s, s), s as [..., 1]."""
    width = wide.shape[-1]
    sums = _row_sum(wide.square().reshape(-1, width), contract.schedule)
    scale = torch.rsqrt(sums.div_(width).add_(contract.eps)).reshape(*wide.shape[:-1], 1)
    return wide * scale, scale


def _backward(
    grad: torch.Tensor, wide: torch.Tensor, weight: torch.Tensor, contract: RmsNormContract
) -> tuple[torch.Tensor, torch.Tensor]:
    width = wide.shape[-1]
    normal, scale = _normalised(wide, contract)
    wide_grad = grad.to(torch.float32)
    weighted = wide_grad * weight.to(torch.float32)
    sums = _row_sum((weighted * normal).reshape(-1, width), contract.schedule)
    mean = sums.div_(width).reshape(*wide.shape[:-1], 1)
    grad_x = (weighted - normal * mean) * scale
    return grad_x, token_sum((wide_grad * normal).reshape(-1, weight.numel())).reshape(weight.shape)


def _row_sum(x_NW: torch.Tensor, schedule: Schedule) -> torch.Tensor:
    return row_sum(x_NW, schedule) if x_NW.device.type == "cpu" else elementwise_row_sum(x_NW, schedule)


def elementwise_row_sum(x_NW: torch.Tensor, schedule: Schedule) -> torch.Tensor:
    """Sum each row in the order of `schedule` with elementwise additions only; float32 [N].

    Each leaf is summed from +0, one element after the other; sibling halves are added pairwise up the tree.
    """
    rows, width = x_NW.shape
    ordered_NW = x_NW.flip(-1) if schedule.reversed_k else x_NW
    spans = leaf_spans(width, schedule.k_leaf)
    longest = max(end - start for start, end in spans)
    at_ML = torch.full((longest, len(spans)), width, dtype=torch.int64)
    for leaf, (start, end) in enumerate(spans):
        at_ML[: end - start, leaf] = torch.arange(start, end)
    padded_VN = torch.nn.functional.pad(ordered_NW, (0, 1)).T.contiguous()
    total_LN = padded_VN.new_zeros((len(spans), rows))
    for at_L in at_ML.to(x_NW.device):
        total_LN += padded_VN.index_select(0, at_L)
    return _tree(total_LN, spans)


def _tree(total_LN: torch.Tensor, spans: tuple[tuple[int, int], ...]) -> torch.Tensor:
    if len(spans) == 1:
        return total_LN[0]
    middle = spans[0][0] + (spans[-1][1] - spans[0][0]) // 2
    cut = next(index for index, span in enumerate(spans) if span[0] == middle)
    return _tree(total_LN[:cut], spans[:cut]) + _tree(total_LN[cut:], spans[cut:])
