"""Claims about every launch of a Triton kernel: it runs where its operands lie, and no binary follows from a batch."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from pretend_device import DEVICE, PretendDevice

import rlk_ledger_kernels.ops
from rlk_ledger_kernels.bits import same_bits
from rlk_ledger_kernels.errors import OperandError
from rlk_ledger_kernels.ops.swiglu import triton as swiglu
from rlk_ledger_kernels.ops.swiglu.contract import SwigluContract
from rlk_ledger_kernels.triton_language import dense, launcher

SOURCES = sorted(Path(rlk_ledger_kernels.ops.__path__[0]).glob("*/triton*.py"))
COUNTS = {"rows", "tokens", "lines", "nodes", "heads_total", "row_blocks", "M", "TILES", "spans"}
"""Arguments that count what a batch holds."""


def named(path: Path) -> str:
    return f"{path.parent.name}/{path.name}"


@pytest.mark.parametrize("path", SOURCES, ids=named)
def test_every_launch_of_the_package_is_a_guarded_one(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
            assert "kernel" not in ast.unparse(node.func.value), f"line {node.lineno}: launch with `launcher`"


@pytest.mark.parametrize("path", SOURCES, ids=named)
def test_no_kernel_is_built_anew_for_a_number_of_rows(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef) and node.name.endswith("kernel"):
            (made,) = (ast.unparse(one) for one in node.decorator_list)
            counts = {one.arg for one in node.args.args if one.annotation is None} & COUNTS
            assert all(repr(name) in made for name in counts), f"{node.name} specialises on one of {counts}"


def test_a_kernel_runs_on_the_device_of_its_operands(monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[object] = []

    @contextmanager
    def guard(device: object) -> Iterator[None]:
        current.append(device)
        yield
        current.pop()

    seen: list[object] = []

    class Kernel:
        fn = SimpleNamespace(__module__="package.ops.copy.triton")

        def __getitem__(self, grid: tuple[int, ...]) -> object:
            return lambda *arguments, **options: seen.append((grid, list(current), options))

    with PretendDevice() as device:
        x = device.put(torch.ones(4))
        monkeypatch.setattr(torch.cuda, "device", guard)
        launcher(Kernel(), (2, 3))(x, 4, num_warps=4)
        launcher(Kernel(), (2, 0))(x, 4)
    assert seen == [((2, 3), [DEVICE], {"num_warps": 4})]


def test_operands_on_two_devices_are_refused_by_the_operators_name() -> None:
    gate, up = torch.ones((3, 5)), torch.ones((3, 5), device="meta")
    with pytest.raises(OperandError, match="swiglu: operands lie on cpu and meta; move them to one device"):
        swiglu.swiglu(gate, up, SwigluContract())


def test_dense_moves_only_what_lies_askew() -> None:
    base = torch.arange(40, dtype=torch.float32)
    even = base[4:36].view(4, 8)
    assert dense(even) is even
    for askew in (base[1:33].view(4, 8), base[:32].view(8, 4).T):
        moved = dense(askew)
        assert moved.is_contiguous()
        assert moved.data_ptr() % 16 == 0
        assert same_bits(moved, askew)
