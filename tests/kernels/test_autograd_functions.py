"""Claim: no operator has a second derivative, and asking for one is an error and never a wrong number."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest
import torch

import rlk_ledger_kernels.ops
from rlk_ledger_kernels.errors import ContractError
from rlk_ledger_kernels.ops.swiglu import autograd as swiglu_autograd
from rlk_ledger_kernels.ops.swiglu import torch as swiglu_torch
from rlk_ledger_kernels.ops.swiglu.contract import SwigluContract

OPERATORS = sorted(path.parent.name for path in Path(rlk_ledger_kernels.ops.__path__[0]).glob("*/autograd.py"))


@pytest.mark.parametrize("operator", OPERATORS)
def test_every_function_is_differentiable_once(operator: str) -> None:
    module = import_module(f"rlk_ledger_kernels.ops.{operator}.autograd")
    made = [one for one in vars(module).values() if isinstance(one, type) and issubclass(one, torch.autograd.Function)]
    assert made
    for function in made:
        assert hasattr(function.backward, "__wrapped__"), f"{function.__name__}.backward has a second derivative"


def test_a_second_derivative_is_refused() -> None:
    gate, up = torch.randn((3, 5), requires_grad=True), torch.randn((3, 5), requires_grad=True)
    y = swiglu_autograd.swiglu(swiglu_torch, gate, up, SwigluContract())
    with pytest.raises(ContractError, match="swiglu: there is no second derivative"):
        torch.autograd.grad(y.sum(), gate, create_graph=True, retain_graph=True)
    assert torch.autograd.grad(y.sum(), gate)[0].isfinite().all()
