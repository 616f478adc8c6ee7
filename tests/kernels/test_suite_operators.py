"""Claim: every operator passes every suite on every backend that can run here: torch on all cases, on one and two
threads, Triton in its interpreter on the first case of two dtypes, its invariance on the lower one."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch

from rlk_ledger_kernels.availability import unavailable
from rlk_ledger_kernels.descriptors import Backend, Operator
from rlk_ledger_kernels.probe import using_threads
from rlk_ledger_kernels.suite import accuracy, catalogue, invariance, parity
from rlk_ledger_kernels.suite.backend_check import first_of_each_dtype
from rlk_ledger_kernels.suite.case import Case, MaskedCase, RowCase, SequenceCase

OPERATORS = catalogue.operators()
CASES = {name: catalogue.cases(operator) for name, operator in OPERATORS.items()}
TRITON = [
    (operator, backend)
    for operator in OPERATORS.values()
    for backend in operator.backends
    if backend.name == "triton" and unavailable(backend, "cpu") is None
]


def torch_backend(operator: Operator) -> Backend:
    return next(one for one in operator.backends if one.name == "torch")


def graded(case: Case) -> bool:
    return not isinstance(case, MaskedCase) and case.gradient is not None


def takes_gradients(case: Case) -> bool:
    """Whether rows have gradients of their own; those of an embedding belong to its table."""
    operands = case.sequences[0] if isinstance(case, SequenceCase) else case.rows
    return any(operand.is_floating_point() for operand in operands)


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_has_cases_that_reach_past_a_tile(name: str) -> None:
    cases = CASES[name]
    assert {case.dtype for case in cases} >= {"float32", "bfloat16"}
    assert len({case.name for case in cases}) == len(cases)
    assert all(case.operator == name for case in cases)
    for case in cases:
        if isinstance(case, RowCase):
            assert len(case.rows[0]) >= 130
        if isinstance(case, SequenceCase):
            lengths = sorted(len(sequence[0]) for sequence in case.sequences)
            assert (lengths[0], lengths[-1] > 128) == (1, True)
    if "backward" in torch_backend(OPERATORS[name]).autograd:
        by_row = [case for case in cases if not isinstance(case, MaskedCase) and takes_gradients(case)]
        assert not by_row or any(map(graded, by_row))


@pytest.mark.parametrize("name", OPERATORS)
def test_torch_is_invariant_forward_and_backward_on_one_and_two_threads(name: str) -> None:
    module = import_module(f"{OPERATORS[name].package}.torch")
    with using_threads(1):
        for case in CASES[name]:
            assert invariance.check(case, module) is None
            if graded(case):
                assert invariance.check(case, module, direction="backward") is None
        for case in first_of_each_dtype(CASES[name]):
            assert invariance.check(case, module, effort="brief", threads=2) is None


@pytest.mark.parametrize("name", OPERATORS)
def test_torch_is_within_tolerance_of_the_reference(name: str) -> None:
    module = import_module(f"{OPERATORS[name].package}.torch")
    for case in CASES[name]:
        assert accuracy.check(case, module) is None


@pytest.mark.parametrize(("operator", "backend"), TRITON, ids=[operator.name for operator, _ in TRITON])
def test_triton_is_invariant_accurate_and_equal_to_torch(operator: Operator, backend: Backend) -> None:
    triton, plain = (import_module(f"{operator.package}.{name}") for name in ("triton", "torch"))
    fitting = first_of_each_dtype([case for case in CASES[operator.name] if case.dtype in backend.dtypes])
    tried = fitting[: 1 if isinstance(fitting[0], SequenceCase) else 2]  # many launches to a sequence
    assert invariance.check(tried[-1], triton, effort="brief") is None
    for case in tried:
        assert accuracy.check(case, triton) is None
        assert parity.compare(case, triton, case, plain).worst.share <= 1.0


def test_triton_is_part_of_this() -> None:
    """Where no interpreter runs, the test above would pass by testing nothing."""
    assert len(TRITON) >= 9 or torch.cuda.is_available()
