"""The Triton linear, interpreted: its tree, shards and gradients, and rows that depend on themselves alone."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlk_ledger_kernels.bits import same_bits
from rlk_ledger_kernels.errors import ContractError, OperandError
from rlk_ledger_kernels.ops.linear.contract import LinearContract
from rlk_ledger_kernels.ops.linear.tree import leaf_spans
from rlk_ledger_kernels.schedule import Schedule

pytest.importorskip("triton")
linear_triton = pytest.importorskip("rlk_ledger_kernels.ops.linear.triton")

few = settings(max_examples=int(os.environ.get("RLK_KERNEL_EXAMPLES", "8")), deadline=None)
TOLERANCE = {"float32": (1e-4, 1e-4), "bfloat16": (5e-2, 2e-2), "float16": (1e-3, 1e-3)}


def draw(seed: int, *shape: int, dtype: str = "float32") -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(getattr(torch, dtype))


def tree_of(values: list[torch.Tensor], spans: tuple[tuple[int, int], ...]) -> torch.Tensor:
    """Add leaf results by the definition of the tree: cut at the middle, add the two sides."""
    if len(spans) == 1:
        return values[0]
    middle = spans[0][0] + (spans[-1][1] - spans[0][0]) // 2
    cut = [start for start, _ in spans].index(middle)
    return tree_of(values[:cut], spans[:cut]) + tree_of(values[cut:], spans[cut:])


@few
@given(
    n=st.integers(1, 40),
    k=st.integers(1, 400),
    o=st.integers(1, 150),
    dtype=st.sampled_from(sorted(TOLERANCE)),
    leaf=st.sampled_from([24, 64, 100, 512]),
    order=st.sampled_from(["ascending", "descending"]),
    biased=st.booleans(),
)
def test_the_product_is_the_equation(n: int, k: int, o: int, dtype: str, leaf: int, order: str, biased: bool) -> None:
    x, weight = draw(n + k, n, k, dtype=dtype), draw(k + o, o, k, dtype=dtype)
    bias = draw(o, o, dtype=dtype) if biased else None
    contract = LinearContract(output=dtype, schedule=Schedule(k_leaf=leaf, k_order=order))  # type: ignore[arg-type]
    got = linear_triton.linear(x, linear_triton.pack_linear(weight, contract, bias))
    expected = x.double() @ weight.double().T + (0.0 if bias is None else bias.double())
    atol, rtol = TOLERANCE[dtype]
    assert got.dtype == getattr(torch, dtype)
    torch.testing.assert_close(got.double(), expected, atol=max(atol, 1e-3 if dtype == "float16" else 0), rtol=rtol)


@pytest.mark.parametrize(
    ("k", "leaf", "order"),
    [(512, 64, "ascending"), (129, 64, "descending"), (515, 128, "ascending"), (700, 32, "descending")],
)
def test_leaves_meet_along_the_tree(k: int, leaf: int, order: str) -> None:
    """Each leaf alone through the kernel, added by the definition, is the whole; so the kernel adds in that order."""
    schedule = Schedule(k_leaf=leaf, k_order=order)  # type: ignore[arg-type]
    x, weight = draw(k, 7, k), draw(k + 1, 20, k)
    whole = linear_triton.product(x, weight, schedule, torch.float32)
    summed_x, summed_w = (x.flip(1), weight.flip(1)) if schedule.reversed_k else (x, weight)
    spans = leaf_spans(k, leaf)
    leaves = [
        linear_triton.product(summed_x[:, a:b], summed_w[:, a:b], Schedule(k_leaf=leaf), torch.float32)
        for a, b in spans
    ]
    assert same_bits(whole, tree_of(leaves, spans))
    in_order = leaves[0]
    for leaf_result in leaves[1:]:
        in_order = in_order + leaf_result
    assert len(spans) < 4 or not same_bits(whole, in_order), "an order of sums nobody could tell from the tree"


@pytest.mark.parametrize(("dtype", "ranks"), [("float32", 2), ("bfloat16", 8)])
def test_shards_merge_to_the_bits_of_one_rank(dtype: str, ranks: int) -> None:
    contract = LinearContract(output=dtype, schedule=Schedule(k_leaf=64))  # type: ignore[arg-type]
    x, weight, bias = draw(1, 9, 520, dtype=dtype), draw(2, 30, 520, dtype=dtype), draw(3, 30, dtype=dtype)
    whole = linear_triton.linear(x, linear_triton.pack_linear(weight, contract, bias))
    width = 520 // ranks
    parts = [
        linear_triton.linear_partial(
            x[:, r * width : (r + 1) * width], linear_triton.pack_row_shard(weight, contract, ranks, r)
        )
        for r in range(ranks)
    ]
    assert same_bits(linear_triton.merge_partials(parts, contract, bias), whole)
    slices = [
        linear_triton.linear(x, linear_triton.pack_linear(weight[a:b], contract, bias[a:b]))
        for a, b in ((0, 1), (1, 18), (18, 30))
    ]
    assert same_bits(torch.cat(slices, dim=1), whole), "column parallel, of any width"


def test_a_row_depends_on_itself_alone() -> None:
    contract = LinearContract(output="bfloat16", schedule=Schedule(k_leaf=64))
    packed = linear_triton.pack_linear(draw(5, 24, 130, dtype="bfloat16"), contract)
    x = draw(6, 150, 130, dtype="bfloat16")
    whole = linear_triton.linear(x, packed)
    for rows in ([0], [149], [128, 127], list(range(149, -1, -3))):
        assert same_bits(linear_triton.linear(x[rows], packed), whole[rows])
    noisy = torch.full_like(x, float("nan"))
    noisy[[3, 140]] = x[[3, 140]]
    assert same_bits(linear_triton.linear(noisy, packed)[[3, 140]], whole[[3, 140]])
    assert linear_triton.linear(x[:0], packed).shape == (0, 24)


@pytest.mark.parametrize(("n", "leaf"), [(1, 64), (460, 24)])
def test_gradients_are_those_of_float64_autograd(n: int, leaf: int) -> None:
    contract = LinearContract(schedule=Schedule(k_leaf=leaf))
    x, weight, bias, grad = draw(1, n, 70), draw(2, 33, 70), draw(3, 33), draw(4, n, 33)
    leaves = [tensor.double().requires_grad_() for tensor in (x, weight, bias)]
    torch.nn.functional.linear(*leaves).backward(grad.double())
    packed = linear_triton.pack_linear(weight, contract, bias)
    for got, expected in zip(linear_triton.linear_backward(grad, x, packed), leaves, strict=True):
        torch.testing.assert_close(got.double(), expected.grad, atol=1e-4, rtol=1e-4)
    grad_x, *_ = linear_triton.linear_backward(grad, x, packed)
    assert same_bits(linear_triton.linear_backward(grad[-1:], x[-1:], packed)[0], grad_x[-1:])


def test_the_triton_linear_refuses_what_the_torch_one_refuses() -> None:
    contract = LinearContract(schedule=Schedule(k_leaf=64))
    shard = linear_triton.pack_row_shard(torch.zeros(16, 256), contract, 2, 1)
    with pytest.raises(OperandError, match="the weight is shard 1 of 2"):
        linear_triton.linear(torch.zeros(3, 128), shard)
    with pytest.raises(OperandError, match=r"the weight needs \[rows, 128\]"):
        linear_triton.linear_partial(torch.zeros(3, 256), shard)
    with pytest.raises(ContractError, match="straddle the boundaries of 8 shards"):
        linear_triton.pack_row_shard(torch.zeros(16, 256), contract, 8, 1)
