"""Claim: the pretended device refuses what a GPU refuses, and computes the same bits as the CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from pretend_device import DEVICE, DeviceMixError, PretendDevice, PretendTensor, left_on_cpu

X_NK = torch.randn((4, 4), generator=torch.Generator().manual_seed(0))

REFUSED: dict[str, Callable[[torch.Tensor], object]] = {
    "an operand made without a device": lambda x: x * torch.ones(4),
    "an accumulator made without a device": lambda x: torch.zeros(4, 4).add_(x),
    "a product with a CPU weight": lambda x: x @ torch.ones(4, 4),
    "a CPU index of index_select": lambda x: x.index_select(0, torch.tensor([1])),
    "a CPU index in brackets": lambda x: x[torch.tensor([1])],
    "a CPU mask": lambda x: x.masked_fill(torch.zeros((4, 4), dtype=torch.bool), 0.0),
    "a concatenation of both": lambda x: torch.cat((x, torch.ones(1, 4))),
    "a stack with a CPU scalar": lambda x: torch.stack((x[0, 0], torch.tensor(1.0))),
    "an assignment from the CPU": lambda x: x.__setitem__(slice(0, 1), torch.ones(1, 4)),
    "an assignment to the CPU": lambda x: torch.zeros(4, 4).copy_(x),
    "numpy": lambda x: x.numpy(),
    "a CPU generator": lambda x: torch.randn(3, device=x.device, generator=torch.Generator()),
    "a where with a CPU mask": lambda x: torch.where(torch.ones(4, 4, dtype=torch.bool), x, 0.0),
}

ALLOWED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a CPU scalar": lambda x: x * torch.tensor(2.0),
    "factories that name the device": lambda x: x @ torch.full((4, 4), 2.0, device=x.device),
    "factories inside torch": lambda x: x.repeat_interleave(2, dim=1) + x.new_ones(8),
    "an index on the device": lambda x: x[torch.arange(2, device=x.device)],
    "a move there": lambda x: x + torch.ones(4, 4).to(x.device),
    "a move and a cast": lambda x: x.to(torch.bfloat16) + torch.ones(4, 4).to(x.device, torch.bfloat16),
    "views in place": lambda x: (x.view(-1)[3:7].zero_(), x)[1],
    "an out argument": lambda x: torch.mm(x, x, out=torch.empty((4, 4), device=x.device)),
    "a composite": lambda x: torch.einsum("ij,kj->ik", x, x).masked_fill(x > 0, float("-inf")).logsumexp(-1),
    "a sort": lambda x: torch.topk(x, 2).values,
    "reading an element": lambda x: x * float(x[0, 0]) + x[0].tolist()[1],
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_a_gpu_refuses_is_refused(what: str) -> None:
    with PretendDevice() as device:
        x = device.put(X_NK)
        with pytest.raises((DeviceMixError, TypeError), match=r"Expected|can't convert"):
            REFUSED[what](x)


@pytest.mark.parametrize("what", ALLOWED)
def test_what_a_gpu_does_gives_the_bits_of_the_cpu_and_stays_there(what: str) -> None:
    expected = ALLOWED[what](X_NK.clone())
    with PretendDevice() as device:
        got = ALLOWED[what](device.put(X_NK))
        assert (got.device, got.is_cuda, left_on_cpu(got)) == (DEVICE, True, [])
    assert torch.equal(device.back(got), expected)


def test_gradients_flow_on_the_device() -> None:
    plain = X_NK.clone().requires_grad_(True)
    (expected,) = torch.autograd.grad((plain @ plain).exp().sum(), plain)
    with PretendDevice() as device:
        there = device.put(X_NK).requires_grad_(True)
        (got,) = torch.autograd.grad((there @ there).exp().sum(), there)
        assert isinstance(got, PretendTensor)
    assert torch.equal(device.back(got), expected)


def test_nothing_is_left_of_it_afterwards() -> None:
    with PretendDevice():
        pass
    assert not torch.cuda.is_available()
    with pytest.raises((RuntimeError, AssertionError)):
        torch.ones(1, device="cuda")
