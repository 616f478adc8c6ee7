"""What a training job sets for the whole process changes no bit: the default dtype, autocast."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

import pytest
import torch

import rlk_ledger_kernels
from rlk_ledger_kernels.bits import same_bits
from rlk_ledger_kernels.ops.attention.cache import KVCache
from rlk_ledger_kernels.ops.attention.contract import AttentionContract
from rlk_ledger_kernels.ops.attention.partials import contiguous, unpacked
from rlk_ledger_kernels.ops.attention.plan import Chunk, plan_attention
from rlk_ledger_kernels.ops.attention.torch import attention, attention_partials, merge_partials
from rlk_ledger_kernels.schedule import Schedule
from rlk_ledger_kernels.suite import accuracy
from rlk_ledger_kernels.suite.backend_check import first_of_each_dtype
from rlk_ledger_kernels.suite.catalogue import cases, operators

FACTORIES = {"zeros", "ones", "empty", "full", "rand", "randn"}
PACKAGE = Path(rlk_ledger_kernels.__file__).parent


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def test_no_tensor_is_made_in_whatever_dtype_the_process_defaults_to() -> None:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or any(word.arg == "dtype" for word in node.keywords):
                continue
            called = ast.unparse(node.func)
            if called.startswith("torch.") and called.removeprefix("torch.") in FACTORIES:
                found.append(f"{path.relative_to(PACKAGE)}:{node.lineno} {called}")
    assert not found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=["bf16", "float64"])
@pytest.mark.parametrize("name", sorted(operators()))
def test_bits_do_not_follow_the_default_dtype(name: str, dtype: torch.dtype) -> None:
    operator = operators()[name]
    module = import_module(f"{operator.package}.torch")
    case = first_of_each_dtype(cases(operator))[0]
    with torch.no_grad():
        expected, gradient = accuracy.outputs(case, module), accuracy.gradients(case, module)
        with default_dtype(dtype):
            got, again = accuracy.outputs(case, module), accuracy.gradients(case, module)
    assert same_bits(got, expected)
    assert gradient is None or (again is not None and same_bits(again, gradient))


def test_a_narrow_cache_and_sent_partials_do_not_follow_the_default_dtype() -> None:
    schedule = Schedule(kv_block=16)
    contract = AttentionContract(0.25, schedule=schedule)
    plan = plan_attention([Chunk(0, 40, (0, 1, 2))], schedule)
    q, k, v = (torch.randn(40, 2, 16, generator=torch.Generator().manual_seed(i)) for i in range(3))
    cache = KVCache(3, 2, 16, 16, "float16", wide=False)
    cache.write(k, v, plan)
    expected, _ = attention(q, cache, plan, contract)
    with default_dtype(torch.bfloat16):
        got, _ = attention(q, cache, plan, contract)
        owners = [[blocks] for blocks in contiguous(3, 2)]
        made = [attention_partials(q, cache, plan, contract, owned) for owned in owners]
        sent = [unpacked(one.packed(99), plan, owned, 40) for one, owned in zip(made, owners)]
        merged, _ = merge_partials(sent, plan, contract)
    assert same_bits(got, expected)
    assert same_bits(merged, expected)


@pytest.mark.parametrize("name", ["linear", "linear_logprob", "grouped_experts", "attention"])
def test_a_reference_multiplies_in_float32_under_autocast(name: str) -> None:
    operator = operators()[name]
    module = import_module(f"{operator.package}.reference")
    case = next(one for one in cases(operator) if one.dtype == "float32")
    expected, gradient = accuracy.outputs(case, module), accuracy.gradients(case, module)
    with torch.autocast("cpu", torch.bfloat16):
        got, again = accuracy.outputs(case, module), accuracy.gradients(case, module)
    assert same_bits(got, expected)
    assert gradient is not None
    assert again is not None
    assert same_bits(again, gradient)
