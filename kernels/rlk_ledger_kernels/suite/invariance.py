"""The invariance suite: an operator against itself under T1 to T7, bitwise, `+0`/`-0` and NaN bits included.

An operator that keeps its promise returns None; one that fails returns the first mismatch, in the index order of the
case, of the first transform that has one. One that writes to its operands fails before any transform. Where a case has
a gradient, the same transforms run backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import ModuleType
from typing import Literal

import torch

from rlk_ledger_kernels.bits import bits, same_bits
from rlk_ledger_kernels.errors import OperandError
from rlk_ledger_kernels.probe import using_threads
from rlk_ledger_kernels.suite.case import Case, MaskedCase, RowCase, Rows, Sequence_, SequenceCase, moved
from rlk_ledger_kernels.suite.layouts import (
    Effort,
    lengths_of,
    masked_layouts,
    prefix_layouts,
    row_layouts,
    sequence_layouts,
    taken,
    whole,
)
from rlk_ledger_kernels.suite.quiet import quiet

Pass = Literal["forward", "backward"]


@dataclass(frozen=True)
class Mismatch:
    """Where an operator first differed from itself.

    transform: T1 to T7 with its parameter. row: of the case; a token where `sequence` is given. element: of the row.
    """

    operator: str
    case: str
    transform: str
    direction: Pass
    row: int
    element: int
    expected: float
    got: float
    sequence: int | None = None

    def __str__(self) -> str:
        """One sentence."""
        place = f"row {self.row}" if self.sequence is None else f"sequence {self.sequence}, token {self.row}"
        return (
            f"{self.operator} ({self.case}, {self.direction}) changed under {self.transform}: {place}, element "
            f"{self.element} is {self.got!r} instead of {self.expected!r}"
        )


@quiet()
def check(
    case: Case,
    module: ModuleType,
    device: str = "cpu",
    direction: Pass = "forward",
    effort: Effort = "full",
    threads: int | None = None,
) -> Mismatch | None:
    """Run `case` on a backend module and on its transforms.

    threads: intra-op threads of the transformed runs; the runs they are compared with have one, so that a bit that
    depends on the thread count is a mismatch too. None leaves the count alone. Errors of the operator pass through.
    """
    case = moved(case, device)
    with torch.no_grad() if direction == "forward" else torch.enable_grad():
        if isinstance(case, SequenceCase):
            if direction == "backward":
                return _check_packed_gradients(case, module, effort, threads)
            return _check_sequences(case, module, effort, threads)
        if isinstance(case, MaskedCase):
            return None if direction == "backward" else _check_masked(case, module, effort, threads)
        return _check_rows(case, module, direction, effort, threads)


def first_mismatch(operator: Callable[[torch.Tensor], torch.Tensor], x_NK: torch.Tensor) -> Mismatch | None:
    """`check` for a function of one matrix that is no operator of the registry."""
    case = RowCase("operator", "rows", "float32", (x_NK,), lambda _, rows: operator(rows[0]), lambda rows: rows[0])
    return check(case, ModuleType("none"))


def _check_rows(
    case: RowCase, module: ModuleType, direction: Pass, effort: Effort, threads: int | None
) -> Mismatch | None:
    run = case.run if direction == "forward" else case.gradient
    if run is None:
        return None
    given = taken(case.rows, torch.arange(len(case.rows[0]), device=case.rows[0].device))
    with _base(threads):
        base = run(module, given)
    written = _written(case, direction, given, case.rows)
    if written is not None:
        return written
    with _transformed(threads):
        for layout in row_layouts(case.rows, effort):
            if layout.calls is None:
                out = run(module, layout.rows)
            else:
                parts = zip(*(torch.split(operand, list(layout.calls)) for operand in layout.rows))
                out = torch.cat([run(module, tuple(part)) for part in parts])
            order = layout.base_N.argsort()
            base_N = layout.base_N[order]
            found = _first(base[base_N], out[layout.at_N[order]], base_N.tolist())
            if found is not None:
                return Mismatch(case.operator, case.name, layout.transform, direction, *found)
    return None


def _check_masked(case: MaskedCase, module: ModuleType, effort: Effort, threads: int | None) -> Mismatch | None:
    given = taken(case.rows, torch.arange(len(case.mask_N), device=case.mask_N.device))
    with _base(threads):
        base = case.run(module, given, case.mask_N.clone()).reshape(-1)
    written = _written(case, "forward", given, case.rows)
    if written is not None:
        return written
    with _transformed(threads):
        for layout in masked_layouts(case, effort):
            out = case.run(module, layout.rows, layout.mask_N).reshape(-1)
            found = _first(base, out, range(len(base)))
            if found is not None:
                return Mismatch(case.operator, case.name, layout.transform, "forward", *found)
    return None


def _check_sequences(case: SequenceCase, module: ModuleType, effort: Effort, threads: int | None) -> Mismatch | None:
    def alone(sequence: Sequence_) -> torch.Tensor:
        return case.run(module, [sequence], whole(len(sequence[0])))[0]

    prefixes = list(prefix_layouts(case, effort))
    given = [tuple(part.clone() for part in sequence) for sequence in case.sequences]
    with _base(threads):
        base = [alone(sequence) for sequence in given]
    for index, sequence in enumerate(given):
        written = _written(case, "forward", sequence, case.sequences[index], index)
        if written is not None:
            return written
    with _base(threads):
        missed = [alone(prefix.fork)[prefix.prefix :] for prefix in prefixes]
    with _transformed(threads):
        for layout in sequence_layouts(case, effort):
            out = case.run(module, layout.sequences, layout.feeding)
            for place, index in sorted(layout.kept, key=lambda one: one[1]):
                found = _first(base[index], out[place], range(len(base[index])))
                if found is not None:
                    return Mismatch(case.operator, case.name, layout.transform, "forward", *found, sequence=index)
        for prefix, miss in zip(prefixes, missed):
            hit = case.run(module, [prefix.owner, prefix.fork], prefix.hit)[1]
            found = _first(miss, hit, range(prefix.prefix, prefix.prefix + len(miss)))
            if found is not None:
                return Mismatch(case.operator, case.name, prefix.transform, "forward", *found, sequence=1)
    return None


def _check_packed_gradients(
    case: SequenceCase, module: ModuleType, effort: Effort, threads: int | None
) -> Mismatch | None:
    """T1 to T4 and T6: a backward pass sees whole sequences, in another packing."""
    run = case.gradient
    if run is None:
        return None
    with _base(threads):
        base = [run(module, [sequence])[0] for sequence in case.sequences]
    with _transformed(threads):
        for layout in sequence_layouts(case, effort):
            if layout.feeding != whole(*lengths_of(layout.sequences)):
                continue
            out = run(module, layout.sequences)
            for place, index in sorted(layout.kept, key=lambda one: one[1]):
                found = _first(base[index], out[place], range(len(base[index])))
                if found is not None:
                    return Mismatch(case.operator, case.name, layout.transform, "backward", *found, sequence=index)
    return None


def _written(case: Case, direction: Pass, given: Rows, before: Rows, sequence: int | None = None) -> Mismatch | None:
    """What the operator changed in the operands it was given, which it must leave alone."""
    for index, (got, expected) in enumerate(zip(given, before)):
        found = _first(expected, got, range(len(expected)))
        if found is not None:
            what = f"its own run, which wrote to operand {index}"
            return Mismatch(case.operator, case.name, what, direction, *found, sequence=sequence)
    return None


def _base(threads: int | None) -> AbstractContextManager[None]:
    """Where thread counts are part of the check, what others are compared with ran on one."""
    return using_threads(1 if threads else torch.get_num_threads())


def _transformed(threads: int | None) -> AbstractContextManager[None]:
    return using_threads(threads or torch.get_num_threads())


def _first(expected: torch.Tensor, got: torch.Tensor, rows: Iterable[int]) -> tuple[int, int, float, float] | None:
    """(row, element, expected, got) of the first bit pattern that differs, rows being named by `rows`."""
    if same_bits(got, expected):
        return None
    if got.shape != expected.shape or got.dtype != expected.dtype:
        was, now = (f"{tuple(one.shape)} of {one.dtype}" for one in (expected, got))
        raise OperandError(f"the output is {now} where it was {was}")
    flat_expected, flat_got = expected.reshape(len(expected), -1), got.reshape(len(got), -1)
    at, element = (bits(flat_got) != bits(flat_expected)).nonzero()[0].tolist()
    return list(rows)[at], element, float(flat_expected[at, element]), float(flat_got[at, element])
