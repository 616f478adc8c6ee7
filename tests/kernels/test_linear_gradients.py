"""Gradients of linear, router and experts through autograd, on every backend; weight gradients sum tokens in blocks."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from rlk_ledger_kernels.bits import same_bits
from rlk_ledger_kernels.errors import OperandError
from rlk_ledger_kernels.ops.grouped_experts import autograd as experts_autograd
from rlk_ledger_kernels.ops.grouped_experts import torch as experts_torch
from rlk_ledger_kernels.ops.grouped_experts.contract import GroupedExpertsContract
from rlk_ledger_kernels.ops.linear import autograd as linear_autograd
from rlk_ledger_kernels.ops.linear import reference
from rlk_ledger_kernels.ops.linear import torch as linear_torch
from rlk_ledger_kernels.ops.linear import triton as linear_triton
from rlk_ledger_kernels.ops.linear.contract import LinearContract
from rlk_ledger_kernels.ops.linear.tree import sum_blocks
from rlk_ledger_kernels.ops.moe_router import autograd as router_autograd
from rlk_ledger_kernels.ops.moe_router import torch as router_torch
from rlk_ledger_kernels.ops.moe_router.contract import MoeRouterContract
from rlk_ledger_kernels.schedule import Schedule


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("module", [linear_torch, linear_triton, reference], ids=["torch", "triton", "reference"])
@pytest.mark.parametrize("biased", [True, False])
def test_linear_through_autograd_is_float64_autograd(module: ModuleType, biased: bool) -> None:
    contract = LinearContract(schedule=Schedule(k_leaf=32))
    x, weight, bias, grad = draw(1, 70, 40), draw(2, 21, 40), draw(3, 21) if biased else None, draw(4, 70, 21)
    wide = [None if one is None else one.double().requires_grad_() for one in (x, weight, bias)]
    torch.nn.functional.linear(*wide).backward(grad.double())
    leaves = [None if one is None else one.clone().requires_grad_() for one in (x, weight, bias)]
    linear_autograd.linear(module, leaves[0], leaves[1], contract, leaves[2]).backward(grad)
    for got, expected in zip(leaves, wide, strict=True):
        if got is not None:
            torch.testing.assert_close(got.grad.double(), expected.grad, atol=1e-5, rtol=1e-5)


def test_a_gradient_row_depends_on_itself_and_a_weight_gradient_on_blocks_in_order() -> None:
    contract = LinearContract(schedule=Schedule(k_leaf=32))
    x, grad = draw(1, 150, 40), draw(4, 150, 21)
    packed = linear_torch.pack_linear(draw(2, 21, 40), contract, draw(3, 21))
    grad_x, grad_weight, grad_bias = linear_torch.linear_backward(grad, x, packed)
    for rows in ([0], [149, 3], list(range(100))):
        assert same_bits(linear_torch.linear_backward(grad[rows], x[rows], packed)[0], grad_x[rows])
    blocks = [linear_torch.linear_backward(grad[s : s + 32], x[s : s + 32], packed) for s in range(0, 150, 32)]
    assert same_bits(sum_blocks(block[1] for block in blocks), grad_weight)
    assert same_bits(sum_blocks(block[2] for block in blocks), grad_bias)
    shuffled = torch.randperm(150, generator=torch.Generator().manual_seed(0))
    assert not same_bits(linear_torch.linear_backward(grad[shuffled], x[shuffled], packed)[1], grad_weight)
    with pytest.raises(OperandError, match="the gradient has 150 rows, x has 149"):
        linear_torch.linear_backward(grad, x[1:], packed)
    empty = linear_torch.linear_backward(grad[:0], x[:0], packed)
    assert [tuple(one.shape) for one in empty] == [(0, 40), (21, 40), (21,)]
    assert not empty[1].any()


def test_a_whole_mixture_trains_through_autograd() -> None:
    """Router and experts in one graph, against the same equations in float64; the routes are constants."""
    rows, count, top_k, inner, hidden = 23, 5, 2, 12, 10
    x, gate_weight = draw(1, rows, hidden), draw(2, count, hidden)
    experts = draw(3, count, inner, hidden), draw(4, count, inner, hidden), draw(5, count, hidden, inner)
    leaves = [one.clone().requires_grad_() for one in (x, gate_weight, *experts)]
    logits = linear_autograd.linear(linear_torch, leaves[0], leaves[1], LinearContract())
    weights, routes = router_autograd.moe_router(router_torch, logits, MoeRouterContract(top_k))
    contract = GroupedExpertsContract()
    y = experts_autograd.grouped_experts(
        experts_torch, leaves[0], (leaves[2], leaves[3], leaves[4]), weights, routes, contract
    )
    y.square().sum().backward()

    wide = [one.double().requires_grad_() for one in (x, gate_weight, *experts)]
    wide_weights = (wide[0] @ wide[1].T).softmax(1).gather(1, routes)
    wide_weights = wide_weights / wide_weights.sum(1, keepdim=True)
    total = torch.zeros(rows, hidden, dtype=torch.float64)
    for column in range(top_k):
        gate, up, down = (one[routes[:, column]] for one in wide[2:])
        inside = torch.nn.functional.silu(torch.einsum("nih,nh->ni", gate, wide[0]))
        inside = inside * torch.einsum("nih,nh->ni", up, wide[0])
        total = total + wide_weights[:, column, None] * torch.einsum("nhi,ni->nh", down, inside)
    total.square().sum().backward()
    for got, expected in zip(leaves, wide, strict=True):
        assert got.grad is not None
        scale = float(expected.grad.abs().max())  # type: ignore[union-attr]
        torch.testing.assert_close(got.grad.double(), expected.grad, atol=2e-6 * scale, rtol=1e-4)
