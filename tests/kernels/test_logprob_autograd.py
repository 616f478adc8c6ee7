"""Claim: log-probabilities have the gradients of float64 autograd, and shards in 2 and 4 processes give one's bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from logprob_rank import CONTRACT, V, module, operands, shard_results

from rlk_ledger_kernels.bits import same_bits
from rlk_ledger_kernels.ops.linear_logprob import autograd as linear_autograd
from rlk_ledger_kernels.ops.selected_logprob import autograd as logits_autograd
from rlk_ledger_kernels.parallel.group import SimulatedGroup

BACKENDS = ("reference", "torch", "triton")


def in_float64(logits_NV: torch.Tensor, tokens_N: torch.Tensor) -> torch.Tensor:
    scores_NV = torch.log_softmax(logits_NV[:, :V] / CONTRACT.temperature, -1)
    picked_N = scores_NV.gather(1, tokens_N.clamp(0)[:, None])[:, 0]
    return torch.where(tokens_N == -100, 0.0, picked_N)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_of_logits_are_those_of_float64(backend: str) -> None:
    hidden_NK, weight_VK, tokens_N, grad_N = operands()
    logits_NV = (hidden_NK @ weight_VK.T).requires_grad_()
    wide_NV = logits_NV.detach().double().requires_grad_()
    got = logits_autograd.selected_logprob(module("selected_logprob", backend), logits_NV, tokens_N, CONTRACT, V)
    expected = in_float64(wide_NV, tokens_N)
    (got * grad_N).sum().backward()
    (expected * grad_N.double()).sum().backward()
    assert logits_NV.grad is not None
    assert wide_NV.grad is not None
    torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(logits_NV.grad.double(), wide_NV.grad, atol=2e-6, rtol=1e-5)
    assert not logits_NV.grad[:, V:].any()
    assert not logits_NV.grad[4].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_of_hidden_states_and_head_are_those_of_float64(backend: str) -> None:
    hidden_NK, weight_VK, tokens_N, grad_N = operands()
    ours = [hidden_NK.requires_grad_(), weight_VK.requires_grad_()]
    wide = [one.detach().double().requires_grad_() for one in ours]
    made = linear_autograd.linear_logprob(
        module("linear_logprob", backend), ours[0], ours[1], tokens_N, CONTRACT, vocabulary=V
    )
    (made * grad_N).sum().backward()
    (in_float64(wide[0] @ wide[1].T, tokens_N) * grad_N.double()).sum().backward()
    for got, expected in zip(ours, wide):
        assert got.grad is not None
        assert expected.grad is not None
        torch.testing.assert_close(got.grad.double(), expected.grad, atol=2e-5, rtol=1e-5)
    assert not weight_VK.grad[V:].any()  # type: ignore[index]
    assert not hidden_NK.grad[4].any()  # type: ignore[index]


@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")  # numpy's, in the interpreter
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_an_ignored_row_of_nan_harms_no_gradient(backend: str) -> None:
    hidden_NK, weight_VK, tokens_N, grad_N = operands()
    results = []
    for content in (0.0, float("nan")):
        held_NK = hidden_NK.clone()
        held_NK[4] = content
        held_NK.requires_grad_()
        weight = weight_VK.clone().requires_grad_()
        made = linear_autograd.linear_logprob(
            module("linear_logprob", backend), held_NK, weight, tokens_N, CONTRACT, vocabulary=V
        )
        (made * grad_N).sum().backward()
        results.append((made.detach(), held_NK.grad, weight.grad))
    for clean, dirty in zip(*results):
        assert clean is not None
        assert dirty is not None
        assert same_bits(clean, dirty)
    assert same_bits(results[1][0][4], torch.tensor(0.0))


@pytest.mark.parametrize("ranks", [2, 4])
def test_processes_with_a_shard_each_give_the_bits_of_one(
    ranks: int, four_ranks: list[dict[tuple[str, int], Any]]
) -> None:
    alone = shard_results(0, 1, SimulatedGroup(1))
    parts = [found["logprob", ranks] for found in four_ranks[:ranks]]
    for part in parts:
        for name in ("from_logits", "from_hidden", "hidden_grad"):
            assert same_bits(part[name], alone[name]), name
    assert same_bits(torch.cat([part["logits_grad"] for part in parts], 1), alone["logits_grad"])
    assert same_bits(torch.cat([part["weight_grad"] for part in parts]), alone["weight_grad"])
