"""Where the suites find cases: `cases.py` in the folder of an operator the registry knows."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

from rlk_ledger_kernels import registry
from rlk_ledger_kernels.descriptors import Operator
from rlk_ledger_kernels.suite.case import Case, Wrong


def operators() -> dict[str, Operator]:
    """Every operator in the order of a forward pass."""
    return dict(registry.operators())


def cases(operator: Operator, size: str = "small") -> list[Case]:
    """The cases of an operator; none where its folder has no `cases.py`."""
    name = f"{operator.package}.cases"
    if find_spec(name) is None:
        return []
    made: list[Case] = import_module(name).cases(size)
    return made


def own_mistakes(operator: Operator) -> list[Wrong]:
    """The wrong operators an operator's folder ships."""
    name = f"{operator.package}.cases"
    if find_spec(name) is None:
        return []
    made: list[Wrong] = getattr(import_module(name), "wrong", list)()
    return made
