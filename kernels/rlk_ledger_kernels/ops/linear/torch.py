"""linear, torch: fixed row tiles, K halved down to leaves, the leaves added as the same tree every time.

Within a leaf the sum runs over k one element after the other with fused multiply-add; that is what BLAS
does for such shapes on the machines measured, and what the probe checks. The tree depends on K and `k_leaf`
alone, so a shard of K/2, K/4 or K/8 computes a node of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from rlk_ledger_kernels.dtypes import torch_dtype
from rlk_ledger_kernels.errors import OperandError
from rlk_ledger_kernels.ops.linear.contract import LinearContract
from rlk_ledger_kernels.schedule import ALIGNMENT, Schedule
from rlk_ledger_kernels.tiles import aligned_float32, row_spans


@dataclass(frozen=True)
class PackedLinear:
    """A weight made ready for one schedule.

    leaves: for each leaf of K in ascending order, its first element, its end, and the float32 [k, O'] operand,
        O' being O rounded up to a multiple of 16 with zeros: a narrow product takes another path in BLAS.
    """

    leaves: tuple[tuple[int, int, torch.Tensor], ...]
    bias_O: torch.Tensor | None
    k: int
    outputs: int
    contract: LinearContract


def leaf_spans(k: int, leaf: int) -> tuple[tuple[int, int], ...]:
    """Cut 0..k by halving until every part is at most `leaf` long."""
    parts: list[tuple[int, int]] = []

    def cut(start: int, end: int) -> None:
        if end - start <= leaf:
            parts.append((start, end))
            return
        middle = start + (end - start) // 2
        cut(start, middle)
        cut(middle, end)

    cut(0, k)
    return tuple(parts)


def padded_outputs(outputs: int) -> int:
    """Columns a product with `outputs` outputs is run at."""
    return -(-outputs // ALIGNMENT) * ALIGNMENT


def pack_linear(weight_OK: torch.Tensor, contract: LinearContract, bias_O: torch.Tensor | None = None) -> PackedLinear:
    """Widen and cut a weight once.

    weight_OK: [O, K], any float dtype. bias_O: [O] or None.
    Raises OperandError for an empty or non-matrix weight or a bias of another length.
    """
    if weight_OK.dim() != 2 or 0 in weight_OK.shape:
        raise OperandError(f"linear: a weight is a matrix [out, in], got shape {tuple(weight_OK.shape)}")
    outputs, k = weight_OK.shape
    if bias_O is not None and bias_O.shape != (outputs,):
        raise OperandError(f"linear: bias has shape {tuple(bias_O.shape)}, expected ({outputs},)")
    wide_OK = _rounded(weight_OK, contract).to(torch.float32)
    if contract.schedule.reversed_k:
        wide_OK = wide_OK.flip(-1)
    wide_OK = torch.nn.functional.pad(wide_OK, (0, 0, 0, padded_outputs(outputs) - outputs))
    leaves = tuple(
        (start, end, wide_OK[:, start:end].T.clone(memory_format=torch.contiguous_format))
        for start, end in leaf_spans(k, contract.schedule.k_leaf)
    )
    bias = None if bias_O is None else bias_O.to(torch.float32)
    return PackedLinear(leaves=leaves, bias_O=bias, k=k, outputs=outputs, contract=contract)


def linear(x_NK: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
    """Multiply by a packed weight; the bias is added in float32 before the one rounding.

    x_NK: [N, K], any float dtype. Returns [N, O] in the contract's output dtype.
    Raises OperandError when K differs from the weight's.
    """
    if x_NK.dim() != 2 or x_NK.shape[1] != packed.k:
        raise OperandError(f"linear: x has shape {tuple(x_NK.shape)}, the weight needs [rows, {packed.k}]")
    rows = x_NK.shape[0]
    x = _rounded(x_NK, packed.contract)
    schedule = packed.contract.schedule
    if schedule.reversed_k:
        x = x.flip(-1)
    y_NO = contract_rows(aligned_float32(x, schedule.row_tiles), packed.leaves, schedule.row_tiles)
    y_NO = y_NO[:rows, : packed.outputs].contiguous()
    if packed.bias_O is not None:
        y_NO += packed.bias_O
    return y_NO.to(torch_dtype(packed.contract.output))


def contract_rows(
    x_NK: torch.Tensor, leaves: tuple[tuple[int, int, torch.Tensor], ...], tiles: tuple[int, ...]
) -> torch.Tensor:
    """The float32 product of aligned, padded rows with packed leaves; [N, O], N a multiple of the smallest tile."""
    y_NO = torch.empty((x_NK.shape[0], leaves[0][2].shape[1]), dtype=torch.float32)
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
    return linear(x_NW, _ones(x_NW.shape[1], schedule))[:, 0].clone()


@lru_cache(maxsize=64)
def _ones(width: int, schedule: Schedule) -> PackedLinear:
    """Sixteen columns of ones: a single column would take BLAS's matrix-vector path, which sums otherwise."""
    return pack_linear(torch.ones((16, width)), LinearContract(schedule=schedule))


def _rounded(x: torch.Tensor, contract: LinearContract) -> torch.Tensor:
    return x if contract.operands is None else x.to(torch_dtype(contract.operands))
