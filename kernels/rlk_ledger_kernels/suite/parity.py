"""The parity suite: two backends of one operator against each other, once each has passed invariance alone.

A backend whose bits depend on the batch has no value to compare: parity with it would be luck, so it is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import torch

from rlk_ledger_kernels.bits import same_bits
from rlk_ledger_kernels.errors import InvarianceError
from rlk_ledger_kernels.suite import invariance
from rlk_ledger_kernels.suite.accuracy import Excess, outputs, worst
from rlk_ledger_kernels.suite.case import Case, moved


@dataclass(frozen=True)
class Parity:
    """How two backends compare. worst: the farthest element, in tolerances. bitwise: whether every bit is equal."""

    worst: Excess
    bitwise: bool


def check(case: Case, module_a: ModuleType, module_b: ModuleType, device: str = "cpu") -> Excess | None:
    """The worst element where backend `a` leaves the tolerance around backend `b`, or None.

    Raises InvarianceError naming the backend that does not pass invariance on this case.
    """
    for module in (module_a, module_b):
        mismatch = invariance.check(case, module, device)
        if mismatch is not None:
            raise InvarianceError(f"no parity with {module.__name__}: it fails invariance alone: {mismatch}")
    found = compare(case, module_a, case, module_b, device)
    return found.worst if found.worst.share > 1.0 else None


def compare(case_a: Case, module_a: ModuleType, case_b: Case, module_b: ModuleType, device: str = "cpu") -> Parity:
    """Run two cases on the same operands; the caller vouches for the invariance of both sides."""
    with torch.no_grad():
        a, b = outputs(moved(case_a, device), module_a), outputs(moved(case_b, device), module_b)
        return Parity(worst(case_a, a, b.to(torch.float32)), same_bits(a, b))
