"""linear, torch: fixed row tiles, K halved down to leaves, the leaves added as the same tree every time.

Within a leaf BLAS sums float32 products in an order of its own, the same for every row of every tile admitted by the
probe (on the CPUs measured: one element after the other with fused multiply-add). The tree depends on K and `k_leaf`
alone, so a shard of K/2, K/4 or K/8 computes a node of it.

N rows (tokens), K contraction, O outputs, S = K / ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from rlk_ledger_kernels.dtypes import torch_dtype
from rlk_ledger_kernels.errors import ContractError, OperandError
from rlk_ledger_kernels.ops.linear.contract import LinearContract, checked_bias, checked_rows, checked_weight
from rlk_ledger_kernels.ops.linear.tree import leaf_spans as leaf_spans
from rlk_ledger_kernels.ops.linear.tree import merge_tree, shard_span, sum_blocks
from rlk_ledger_kernels.precision import exact_products
from rlk_ledger_kernels.schedule import ALIGNMENT, MAX_CPU_LEAF, Schedule
from rlk_ledger_kernels.tiles import aligned_float32, row_spans


@dataclass(frozen=True)
class PackedLinear:
    """A weight, or one row-parallel shard of it, made ready for one schedule.

    leaves: for each leaf of K in ascending order, its first element, its end, and the float32 [k, O'] operand,
        O' being O rounded up to a multiple of 16 with zeros: a narrow product takes another path in BLAS.
    shard: (ranks, rank) of a row-parallel shard, whose product is a partial result; None for a whole weight.
    """

    leaves: tuple[tuple[int, int, torch.Tensor], ...]
    bias_O: torch.Tensor | None
    k: int
    outputs: int
    contract: LinearContract
    shard: tuple[int, int] | None = None


def padded_outputs(outputs: int) -> int:
    """Columns a product with `outputs` outputs is run at."""
    return -(-outputs // ALIGNMENT) * ALIGNMENT


def pack_linear(weight_OK: torch.Tensor, contract: LinearContract, bias_O: torch.Tensor | None = None) -> PackedLinear:
    """Widen and cut a weight once. A slice of its outputs (column parallel) gives the same bits as the whole.

    weight_OK: [O, K], any float dtype. bias_O: [O] or None.
    Raises OperandError for an empty or non-matrix weight or a bias of another length, ContractError for leaves longer
    than BLAS sums in one piece on a CPU.
    """
    outputs, k = checked_weight(weight_OK)
    bias = checked_bias(bias_O, outputs)
    return PackedLinear(_leaves(weight_OK, contract), bias, k, outputs, contract)


def pack_row_shard(weight_OK: torch.Tensor, contract: LinearContract, ranks: int, rank: int) -> PackedLinear:
    """Pack the part of K that `rank` of `ranks` owns, for `linear_partial`.

    weight_OK: the whole weight [O, K]; only columns rank * K / ranks and on are read.
    Raises ContractError when the shard is no node of the tree, besides the errors of pack_linear.
    """
    outputs, k = checked_weight(weight_OK)
    start, end = shard_span(k, contract.schedule.k_leaf, ranks, rank)
    leaves = _leaves(weight_OK[:, start:end], contract)
    return PackedLinear(leaves, None, end - start, outputs, contract, shard=(ranks, rank))


def linear(x_NK: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
    """Multiply by a packed weight, y = x W^T + b; the bias is added in float32 before the one rounding.

    x_NK: [N, K], any float dtype. Returns [N, O] in the contract's output dtype.
    Raises OperandError when K differs from the weight's, or for a shard, whose product is not the result.
    """
    if packed.shard is not None:
        ranks, rank = packed.shard
        raise OperandError(f"linear: the weight is shard {rank} of {ranks}; use linear_partial and merge_partials")
    return _finished(_product(x_NK, packed), packed.bias_O, packed.contract)


def linear_partial(x_NS: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
    """The share of one row-parallel shard: its node of the tree, with neither bias nor output rounding.

    x_NS: [N, K / ranks], the columns this rank owns. Returns float32 [N, O]. Raises OperandError when K differs.
    """
    return _product(x_NS, packed)


def merge_partials(
    parts_NO: Sequence[torch.Tensor], contract: LinearContract, bias_O: torch.Tensor | None = None
) -> torch.Tensor:
    """Merge the shares of all ranks along the upper levels of the tree, add the bias, round once.

    parts_NO: float32 [N, O] of each rank, in rank order. Returns [N, O] in the contract's output dtype, the bits of
    `linear` on the whole weight. Raises OperandError for shares that do not belong together.
    """
    order = list(parts_NO)[::-1] if contract.schedule.reversed_k else list(parts_NO)
    y_NO = merge_tree(order)
    return _finished(y_NO, checked_bias(bias_O, y_NO.shape[1]), contract)


def linear_backward(
    grad_NO: torch.Tensor, x_NK: torch.Tensor, packed: PackedLinear
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Gradients of y = x W^T + b: dx = g W over the tree of O, dW = g^T x and db = sum g over blocks of tokens.

    grad_NO: [N, O], x_NK: [N, K], any float dtype. A row of dx depends on the same row of g alone; sums over tokens
    take blocks of `k_leaf` tokens in index order along the binary tree over the blocks.
    Returns float32 (dx [N, K], dW [O, K], db [O] or None without a bias). Raises OperandError for shapes that differ.
    """
    checked_rows(grad_NO, packed.outputs, "the gradient")
    checked_rows(x_NK, packed.k)
    if grad_NO.shape[0] != x_NK.shape[0]:
        raise OperandError(f"linear: the gradient has {grad_NO.shape[0]} rows, x has {x_NK.shape[0]}")
    float32 = LinearContract(schedule=packed.contract.schedule)
    weight_OK = unpacked(packed)
    grad_x_NK = linear(grad_NO, pack_linear(weight_OK.T, float32))
    x = _rounded(x_NK, packed.contract).to(torch.float32)
    grad = grad_NO.to(torch.float32)
    grad_weight_OK = token_sum(grad, x, float32.schedule)
    if packed.bias_O is None:
        return grad_x_NK, grad_weight_OK, None
    ones = torch.ones((x.shape[0], ALIGNMENT), dtype=torch.float32, device=x.device)
    return grad_x_NK, grad_weight_OK, token_sum(grad, ones, float32.schedule)[:, 0].clone()


def token_sum(a_NO: torch.Tensor, b_NK: torch.Tensor, schedule: Schedule) -> torch.Tensor:
    """a^T b in float32, summed over tokens: blocks of `k_leaf` tokens in index order, along their binary tree.

    a_NO, b_NK: float32 [N, O] and [N, K]; N may be 0. Returns [O, K].
    """
    contract = LinearContract(schedule=schedule)
    block = schedule.k_leaf

    def products() -> Iterator[torch.Tensor]:
        for start in range(0, a_NO.shape[0], block):
            a_TO, b_TK = a_NO[start : start + block], b_NK[start : start + block]
            missing = block - a_TO.shape[0]
            if missing:
                a_TO, b_TK = (torch.nn.functional.pad(part, (0, 0, 0, missing)) for part in (a_TO, b_TK))
            yield linear(a_TO.T, pack_linear(b_TK.T, contract))

    total_OK = sum_blocks(products())
    return a_NO.new_zeros((a_NO.shape[1], b_NK.shape[1])) if total_OK is None else total_OK


def unpacked(packed: PackedLinear) -> torch.Tensor:
    """The float32 weight [O, K] that a pack holds, in its original order."""
    wide_OK = torch.cat([leaf_KO for _, _, leaf_KO in packed.leaves]).T[: packed.outputs]
    return wide_OK.flip(-1) if packed.contract.schedule.reversed_k else wide_OK


def contract_rows(
    x_NK: torch.Tensor, leaves: tuple[tuple[int, int, torch.Tensor], ...], tiles: tuple[int, ...]
) -> torch.Tensor:
    """The float32 product of aligned, padded rows with packed leaves; [N, O], N a multiple of the smallest tile."""
    y_NO = torch.empty((x_NK.shape[0], leaves[0][2].shape[1]), dtype=torch.float32, device=x_NK.device)
    with exact_products(x_NK.device):
        for start, end in row_spans(x_NK.shape[0], tiles):
            _tree(x_NK[start:end], leaves, y_NO[start:end])
    return y_NO


def _tree(x_TK: torch.Tensor, leaves: tuple[tuple[int, int, torch.Tensor], ...], out_TO: torch.Tensor) -> None:
    """Sum the leaves into `out_TO` along the halving tree; sibling halves always meet in one addition."""
    if len(leaves) == 1:
        start, end, weight_KO = leaves[0]
        torch.mm(x_TK[:, start:end], weight_KO, out=out_TO)
        return
    middle = leaves[0][0] + (leaves[-1][1] - leaves[0][0]) // 2
    cut = next(index for index, leaf in enumerate(leaves) if leaf[0] == middle)
    _tree(x_TK, leaves[:cut], out_TO)
    right_TO = torch.empty_like(out_TO)
    _tree(x_TK, leaves[cut:], right_TO)
    out_TO += right_TO


def row_sum(x_NW: torch.Tensor, schedule: Schedule) -> torch.Tensor:
    """Sum each row in float32 in the order of `schedule`; float32 [N], a fresh tensor."""
    return linear(x_NW, _ones(x_NW.shape[1], schedule, x_NW.device))[:, 0].clone()


@lru_cache(maxsize=64)
def _ones(width: int, schedule: Schedule, device: torch.device) -> PackedLinear:
    """Sixteen columns of ones: a single column would take BLAS's matrix-vector path, which sums otherwise."""
    return pack_linear(torch.ones((16, width), dtype=torch.float32, device=device), LinearContract(schedule=schedule))


def _leaves(weight_OK: torch.Tensor, contract: LinearContract) -> tuple[tuple[int, int, torch.Tensor], ...]:
    outputs, k = weight_OK.shape
    spans = leaf_spans(k, contract.schedule.k_leaf)
    longest = max(end - start for start, end in spans)
    if weight_OK.device.type == "cpu" and longest > MAX_CPU_LEAF:
        raise ContractError(
            f"linear: schedule.k_leaf {contract.schedule.k_leaf} gives leaves of {longest}, and BLAS cuts K itself "
            f"above {MAX_CPU_LEAF} on a CPU; choose schedule.k_leaf <= {MAX_CPU_LEAF}"
        )
    wide_OK = _rounded(weight_OK, contract).to(torch.float32)
    if contract.schedule.reversed_k:
        wide_OK = wide_OK.flip(-1)
    wide_OK = torch.nn.functional.pad(wide_OK, (0, 0, 0, padded_outputs(outputs) - outputs))
    return tuple(
        (start, end, wide_OK[:, start:end].T.clone(memory_format=torch.contiguous_format)) for start, end in spans
    )


def _product(x_NK: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
    checked_rows(x_NK, packed.k)
    x = _rounded(x_NK, packed.contract)
    schedule = packed.contract.schedule
    if schedule.reversed_k:
        x = x.flip(-1)
    y_NO = contract_rows(aligned_float32(x, schedule.row_tiles), packed.leaves, schedule.row_tiles)
    return y_NO[: x_NK.shape[0], : packed.outputs].contiguous()


def _finished(y_NO: torch.Tensor, bias_O: torch.Tensor | None, contract: LinearContract) -> torch.Tensor:
    if bias_O is not None:
        y_NO += bias_O
    return y_NO.to(torch_dtype(contract.output))


def _rounded(x: torch.Tensor, contract: LinearContract) -> torch.Tensor:
    return x if contract.operands is None else x.to(torch_dtype(contract.operands))
