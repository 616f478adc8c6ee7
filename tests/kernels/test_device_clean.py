"""Claim: the reference and torch backends of every operator run on a device as they are: they make no tensor on the
CPU that meets the device's, read nothing back unasked, and give there, with the same arithmetic, the CPU's bits."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from types import ModuleType

import pytest
import torch
from pretend_device import DEVICE, DeviceMixError, PretendDevice, left_on_cpu

from rlk_ledger_kernels.bits import same_bits
from rlk_ledger_kernels.suite import accuracy
from rlk_ledger_kernels.suite.case import Case, MaskedCase, RowCase, SequenceCase
from rlk_ledger_kernels.suite.catalogue import cases, operators

BACKENDS = ("torch", "reference")
MOST = int(os.environ.get("RLK_DEVICE_CLEAN_CASES", "4"))
"""Cases of each operator, evenly chosen; raise it by hand for all of them."""


def some(name: str) -> list[Case]:
    found = cases(operators()[name])
    return found[:: max(1, -(-len(found) // MOST))]


def there(case: Case, device: PretendDevice) -> Case:
    """The case with its operands on the device."""
    if isinstance(case, SequenceCase):
        return type(case)(**{**vars(case), "sequences": [device.put(one) for one in case.sequences]})
    if isinstance(case, MaskedCase):
        return type(case)(**{**vars(case), "rows": device.put(case.rows), "mask_N": device.put(case.mask_N)})
    return type(case)(**{**vars(case), "rows": device.put(case.rows)})


def on_the_device(case: Case, run: Callable[[Case], torch.Tensor]) -> torch.Tensor:
    """What `run` gives for the case on the device. A masked mean is a number of the host by its contract."""
    with PretendDevice() as device:
        out = run(there(case, device))
        assert isinstance(case, MaskedCase) or left_on_cpu(out) == [], "the result lies on the CPU"
    return device.back(out)


def forward(module: ModuleType) -> Callable[[Case], torch.Tensor]:
    return lambda case: accuracy.outputs(case, module)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", operators())
def test_a_backend_runs_on_a_device_as_it_is(name: str, backend: str) -> None:
    module = import_module(f"{operators()[name].package}.{backend}")
    found = some(name)
    assert found, f"{name} has no case"
    for case in found:
        with torch.no_grad():
            assert same_bits(on_the_device(case, forward(module)), accuracy.outputs(case, module)), case.name


@pytest.mark.parametrize("name", operators())
def test_gradients_are_made_on_the_device_too(name: str) -> None:
    module = import_module(f"{operators()[name].package}.torch")
    with_gradient = [case for case in some(name) if isinstance(case, RowCase) and case.gradient is not None]
    for case in with_gradient[:2]:
        gradient = case.gradient
        assert gradient is not None
        expected = gradient(module, case.rows)
        assert same_bits(on_the_device(case, lambda moved, of=gradient: of(module, moved.rows)), expected), case.name


class Careless(ModuleType):
    """A backend with one tensor too many on the CPU."""

    def __init__(self, mistake: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__("careless")
        self.swiglu = lambda gate, up, contract: mistake(gate) * up


@pytest.mark.parametrize(
    "mistake",
    [
        lambda x: x * torch.ones(x.shape[-1]),
        lambda x: torch.empty(x.shape).copy_(x),
        lambda x: x[torch.arange(x.shape[0])],
        lambda x: x.cpu(),
        lambda x: torch.as_tensor(x.cpu().numpy()),
    ],
    ids=["operand", "accumulator", "index", "left on the CPU", "through numpy"],
)
def test_a_backend_that_makes_a_tensor_on_the_cpu_is_caught(mistake: Callable[[torch.Tensor], torch.Tensor]) -> None:
    case = cases(operators()["swiglu"])[0]
    assert accuracy.outputs(case, Careless(mistake)).device.type == "cpu"  # a CPU cannot see it
    with pytest.raises(DeviceMixError, match=str(DEVICE)):
        on_the_device(case, forward(Careless(mistake)))
