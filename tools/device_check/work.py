"""The work of a device check, cut into items: a kernel that fails, hangs or breaks its process costs its own item."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType

import msgspec
import torch

from device_check import card
from device_check.clock import Clock
from device_check.compiled import Compiling
from device_check.report import Row
from rlk_ledger_kernels.capabilities import capability
from rlk_ledger_kernels.descriptors import Backend, Operator
from rlk_ledger_kernels.errors import KernelError
from rlk_ledger_kernels.suite import accuracy, invariance
from rlk_ledger_kernels.suite.case import Case, RowCase, moved
from rlk_ledger_kernels.suite.catalogue import cases, operators

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "bench"))

NATIVE = ("transformer_engine", "flashinfer", "vllm")


compiling: Compiling | None = None
"""Set by a worker that compiles for a card which is not here; owned by its process."""


class Item(msgspec.Struct, frozen=True):
    """One piece of work. size: of the cases. bandwidth: measured bytes per second, once it is known, for P12."""

    section: str
    operator: str = ""
    backend: str = ""
    size: str = "large"
    bandwidth: float = 0.0


class Section(msgspec.Struct, frozen=True):
    """One section: its share of the time, and the items of it that these operators make."""

    name: str
    share: float
    backends: tuple[str, ...]


SECTIONS = (
    Section("rates", 0.06, ()),
    Section("build", 0.24, ("triton",)),
    Section("accuracy", 0.14, ("triton",)),
    Section("P12", 0.10, ()),
    Section("P13", 0.12, ()),
    Section("invariance", 0.18, ("triton",)),
    Section("torch on the device", 0.10, ("torch",)),
    Section("native", 0.06, NATIVE),
)
"""In the order they run; a section may use what those before it left over."""


def items(section: Section, names: tuple[str, ...], device: str, size: str) -> list[Item]:
    """The items of a section. names: operators to keep; none keeps all."""
    if not section.backends:
        return [Item(section.name, size=size)]
    made = []
    for operator in operators().values():
        for backend in operator.backends:
            wanted = backend.name in section.backends and (not names or operator.name in names)
            if wanted and (device in backend.devices or section.name == "native"):
                made.append(Item(section.name, operator.name, backend.name, size))
    return made


def run(item: Item, device: str) -> Iterator[Row]:
    """Do one item. Errors of one case become its row; what breaks the device is left to the caller."""
    clock = _clock(device)
    if item.section == "rates":
        yield from card.rates(clock)
    elif item.section == "P12":
        yield from import_module("p12_selected_logprob").rows(clock, item.bandwidth, item.size)
    elif item.section == "P13":
        yield from import_module("p13_gemm_attention").rows(clock, item.size)
    elif item.section == "native":
        yield _native(item, device)
    else:
        yield from _checked(item, device)


def _checked(item: Item, device: str) -> Iterator[Row]:
    """Build, accuracy and invariance of one backend of one operator, case by case."""
    try:
        module = import_module(f"{operators()[item.operator].package}.{item.backend}")
    except Exception as error:  # a module whose kernels cannot even be defined here
        yield _row(item, "import", "failed", _told(error), 0.0)
        return
    for case in _cases(item.operator, item.size):
        for what, check in _checks(item, case):
            started = time.perf_counter()
            name = f"{case.name}{what}"
            try:
                found = check(case, module, device)
                synchronize(device)
            except KernelError as error:
                yield _row(item, name, "not measured", f"refused: {_told(error)}", started)
            except Exception as error:  # a kernel that does not build or run: a row, and the rest goes on
                yield _row(item, name, "failed", _told(error), started)
                synchronize(device)
            else:
                objection, built = compiling.taken() if compiling is not None else (None, "")
                found = found or objection
                yield _row(item, name, "passed" if found is None else "failed", found or built, started)


Check = Callable[[Case, ModuleType, str], str | None]


def _checks(item: Item, case: Case) -> list[tuple[str, Check]]:
    """(words added to the name of the case, what is checked) of an item and a case."""
    section = item.section
    backward = isinstance(case, RowCase) and case.gradient is not None
    if section == "build":
        return [("", _built), (", backward", _built_backward)][: 1 + backward]
    if section == "accuracy":
        return [("", _accurate)]
    if section == "invariance":
        return [("", _invariant if item.size == "large" else _invariant_brief), (", backward", _invariant_backward)][
            : 1 + backward
        ]
    return [(", accuracy", _accurate), (", invariance", _invariant_brief)]


def _built(case: Case, module: ModuleType, device: str) -> str | None:
    accuracy.outputs(moved(case, device), module)
    return None


def _built_backward(case: Case, module: ModuleType, device: str) -> str | None:
    if isinstance(case, RowCase) and case.gradient is not None:
        case.gradient(module, tuple(operand.to(device) for operand in case.rows))
    return None


def _accurate(case: Case, module: ModuleType, device: str) -> str | None:
    excess = accuracy.check(case, module, device)
    return None if excess is None else str(excess)


def _invariant(case: Case, module: ModuleType, device: str) -> str | None:
    mismatch = invariance.check(case, module, device)
    return None if mismatch is None else str(mismatch)


def _invariant_brief(case: Case, module: ModuleType, device: str) -> str | None:
    mismatch = invariance.check(case, module, device, effort="brief")
    return None if mismatch is None else str(mismatch)


def _invariant_backward(case: Case, module: ModuleType, device: str) -> str | None:
    mismatch = invariance.check(case, module, device, direction="backward", effort="brief")
    return None if mismatch is None else str(mismatch)


def _native(item: Item, device: str) -> Row:
    """Whether a native backend runs here, and what would enable it."""
    operator: Operator = operators()[item.operator]
    backend: Backend = next(one for one in operator.backends if one.name == item.backend)
    started = time.perf_counter()
    found = capability(operator, backend, device)
    state = "passed" if found.runs else "failed" if found.ran else "not measured"
    enable = f"; {found.enable}" if found.enable else ""
    return _row(item, found.ran or "not run", state, f"{found.reason}{enable}", started)


@cache
def _cases(operator: str, size: str) -> list[Case]:
    return cases(operators()[operator], size)


@cache
def _clock(device: str) -> Clock:
    return Clock(device) if device == "cuda" else Clock(device, repetitions=2, budget_s=0.0)


def _row(item: Item, name: str, state: str, detail: str, started: float) -> Row:
    seconds = time.perf_counter() - started if started else 0.0
    values = {"section": item.section, "name": f"{item.operator} {item.backend}: {name}", "state": state}
    return msgspec.convert(values | {"detail": detail, "seconds": round(seconds, 3)}, Row)


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _told(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' | '.join(lines[:3])[:400]}" if lines else type(error).__name__
