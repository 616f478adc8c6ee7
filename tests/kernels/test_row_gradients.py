"""Claims: gradients of the row operators are those of float64 autograd, at odd shapes, in torch and in Triton; weight
gradients are sums over tokens along one declared tree, so what follows the tokens changes no bit."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
import torch

pytest.importorskip("triton")

from rlk_ledger_kernels.bits import same_bits
from rlk_ledger_kernels.ops.embedding import autograd as embedding_autograd
from rlk_ledger_kernels.ops.embedding import torch as embedding_torch
from rlk_ledger_kernels.ops.embedding import triton as embedding_triton
from rlk_ledger_kernels.ops.rms_norm import autograd as norm_autograd
from rlk_ledger_kernels.ops.rms_norm import torch as norm_torch
from rlk_ledger_kernels.ops.rms_norm import triton as norm_triton
from rlk_ledger_kernels.ops.rms_norm.contract import RmsNormContract
from rlk_ledger_kernels.ops.rope import autograd as rope_autograd
from rlk_ledger_kernels.ops.rope import torch as rope_torch
from rlk_ledger_kernels.ops.rope import triton as rope_triton
from rlk_ledger_kernels.ops.rope.contract import RopeContract
from rlk_ledger_kernels.ops.rope.table import frequencies, rope_table
from rlk_ledger_kernels.ops.swiglu import autograd as swiglu_autograd
from rlk_ledger_kernels.ops.swiglu import torch as swiglu_torch
from rlk_ledger_kernels.ops.swiglu import triton as swiglu_triton
from rlk_ledger_kernels.ops.swiglu.contract import SwigluContract
from rlk_ledger_kernels.token_sum import FAN_IN, add_level, grouped_token_sum, token_sum

Function = Callable[..., torch.Tensor]
SHAPES = [((37, 20), (20,)), ((1, 1), (1,)), ((70, 3, 33), (3, 33)), ((3, 700), (700,))]


@pytest.fixture(autouse=True)
def quiet_interpreter() -> Iterator[None]:
    """The interpreter computes with numpy, which warns where IEEE arithmetic gives NaN or an infinity."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def check(candidate: Function, exact: Function, operands: tuple[torch.Tensor, ...], tolerance: float = 2e-5) -> None:
    """Gradients of a random weighting of both outputs, the exact one in float64."""
    ours = [operand.clone().requires_grad_() for operand in operands]
    theirs = [operand.double().requires_grad_() for operand in operands]
    out, expected = candidate(*ours), exact(*theirs)
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)
    weights = draw(99, *out.shape)
    got = torch.autograd.grad((out * weights).sum(), ours)
    wanted = torch.autograd.grad((expected * weights.double()).sum(), theirs)
    for mine, right in zip(got, wanted, strict=True):
        scale = float(right.abs().max().clamp(min=1.0))
        torch.testing.assert_close(mine.double(), right, atol=tolerance * scale, rtol=tolerance)


def exact_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


@pytest.mark.parametrize("module", [norm_torch, norm_triton], ids=["torch", "triton"])
@pytest.mark.parametrize(("shape", "weight_shape"), SHAPES)
def test_rms_norm(module: ModuleType, shape: tuple[int, ...], weight_shape: tuple[int, ...]) -> None:
    x, residual, weight, contract = draw(1, *shape), draw(2, *shape), draw(3, *weight_shape), RmsNormContract()
    check(lambda x, w: norm_autograd.rms_norm(module, x, w, contract), exact_norm, (x, weight))
    check(
        lambda x, r, w: torch.stack(norm_autograd.add_rms_norm(module, x, r, w, contract)),
        lambda x, r, w: torch.stack((exact_norm(x + r, w), x + r)),
        (x, residual, weight),
    )


@pytest.mark.parametrize("module", [rope_torch, rope_triton], ids=["torch", "triton"])
@pytest.mark.parametrize("style", ["half", "interleaved"])
@pytest.mark.parametrize("rotary", [None, 4])
def test_rope(module: ModuleType, style: str, rotary: int | None) -> None:
    contract = RopeContract(style=style, rotary=rotary)  # type: ignore[arg-type]
    rows = rope_table(frequencies(rotary or 6, 100.0), 90, contract).at(torch.arange(21) * 4)
    turned = rotary or 6
    first = torch.arange(turned // 2) if style == "half" else torch.arange(0, turned, 2)
    second = first + (turned // 2 if style == "half" else 1)
    cos, sin = rows.cos_PD[:, None, second].double(), rows.sin_PD[:, None, second].double()

    def exact(x: torch.Tensor) -> torch.Tensor:
        out = x.clone()
        out[..., first] = x[..., first] * cos - x[..., second] * sin
        out[..., second] = x[..., second] * cos + x[..., first] * sin
        return out

    check(lambda x: rope_autograd.rope(module, x, rows, contract), exact, (draw(1, 21, 3, 6),))


@pytest.mark.parametrize("module", [swiglu_torch, swiglu_triton], ids=["torch", "triton"])
@pytest.mark.parametrize("activation", ["quotient", "sigmoid"])
def test_swiglu(module: ModuleType, activation: str) -> None:
    contract = SwigluContract(activation=activation)  # type: ignore[arg-type]
    check(
        lambda gate, up: swiglu_autograd.swiglu(module, gate, up, contract),
        lambda gate, up: gate * gate.sigmoid() * up,
        (draw(1, 19, 77) * 5, draw(2, 19, 77)),
    )
    limits = torch.tensor([[-1e4, -88.0, 0.0, 88.0, 1e4]])
    grad_gate, grad_up = module.swiglu_backward(torch.ones(1, 5), limits, torch.ones(1, 5), contract)
    torch.testing.assert_close(grad_gate, torch.tensor([[0.0, 0.0, 0.5, 1.0, 1.0]]), atol=1e-6, rtol=0)
    torch.testing.assert_close(grad_up, torch.tensor([[0.0, 0.0, 0.0, 88.0, 1e4]]), atol=1e-6, rtol=0)


@pytest.mark.parametrize("module", [embedding_torch, embedding_triton], ids=["torch", "triton"])
def test_embedding(module: ModuleType) -> None:
    """One id stands in more tokens than two levels of the tree hold, many stand in none."""
    ids = torch.randint(0, 60, (FAN_IN * FAN_IN + 300,), generator=torch.Generator().manual_seed(0))
    ids[: FAN_IN * FAN_IN + 5] = 7
    check(lambda t: embedding_autograd.embedding(module, ids, t), lambda t: t[ids], (draw(1, 60, 9),), 1e-4)


def test_triton_adds_tokens_of_a_table_to_the_bits_of_torch() -> None:
    ids = torch.randint(0, 9, (700,), generator=torch.Generator().manual_seed(0))
    for dtype in (torch.float32, torch.bfloat16):
        grad = draw(1, 700, 13).to(dtype)
        whole = embedding_torch.embedding_backward(grad, ids, 9)
        assert same_bits(embedding_triton.embedding_backward(grad, ids, 9), whole)
        for module in (embedding_torch, embedding_triton):
            shards = [module.embedding_backward(grad, ids, end - first, first) for first, end in ((0, 2), (2, 9))]
            assert same_bits(torch.cat(shards), whole)


def test_a_table_row_depends_on_its_own_tokens_alone() -> None:
    ids = torch.randint(0, 9, (300,), generator=torch.Generator().manual_seed(0))
    grad = draw(1, 300, 13)
    row = embedding_torch.embedding_backward(grad, ids, 9)[4]
    kept = ids == 4
    others = torch.where(kept[:, None], grad, torch.full_like(grad, float("nan")))
    for module in (embedding_torch, embedding_triton):
        assert same_bits(module.embedding_backward(others, ids, 9)[4], row)
        assert same_bits(module.embedding_backward(grad[kept], ids[kept], 9)[4], row)


def test_a_weight_gradient_ignores_rows_of_zeros_behind_the_tokens_and_nothing_else() -> None:
    x, grad, weight = draw(1, 75, 40), draw(2, 75, 40), draw(3, 40)
    contract = RmsNormContract()
    padded_x, padded_grad = torch.cat((x, draw(4, 60, 40))), torch.cat((grad, torch.zeros(60, 40)))
    for module in (norm_torch, norm_triton):
        base = module.rms_norm_backward(grad, x, weight, contract)[1]
        assert same_bits(module.rms_norm_backward(padded_grad, padded_x, weight, contract)[1], base)
        order = torch.arange(75).flip(0)
        assert not same_bits(module.rms_norm_backward(grad[order], x[order], weight, contract)[1], base)


@pytest.mark.parametrize("count", [0, 1, 31, 32, 33, 1024, 1025, 2100])
def test_the_tree_is_the_declared_one(count: int) -> None:
    """Nodes of FAN_IN children, each added in order from +0; checked with one float at a time."""
    rows = draw(count, count, 2)

    def tree(values: list[torch.Tensor]) -> torch.Tensor:
        nodes = []
        for start in range(0, max(1, len(values)), FAN_IN):
            total = torch.zeros(2)
            for value in values[start : start + FAN_IN]:
                total = total + value
            nodes.append(total)
        return nodes[0] if len(nodes) == 1 else tree(nodes)

    assert same_bits(token_sum(rows), tree(list(rows)))
    if count:
        groups = torch.arange(count) % 3  # tokens of a group are its own, in order, whatever lies between them
        found, sums = grouped_token_sum(rows, groups, add_level)
        assert found.tolist() == list(range(min(3, count)))
        assert all(same_bits(sums[group], tree(list(rows[groups == group]))) for group in found.tolist())


@pytest.mark.parametrize("module", [norm_torch, norm_triton], ids=["torch", "triton"])
def test_gradients_arrive_in_the_dtype_of_their_operand(module: ModuleType) -> None:
    x = draw(1, 12, 24).bfloat16().requires_grad_()
    weight = draw(2, 24).bfloat16().requires_grad_()
    y = norm_autograd.rms_norm(module, x, weight, RmsNormContract(output="bfloat16"))
    grads = torch.autograd.grad(y.float().square().sum(), (x, weight))
    assert [grad.dtype for grad in grads] == [torch.bfloat16, torch.bfloat16]
    wide_x, wide_weight = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    exact = torch.autograd.grad(exact_norm(wide_x, wide_weight).square().sum(), (wide_x, wide_weight))
    for mine, right in zip(grads, exact, strict=True):
        torch.testing.assert_close(mine.double(), right, atol=0.05 * float(right.abs().max()), rtol=0.02)
