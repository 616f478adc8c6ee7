"""Claim: every operator is its definition at any shape: odd sizes, one row, no row, one head, a vocabulary that is no
multiple of a tile, fully masked rows, signed zeros and infinities.

The definitions are written here in float64, one plain line each, and know nothing of the reference backends. How many
examples each test draws is RLK_TEST_SHAPES; the Triton kernels run in their interpreter with a few of them.
"""

from __future__ import annotations

import math
import os
from importlib import import_module
from itertools import pairwise
from types import ModuleType

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from rlk_ledger_kernels.availability import unavailable
from rlk_ledger_kernels.errors import ZeroActiveTokensError
from rlk_ledger_kernels.ops.attention.cache import KVCache
from rlk_ledger_kernels.ops.attention.contract import AttentionContract
from rlk_ledger_kernels.ops.attention.plan import Chunk, plan_attention
from rlk_ledger_kernels.ops.grouped_experts.contract import GroupedExpertsContract
from rlk_ledger_kernels.ops.linear.contract import LinearContract
from rlk_ledger_kernels.ops.linear_logprob.contract import LogprobContract
from rlk_ledger_kernels.ops.moe_router.contract import MoeRouterContract
from rlk_ledger_kernels.ops.policy_terms.contract import PolicyTermsContract
from rlk_ledger_kernels.ops.rms_norm.contract import RmsNormContract
from rlk_ledger_kernels.ops.rope.contract import RopeContract
from rlk_ledger_kernels.ops.rope.scaling import frequencies
from rlk_ledger_kernels.ops.rope.table import rope_table
from rlk_ledger_kernels.ops.swiglu.contract import SwigluContract
from rlk_ledger_kernels.registry import operators
from rlk_ledger_kernels.schedule import Schedule, placebo_schedules
from rlk_ledger_kernels.suite.quiet import quiet
from rlk_ledger_schemas.tolerances import tolerance

EXAMPLES = int(os.environ.get("RLK_TEST_SHAPES", "12"))
TORCH = {"float32": torch.float32, "bfloat16": torch.bfloat16}
INF = float("inf")
SPECIAL = (0.0, -0.0, INF, -INF)

seeds = st.integers(0, 2**31)
dtypes = st.sampled_from(sorted(TORCH))
counts = st.sampled_from([0, 1, 2, 17, 33])
widths = st.sampled_from([1, 2, 7, 33, 130])
schedules = st.sampled_from([Schedule(), *placebo_schedules(10)])
spices = st.sampled_from([(), (), SPECIAL[:2], SPECIAL])


def backends(operator: str) -> list[ModuleType]:
    """The reference, and every backend of our own that can run here."""
    declared = operators()[operator]
    able = [
        one
        for one in declared.backends
        if one.name in ("reference", "torch", "triton") and unavailable(one, "cpu") is None
    ]
    return [import_module(f"{declared.package}.{one.name}") for one in able]


def its_own(module: ModuleType, schedule: Schedule) -> Schedule:
    """The placebo schedules are for the backend that replay measures floors with; Triton has tiles of its own."""
    return Schedule(k_leaf=64, vocab_tile=64) if module.__name__.endswith("triton") else schedule


def examples(module: ModuleType) -> int:
    return max(2, EXAMPLES // 4) if module.__name__.endswith("triton") else EXAMPLES


def drawn(operator: str, **strategies: st.SearchStrategy[object]):  # type: ignore[no-untyped-def]
    """Run a test on every backend of `operator` with the drawn arguments."""

    def decorate(body):  # type: ignore[no-untyped-def]
        modules = backends(operator)

        @pytest.mark.parametrize("module", modules, ids=[module.__name__.rpartition(".")[2] for module in modules])
        def test(module: ModuleType) -> None:
            @settings(max_examples=examples(module), deadline=None, database=None)
            @given(seed=seeds, **strategies)
            def example(**arguments: object) -> None:
                with quiet():
                    body(module, **arguments)

            example()

        test.__doc__ = body.__doc__
        return test

    return decorate


def draw(seed: int, *shape: int, dtype: str = "float32", spice: tuple[float, ...] = ()) -> torch.Tensor:
    """Normal values, a few of them replaced by special ones."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    for index, value in enumerate(spice):
        if x.numel():
            x.view(-1)[(seed + 31 * index) % x.numel()] = value
    return x.to(TORCH[dtype])


def agrees(op_class: str, dtype: str, got: torch.Tensor, definition: torch.Tensor) -> None:
    """Within the tolerance where the definition is finite, of its class (NaN, +inf, -inf) where it is not."""
    bound = tolerance(op_class, dtype)
    torch.testing.assert_close(got.to(torch.float64), definition, atol=bound.atol, rtol=bound.rtol, equal_nan=True)


@drawn("embedding", n=counts, v=st.integers(1, 40), h=widths, dtype=dtypes, spice=spices)
def test_embedding(module, seed, n, v, h, dtype, spice) -> None:  # type: ignore[no-untyped-def]
    table, ids = draw(seed, v, h, dtype=dtype, spice=spice), torch.arange(n) % v
    got = module.embedding(ids, table)
    assert got.dtype == (torch.float32 if module.__name__.endswith("reference") else TORCH[dtype])
    agrees("elementwise", dtype, got, table.double()[ids])


@drawn("rms_norm", n=counts, w=widths, order=st.sampled_from(["hf", "kernel"]), dtype=dtypes, spice=spices)
def test_rms_norm(module, seed, n, w, order, dtype, spice) -> None:  # type: ignore[no-untyped-def]
    x, more, weight = draw(seed, n, w, dtype=dtype, spice=spice), draw(seed + 1, n, w, dtype=dtype), draw(seed + 2, w)
    weight = weight.to(TORCH[dtype])
    contract = RmsNormContract(rounding_order=order, output=dtype)

    def definition(wide: torch.Tensor) -> torch.Tensor:
        return wide / ((wide * wide).sum(-1, keepdim=True) / w + 1e-6).sqrt() * weight.double()

    agrees("reduction", dtype, module.rms_norm(x, weight, contract), definition(x.double()))
    normalised, total = module.add_rms_norm(x, more, weight, contract)
    rounded = (x.float() + more.float()).to(TORCH[dtype]).double()
    agrees("elementwise", dtype, total, rounded)
    agrees("reduction", dtype, normalised, definition(rounded))


@drawn("rope", n=counts, heads=st.integers(1, 3), half=st.integers(1, 20), pairs=st.booleans(), spice=spices)
def test_rope(module, seed, n, heads, half, pairs, spice) -> None:  # type: ignore[no-untyped-def]
    f, x = frequencies(2 * half, 10000.0), draw(seed, n, heads, 2 * half, spice=spice)
    contract = RopeContract(style="interleaved" if pairs else "half")
    positions = torch.arange(n) * 3
    angle = (positions[:, None].float() * f).double()[:, None]
    wide = x.double()
    low, high = (wide[..., 0::2], wide[..., 1::2]) if pairs else wide.split(half, -1)
    turned = (low * angle.cos() - high * angle.sin(), high * angle.cos() + low * angle.sin())
    expected = torch.stack(turned, -1).flatten(2) if pairs else torch.cat(turned, -1)
    table = rope_table(f, 3 * n + 1, contract)
    agrees("elementwise", "float32", module.rope(x, table.at(positions), contract), expected)


@drawn("swiglu", n=counts, w=widths, dtype=dtypes, spice=spices)
def test_swiglu(module, seed, n, w, dtype, spice) -> None:  # type: ignore[no-untyped-def]
    gate, up = draw(seed, n, w, dtype=dtype, spice=spice), draw(seed + 1, n, w, dtype=dtype)
    expected = gate.double() / (1 + (-gate.double()).exp()) * up.double()
    agrees("elementwise", dtype, module.swiglu(gate, up, SwigluContract(output=dtype)), expected)


@drawn("linear", n=counts, k=widths, o=widths, schedule=schedules, dtype=dtypes, spice=spices)
def test_linear(module, seed, n, k, o, schedule, dtype, spice) -> None:  # type: ignore[no-untyped-def]
    x, weight = draw(seed, n, k, dtype=dtype, spice=spice), draw(seed + 1, o, k, dtype=dtype)
    bias = draw(seed + 2, o, dtype=dtype)
    packed = module.pack_linear(weight, LinearContract(output=dtype, schedule=its_own(module, schedule)), bias)
    expected = (x.double()[:, None] * weight.double()[None]).sum(-1) + bias.double()
    agrees("reduction", dtype, module.linear(x, packed), expected)


@drawn(
    "attention",
    lengths=st.lists(st.sampled_from([1, 2, 15, 16, 17, 40]), min_size=1, max_size=3),
    kv=st.integers(1, 2),
    group=st.integers(1, 3),
    d=st.sampled_from([4, 16, 30]),
    window=st.sampled_from([None, 1, 9]),
    last=st.sampled_from([0.0, INF]),
)
def test_attention(module, seed, lengths, kv, group, d, window, last) -> None:  # type: ignore[no-untyped-def]
    """Packed sequences; an infinity in the last value of each is seen by its own row and by no earlier one."""
    schedule = Schedule(kv_block=16)
    q, k, v = (draw(seed + i, sum(lengths), kv * (group if i == 0 else 1), d) for i in range(3))
    ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    if not module.__name__.endswith("reference"):  # a plain product over all keys: there, 0 x infinity is NaN
        v[[end - 1 for end in ends], 0, 0] += last
    blocks = [-(-n // 16) for n in lengths]
    pages = [range(sum(blocks[:i]), sum(blocks[: i + 1])) for i in range(len(lengths))]
    plan = plan_attention([Chunk(0, n, page) for n, page in zip(lengths, pages)], schedule, window=window)
    cache = KVCache(sum(blocks), kv, 16, d)
    cache.write(k, v, plan)
    contract = AttentionContract(scale=d**-0.5, window=window, schedule=schedule)
    out, lse = module.attention(q, cache, plan, contract)
    for n, end in zip(lengths, ends):
        for row in range(n):
            first = 0 if window is None else max(0, row - window + 1)
            seen = slice(end - n + first, end - n + row + 1)
            keys, values = (x[seen].double().repeat_interleave(group, 1) for x in (k, v))
            scores = (keys * q[end - n + row].double()).sum(-1) * d**-0.5
            weights = (scores - scores.amax(0)).exp()
            expected = (weights[..., None] * values).sum(0) / weights.sum(0)[:, None]
            reached = expected.isfinite()
            assert torch.equal(out[end - n + row].isfinite(), reached)
            agrees("attention", "float32", out[end - n + row][reached], expected[reached])
            agrees("attention", "float32", lse[end - n + row], scores.amax(0) + weights.sum(0).log())


def log_probability(logits: torch.Tensor, tokens: torch.Tensor, temperature: float) -> torch.Tensor:
    scaled = logits.double() / temperature
    top = scaled.amax(-1, keepdim=True)
    top = torch.where(top == -INF, 0.0, top)  # a row that is masked everywhere has log-sum-exp minus infinity
    lse = (scaled - top).exp().sum(-1).log() + top[:, 0]
    return torch.stack([row[token] for row, token in zip(scaled, tokens)]) - lse if len(tokens) else lse


@drawn(
    "selected_logprob",
    n=counts,
    v=st.sampled_from([1, 3, 63, 64, 65, 200]),
    t=st.sampled_from([0.3, 1.0, 2.0]),
    schedule=schedules,
    masked=st.sampled_from(["nothing", "some", "a row", "up to infinity"]),
)
def test_selected_logprob(module, seed, n, v, t, schedule, masked) -> None:  # type: ignore[no-untyped-def]
    logits, tokens = draw(seed, n, v) * 3, torch.arange(n) * 7 % v
    if masked == "some":
        logits[:, seed % v] = -INF
    if n and masked == "a row":
        logits[seed % n] = -INF
    if n and masked == "up to infinity":
        logits[seed % n, seed % v] = INF
    contract = LogprobContract(temperature=t, schedule=its_own(module, schedule))
    agrees("logprob", "float32", module.selected_logprob(logits, tokens, contract), log_probability(logits, tokens, t))


@drawn("vocab_parallel_logprob", n=counts, v=st.sampled_from([17, 64, 131]), ranks=st.integers(1, 4))
def test_vocab_parallel_logprob(module, seed, n, v, ranks) -> None:  # type: ignore[no-untyped-def]
    logits, tokens = draw(seed, n, v) * 3, torch.arange(n) * 7 % v
    contract = LogprobContract(temperature=0.7, schedule=Schedule(vocab_tile=16))
    tiles = -(-v // 16)
    cuts = sorted({min(v, 16 * (tiles * rank // ranks)) for rank in range(ranks + 1)} | {v})
    parts = [module.shard_statistics(logits[:, a:b], a, v, tokens, contract) for a, b in pairwise(cuts)]
    agrees("logprob", "float32", module.merge_statistics(parts, contract), log_probability(logits, tokens, 0.7))


@drawn("linear_logprob", n=counts, k=st.sampled_from([1, 7, 64, 130]), v=st.sampled_from([1, 17, 65]))
def test_linear_logprob(module, seed, n, k, v) -> None:  # type: ignore[no-untyped-def]
    hidden, weight = draw(seed, n, k), draw(seed + 1, v, k) * k**-0.5
    tokens = torch.arange(n) * 7 % v
    contract = LogprobContract(temperature=0.7, schedule=Schedule(vocab_tile=16))
    got = module.linear_logprob(hidden, module.pack_head(weight, contract), tokens)
    logits = (hidden.double()[:, None] * weight.double()[None]).sum(-1)
    agrees("logprob", "float32", got, log_probability(logits, tokens, 0.7))


@drawn("moe_router", n=counts, experts=st.integers(1, 20), k=st.integers(1, 4), renormalise=st.booleans())
def test_moe_router(module, seed, n, experts, k, renormalise) -> None:  # type: ignore[no-untyped-def]
    """Logits of few values, signed zeros among them, so that ties are the rule."""
    k = min(k, experts)
    logits = torch.randint(-1, 2, (n, experts), generator=torch.Generator().manual_seed(seed)) * draw(seed, 1).abs()
    logits = torch.where((logits == 0) & (torch.arange(experts) % 2 == 0), -0.0, logits)
    contract = MoeRouterContract(top_k=k, weighting="softmax_renormalised" if renormalise else "softmax")
    weights, chosen = module.moe_router(logits, contract)
    assert (weights.shape, chosen.shape) == ((n, k), (n, k))
    for row in range(n):
        order = sorted(range(experts), key=lambda e: (-float(logits[row, e]), e))[:k]
        assert chosen[row].tolist() == order
        exponentials = [math.exp(float(logits[row, e])) for e in range(experts)]
        whole = sum(exponentials[e] for e in order) if renormalise else sum(exponentials)
        expected = torch.tensor([exponentials[e] / whole for e in order], dtype=torch.float64)
        agrees("reduction", "float32", weights[row], expected)


@drawn("grouped_experts", n=counts, experts=st.integers(1, 5), k=st.integers(1, 3), h=st.sampled_from([1, 17, 40]))
def test_grouped_experts(module, seed, n, experts, k, h) -> None:  # type: ignore[no-untyped-def]
    """Experts without tokens among them."""
    k, inner = min(k, experts), 9
    x = draw(seed, n, h)
    gate, up = (draw(seed + i, experts, inner, h) * h**-0.5 for i in (1, 2))
    down = draw(seed + 3, experts, h, inner) / 3
    chosen = torch.stack([torch.randperm(experts)[:k] for _ in range(n)]) if n else torch.zeros((0, k)).long()
    weights = draw(seed + 4, n, k).abs()
    got = module.grouped_experts(x, module.pack_experts(gate, up, down, GroupedExpertsContract()), weights, chosen)
    expected = torch.zeros((n, h), dtype=torch.float64)
    for row in range(n):
        for weight, expert in zip(weights[row].double(), chosen[row].tolist()):
            left, right = (matrix[expert].double() @ x[row].double() for matrix in (gate, up))
            expected[row] += weight * (down[expert].double() @ (left / (1 + (-left).exp()) * right))
    agrees("reduction", "float32", got, expected)


@drawn("masked_mean", n=st.sampled_from([0, 1, 2, 33, 1000]), share=st.sampled_from([0.0, 0.3, 1.0]), dtype=dtypes)
def test_masked_mean(module, seed, n, share, dtype) -> None:  # type: ignore[no-untyped-def]
    """Inactive values are NaN and infinities."""
    values = draw(seed, n, dtype=dtype)
    mask = torch.rand(n, generator=torch.Generator().manual_seed(seed)) < share
    values[~mask] = torch.where(torch.arange(n) % 2 == 0, INF, float("nan")).to(values.dtype)[~mask]
    if not mask.any():
        with pytest.raises(ZeroActiveTokensError):
            module.masked_mean(values, mask)
        return
    expected = math.fsum(values[mask].double().tolist()) / int(mask.sum())
    assert module.masked_mean(values, mask) == pytest.approx(expected, rel=1e-6, abs=1e-9)


@drawn("policy_terms", n=counts, far=st.sampled_from([0.1, 3.0, 40.0]))
def test_policy_terms(module, seed, n, far) -> None:  # type: ignore[no-untyped-def]
    rollout, advantage = -draw(seed, n).abs(), draw(seed + 2, n)
    training = rollout + far * draw(seed + 1, n)
    terms = module.policy_terms(training, rollout, advantage, PolicyTermsContract())
    d = training.double() - rollout.double()
    bounded = d.clamp(-20.0, 20.0)
    assert terms.clamped_N.tolist() == (d.abs() > 20.0).tolist()
    for name, definition in {
        "ratio_N": bounded.exp(),
        "k1_N": -d,
        "k3_N": bounded.exp() - 1 - bounded,
    }.items():
        torch.testing.assert_close(getattr(terms, name).double(), definition, rtol=1e-5, atol=1e-6)
