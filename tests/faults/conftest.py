"""The writers of the ledger's tests, here too."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest


def _load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location("ledger_helpers", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def helpers() -> Any:
    """`Writer` and the rest of tests/ledger/conftest.py."""
    return _load(Path(__file__).parents[1] / "ledger" / "conftest.py")
