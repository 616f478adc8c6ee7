"""Claim: attention under placebo schedules is within the tolerance of `ws1-c1-v2`, the fused log-probability has the
bits of its parts, rounding orders take effect where they can; bad operands get one sentence."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from rlk_ledger_kernels.errors import OperandError
from rlk_ledger_kernels.ops.attention import reference as attention_reference
from rlk_ledger_kernels.ops.attention.cache import KVCache
from rlk_ledger_kernels.ops.attention.contract import AttentionContract
from rlk_ledger_kernels.ops.attention.plan import Chunk, plan_attention
from rlk_ledger_kernels.ops.attention.torch import attention
from rlk_ledger_kernels.ops.linear.contract import LinearContract
from rlk_ledger_kernels.ops.linear.torch import linear, pack_linear
from rlk_ledger_kernels.ops.linear_logprob.torch import linear_logprob, pack_head
from rlk_ledger_kernels.ops.rms_norm.contract import RmsNormContract
from rlk_ledger_kernels.ops.rms_norm.torch import rms_norm
from rlk_ledger_kernels.ops.rope.contract import RopeContract
from rlk_ledger_kernels.ops.rope.table import frequencies, rope_table
from rlk_ledger_kernels.ops.selected_logprob.contract import LogprobContract
from rlk_ledger_kernels.ops.selected_logprob.torch import selected_logprob
from rlk_ledger_kernels.ops.swiglu.contract import SwigluContract
from rlk_ledger_kernels.ops.swiglu.torch import swiglu
from rlk_ledger_kernels.schedule import Schedule, placebo_schedules

TOLERANCE = {"float32": (1e-4, 1e-4), "bfloat16": (5e-2, 2e-2)}
TORCH = {"float32": torch.float32, "bfloat16": torch.bfloat16}
dtypes = st.sampled_from(["float32", "bfloat16"])
schedules = st.sampled_from([Schedule(), *placebo_schedules(10)])
seeds = st.integers(0, 2**31)
few = settings(max_examples=25, deadline=None)


def draw(seed: int, *shape: int, dtype: str = "float32") -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(TORCH[dtype])


def test_rms_norm_rounding_orders_differ_in_bfloat16_and_agree_in_float32() -> None:
    for dtype, equal in (("float32", True), ("bfloat16", False)):
        x, weight = draw(1, 64, 128, dtype=dtype), draw(2, 128, dtype=dtype)
        hf, kernel = (
            rms_norm(x, weight, RmsNormContract(rounding_order=order, output=dtype)) for order in ("hf", "kernel")
        )
        assert torch.equal(hf, kernel) is equal


def test_swiglu_keeps_its_limits() -> None:
    gate = torch.tensor([-1e4, -100.0, 100.0, 1e4])
    assert swiglu(gate, torch.ones(4), SwigluContract()).tolist() == [0.0, 0.0, 100.0, 1e4]


@few
@given(n=st.integers(1, 40), k=st.integers(1, 64), v=st.integers(1, 200), schedule=schedules, seed=seeds)
def test_linear_logprob_equals_logits_then_logprob_bit_for_bit(
    n: int, k: int, v: int, schedule: Schedule, seed: int
) -> None:
    hidden, weight = draw(seed, n, k), draw(seed + 1, v, k)
    tokens = torch.randint(0, v, (n,), generator=torch.Generator().manual_seed(seed))
    contract = LogprobContract(temperature=0.7, schedule=schedule)
    logits = linear(hidden, pack_linear(weight, LinearContract(schedule=schedule)))
    fused = linear_logprob(hidden, pack_head(weight, contract), tokens)
    assert torch.equal(fused, selected_logprob(logits, tokens, contract))


@few
@given(
    t=st.integers(1, 200),
    kv=st.integers(1, 3),
    group=st.integers(1, 3),
    d=st.integers(1, 40),
    dtype=dtypes,
    schedule=schedules,
    seed=seeds,
)
def test_attention(t: int, kv: int, group: int, d: int, dtype: str, schedule: Schedule, seed: int) -> None:
    q, k, v = (
        draw(seed, t, kv * group, d, dtype=dtype),
        draw(seed + 1, t, kv, d, dtype=dtype),
        draw(seed + 2, t, kv, d, dtype=dtype),
    )
    blocks = -(-t // schedule.kv_block)
    plan = plan_attention([Chunk(0, t, range(blocks))], schedule)
    cache = KVCache(blocks, kv, schedule.kv_block, d)
    cache.write(k, v, plan)
    contract = AttentionContract(scale=d**-0.5, output=dtype, schedule=schedule)
    got, lse = attention(q, cache, plan, contract)
    reference, _ = attention_reference.attention(q, cache, plan, contract)
    assert got.dtype == TORCH[dtype]
    atol, rtol = TOLERANCE[dtype]
    torch.testing.assert_close(got.double(), reference.double(), atol=atol, rtol=rtol)
    scores = torch.einsum("thd,shd->ths", q.double(), k.double().repeat_interleave(group, 1)) * d**-0.5
    hidden = torch.arange(t)[None, :] > torch.arange(t)[:, None]
    expected = scores.masked_fill(hidden[:, None, :], float("-inf")).logsumexp(-1)
    torch.testing.assert_close(lse.double(), expected, atol=1e-5, rtol=1e-5)


def test_wrong_operands_are_refused_in_one_sentence() -> None:
    with pytest.raises(OperandError, match=r"x has shape \(2, 5\), the weight needs \[rows, 4\]"):
        linear(torch.zeros(2, 5), pack_linear(torch.zeros(3, 4), LinearContract()))
    with pytest.raises(OperandError, match="token id -1 at row 0"):
        selected_logprob(torch.zeros(1, 4), torch.tensor([-1]), LogprobContract())
    with pytest.raises(OperandError, match="must be equal"):
        swiglu(torch.zeros(3), torch.zeros(4), SwigluContract())
    with pytest.raises(OperandError, match="its 1 cache blocks end at 64"):
        plan_attention([Chunk(0, 65, range(1))], Schedule())
    with pytest.raises(OperandError, match=r"positions must lie in 0..3, got up to 4"):
        rope_table(frequencies(4, 1e4), 4, RopeContract()).at(torch.tensor([4]))
