"""moe_router, Triton: a row's logits stay in registers; experts are picked one after the other by an integer key.

The key orders floats as their values do, so a pick is a maximum and then the lowest index that reaches it: exact, and
the same experts as the torch backend. Sums over experts are one reduction whose shape the number of experts fixes.

N tokens, E experts, T = top_k columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rlk_ledger_kernels.dtypes import torch_dtype
from rlk_ledger_kernels.ops.moe_router.contract import MoeRouterContract, checked_experts, checked_logits
from rlk_ledger_kernels.triton_language import (
    TRITON_DTYPES,
    dense,
    launcher,
    round_to,
    rounded_through,
    row_tile,
    warps,
)


@triton.jit
def _softmax(logits, seen):
    """float32 softmax over the seen experts; NaN throughout a row with a NaN logit or an infinite maximum."""
    number = logits == logits
    finite = tl.where(seen & number, logits, float("-inf"))
    top = tl.max(finite, axis=1)
    defined = (tl.min(number.to(tl.int32), axis=1) > 0) & (tl.abs(top) < float("inf"))
    weight = tl.exp(tl.where(defined[:, None], finite, 0.0) - tl.where(defined, top, 0.0)[:, None])
    total = tl.broadcast_to(tl.sum(weight, axis=1)[:, None], weight.shape)
    return tl.where(defined[:, None], tl.div_rn(weight, total), float("nan"))


@triton.jit(do_not_specialize=["rows"])
def _router_kernel(
    logits_ptr,
    experts_ptr,
    weights_ptr,
    rows,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    GIVEN: tl.constexpr,  # the routes are read and not chosen
    OF_TOP_K: tl.constexpr,
    RENORMALISED: tl.constexpr,
    PRECISION: tl.constexpr,
    OUTPUT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    expert = tl.arange(0, COLUMNS)[None, :]
    inside = (row < rows)[:, None] & (expert < EXPERTS)
    logits = tl.load(logits_ptr + row[:, None] * EXPERTS + expert, mask=inside, other=float("-inf")).to(tl.float32)
    logits = rounded_through(logits, PRECISION)
    chosen = inside & (expert < 0)
    picks = ()  # kept in registers: what one thread stores another may not yet read
    if GIVEN:
        for column in tl.static_range(TOP_K):
            given = tl.load(experts_ptr + row * TOP_K + column, mask=row < rows, other=-1)[:, None]
            picks = picks + (given,)  # type: ignore[assignment]  # noqa: RUF005
            chosen = chosen | (expert == given)
    else:
        value = tl.where(logits == logits, logits, float("-inf"))
        bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)  # -0 and +0 tie
        key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
        key = tl.where(expert < EXPERTS, key, -0x80000000)
        for column in tl.static_range(TOP_K):
            reached = key == tl.max(key, axis=1)[:, None]
            pick = tl.min(tl.where(reached, expert, COLUMNS), axis=1)[:, None]
            tl.store(experts_ptr + row[:, None] * TOP_K + column, pick.to(tl.int64), mask=(row < rows)[:, None])
            picks = picks + (pick,)  # type: ignore[assignment]  # noqa: RUF005
            chosen = chosen | (expert == pick)
            key = tl.where(expert == pick, -0x80000000, key)
    seen = (expert < EXPERTS) & (chosen | (not OF_TOP_K))
    p = rounded_through(_softmax(logits, seen), PRECISION)
    if RENORMALISED:
        total = tl.sum(tl.where(chosen, p, 0.0), axis=1)[:, None]
        p = tl.div_rn(p, tl.broadcast_to(total, p.shape))
    p = rounded_through(p, PRECISION)
    for column in tl.static_range(TOP_K):
        weight = tl.sum(tl.where(expert == picks[column], p, 0.0), axis=1)
        tl.store(weights_ptr + row * TOP_K + column, round_to(weight, OUTPUT), mask=row < rows)


@triton.jit(do_not_specialize=["rows"])
def _backward_kernel(
    grad_ptr,
    logits_ptr,
    experts_ptr,
    grad_logits_ptr,
    rows,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    OVER_CHOSEN: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    expert = tl.arange(0, COLUMNS)[None, :]
    inside = (row < rows)[:, None] & (expert < EXPERTS)
    at = row[:, None] * EXPERTS + expert
    logits = tl.load(logits_ptr + at, mask=inside, other=float("-inf")).to(tl.float32)
    logits = rounded_through(logits, PRECISION)
    chosen = inside & (expert < 0)
    grad = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for column in tl.static_range(TOP_K):
        pick = tl.load(experts_ptr + row * TOP_K + column, mask=row < rows, other=-1)[:, None]
        given = tl.load(grad_ptr + row * TOP_K + column, mask=row < rows, other=0.0).to(tl.float32)[:, None]
        chosen = chosen | (expert == pick)
        grad = tl.where(expert == pick, given, grad)
    p = _softmax(logits, (expert < EXPERTS) & (chosen | (not OVER_CHOSEN)))
    inner = tl.sum(tl.where(chosen, grad * p, 0.0), axis=1)[:, None]
    out = p * (grad - inner)
    if OVER_CHOSEN:
        out = tl.where(chosen, out, 0.0)
    tl.store(grad_logits_ptr + at, out, mask=inside)


def moe_router(logits_NE: torch.Tensor, contract: MoeRouterContract) -> tuple[torch.Tensor, torch.Tensor]:
    """The top_k experts of each row by falling logit, ties to the lowest index, and their weights.

    logits_NE: [N, E], any float dtype. Returns (weights [N, T] in `contract.output`, experts int64 [N, T]).
    Raises OperandError for fewer than top_k experts.
    """
    checked_logits(logits_NE, contract)
    experts_NT = torch.empty((logits_NE.shape[0], contract.top_k), dtype=torch.int64, device=logits_NE.device)
    return _route(logits_NE, experts_NT, contract, given=False), experts_NT


def routed_weights(logits_NE: torch.Tensor, experts_NT: torch.Tensor, contract: MoeRouterContract) -> torch.Tensor:
    """The weights of given routes. experts_NT: int64 [N, T], the experts of a row in any order.

    Returns [N, T] in `contract.output`. Raises OperandError for routes that do not fit.
    """
    checked_logits(logits_NE, contract)
    checked_experts(experts_NT, logits_NE, contract)
    return _route(logits_NE, experts_NT.contiguous(), contract, given=True)


def moe_router_backward(
    grad_NT: torch.Tensor, logits_NE: torch.Tensor, experts_NT: torch.Tensor, contract: MoeRouterContract
) -> torch.Tensor:
    """dl_j = p_j (g_j - sum_t g_t w_t), the routes being constants; float32 [N, E], each row from its own row."""
    rows, experts = logits_NE.shape
    grad_NE = torch.empty((rows, experts), dtype=torch.float32, device=logits_NE.device)
    tile_rows, columns = row_tile(experts)
    launcher(_backward_kernel, (triton.cdiv(rows, tile_rows),))(
        grad_NT.contiguous(),
        dense(logits_NE),
        experts_NT.contiguous(),
        grad_NE,
        rows,
        EXPERTS=experts,
        TOP_K=contract.top_k,
        OVER_CHOSEN=contract.weighting != "softmax",
        PRECISION=TRITON_DTYPES[torch_dtype(contract.router_precision)],
        ROWS=tile_rows,
        COLUMNS=columns,
        num_warps=warps(tile_rows, columns),
        enable_fp_fusion=False,
    )
    return grad_NE


def _route(logits_NE: torch.Tensor, experts_NT: torch.Tensor, contract: MoeRouterContract, given: bool) -> torch.Tensor:
    rows, experts = logits_NE.shape
    weights_NT = torch.empty((rows, contract.top_k), dtype=torch_dtype(contract.output), device=logits_NE.device)
    tile_rows, columns = row_tile(experts)
    launcher(_router_kernel, (triton.cdiv(rows, tile_rows),))(
        dense(logits_NE),
        experts_NT,
        weights_NT,
        rows,
        EXPERTS=experts,
        TOP_K=contract.top_k,
        GIVEN=given,
        OF_TOP_K=contract.weighting == "softmax_of_top_k",
        RENORMALISED=contract.weighting == "softmax_renormalised",
        PRECISION=TRITON_DTYPES[torch_dtype(contract.router_precision)],
        OUTPUT=TRITON_DTYPES[weights_NT.dtype],
        ROWS=tile_rows,
        COLUMNS=columns,
        num_warps=warps(tile_rows, columns),
        enable_fp_fusion=False,
    )
    return weights_NT
