"""What every Triton kernel of attention does with one logical block, in one place so that all give the same bits."""

from __future__ import annotations

import triton
import triton.language as tl

from rlk_ledger_kernels.triton_language import dot, round_to

LARGEST = tl.constexpr(3.4028234663852886e38)
"""The largest float32."""


@triton.jit
def block_scores(q, k, scale, SCALE_SCORE: tl.constexpr):
    """Scaled scores of one block, float32 [rows, kv_block]."""
    scores = dot(q, k)
    if SCALE_SCORE:
        scores = scores * scale
    return scores


@triton.jit
def visible(position, key, WINDOW: tl.constexpr):
    """Which keys a query sees; WINDOW 0 is no window."""
    seen = key[None, :] <= position[:, None]
    if WINDOW > 0:
        seen = seen & (key[None, :] > position[:, None] - WINDOW)
    return seen


@triton.jit
def reduced_block(
    q, k, v, position, first_key, scale, KV_BLOCK: tl.constexpr, WINDOW: tl.constexpr, SCALE_SCORE: tl.constexpr,
    WEIGHTS: tl.constexpr, PV: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """(m, l, o) of one block under its own maximum."""
    scores = block_scores(q, k, scale, SCALE_SCORE)
    if MASKED:
        key = first_key + tl.arange(0, KV_BLOCK)
        scores = tl.where(visible(position, key, WINDOW), scores, float("-inf"))
    m = tl.max(scores, axis=1)
    base = tl.where(m == float("-inf"), 0.0, m)
    weights = round_to(tl.exp(scores - base[:, None]), WEIGHTS)
    total = tl.sum(weights.to(tl.float32), axis=1)
    weights = weights.to(PV)
    if MASKED:
        # A masked key weighs 0, but 0 times a value that is not finite is NaN: such values are taken out of the
        # product and reach only the rows that see them. Where no key is masked the product does so by itself.
        bad = (tl.abs(v.to(tl.float32)) <= LARGEST) == 0
        if tl.max(tl.max(bad.to(tl.int32), axis=1), axis=0) > 0:
            sees = tl.where(visible(position, key, WINDOW), 1.0, 0.0).to(PV)
            seen = dot(sees, tl.where(bad, 1.0, 0.0).to(PV))
            out = tl.where(seen > 0, float("nan"), dot(weights, tl.where(bad, 0.0, v).to(PV)))
        else:
            out = dot(weights, v)
    else:
        out = dot(weights, v)
    return m, total, out


@triton.jit
def merged(m, total, out, m_block, total_block, out_block):
    """The running (m, l, o) with one more block in it."""
    new = tl.maximum(m, m_block)
    base = tl.where(new == float("-inf"), 0.0, new)
    kept = tl.exp(m - base)
    added = tl.exp(m_block - base)
    total = tl.fma(total, kept, total_block * added)
    out = tl.fma(out, tl.broadcast_to(kept[:, None], out.shape), out_block * added[:, None])
    return new, total, out


@triton.jit
def finished(m, total, out):
    """Output and log-sum-exp; a row that sees nothing is zero and minus infinity. Adding 0 makes a zero positive.

    What is not finite becomes NaN: which kind it is depends on the blocks a value was masked in.
    """
    nothing = total == 0.0
    safe = tl.where(nothing, 1.0, total)
    lse = tl.where(nothing, float("-inf"), m + tl.log(safe))
    divisor = tl.broadcast_to(safe[:, None], out.shape)
    out = tl.div_rn(out, divisor) + 0.0
    return tl.where(tl.abs(out) <= LARGEST, out, float("nan")), lse
