"""grouped_experts, Triton: pairs sorted by expert, one grouped product for gate and up, one for down, one combination.

A program owns a tile of one expert's pairs and of its outputs; a tile never holds pairs of two experts, and its rows
are gathered where they lie. Tiles are fixed, so how many other tokens share an expert changes no bit; the tree of K is
the one of `linear`. Which tile belongs to which expert is worked out on the device. No atomics: every pair's result
has a place of its own, and a last kernel adds each token's by rising expert.

N tokens, T columns (top_k), E experts held, I inner width, H hidden, P pairs of a token and an expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from rlk_ledger_kernels.dtypes import torch_dtype
from rlk_ledger_kernels.errors import OperandError
from rlk_ledger_kernels.ops.grouped_experts.contract import (
    GroupedExpertsContract,
    checked_routes,
    checked_weights,
    checked_x,
)
from rlk_ledger_kernels.ops.grouped_experts.gradients import Gradients, gradients
from rlk_ledger_kernels.ops.grouped_experts.routes import expert_span, group, merge_shares
from rlk_ledger_kernels.ops.linear import triton as linear_triton
from rlk_ledger_kernels.ops.linear.tree import shard_span
from rlk_ledger_kernels.ops.linear.triton import (
    MAX_DEPTH,
    along_tree,
    rounded_operand,
    tile_for,
    tile_of,
    tree_depth,
    tree_dot,
    tree_shape,
)
from rlk_ledger_kernels.ops.swiglu import triton as swiglu_triton
from rlk_ledger_kernels.schedule import Schedule
from rlk_ledger_kernels.triton_language import TRITON_DTYPES, launcher, round_to, rounded_through, row_tile, warps

_COLUMNS = 1024


@triton.jit(do_not_specialize=["TILES", "X_DIVISOR"])
def _grouped_kernel(
    x_ptr,
    w_ptr,
    y_ptr,
    pairs_ptr,
    tile_expert_ptr,
    tile_first_ptr,
    tile_end_ptr,
    TILES,
    X_DIVISOR,  # pair // X_DIVISOR is the row of x: top_k for tokens, 1 for pairs
    N,
    K,
    stride_xm,
    stride_we,
    stride_wn,
    stride_ym,
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
    """One tile of y[pair] = x[pair // X_DIVISOR] W_e^T for pairs of one expert e."""
    tile, output_tile = tile_of(tl.program_id(0), TILES, tl.cdiv(N, BLOCK_N), GROUP)
    expert = tl.load(tile_expert_ptr + tile)
    if expert >= 0:
        places = tl.load(tile_first_ptr + tile) + tl.arange(0, BLOCK_M)
        end = tl.load(tile_end_ptr + tile)
        pairs = tl.load(pairs_ptr + tl.minimum(places, end - 1))
        outputs = output_tile * BLOCK_N + tl.arange(0, BLOCK_N)
        x_rows = x_ptr + (pairs // X_DIVISOR)[:, None] * stride_xm
        w_rows = w_ptr + expert.to(tl.int64) * stride_we + tl.minimum(outputs, N - 1).to(tl.int64)[None, :] * stride_wn
        y = tree_dot(x_rows, w_rows, 1, 1, K, LEAF, DEPTH, STEPS, EXACT, FIXED, REVERSED, BLOCK_M, BLOCK_N, BLOCK_K)
        inside = (places < end)[:, None] & (outputs < N)[None, :]
        tl.store(y_ptr + pairs[:, None] * stride_ym + outputs[None, :], round_to(y, OUTPUT), mask=inside)


@triton.jit(do_not_specialize=["N"])
def _combine_kernel(
    parts_ptr,
    weights_ptr,
    order_ptr,
    y_ptr,
    N,
    H,
    TOP_K: tl.constexpr,
    ROUND_RESULT: tl.constexpr,
    ROUND_WEIGHTED: tl.constexpr,
    ROUND_TOTAL: tl.constexpr,
    OUTPUT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Tokens' results times their weights, added by rising expert; nothing is summed across rows or columns."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < N)[:, None] & (column < H)[None, :]
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for rank in tl.static_range(TOP_K):
        pair = row * TOP_K + tl.load(order_ptr + row * TOP_K + rank, mask=row < N, other=0)
        part = tl.load(parts_ptr + pair[:, None] * H + column[None, :], mask=inside, other=0.0).to(tl.float32)
        if ROUND_RESULT:
            part = rounded_through(part, OUTPUT)
        part = part * tl.load(weights_ptr + pair, mask=row < N, other=0.0).to(tl.float32)[:, None]
        if ROUND_WEIGHTED:
            part = rounded_through(part, OUTPUT)
        total = part if rank == 0 else total + part
        if ROUND_TOTAL:
            total = rounded_through(total, OUTPUT)
    tl.store(y_ptr + row[:, None] * H + column[None, :], round_to(total, OUTPUT), mask=inside)


@dataclass(frozen=True)
class PackedExperts:
    """The experts of a layer, or a rank's share of them, in their operand dtype.

    gate_up_EJH: gate above up, J = 2 I. down_EHI. first: the first expert held. experts: of the whole layer.
    """

    gate_up_EJH: torch.Tensor
    down_EHI: torch.Tensor
    first: int
    experts: int
    whole: bool
    contract: GroupedExpertsContract


def pack_experts(
    gate_EIH: torch.Tensor, up_EIH: torch.Tensor, down_EHI: torch.Tensor, contract: GroupedExpertsContract
) -> PackedExperts:
    """Join gate and up of each expert. gate_EIH, up_EIH: [E, I, H]. down_EHI: [E, H, I]. Errors as other backends."""
    return pack_expert_shard(gate_EIH, up_EIH, down_EHI, contract)


def pack_expert_shard(
    gate_EIH: torch.Tensor,
    up_EIH: torch.Tensor,
    down_EHI: torch.Tensor,
    contract: GroupedExpertsContract,
    tp: tuple[int, int] = (1, 0),
    ep: tuple[int, int] = (1, 0),
) -> PackedExperts:
    """Pack what one rank holds; tp, ep: (ranks, rank); the weights are the whole layer's. Errors as other backends."""
    experts, inner, _ = checked_weights(gate_EIH, up_EIH, down_EHI)
    first, end = expert_span(experts, *ep)
    start, stop = shard_span(inner, contract.schedule.k_leaf, *tp)
    gate_up_EJH = torch.cat((gate_EIH[first:end, start:stop], up_EIH[first:end, start:stop]), dim=1)
    down = rounded_operand(down_EHI[first:end, :, start:stop], contract.linear()).contiguous()
    gate_up = rounded_operand(gate_up_EJH, contract.linear()).contiguous()
    return PackedExperts(gate_up, down, first, experts, tp[0] == ep[0] == 1, contract)


def grouped_experts(
    x_NH: torch.Tensor, packed: PackedExperts, weights_NT: torch.Tensor, experts_NT: torch.Tensor
) -> torch.Tensor:
    """y_n = sum over the experts e of row n, by rising e, of w_ne down_e(silu(gate_e x_n) * up_e x_n).

    x_NH: [N, H]. weights_NT: [N, T]. experts_NT: int64 [N, T]. Returns [N, H] in `contract.output`.
    Raises OperandError for a share of the experts, or operands that do not fit.
    """
    if not packed.whole:
        raise OperandError("grouped_experts: the weights are a rank's share; use expert_partials and merge_experts")
    checked_routes(x_NH.shape[0], weights_NT, experts_NT)
    contract = packed.contract
    kept = torch_dtype(contract.output) if contract.weighted == "hf" else torch.float32  # hf rounds results anyway
    return _combine(_results(x_NH, packed, experts_NT, kept), weights_NT, experts_NT, contract)


def expert_partials(x_NH: torch.Tensor, packed: PackedExperts, experts_NT: torch.Tensor) -> torch.Tensor:
    """The results of down for each pair this rank holds, float32 [N, T, H], zero elsewhere; no weight, no rounding."""
    return _results(x_NH, packed, experts_NT, torch.float32)


def merge_experts(
    parts: Sequence[torch.Tensor],
    weights_NT: torch.Tensor,
    experts_NT: torch.Tensor,
    contract: GroupedExpertsContract,
    experts: int,
    tp: int = 1,
    ep: int = 1,
) -> torch.Tensor:
    """Merge the shares of all ranks (ep_rank * tp + tp_rank) and combine. Returns [N, H] in `contract.output`."""
    parts_NTH = merge_shares(parts, experts_NT, experts, tp, ep)
    checked_routes(parts_NTH.shape[0], weights_NT, experts_NT)
    return _combine(parts_NTH, weights_NT, experts_NT, contract)


def grouped_experts_backward(
    grad_NH: torch.Tensor,
    x_NH: torch.Tensor,
    packed: PackedExperts,
    weights_NT: torch.Tensor,
    experts_NT: torch.Tensor,
) -> Gradients:
    """Gradients with respect to x, the weights of the routes, gate, up and down, one expert after the other.

    Order of sums, shapes and errors as the torch backend; the products run in the Triton linear.
    """
    if not packed.whole:
        raise OperandError("grouped_experts: the gradient of a rank's share is not defined; pass the whole layer")
    checked_x(x_NH, packed.down_EHI.shape[1])
    checked_routes(x_NH.shape[0], weights_NT, experts_NT)
    contract = packed.contract
    gate_up = [linear_triton.PackedLinear(weight, None, contract.linear()) for weight in packed.gate_up_EJH]
    down = [linear_triton.PackedLinear(weight, None, contract.linear("float32")) for weight in packed.down_EHI]
    modules = linear_triton, swiglu_triton
    return gradients(modules, grad_NH, x_NH, gate_up, down, weights_NT, experts_NT, contract)


def _results(x_NH: torch.Tensor, packed: PackedExperts, experts_NT: torch.Tensor, kept: torch.dtype) -> torch.Tensor:
    """The results of down in dtype `kept`, [N, T, H]; zero where the expert is not held."""
    hidden, contract = packed.down_EHI.shape[1], packed.contract
    checked_x(x_NH, hidden)
    checked_routes(x_NH.shape[0], None, experts_NT)
    rows, columns = experts_NT.shape
    pairs_P = group(experts_NT, packed.experts).pairs_P
    sorted_P = experts_NT.reshape(-1)[pairs_P]
    grouped = _Grouped(pairs_P, sorted_P, packed.first, packed.down_EHI.shape[0])
    output = torch_dtype(contract.output)
    x = rounded_operand(x_NH, contract.linear())
    gate_up_PJ = grouped.product(x, packed.gate_up_EJH, columns, contract.schedule, output)
    gate_PI, up_PI = gate_up_PJ.chunk(2, dim=1)
    activated_PI = rounded_operand(swiglu_triton.swiglu(gate_PI, up_PI, contract.swiglu()), contract.linear())
    return grouped.product(activated_PI, packed.down_EHI, 1, contract.schedule, kept).view(rows, columns, hidden)


class _Grouped:
    """Pairs sorted by expert, and the tiles that hold them."""

    def __init__(self, pairs_P: torch.Tensor, experts_P: torch.Tensor, first: int, experts: int) -> None:
        self.pairs_P = pairs_P
        edges = torch.arange(first, first + experts + 1, device=pairs_P.device)
        self.offsets = torch.searchsorted(experts_P, edges)

    def tiles(self, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(expert or -1, first place, end of its expert) of as many tiles of `rows` as could be needed, int64."""
        counts = self.offsets.diff()
        ends = (counts + rows - 1).div(rows, rounding_mode="floor").cumsum(0)
        most = self.pairs_P.numel() // rows + min(counts.numel(), self.pairs_P.numel())
        tile = torch.arange(most, device=counts.device)
        expert = torch.searchsorted(ends, tile, right=True)
        held = expert.clamp(max=counts.numel() - 1)
        begun = torch.where(held > 0, ends[(held - 1).clamp(min=0)], 0)
        first = self.offsets[held] + (tile - begun) * rows
        return torch.where(expert < counts.numel(), expert, -1), first, self.offsets[held + 1]

    def product(
        self, x: torch.Tensor, w_EOK: torch.Tensor, divisor: int, schedule: Schedule, output: torch.dtype
    ) -> torch.Tensor:
        """[P, O] in `output`: each pair's row of x times its expert's weights; zero for pairs of no held expert."""
        if x.dtype != w_EOK.dtype:
            x, w_EOK = x.to(torch.float32), w_EOK.to(torch.float32)
        x = x.contiguous()
        tile = tile_for(x.dtype, x.device)
        tiles = self.tiles(tile.rows)

        def node(start: int, end: int) -> torch.Tensor:
            return self._launch(x[:, start:end], w_EOK[:, :, start:end], divisor, schedule, torch.float32, tiles)

        k = x.shape[1]
        if tree_depth(k, schedule.k_leaf) <= MAX_DEPTH:
            return self._launch(x, w_EOK, divisor, schedule, output, tiles)
        return along_tree(0, k, schedule, node).to(output)

    def _launch(
        self,
        x: torch.Tensor,
        w_EOK: torch.Tensor,
        divisor: int,
        schedule: Schedule,
        output: torch.dtype,
        tiles: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        _, outputs, k = w_EOK.shape
        y_PO = torch.zeros((self.pairs_P.numel(), outputs), dtype=output, device=x.device)
        if not self.pairs_P.numel():
            return y_PO
        tile, count = tile_for(x.dtype, x.device), tiles[0].numel()
        launcher(_grouped_kernel, (count * triton.cdiv(outputs, tile.outputs),))(
            x,
            w_EOK,
            y_PO,
            self.pairs_P,
            *tiles,
            count,
            divisor,
            outputs,
            k,
            x.stride(0),
            w_EOK.stride(0),
            w_EOK.stride(1),
            y_PO.stride(0),
            OUTPUT=TRITON_DTYPES[output],
            REVERSED=schedule.reversed_k,
            BLOCK_M=tile.rows,
            BLOCK_N=tile.outputs,
            BLOCK_K=tile.k,
            GROUP=8,
            num_warps=tile.warps,
            num_stages=tile.stages,
            enable_fp_fusion=True,
            **tree_shape(k, schedule.k_leaf, tile.k),
        )
        return y_PO


def _combine(
    parts_NTH: torch.Tensor, weights_NT: torch.Tensor, experts_NT: torch.Tensor, contract: GroupedExpertsContract
) -> torch.Tensor:
    rows, columns, hidden = parts_NTH.shape
    y_NH = torch.zeros((rows, hidden), dtype=torch_dtype(contract.output), device=parts_NTH.device)
    if not parts_NTH.numel():
        return y_NH
    tile_rows, width = row_tile(hidden, _COLUMNS)
    launcher(_combine_kernel, (triton.cdiv(rows, tile_rows), triton.cdiv(hidden, width)))(
        parts_NTH.contiguous(),
        weights_NT.contiguous(),
        experts_NT.argsort(dim=1, stable=True).contiguous(),  # it keeps the strides it is given
        y_NH,
        rows,
        hidden,
        TOP_K=columns,
        ROUND_RESULT=contract.weighted == "hf",
        ROUND_WEIGHTED=contract.weighted != "float32",
        ROUND_TOTAL=contract.combine == "output",
        OUTPUT=TRITON_DTYPES[y_NH.dtype],
        ROWS=tile_rows,
        COLUMNS=width,
        num_warps=warps(tile_rows, width),
        enable_fp_fusion=False,
    )
    return y_NH
