"""Deliberately wrong operators, of kinds people really write, each with its right twin; every suite must catch its own.

They are written in plain tensor operations, one rounding at a time, and need no backend: what catches them on a device
is the suite alone, and their twins, which the suite must not accuse, show that it is the mistake it catches.
"""

from __future__ import annotations

from rlk_ledger_kernels.suite.case import Wrong
from rlk_ledger_kernels.suite.mistakes.numbers import number_mistakes
from rlk_ledger_kernels.suite.mistakes.rows import row_mistakes
from rlk_ledger_kernels.suite.mistakes.sequences import sequence_mistakes


def mistakes() -> list[Wrong]:
    """Every wrong operator that comes with the suites."""
    return [*row_mistakes(), *sequence_mistakes(), *number_mistakes()]
