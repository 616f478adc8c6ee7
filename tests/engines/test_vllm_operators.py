"""Claims: vLLM's own kernels, run for real on a CPU, are found capable by running; they are admitted bit for bit where
they give the contract's bits on the very inputs and refused, with the first difference, where they do not."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

import pytest
import torch

from rlk_ledger_kernels.bits import same_bits
from rlk_ledger_kernels.capabilities import capability
from rlk_ledger_kernels.descriptors import Backend, Operator
from rlk_ledger_kernels.errors import BackendError, OperandError
from rlk_ledger_kernels.native import Verdict, Verdicts, admit_native
from rlk_ledger_kernels.ops.linear.contract import LinearContract
from rlk_ledger_kernels.ops.rms_norm.contract import RmsNormContract
from rlk_ledger_kernels.ops.rope.contract import RopeContract
from rlk_ledger_kernels.ops.rope.table import RopeTable, rope_table
from rlk_ledger_kernels.ops.swiglu.contract import SwigluContract
from rlk_ledger_kernels.suite import accuracy
from rlk_ledger_kernels.suite.catalogue import cases, operators

pytestmark = pytest.mark.engines

ON_CPU = ("rms_norm", "rope", "swiglu")


def backend(name: str, backend_name: str = "vllm") -> tuple[Operator, Backend, ModuleType]:
    operator = operators()[name]
    declared = next(one for one in operator.backends if one.name == backend_name)
    return operator, declared, import_module(f"{operator.package}.{backend_name}")


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


@pytest.mark.parametrize("name", ON_CPU)
def test_a_kernel_of_vllm_runs_here_and_is_found_by_running_it(name: str) -> None:
    operator, declared, _ = backend(name)
    told = capability(operator, declared, "cpu")
    assert told.runs, told.reason
    assert told.versions["vllm"] != "absent"


@pytest.mark.parametrize("name", ON_CPU)
def test_every_case_it_takes_lies_within_its_tolerance(name: str) -> None:
    operator, _, module = backend(name)
    taken = []
    for case in cases(operator):
        try:
            excess = accuracy.check(case, module)
        except ValueError:  # a contract whose output is not the operands' dtype, say
            continue
        assert excess is None, str(excess)
        taken.append(case.name)
    assert taken or name == "rms_norm"  # no small case of rms_norm has rows that its CPU kernel takes


def test_kernels_for_a_gpu_are_refused_here() -> None:
    _, declared, module = backend("linear")
    assert not capability(operators()["linear"], declared, "cpu").runs
    with pytest.raises(BackendError, match="kernels for cuda only"):
        module.pack_linear(draw(4, 4), LinearContract(output="bfloat16"))


def judged(name: str, inputs: list[torch.Tensor], contract: object, verdicts: Verdicts | None = None) -> Verdict:
    _, declared, native = backend(name)
    _, _, ours = backend(name, "torch")

    def call(module: ModuleType, operands: tuple[torch.Tensor, ...]) -> torch.Tensor:
        result: torch.Tensor
        if name == "rope":
            result = module.rope(operands[0], RopeTable(operands[1], operands[2]), contract)
        else:
            result = getattr(module, name)(*operands, contract)
        return result

    return admit_native(
        declared,
        name,
        inputs,
        lambda *operands: call(native, operands),
        lambda *operands: call(ours, operands),
        configuration=repr(contract),
        verdicts=verdicts,
    )


def test_swiglu_is_admitted_where_the_contract_rounds_as_vllm_does() -> None:
    inputs = [draw(33, 128), draw(33, 128, seed=1)]
    rounds_once = SwigluContract(output="bfloat16", materialise="product")
    assert judged("swiglu", inputs, rounds_once).admitted
    refused = judged("swiglu", inputs, SwigluContract(output="bfloat16", materialise="activation"))
    assert (refused.admitted, "differs from the deterministic backend at" in refused.reason) == (False, True)


@pytest.mark.parametrize("style", ["half", "interleaved"])
def test_rope_is_admitted_in_float32_arithmetic_and_refused_in_bfloat16(style: str) -> None:
    frequencies_F = 1.0 / 10000 ** (torch.arange(0, 64, 2) / 64)
    for arithmetic, admitted in (("float32", True), ("bfloat16", False)):
        contract = RopeContract(table="bfloat16", arithmetic=arithmetic, style=style, output="bfloat16")
        rows = rope_table(frequencies_F, 40, contract).at(torch.arange(3, 36))
        verdict = judged("rope", [draw(33, 4, 64), rows.cos_PD, rows.sin_PD], contract)
        assert verdict.admitted == admitted, verdict.reason


def test_rms_norm_is_refused_because_vllm_sums_in_another_order() -> None:
    contract = RmsNormContract(output="bfloat16", rounding_order="kernel")
    verdict = judged("rms_norm", [draw(512, 1536), draw(1536, seed=1)], contract)
    assert (verdict.admitted, "differs from the deterministic backend at" in verdict.reason) == (False, True)


def test_a_verdict_holds_for_its_contents_alone() -> None:
    contract, verdicts = SwigluContract(output="bfloat16", materialise="product"), Verdicts()
    first = judged("swiglu", [draw(4, 16), draw(4, 16, seed=1)], contract, verdicts)
    again = judged("swiglu", [draw(4, 16), draw(4, 16, seed=1)], contract, verdicts)
    other = judged("swiglu", [draw(4, 16), draw(4, 16, seed=2)], contract, verdicts)
    assert (again.key == first.key, other.key == first.key, len(verdicts)) == (True, False, 2)


def test_operands_are_left_as_they_are() -> None:
    """vLLM's fused kernels work in place; the backend's functions do not."""
    _, _, norm = backend("rms_norm")
    _, _, turn = backend("rope")
    x, residual, weight = draw(8, 64), draw(8, 64, seed=1), draw(64, seed=2)
    kept = (x.clone(), residual.clone())
    normal, total = norm.add_rms_norm(x, residual, weight, RmsNormContract(output="bfloat16"))
    assert same_bits(x, kept[0])
    assert same_bits(residual, kept[1])
    assert same_bits(total, x + residual)
    assert not same_bits(normal, x)
    heads = draw(8, 2, 64)
    before = heads.clone()
    contract = RopeContract(table="bfloat16", output="bfloat16")
    rows = rope_table(1.0 / 10000 ** (torch.arange(0, 64, 2) / 64), 8, contract)
    assert not same_bits(turn.rope(heads, rows, contract), before)
    assert same_bits(heads, before)


def test_shapes_on_which_vllm_crashes_or_complains_are_refused() -> None:
    """vLLM 0.32 on a CPU ends in a segmentation fault for 34 rotated dimensions in bfloat16."""
    _, _, turn = backend("rope")
    contract = RopeContract(table="bfloat16", output="bfloat16")
    rows = rope_table(1.0 / 10000 ** (torch.arange(0, 34, 2) / 34), 8, contract)
    _, _, norm = backend("rms_norm")
    with pytest.raises(OperandError, match="a multiple of 8, got 33"):
        norm.rms_norm(draw(8, 33), draw(33), RmsNormContract(output="bfloat16"))
    with pytest.raises(OperandError, match="crashes on 34 rotated dimensions"):
        turn.rope(draw(8, 2, 34), rows, contract)


def test_per_head_weights_and_no_rows() -> None:
    _, _, norm = backend("rms_norm")
    contract = RmsNormContract(output="bfloat16", rounding_order="kernel")
    x_NHD, weight_HD = draw(5, 3, 64), draw(3, 64, seed=1)
    whole = norm.rms_norm(x_NHD, weight_HD, contract)
    assert all(same_bits(whole[:, head], norm.rms_norm(x_NHD[:, head], weight_HD[head], contract)) for head in range(3))
    assert norm.rms_norm(x_NHD[:0], weight_HD, contract).shape == (0, 3, 64)
