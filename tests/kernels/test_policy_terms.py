"""Claims: policy terms equal their definitions in exact arithmetic, wherever the log-ratio is; gradients are those of
autograd; sums over active tokens are exact, so every sharding merges to the same bits."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from fractions import Fraction
from types import ModuleType

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

pytest.importorskip("triton")

from rlk_ledger_kernels.bits import same_bits
from rlk_ledger_kernels.errors import ContractError, OperandError, ZeroActiveTokensError
from rlk_ledger_kernels.ops.masked_mean import torch as masked_torch
from rlk_ledger_kernels.ops.masked_mean import triton as masked_triton
from rlk_ledger_kernels.ops.masked_mean.exact import UNIT, MaskedSum, mean_gradient, merge, unpack
from rlk_ledger_kernels.ops.policy_terms import autograd
from rlk_ledger_kernels.ops.policy_terms import torch as terms_torch
from rlk_ledger_kernels.ops.policy_terms import triton as terms_triton
from rlk_ledger_kernels.ops.policy_terms.contract import PolicyTermsContract, TermGradients
from rlk_ledger_kernels.ops.policy_terms.sums import policy_sums

CONTRACT = PolicyTermsContract()
NAN, INF = float("nan"), float("inf")
both_terms = pytest.mark.parametrize("module", [terms_torch, terms_triton], ids=["torch", "triton"])
both_sums = pytest.mark.parametrize("module", [masked_torch, masked_triton], ids=["torch", "triton"])


@pytest.fixture(autouse=True)
def quiet_interpreter() -> Iterator[None]:
    """The interpreter computes with numpy, which warns where IEEE arithmetic gives NaN or an infinity."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


def operands(count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probabilities whose difference runs from 2^-30 to beyond the clamp, and advantages of both signs."""
    generator = torch.Generator().manual_seed(seed)
    rollout = -2 * torch.rand(count, generator=generator)
    size = torch.exp2(torch.randint(-30, 6, (count,), generator=generator).float())
    return rollout + torch.randn(count, generator=generator) * size, rollout, torch.randn(count, generator=generator)


def exact_k3(d: float) -> float:
    """exp(d) - 1 - d as a rational series: no cancellation at any d."""
    x, term, total = Fraction(d), Fraction(d), Fraction(0)
    for n in range(2, 120):
        term = term * x / n
        total += term
    return float(total)


@both_terms
def test_terms_are_their_definitions_to_the_last_bit_of_float32(module: ModuleType) -> None:
    training, rollout, advantage = operands(400)
    terms = module.policy_terms(training, rollout, advantage, CONTRACT)
    for at in range(400):
        d = float(training[at]) - float(rollout[at])
        c = min(max(d, -20.0), 20.0)
        a, rho = float(advantage[at]), math.exp(c)
        expected = (rho, -d, d * d / 2, exact_k3(c), min(rho * a, min(max(rho, 0.8), 1.2) * a))
        got = [float(term[at]) for term in terms[:5]]
        assert got == pytest.approx(expected, rel=1.2e-7, abs=1e-38)
        assert bool(terms.clamped_N[at]) is (abs(d) > 20)
        assert bool(terms.outside_N[at]) is not (0.8 <= rho <= 1.2)
    assert 0 < int(terms.clamped_N.sum()) < 200


def test_triton_has_the_bits_of_torch() -> None:
    training, rollout, advantage = operands(1500)
    training[:4], rollout[2:5] = torch.tensor([NAN, INF, -INF, -INF]), torch.tensor([-INF, 0.0, -INF])
    given_terms = (training, rollout, advantage)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        cast = [operand.to(dtype) for operand in given_terms]
        pairs = zip(terms_triton.policy_terms(*cast, CONTRACT), terms_torch.policy_terms(*cast, CONTRACT), strict=True)
        for mine, theirs in pairs:
            assert same_bits(mine.float().nan_to_num(7.0), theirs.float().nan_to_num(7.0))
    grads = TermGradients(*torch.randn((5, 1500), generator=torch.Generator().manual_seed(3)))
    for some in (grads, TermGradients(k3_N=grads.k3_N), grads._replace(ratio_N=None)):
        mine, theirs = (m.policy_terms_backward(some, *given_terms, CONTRACT) for m in (terms_triton, terms_torch))
        assert same_bits(mine.nan_to_num(7.0), theirs.nan_to_num(7.0))


@both_terms
def test_gradients_are_those_of_autograd(module: ModuleType) -> None:
    training, rollout, advantage = operands(800)
    weights = torch.randn((5, 800), generator=torch.Generator().manual_seed(4))
    ours = training.clone().requires_grad_()
    terms = autograd.policy_terms(module, ours, rollout, advantage, CONTRACT)
    loss = sum(((w * term).double().sum() for w, term in zip(weights, terms[:5], strict=True)), torch.zeros(()))
    (got,) = torch.autograd.grad(loss, ours)
    wide = training.double().requires_grad_()
    d = wide - rollout.double()
    c = torch.where(d.abs() > 20, d.detach().clamp(-20, 20), d)
    rho, a = c.exp(), advantage.double()
    exact = (rho, -d, d.square() / 2, c.expm1() - c, torch.minimum(rho * a, rho.clamp(0.8, 1.2) * a))
    (expected,) = torch.autograd.grad(sum((w.double() * t).sum() for w, t in zip(weights, exact, strict=True)), wide)
    torch.testing.assert_close(got.double(), expected, atol=1e-6, rtol=3e-7)


@both_terms
def test_nothing_overflows_and_nan_stays_in_its_token(module: ModuleType) -> None:
    training, rollout = torch.tensor([0.0, -1e4, NAN, -1.0]), torch.tensor([-1e4, 0.0, -1.0, -1.0])
    terms = module.policy_terms(training, rollout, torch.ones(4), CONTRACT)
    assert terms.ratio_N[:2].tolist() == pytest.approx([math.exp(20), math.exp(-20)], rel=1e-6)
    assert terms.k3_N[3].item() == 0.0
    assert [bool(term[2].isnan()) for term in terms[:5]] == [True] * 5
    assert terms.clamped_N.tolist() == [True, True, False, False]


def test_wrong_contracts_and_shapes_are_refused() -> None:
    for fields, message in (
        ({"clamp": 0.0}, "clamp is 0.0; choose above 0"),
        ({"eps_low": 1.5}, "eps_low is 1.5; choose 0 or more"),
        ({"eps_high": NAN}, "eps_high is nan"),
    ):
        with pytest.raises(ContractError, match=message):
            PolicyTermsContract(**fields)
    for module in (terms_torch, terms_triton):
        with pytest.raises(OperandError, match=r"\(2,\), \(3,\), \(2,\); pass \[N\] each"):
            module.policy_terms(torch.zeros(2), torch.zeros(3), torch.zeros(2), CONTRACT)


@settings(max_examples=30, deadline=None)
@given(
    values=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=70),
    cut=st.integers(0, 70),
    seed=st.integers(0, 2**20),
)
def test_a_sum_is_exact_and_so_the_same_however_it_is_sharded(values: list[float], cut: int, seed: int) -> None:
    x = torch.tensor(values, dtype=torch.float32)
    mask = torch.rand(len(x), generator=torch.Generator().manual_seed(seed)) < 0.7
    whole = masked_torch.masked_sum(x, mask)
    assert Fraction(whole.units, 1 << UNIT) == sum((Fraction(v) for v in x[mask].tolist()), Fraction(0))
    assert whole.total == math.fsum(x[mask].tolist())
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    for module in (masked_torch, masked_triton):
        parts = [module.masked_sum(x[order][a:b], mask[order][a:b]) for a, b in ((0, cut), (cut, None))]
        assert merge(parts) == merge(reversed(parts)) == whole
    assert unpack(whole.pack()) == whole


@both_sums
def test_dtypes_and_rows_sum_exactly(module: ModuleType) -> None:
    generator = torch.Generator().manual_seed(0)
    dtypes = [torch.float32, torch.bfloat16, torch.float16] + [torch.float64] * (module is masked_torch)
    for dtype in dtypes:
        x = (torch.randn((3, 5000), generator=generator, dtype=torch.float64) * 1e-3).to(dtype)
        x[0, :3] = torch.tensor([torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal / 4, -0.0], dtype=dtype)
        mask = torch.rand((3, 5000), generator=generator) < 0.5
        mask[0, :3] = True
        for row, found in enumerate(module.masked_sums(x, mask)):
            exact = sum((Fraction(v) for v in x[row][mask[row]].double().tolist()), Fraction(0))
            assert Fraction(found.units, 1 << UNIT) == exact
            assert found.active == int(mask[row].sum())


@both_sums
def test_values_that_are_no_numbers_follow_ieee_and_inactive_ones_are_not_read(module: ModuleType) -> None:
    rows = torch.tensor([[1.0, INF], [NAN, -1.0], [-INF, INF], [-0.0, -0.0], [-INF, 3e38]])
    totals = [found.total for found in module.masked_sums(rows, torch.ones(5, 2))]
    assert [repr(total) for total in totals] == ["inf", "nan", "nan", "0.0", "-inf"]
    inactive = torch.tensor([1.0, NAN, INF])
    assert module.masked_mean(inactive, torch.tensor([1, 0, 0])) == 1.0
    with pytest.raises(ZeroActiveTokensError, match="zero_active_tokens"):
        module.masked_mean(inactive, torch.zeros(3))
    with pytest.raises(OperandError, match=r"mask is \(2,\)"):
        module.masked_sum(inactive, torch.ones(2))


def test_a_mean_divides_once_by_the_global_count() -> None:
    values = torch.tensor([1.0] * 4 + [5.0])
    parts = [masked_torch.masked_sum(values[:4], torch.ones(4)), masked_torch.masked_sum(values[4:], torch.ones(1))]
    assert merge(parts).mean == 9 / 5
    assert sum(part.mean for part in parts) / 2 != 9 / 5  # a mean of means
    assert merge([]) == MaskedSum()
    mask = torch.tensor([1, 0, 1])
    assert mean_gradient(mask, 8, 2.0).tolist() == [0.25, 0.0, 0.25]
    with pytest.raises(ZeroActiveTokensError):
        mean_gradient(mask, 0)


def test_sums_of_terms_merge_over_ranks_and_micro_batches_to_the_same_bits() -> None:
    training, rollout, advantage = operands(600)
    mask = torch.rand(600, generator=torch.Generator().manual_seed(5)) < 0.6
    whole = policy_sums(masked_torch, terms_torch.policy_terms(training, rollout, advantage, CONTRACT), mask)
    merged = None
    for start, end in ((401, 600), (0, 17), (17, 401)):
        at = slice(start, end)
        terms = terms_triton.policy_terms(training[at], rollout[at], advantage[at], CONTRACT)
        part = policy_sums(masked_triton, terms, mask[at])
        merged = part if merged is None else merged.merged(part)
    assert merged == whole
    assert whole.clamped == int((((training.double() - rollout.double()).abs() > 20) & mask).sum()) > 0
    assert whole.k1.active == int(mask.sum())
