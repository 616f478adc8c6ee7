"""Claim: within a class of device the bits of an operator are those recorded; a class nobody recorded never passes."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch

from rlk_ledger_kernels.availability import unavailable
from rlk_ledger_kernels.probe import using_threads
from rlk_ledger_kernels.registry import operators
from rlk_ledger_kernels.suite import catalogue, golden
from rlk_ledger_kernels.suite.backend_check import first_of_each_dtype
from rlk_ledger_kernels.suite.case import RowCase, Rows

OPERATORS = dict(operators())
QUICK = ("embedding", "linear", "selected_logprob", "linear_logprob", "masked_mean")
"""Those whose gradients do not take seconds in Triton's interpreter."""
NOTHING = ModuleType("nothing")


def same_as_recorded(name: str, backend: str, thinned: bool) -> None:
    operator = OPERATORS[name]
    declared = next(one for one in operator.backends if one.name == backend)
    lacking = unavailable(declared, "cpu")
    if lacking is not None:
        pytest.skip(lacking.reason)
    kind = golden.device_class("cpu", declared.needs)
    before = (golden.recorded(kind) or {}).get(name, {}).get(backend)
    if before is None:
        pytest.skip(f"nobody recorded {name} ({backend}) for {kind}: tools/golden/kernel_bits.py does")
    module = import_module(f"{operator.package}.{backend}")
    every = [case for case in catalogue.cases(operator) if case.dtype in declared.dtypes]
    with using_threads(1):
        got = {
            case.name: golden.fingerprint(case, module) for case in (first_of_each_dtype(every) if thinned else every)
        }
    assert got == before


@pytest.mark.parametrize("name", OPERATORS)
def test_the_bits_of_torch_are_the_recorded_ones(name: str) -> None:
    same_as_recorded(name, "torch", thinned=False)


@pytest.mark.parametrize("name", QUICK)
def test_the_bits_of_triton_in_its_interpreter_are_the_recorded_ones(name: str) -> None:
    same_as_recorded(name, "triton", thinned=True)


def case(value: float) -> RowCase:
    x = torch.ones((130, 2))
    return RowCase("linear", "made up", "float32", (x,), lambda _, rows: rows[0] * value, lambda rows: rows[0])


def test_a_digest_covers_every_bit_the_shape_the_dtype_and_the_gradient() -> None:
    def narrow(_: ModuleType, rows: Rows) -> torch.Tensor:
        return rows[0].to(torch.bfloat16)

    def flat(_: ModuleType, rows: Rows) -> torch.Tensor:
        return rows[0].reshape(-1, 1)

    one = case(1.0)
    different = [one, case(1.0 + 2.0**-23), case(-1.0), replace(one, run=narrow), replace(one, run=flat)]
    different.append(replace(one, gradient=lambda _, rows: rows[0]))
    assert len({golden.fingerprint(each, NOTHING) for each in different}) == len(different)
    assert golden.fingerprint(one, NOTHING) == golden.fingerprint(case(1.0), NOTHING)


def test_a_class_names_what_bits_depend_on() -> None:
    plain, triton = golden.device_class("cpu"), golden.device_class("cpu", ("triton",))
    assert torch.backends.cpu.get_cpu_capability() in plain
    assert f"torch-{torch.__version__}" in plain
    assert plain.startswith("cpu-")
    assert (triton.startswith("interpreter-"), "-triton-" in triton, "-numpy-" in triton) == (True, True, True)
    assert golden.device_class("cpu", ("vllm",)) != plain


def test_a_class_nobody_recorded_is_none_and_saving_keeps_other_backends(tmp_path: Path) -> None:
    assert golden.recorded("cpu-of-tomorrow", tmp_path) is None
    golden.save("here", {"linear": {"torch": {"a": "sha256:1"}, "triton": {"a": "sha256:2"}}}, tmp_path)
    golden.save("here", {"linear": {"torch": {"b": "sha256:3"}}, "rope": {"torch": {"c": "sha256:4"}}}, tmp_path)
    assert golden.recorded("here", tmp_path) == {
        "linear": {"torch": {"b": "sha256:3"}, "triton": {"a": "sha256:2"}},
        "rope": {"torch": {"c": "sha256:4"}},
    }
