"""Claims: native backends hand their operands over as the libraries document it and refuse what those cannot keep;
nothing imports a native library before a kernel of it is asked for; an absent one says what would enable it."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import native_standins
import pytest
import torch
from pretend_device import PretendDevice

from rlk_ledger_kernels.capabilities import capabilities, capability
from rlk_ledger_kernels.descriptors import Backend, Operator
from rlk_ledger_kernels.errors import BackendError, ContractError, KernelError, OperandError
from rlk_ledger_kernels.native_backends import ENABLE
from rlk_ledger_kernels.ops.attention.cache import KVCache
from rlk_ledger_kernels.ops.attention.contract import AttentionContract
from rlk_ledger_kernels.ops.attention.plan import Chunk, plan_attention
from rlk_ledger_kernels.ops.linear.contract import LinearContract
from rlk_ledger_kernels.ops.rms_norm.contract import RmsNormContract
from rlk_ledger_kernels.ops.swiglu.contract import SwigluContract
from rlk_ledger_kernels.suite import accuracy
from rlk_ledger_kernels.suite.case import Case, SequenceCase
from rlk_ledger_kernels.suite.catalogue import cases, operators

NATIVE = [
    (operator.name, backend.name) for operator in operators().values() for backend in operator.backends
    if backend.name in ENABLE
]  # fmt: skip
ON_CPU = [("rms_norm", "vllm"), ("rope", "vllm"), ("swiglu", "vllm")]
"""These run for real in tests/engines."""
LIBRARIES = ("vllm", "flashinfer", "transformer_engine")


def found(operator: str, backend: str) -> tuple[Operator, Backend]:
    declared = operators()[operator]
    return declared, next(one for one in declared.backends if one.name == backend)


@pytest.fixture
def standins(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, module in native_standins.modules().items():
        monkeypatch.setitem(sys.modules, name, module)


def on_device(case: Case) -> Case:
    if isinstance(case, SequenceCase):
        return replace(case, sequences=[PretendDevice.put(one) for one in case.sequences])
    return replace(case, rows=PretendDevice.put(case.rows))


@pytest.mark.usefixtures("standins")
@pytest.mark.parametrize(("operator", "backend"), [pair for pair in NATIVE if pair not in ON_CPU])
def test_operands_are_handed_over_as_documented(operator: str, backend: str) -> None:
    declared, native = found(operator, backend)
    module = import_module(f"{declared.package}.{backend}")
    ran = []
    for case in cases(declared):
        if case.dtype not in native.dtypes:
            continue
        with PretendDevice(), torch.no_grad():
            there = on_device(case)
            try:
                got = accuracy.outputs(there, module)
            except KernelError:  # a contract this library cannot keep
                continue
            got, expected = PretendDevice.back(got), PretendDevice.back(accuracy.expected(there))
        assert accuracy.worst(case, got, expected).share <= 1.0, case.name
        ran.append(case.name)
    assert ran


@pytest.mark.parametrize(("operator", "backend"), NATIVE)
def test_an_absent_library_says_what_would_enable_it(operator: str, backend: str) -> None:
    declared, native = found(operator, backend)
    assert (native.bucket, native.lifecycle, native.deterministic) == ("opportunistic", "experimental", False)
    told = capability(declared, native, native.devices[0])
    assert not told.runs
    assert told.reason
    assert told.enable == ENABLE[backend]
    assert set(told.versions) == set(native.needs)


@pytest.mark.parametrize("backend", ["flashinfer", "transformer_engine", "vllm"])
def test_calling_an_absent_library_is_one_sentence(backend: str) -> None:
    module = import_module(f"rlk_ledger_kernels.ops.rms_norm.{backend}")
    x = torch.ones((2, 8), dtype=torch.bfloat16)
    with pytest.raises(BackendError, match=r"cannot be imported here.*pip install|kernels for cuda only"):
        module.rms_norm(x, x[0], RmsNormContract(output="bfloat16"))


@pytest.mark.usefixtures("standins")
def test_what_a_library_cannot_keep_is_refused() -> None:
    norm = import_module("rlk_ledger_kernels.ops.rms_norm.transformer_engine")
    gate = import_module("rlk_ledger_kernels.ops.swiglu.flashinfer")
    product = import_module("rlk_ledger_kernels.ops.linear.vllm")
    bfloat16 = RmsNormContract(output="bfloat16")
    with PretendDevice() as device:
        x = device.put(torch.ones((2, 4), dtype=torch.bfloat16))
        with pytest.raises(ContractError, match=r"the kernel writes bfloat16, the contract's output is float32"):
            norm.rms_norm(x, x[0], RmsNormContract())
        with pytest.raises(OperandError, match="one dtype, got bfloat16, float32"):
            norm.rms_norm(x, x[0].to(torch.float32), bfloat16)
        with pytest.raises(ContractError, match="normalises the rounded sum"):
            norm.add_rms_norm(x, x, x[0], replace(bfloat16, normalises="unrounded"))
        with pytest.raises(OperandError, match="make them equal"):
            gate.swiglu(x, x[:1], SwigluContract(output="bfloat16"))
        with pytest.raises(ContractError, match="vllm has no kernel for pack_row_shard"):
            product.pack_row_shard(x, LinearContract(), 2, 0)


@pytest.mark.usefixtures("standins")
def test_flashinfer_attention_takes_16_bit_caches_and_any_paging() -> None:
    backend = import_module("rlk_ledger_kernels.ops.attention.flashinfer")
    contract = AttentionContract(scale=0.25, output="bfloat16")
    block = contract.schedule.kv_block
    with PretendDevice() as device:
        plan = plan_attention([Chunk(0, 3, [0])], contract.schedule).to("cuda")
        q = device.put(torch.ones((3, 2, 16), dtype=torch.bfloat16))
        with pytest.raises(ContractError, match="it needs bfloat16 or float16 in both"):
            backend.attention(q, KVCache(1, 1, block, 16, device="cuda"), plan, contract)


def test_nothing_imports_a_native_library_before_a_kernel_is_asked_for(tmp_path: Path) -> None:
    """The libraries are there, as packages that tell when they are imported."""
    for name in LIBRARIES:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"print('imported {name}')\nraise ImportError('of no use')\n")
    everything = """
import torch
from rlk_ledger_kernels import native, native_operands, capabilities, registry
from rlk_ledger_kernels.suite.catalogue import operators
from contextlib import suppress
from importlib import import_module
from rlk_ledger_kernels.errors import DecisionError
for operator in operators().values():
    for backend in operator.backends:
        if backend.name != "triton":
            import_module(f"{operator.package}.{backend.name}")
    with suppress(DecisionError):
        registry.resolve(operator.name)
list(capabilities.capabilities("cpu", ("vllm", "flashinfer", "transformer_engine")))
print("nothing else")
from rlk_ledger_kernels.ops.rms_norm import vllm
from rlk_ledger_kernels.ops.rms_norm.contract import RmsNormContract
try:
    vllm.rms_norm(torch.ones(2, 8), torch.ones(8), RmsNormContract())
except Exception as error:
    print(type(error).__name__)
"""
    assert said(everything, tmp_path) == ["nothing else", "imported vllm", "BackendError"]


def said(code: str, folder: Path) -> list[str]:
    start = f"import sys; sys.path.insert(0, {str(folder)!r})\n"
    done = subprocess.run([sys.executable, "-c", start + code], capture_output=True, text=True, check=True, cwd="/")
    return done.stdout.split("\n")[:-1]


def test_a_capability_comes_of_running_a_case() -> None:
    """torch runs; a backend that computes something else is told apart; so is one that cannot run on the device."""
    swiglu = operators()["swiglu"]
    torch_backend = next(one for one in swiglu.backends if one.name == "torch")
    told = capability(swiglu, torch_backend, "cpu")
    assert (told.runs, told.enable, told.ran != "") == (True, "", True)
    elsewhere = capability(swiglu, torch_backend, "cuda")
    assert (elsewhere.runs, "no cuda device" in elsewhere.reason) == (False, True)
    assert {one.backend for one in capabilities("cpu", ("reference",))} == {"reference"}


def test_a_wrong_kernel_does_not_count_as_capable(monkeypatch: pytest.MonkeyPatch) -> None:
    swiglu = operators()["swiglu"]
    torch_backend = next(one for one in swiglu.backends if one.name == "torch")
    monkeypatch.setattr(import_module("rlk_ledger_kernels.ops.swiglu.torch"), "swiglu", lambda gate, up, contract: gate)
    told = capability(swiglu, torch_backend, "cpu")
    assert (told.runs, "tolerances away" in told.reason) == (False, True)
    monkeypatch.setattr(
        import_module("rlk_ledger_kernels.ops.swiglu.torch"), "swiglu", lambda gate, up, contract: 1 / 0
    )
    told = capability(swiglu, torch_backend, "cpu")
    assert (told.runs, told.reason) == (False, "ZeroDivisionError: division by zero")
