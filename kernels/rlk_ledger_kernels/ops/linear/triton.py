"""linear, Triton: one kernel, the tree of K inside it.

A program owns one tile of the output and walks K once, in leaves. At the end of a leaf its accumulator meets the
finished halves that wait in `slots`, as a carry meets the digits of a binary counter: sibling halves add once, in the
order of `tree.leaf_spans`. Nothing is split by shape, nothing is atomic, and the tile is the same for every row count,
so a row's bits depend on the row, the weight, the schedule and the class of device alone.

Registers decide the tile: a finished half is as large as the accumulator, and 2^d leaves keep up to d of them. Four
levels at most run in one kernel; a deeper tree is cut at its upper levels into several launches and merged as shards
are. Choose `schedule.k_leaf` of 512 or 1024 on a GPU.

N rows, K contraction, O outputs; M, N tile sizes in BLOCK_* follow the usual GEMM names: M rows, N outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl

from rlk_ledger_kernels.dtypes import torch_dtype
from rlk_ledger_kernels.errors import OperandError
from rlk_ledger_kernels.ops.linear.contract import LinearContract, checked_bias, checked_rows, checked_weight
from rlk_ledger_kernels.ops.linear.torch import merge_partials as merge_partials
from rlk_ledger_kernels.ops.linear.tree import leaf_spans, shard_span, sum_blocks
from rlk_ledger_kernels.schedule import Schedule
from rlk_ledger_kernels.triton_language import TRITON_DTYPES, dot, launcher, round_to

MAX_DEPTH = 4
"""Levels of the tree inside one kernel: 16 leaves."""


@triton.jit
def leaf_at(index, K, LEAF: tl.constexpr, DEPTH: tl.constexpr, FIXED: tl.constexpr):
    """(first element, length) of leaf `index` of 2^DEPTH: of the halving tree, or of blocks of LEAF when FIXED.

    A node that is short enough before the last level is the first leaf below it; the others below it are empty.
    """
    if FIXED:
        start = index * LEAF
        length = tl.minimum(tl.maximum(K - start, 0), LEAF)
    else:
        start = index * 0
        length = start + K
        for level in tl.static_range(DEPTH):
            right = ((index >> (DEPTH - 1 - level)) & 1) == 1
            whole = length <= LEAF
            half = tl.where(whole, length, length // 2)
            start = tl.where(right, start + half, start)
            length = tl.where(right, length - half, half)
    return start, length


@triton.jit
def joined(left, right, leaf, level: tl.constexpr, K, LEAF: tl.constexpr, DEPTH: tl.constexpr, FIXED: tl.constexpr):
    """left + right, or left when the node at `level` that ends with `leaf`, the right one, has no element."""
    _, length = leaf_at((leaf >> level) << level, K, LEAF, DEPTH, FIXED)
    return tl.where(length > 0, left + right, left)


@triton.jit
def carried(leaf, acc, slots, K, LEAF: tl.constexpr, DEPTH: tl.constexpr, FIXED: tl.constexpr, EXACT: tl.constexpr):
    """The waiting halves after leaf `leaf`, not the last one: the digits of a binary counter after one more."""
    carry = acc
    moving = leaf >= 0
    new = ()
    for level in tl.static_range(DEPTH):
        full = ((leaf >> level) & 1) == 1
        both = slots[level] + carry if EXACT else joined(slots[level], carry, leaf, level, K, LEAF, DEPTH, FIXED)
        new = new + (tl.where(moving & (full == 0), carry, slots[level]),)  # type: ignore[assignment]  # noqa: RUF005
        carry = tl.where(moving & full, both, carry)
        moving = moving & full
    return new


@triton.jit
def tree_dot(
    x_rows,  # [BLOCK_M, 1] pointers to the first element of each row
    w_rows,  # [1, BLOCK_N] pointers to the first element of each output's weights
    stride_xk,
    stride_wk,
    K,
    LEAF: tl.constexpr,
    DEPTH: tl.constexpr,  # 2^DEPTH leaves
    STEPS: tl.constexpr,  # steps of BLOCK_K to a leaf
    EXACT: tl.constexpr,  # K == 2^DEPTH * STEPS * BLOCK_K: no step is short
    FIXED: tl.constexpr,
    REVERSED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """float32 [BLOCK_M, BLOCK_N], the product of the rows with the weights, summed along the tree."""
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    slots = ()
    for _ in tl.static_range(DEPTH):
        slots = slots + (acc,)  # type: ignore[assignment]  # noqa: RUF005
    last: tl.constexpr = 2**DEPTH - 1
    element = tl.arange(0, BLOCK_K)
    for step in tl.range((last + 1) * STEPS):
        leaf = step // STEPS
        inner = step % STEPS
        if EXACT:
            k = step * BLOCK_K + element
            if REVERSED:
                k = K - 1 - k
            a = tl.load(x_rows + k[None, :].to(tl.int64) * stride_xk)
            b = tl.load(w_rows + k[:, None].to(tl.int64) * stride_wk)
        else:
            start, length = leaf_at(leaf, K, LEAF, DEPTH, FIXED)
            place = inner * BLOCK_K + element
            k = start + place
            if REVERSED:
                k = K - 1 - k
            a = tl.load(x_rows + k[None, :].to(tl.int64) * stride_xk, mask=(place < length)[None, :], other=0.0)
            b = tl.load(w_rows + k[:, None].to(tl.int64) * stride_wk, mask=(place < length)[:, None], other=0.0)
        acc = dot(a, b, acc)
        if DEPTH > 0:  # noqa: SIM102 - decided when compiled
            if (inner == STEPS - 1) & (leaf < last):
                slots = carried(leaf, acc, slots, K, LEAF, DEPTH, FIXED, EXACT)
                acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for level in tl.static_range(DEPTH):
        acc = slots[level] + acc if EXACT else joined(slots[level], acc, last, level, K, LEAF, DEPTH, FIXED)
    return acc


@triton.jit
def tile_of(pid, ROW_TILES, OUTPUT_TILES, GROUP: tl.constexpr):
    """(row tile, output tile) of a program: GROUP row tiles share the weights they read, so that L2 serves them."""
    span = GROUP * OUTPUT_TILES
    first = (pid // span) * GROUP
    height = tl.minimum(ROW_TILES - first, GROUP)
    return first + (pid % span) % height, (pid % span) // height


@triton.jit(do_not_specialize=["M"])  # one binary for every row count
def linear_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    y_ptr,
    M,
    N,
    K,
    stride_xm,
    stride_xk,
    stride_wn,
    stride_wk,
    stride_ym,
    HAS_BIAS: tl.constexpr,
    OUTPUT: tl.constexpr,
    LEAF: tl.constexpr,
    DEPTH: tl.constexpr,
    STEPS: tl.constexpr,
    EXACT: tl.constexpr,
    FIXED: tl.constexpr,
    REVERSED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """One tile of y = x W^T + b. Rows and outputs beyond the edge read the last one and are not stored."""
    row_tile, output_tile = tile_of(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP)
    rows = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    outputs = output_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    x_rows = x_ptr + tl.minimum(rows, M - 1).to(tl.int64)[:, None] * stride_xm
    w_rows = w_ptr + tl.minimum(outputs, N - 1).to(tl.int64)[None, :] * stride_wn
    y = tree_dot(
        x_rows,
        w_rows,
        stride_xk,
        stride_wk,
        K,
        LEAF,
        DEPTH,
        STEPS,
        EXACT,
        FIXED,
        REVERSED,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
    )
    if HAS_BIAS:
        y += tl.load(bias_ptr + outputs, mask=outputs < N, other=0.0)[None, :]
    inside = (rows < M)[:, None] & (outputs < N)[None, :]
    y_tile = y_ptr + rows.to(tl.int64)[:, None] * stride_ym + outputs[None, :]
    tl.store(y_tile, round_to(y, OUTPUT), mask=inside)


@dataclass(frozen=True)
class Tile:
    """The one tile of a device class and operand dtype: block sizes, warps, pipeline stages."""

    rows: int
    outputs: int
    k: int
    warps: int
    stages: int


@lru_cache
def tile_for(dtype: torch.dtype, device: torch.device) -> Tile:
    """The tile every launch uses, whatever the shape: by the shared memory a capability has, and the operand dtype."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)
    roomy = capability in ((8, 0), (8, 7)) or capability[0] in (9, 10)
    if dtype == torch.float32:  # no tensor core sums these in IEEE float32: fused multiply-add in registers
        return Tile(64, 64, 32, warps=4, stages=3 if roomy else 2)
    if not roomy:
        return Tile(128, 128, 32, warps=8, stages=3)
    return Tile(128, 128, 64, warps=8, stages=4 if capability[0] >= 9 else 3)


@dataclass(frozen=True)
class PackedLinear:
    """A weight [O, K], or the columns one row-parallel shard owns, in its operand dtype, rows contiguous."""

    weight_OK: torch.Tensor
    bias_O: torch.Tensor | None
    contract: LinearContract
    shard: tuple[int, int] | None = None

    @property
    def k(self) -> int:
        """Elements of the contraction this pack holds."""
        return self.weight_OK.shape[1]


def pack_linear(weight_OK: torch.Tensor, contract: LinearContract, bias_O: torch.Tensor | None = None) -> PackedLinear:
    """Round a weight to the operand dtype; nothing is widened or copied that need not be.

    weight_OK: [O, K], any float dtype. bias_O: [O] or None. Raises OperandError as other backends do.
    """
    outputs, _ = checked_weight(weight_OK)
    return PackedLinear(rounded_operand(weight_OK, contract).contiguous(), checked_bias(bias_O, outputs), contract)


def pack_row_shard(weight_OK: torch.Tensor, contract: LinearContract, ranks: int, rank: int) -> PackedLinear:
    """Pack the part of K that `rank` of `ranks` owns; the whole weight is passed. Errors as other backends."""
    _, k = checked_weight(weight_OK)
    start, end = shard_span(k, contract.schedule.k_leaf, ranks, rank)
    shard_OS = rounded_operand(weight_OK[:, start:end], contract).contiguous()
    return PackedLinear(shard_OS, None, contract, shard=(ranks, rank))


def linear(x_NK: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
    """y = x W^T + b in one kernel, bias and rounding included.

    x_NK: [N, K], any float dtype; operands of two dtypes are both widened to float32. Returns [N, O] in the contract's
    output dtype. Raises OperandError when K differs from the weight's, or for a shard.
    """
    if packed.shard is not None:
        ranks, rank = packed.shard
        raise OperandError(f"linear: the weight is shard {rank} of {ranks}; use linear_partial and merge_partials")
    checked_rows(x_NK, packed.weight_OK.shape[1])
    x = rounded_operand(x_NK, packed.contract)
    return product(x, packed.weight_OK, packed.contract.schedule, torch_dtype(packed.contract.output), packed.bias_O)


def linear_partial(x_NS: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
    """The share of one row-parallel shard, float32 [N, O]. x_NS: [N, K / ranks]. Raises OperandError as `linear`."""
    checked_rows(x_NS, packed.weight_OK.shape[1])
    return product(rounded_operand(x_NS, packed.contract), packed.weight_OK, packed.contract.schedule, torch.float32)


def linear_backward(
    grad_NO: torch.Tensor, x_NK: torch.Tensor, packed: PackedLinear
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """dx = g W over the tree of O; dW = g^T x and db = sum g over blocks of `k_leaf` tokens in index order.

    Blocks are leaves of a fixed length, added along the binary tree over their indices. Shapes, dtypes and errors as
    the torch backend.
    """
    checked_rows(grad_NO, packed.weight_OK.shape[0], "the gradient")
    checked_rows(x_NK, packed.weight_OK.shape[1])
    if grad_NO.shape[0] != x_NK.shape[0]:
        raise OperandError(f"linear: the gradient has {grad_NO.shape[0]} rows, x has {x_NK.shape[0]}")
    schedule = packed.contract.schedule
    grad_x_NK = product(grad_NO, packed.weight_OK.T, schedule, torch.float32)
    grad_weight_OK = token_sum(grad_NO, rounded_operand(x_NK, packed.contract), schedule)
    if packed.bias_O is None:
        return grad_x_NK, grad_weight_OK, None
    ones_N1 = torch.ones((x_NK.shape[0], 1), dtype=grad_NO.dtype, device=grad_NO.device)
    return grad_x_NK, grad_weight_OK, token_sum(grad_NO, ones_N1, schedule)[:, 0].clone()


def token_sum(a_NO: torch.Tensor, b_NK: torch.Tensor, schedule: Schedule) -> torch.Tensor:
    """a^T b summed over tokens, float32 [O, K]: blocks of `k_leaf` tokens along the binary tree over the blocks."""
    run = schedule.k_leaf << MAX_DEPTH  # tokens one launch sums: a node of the tree, but for the last
    total_OK = sum_blocks(
        _launch(a_NO[start : start + run].T, b_NK[start : start + run].T, schedule, torch.float32, None, fixed=True)
        for start in range(0, a_NO.shape[0], run)
    )
    return a_NO.new_zeros((a_NO.shape[1], b_NK.shape[1]), dtype=torch.float32) if total_OK is None else total_OK


def rounded_operand(x: torch.Tensor, contract: LinearContract) -> torch.Tensor:
    """An operand in the dtype the contract rounds it to, or as it is."""
    return x if contract.operands is None else x.to(torch_dtype(contract.operands))


def product(
    x_NK: torch.Tensor,
    weight_OK: torch.Tensor,
    schedule: Schedule,
    output: torch.dtype,
    bias_O: torch.Tensor | None = None,
) -> torch.Tensor:
    """x W^T + b along the tree of K, rounded once to `output`; strided operands are read where they are."""
    k = x_NK.shape[1]
    if tree_depth(k, schedule.k_leaf) <= MAX_DEPTH:
        return _launch(x_NK, weight_OK, schedule, output, bias_O)

    def node(start: int, end: int) -> torch.Tensor:
        return _launch(x_NK[:, start:end], weight_OK[:, start:end], schedule, torch.float32, None)

    y_NO = along_tree(0, k, schedule, node)
    return (y_NO if bias_O is None else y_NO + bias_O).to(output)


def along_tree(start: int, end: int, schedule: Schedule, node: Callable[[int, int], torch.Tensor]) -> torch.Tensor:
    """The float32 sum over K from `start` to `end`: `node` sums what one launch can, halves above it are added here."""
    k = end - start
    if tree_depth(k, schedule.k_leaf) <= MAX_DEPTH:
        return node(start, end)
    cut = start + (k - k // 2 if schedule.reversed_k else k // 2)  # the middle in the order of summation
    left = along_tree(start, cut, schedule, node)
    right = along_tree(cut, end, schedule, node)
    return right + left if schedule.reversed_k else left + right


def row_sum(x_NW: torch.Tensor, schedule: Schedule) -> torch.Tensor:
    """Sum each row in float32 in the order of `schedule`, as a product with ones; float32 [N]."""
    ones_1W = torch.ones((1, x_NW.shape[1]), dtype=torch.float32, device=x_NW.device)
    return product(x_NW.to(torch.float32), ones_1W, schedule, torch.float32)[:, 0]


def tree_depth(k: int, leaf: int) -> int:
    """Levels of halves above the leaves of K."""
    depth = 0
    while -(-k >> depth) > leaf:
        depth += 1
    return depth


def _launch(
    x_NK: torch.Tensor,
    weight_OK: torch.Tensor,
    schedule: Schedule,
    output: torch.dtype,
    bias_O: torch.Tensor | None,
    fixed: bool = False,
) -> torch.Tensor:
    """Run the kernel once over a tree of at most MAX_DEPTH levels."""
    if x_NK.dtype != weight_OK.dtype:
        x_NK, weight_OK = x_NK.to(torch.float32), weight_OK.to(torch.float32)
    (rows, k), outputs = x_NK.shape, weight_OK.shape[0]
    y_NO = torch.empty((rows, outputs), dtype=output, device=x_NK.device)
    if rows == 0:
        return y_NO
    tile = tile_for(x_NK.dtype, x_NK.device)
    grid = (triton.cdiv(rows, tile.rows) * triton.cdiv(outputs, tile.outputs),)
    launcher(linear_kernel, grid)(
        x_NK,
        weight_OK,
        bias_O,
        y_NO,
        rows,
        outputs,
        k,
        *x_NK.stride(),
        *weight_OK.stride(),
        y_NO.stride(0),
        HAS_BIAS=bias_O is not None,
        OUTPUT=TRITON_DTYPES[output],
        REVERSED=schedule.reversed_k,
        BLOCK_M=tile.rows,
        BLOCK_N=tile.outputs,
        BLOCK_K=tile.k,
        GROUP=8,
        num_warps=tile.warps,
        num_stages=tile.stages,
        enable_fp_fusion=True,
        **tree_shape(k, schedule.k_leaf, tile.k, fixed),
    )
    return y_NO


@lru_cache
def tree_shape(k: int, leaf: int, block: int, fixed: bool = False) -> dict[str, int | bool]:
    """The constants of a tree over K: LEAF, DEPTH, STEPS of `block` elements to a leaf, EXACT, FIXED."""
    if fixed:
        depth, longest = tree_depth(-(-k // leaf), 1), leaf
        exact = k == leaf << depth and leaf % block == 0
    else:
        lengths = {end - start for start, end in leaf_spans(k, leaf)}
        depth, longest = tree_depth(k, leaf), max(lengths)
        exact = len(lengths) == 1 and k == longest << depth and longest % block == 0
    return {"LEAF": leaf, "DEPTH": depth, "STEPS": -(-longest // block), "EXACT": exact, "FIXED": fixed}
