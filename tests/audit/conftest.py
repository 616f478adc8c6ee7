"""The made runs, the faults, and how to audit one."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rlk_ledger.audit import AuditResult, audit
from rlk_ledger.history import History


def _load(name: str) -> ModuleType:
    """A helper module of this folder, importable by its own name."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


_RUNS = _load("made_runs")
_FAULTS: dict[str, Callable[[Any], None]] = _load("made_faults").FAULTS


@pytest.fixture(scope="session")
def made() -> ModuleType:
    """tests/audit/made_runs.py."""
    return _RUNS


@pytest.fixture(scope="session")
def faults() -> dict[str, Callable[[Any], None]]:
    """Every fault by name."""
    return _FAULTS


@pytest.fixture(scope="session")
def audited() -> Callable[..., AuditResult]:
    """Audits the made run of a seed, with a fault or without."""

    def run(seed: int, fault: str | None = None) -> AuditResult:
        return audit(History.from_events(_RUNS.events(seed, None if fault is None else _FAULTS[fault])))

    return run


def pytest_generate_tests(metafunc: Any) -> None:
    """Parametrises `fault` over every fault."""
    if "fault" in metafunc.fixturenames:
        metafunc.parametrize("fault", sorted(_FAULTS))
