"""swiglu, Triton: one pass over gate and up where they lie (the two halves of one product, say).

Nothing is summed across elements, so a tile's shape can change no bit; it is chosen by the width alone.
FMA contraction is off: the contract rounds each operation.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rlk_ledger_kernels.dtypes import torch_dtype
from rlk_ledger_kernels.ops.swiglu.contract import SwigluContract, check_operands
from rlk_ledger_kernels.triton_language import TRITON_DTYPES, launcher, round_to, rounded_through, row_tile, warps

_MOST_COLUMNS = 1024


@triton.jit
def _activate(gate, QUOTIENT: tl.constexpr):
    """(silu(gate), sigmoid(gate))."""
    denominator = 1.0 + tl.exp(-gate)
    sigmoid = tl.div_rn(tl.full(gate.shape, 1.0, tl.float32), denominator)
    if QUOTIENT:
        return tl.div_rn(gate, denominator), sigmoid
    else:
        return gate * sigmoid, sigmoid


@triton.jit(do_not_specialize=["rows"])
def _forward_kernel(
    gate_ptr,
    up_ptr,
    out_ptr,
    rows,
    width,
    gate_stride,
    up_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    QUOTIENT: tl.constexpr,
    ROUND_ACTIVATION: tl.constexpr,
    OUTPUT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    gate = tl.load(gate_ptr + row[:, None] * gate_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row[:, None] * up_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    activated, _sigmoid = _activate(gate, QUOTIENT)
    if ROUND_ACTIVATION:
        activated = rounded_through(activated, OUTPUT)
        up = rounded_through(up, OUTPUT)
    tl.store(out_ptr + row[:, None] * width + column[None, :], round_to(activated * up, OUTPUT), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _backward_kernel(
    grad_ptr,
    gate_ptr,
    up_ptr,
    grad_gate_ptr,
    grad_up_ptr,
    rows,
    width,
    grad_stride,
    gate_stride,
    up_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    QUOTIENT: tl.constexpr,
    GATE: tl.constexpr,
    UP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    grad = tl.load(grad_ptr + row[:, None] * grad_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row[:, None] * gate_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row[:, None] * up_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    activated, sigmoid = _activate(gate, QUOTIENT)
    slope = (1.0 + (1.0 - sigmoid) * gate) * sigmoid
    at = row[:, None] * width + column[None, :]
    tl.store(grad_gate_ptr + at, round_to(grad * up * slope, GATE), mask=inside)
    tl.store(grad_up_ptr + at, round_to(grad * activated, UP), mask=inside)


def swiglu(gate: torch.Tensor, up: torch.Tensor, contract: SwigluContract) -> torch.Tensor:
    """Gate: y = silu(gate) * up.

    gate, up: same shape, any float dtype. Returns that shape in `contract.output`.
    Raises OperandError when the shapes differ.
    """
    check_operands(gate, up)
    out = torch.empty(gate.shape, dtype=torch_dtype(contract.output), device=gate.device)
    if not out.numel():
        return out
    gate_NI, up_NI = _as_rows(gate), _as_rows(up)
    rows, width = gate_NI.shape
    tile_rows, columns = row_tile(width, _MOST_COLUMNS)
    launcher(_forward_kernel, (triton.cdiv(rows, tile_rows), triton.cdiv(width, columns)))(
        gate_NI,
        up_NI,
        out,
        rows,
        width,
        gate_NI.stride(0),
        up_NI.stride(0),
        ROWS=tile_rows,
        COLUMNS=columns,
        QUOTIENT=contract.activation == "quotient",
        ROUND_ACTIVATION=contract.materialise == "activation",
        OUTPUT=TRITON_DTYPES[out.dtype],
        num_warps=warps(tile_rows, columns),
        enable_fp_fusion=False,
    )
    return out


def swiglu_backward(
    grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, contract: SwigluContract
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients: with s = 1 / (1 + exp(-gate)), dgate = g * up * s * (1 + gate * (1 - s)) and dup = g * silu(gate).

    grad: gate's shape. Returns (dgate in gate's dtype, dup in up's).
    """
    check_operands(gate, up, grad)
    grad_gate = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    grad_up = torch.empty(up.shape, dtype=up.dtype, device=up.device)
    if not grad.numel():
        return grad_gate, grad_up
    grad_NI, gate_NI, up_NI = _as_rows(grad), _as_rows(gate), _as_rows(up)
    rows, width = gate_NI.shape
    tile_rows, columns = row_tile(width, _MOST_COLUMNS)
    launcher(_backward_kernel, (triton.cdiv(rows, tile_rows), triton.cdiv(width, columns)))(
        grad_NI,
        gate_NI,
        up_NI,
        grad_gate,
        grad_up,
        rows,
        width,
        grad_NI.stride(0),
        gate_NI.stride(0),
        up_NI.stride(0),
        ROWS=tile_rows,
        COLUMNS=columns,
        QUOTIENT=contract.activation == "quotient",
        GATE=TRITON_DTYPES[gate.dtype],
        UP=TRITON_DTYPES[up.dtype],
        num_warps=warps(tile_rows, columns),
        enable_fp_fusion=False,
    )
    return grad_gate, grad_up


def _as_rows(x: torch.Tensor) -> torch.Tensor:
    """[N, W] over the same memory where the strides allow it (a view of a wider matrix does)."""
    rows_NW = x.reshape(-1, x.shape[-1]) if x.dim() else x.reshape(1, 1)
    return rows_NW if rows_NW.stride(-1) == 1 else rows_NW.contiguous()
