"""The made runs, and how to audit one."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rlk_ledger.audit import AuditResult, audit
from rlk_ledger.history import History

_SPEC = importlib.util.spec_from_file_location("made_runs", Path(__file__).with_name("made_runs.py"))
assert _SPEC is not None
assert _SPEC.loader is not None
_MADE = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(_MADE)


@pytest.fixture(scope="session")
def made() -> ModuleType:
    """tests/audit/made_runs.py."""
    return _MADE


@pytest.fixture(scope="session")
def audited() -> Callable[..., AuditResult]:
    """Audits the made run of a seed, with a fault or without."""

    def run(seed: int, fault: str | None = None) -> AuditResult:
        return audit(History.from_events(_MADE.events(seed, fault)))

    return run


def pytest_generate_tests(metafunc: Any) -> None:
    """Parametrises `fault` over every fault the made runs know."""
    if "fault" in metafunc.fixturenames:
        metafunc.parametrize("fault", sorted(_MADE.FAULTS))
