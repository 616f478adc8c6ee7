"""rms_norm, Triton: one pass over memory, the row held in registers.

A tile is [ROWS, COLUMNS] with COLUMNS the power of two above the width (at most 32,768) and ROWS chosen by the width
alone, so narrow rows (qk-norm) share a program and no sum depends on the batch. Square sums add the tile's columns in
one reduction whose shape the width fixes; the schedule's leaves belong to the torch backend.
The backward pass gives each program `FAN_IN` tokens of one head, the same ones whatever the batch holds besides: its
weight gradient adds them tile by tile and is one node of the tree in `token_sum`, which adds the rest.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rlk_ledger_kernels.dtypes import torch_dtype
from rlk_ledger_kernels.errors import OperandError
from rlk_ledger_kernels.ops.rms_norm.contract import RmsNormContract, check_operands
from rlk_ledger_kernels.token_sum import FAN_IN, token_sum
from rlk_ledger_kernels.triton_language import (
    TRITON_DTYPES,
    dense,
    launcher,
    round_to,
    rounded_through,
    row_tile,
    warps,
)

_WIDEST = 32768


@triton.jit(do_not_specialize=["rows"])
def _forward_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    sum_ptr,
    rows,
    heads,
    eps,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ADD: tl.constexpr,
    NORMALISES_ROUNDED: tl.constexpr,
    HF: tl.constexpr,
    OUTPUT: tl.constexpr,
    SUM: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < WIDTH)[None, :]
    at = row[:, None] * WIDTH + column[None, :]
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        x = x + tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(sum_ptr + at, round_to(x, SUM), mask=inside)
        if NORMALISES_ROUNDED:
            x = rounded_through(x, SUM)
    weight_at = (row % heads)[:, None] * WIDTH + column[None, :]
    weight = tl.load(weight_ptr + weight_at, mask=inside, other=0.0).to(tl.float32)
    mean = tl.div_rn(tl.sum(x * x, axis=1), tl.full((ROWS,), WIDTH, tl.float32))
    scale = tl.div_rn(tl.full((ROWS,), 1.0, tl.float32), tl.sqrt_rn(mean + eps))
    normal = x * scale[:, None]
    if HF:
        normal = rounded_through(normal, OUTPUT)
        weight = rounded_through(weight, OUTPUT)
    tl.store(out_ptr + at, round_to(normal * weight, OUTPUT), mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def _backward_kernel(
    grad_ptr,
    grad_sum_ptr,
    x_ptr,
    residual_ptr,
    weight_ptr,
    grad_x_ptr,
    partial_ptr,
    tokens,
    heads,
    eps,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
    ADD: tl.constexpr,
    NORMALISES_ROUNDED: tl.constexpr,
    SUM: tl.constexpr,
    GRAD_X: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    column = tl.arange(0, COLUMNS)
    real = column < WIDTH
    weight = tl.load(weight_ptr + head * WIDTH + column, mask=real, other=0.0).to(tl.float32)[None, :]
    grad_weight = tl.zeros((COLUMNS,), tl.float32)
    width = tl.full((TILE,), WIDTH, tl.float32)
    one = tl.full((TILE,), 1.0, tl.float32)
    for start in range(0, TOKENS, TILE):
        token = block * TOKENS + start + tl.arange(0, TILE)
        inside = (token < tokens)[:, None] & real[None, :]
        at = ((token * heads + head) * WIDTH)[:, None] + column[None, :]
        x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + at, mask=inside, other=0.0).to(tl.float32)
        if ADD:
            x = x + tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
            if NORMALISES_ROUNDED:
                x = rounded_through(x, SUM)
        mean = tl.div_rn(tl.sum(x * x, axis=1), width)
        # A row outside has mean 0 and, with eps 0, an infinite scale: its weight gradient is masked below.
        scale = tl.div_rn(one, tl.sqrt_rn(mean + eps))
        normal = x * scale[:, None]
        weighted = grad * weight
        slope = tl.div_rn(tl.sum(weighted * normal, axis=1), width)
        grad_x = (weighted - normal * slope[:, None]) * scale[:, None]
        if ADD:
            grad_x = grad_x + tl.load(grad_sum_ptr + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(grad_x_ptr + at, round_to(grad_x, GRAD_X), mask=inside)
        grad_weight += tl.sum(tl.where(inside, grad * normal, 0.0), axis=0)
    tl.store(partial_ptr + (block * heads + head) * WIDTH + column, grad_weight, mask=real)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, contract: RmsNormContract) -> torch.Tensor:
    """Normalise over the last dimension: y = x / sqrt(mean(x^2) + eps) * w.

    x: [..., W] or [..., heads, W], W at most 32,768. weight: [W] or [heads, W]. Returns x's shape in
    `contract.output`. Raises OperandError when the shapes do not belong together.
    """
    return _forward(x, None, weight, contract)[0]


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, contract: RmsNormContract
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add in float32, round the sum where the contract says, normalise it: one pass over both.

    x, residual: [..., W]. Returns (normalised in `contract.output`, sum in `contract.residual_dtype`).
    """
    return _forward(x, residual, weight, contract)


def rms_norm_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, contract: RmsNormContract
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients: dx = s * (g w - n * mean(g w n)) and dw = sum over tokens of g n, with n = x * s.

    grad: x's shape. Returns (dx in x's dtype, dw in float32).
    """
    return _backward(grad, None, x, None, weight, contract)


def add_rms_norm_backward(
    grad: torch.Tensor,
    grad_sum: torch.Tensor,
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    contract: RmsNormContract,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of `add_rms_norm`: (d sum in x's dtype, which is d x and d residual; dw in float32)."""
    return _backward(grad, grad_sum, x, residual, weight, contract)


def _forward(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, contract: RmsNormContract
) -> tuple[torch.Tensor, torch.Tensor]:
    _check(x, weight, residual)
    width = x.shape[-1]
    rows = x.numel() // width
    x, added = dense(x), x if residual is None else residual
    out = torch.empty(x.shape, dtype=torch_dtype(contract.output), device=x.device)
    total = out if residual is None else torch.empty_like(out, dtype=torch_dtype(contract.residual_dtype))
    tile_rows, columns = row_tile(width, _WIDEST)
    if rows:
        launcher(_forward_kernel, (triton.cdiv(rows, tile_rows),))(
            x,
            dense(added),
            dense(weight),
            out,
            total,
            rows,
            weight.numel() // width,
            contract.eps,
            WIDTH=width,
            ROWS=tile_rows,
            COLUMNS=columns,
            ADD=residual is not None,
            NORMALISES_ROUNDED=contract.normalises == "rounded",
            HF=contract.rounding_order == "hf",
            OUTPUT=TRITON_DTYPES[out.dtype],
            SUM=TRITON_DTYPES[total.dtype],
            num_warps=warps(tile_rows, columns),
            enable_fp_fusion=False,
        )
    return out, total


def _backward(
    grad: torch.Tensor,
    grad_sum: torch.Tensor | None,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    contract: RmsNormContract,
) -> tuple[torch.Tensor, torch.Tensor]:
    _check(x, weight, residual)
    check_operands(x, weight, grad)
    width, heads = x.shape[-1], weight.numel() // x.shape[-1]
    tokens = x.numel() // weight.numel()
    blocks = triton.cdiv(tokens, FAN_IN)
    x, grad = dense(x), dense(grad)
    grad_x = torch.empty_like(x)
    partial_BW = torch.zeros((blocks, weight.numel()), dtype=torch.float32, device=x.device)
    tile_rows, columns = row_tile(width, _WIDEST)
    tile = min(tile_rows, FAN_IN)
    if tokens:
        launcher(_backward_kernel, (blocks, heads))(
            grad,
            grad if grad_sum is None else dense(grad_sum),
            x,
            x if residual is None else dense(residual),
            dense(weight),
            grad_x,
            partial_BW,
            tokens,
            heads,
            contract.eps,
            WIDTH=width,
            TOKENS=FAN_IN,
            TILE=tile,
            COLUMNS=columns,
            ADD=residual is not None,
            NORMALISES_ROUNDED=contract.normalises == "rounded",
            SUM=TRITON_DTYPES[torch_dtype(contract.residual_dtype)],
            GRAD_X=TRITON_DTYPES[x.dtype],
            num_warps=warps(tile, columns),
            enable_fp_fusion=False,
        )
    return grad_x, token_sum(partial_BW).reshape(weight.shape)


def _check(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None) -> None:
    check_operands(x, weight, residual)
    if x.shape[-1] > _WIDEST:
        raise OperandError(f"rms_norm: rows of {x.shape[-1]} do not fit one program; use backend torch above {_WIDEST}")
