"""The proof that the suites can fail: every wrong operator must be caught, and its right twin must not be accused."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import torch

from rlk_ledger_kernels.probe import using_threads
from rlk_ledger_kernels.suite import accuracy, invariance, parity
from rlk_ledger_kernels.suite.case import Case, RowCase, Wrong

_NOTHING = ModuleType("no_backend")


@dataclass(frozen=True)
class Proof:
    """What a suite made of a wrong operator. caught: what it said, None when it saw nothing. accused: of the twin."""

    wrong: Wrong
    caught: str | None
    accused: str | None


def prove(wrong: Wrong, device: str = "cpu", module: ModuleType = _NOTHING) -> Proof:
    """Run a wrong operator and its twin through the suite it belongs to.

    module: the backend that a wrong operator made of a real one is built on.
    """
    right = wrong.right
    with using_threads(1 if device == "cpu" else torch.get_num_threads()):
        caught = _says(wrong, wrong.case, device, module)
        accused = None if right is None else _says(wrong, right, device, module)
    return Proof(wrong, caught, accused)


def _says(wrong: Wrong, case: Case, device: str, module: ModuleType) -> str | None:
    if wrong.suite == "invariance":
        backward = isinstance(case, RowCase) and case.gradient is not None
        directions: tuple[invariance.Pass, ...] = ("forward", "backward") if backward else ("forward",)
        found = [invariance.check(case, module, device, direction) for direction in directions]
        return next((str(one) for one in found if one is not None), None)
    if wrong.suite == "accuracy":
        excess = accuracy.check(case, module, device)
        return None if excess is None else str(excess)
    twin = wrong.right or case
    for one in (case, twin):
        mismatch = invariance.check(one, module, device, effort="brief")
        if mismatch is not None:
            return f"refused: {mismatch}"
    worst = parity.compare(case, module, twin, module, device).worst
    return str(worst) if worst.share > 1.0 else None
