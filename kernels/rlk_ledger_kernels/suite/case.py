"""A case: one operator at one shape and dtype, in the form every suite can run on every backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import ModuleType

import torch

Rows = tuple[torch.Tensor, ...]
"""Operands with one leading dimension N: floating activations first, then integers such as tokens or positions."""

Sequence_ = tuple[torch.Tensor, ...]
"""Operands of one sequence, each with leading dimension T: (q_THD, k_TKD, v_TKD) of attention, (ids_T,) of a model."""


@dataclass(frozen=True)
class RowCase:
    """An operator whose output row depends on the same row of its operands alone: T1, T2, T3, T4 and T6 apply.

    name: shape and dtype in words. dtype: execution dtype, by which the tolerance is looked up. rows: at least 130
    rows on the CPU. run: (backend module, rows) -> [N, ...] on the device of `rows`. reference: rows -> float32
    [N, ...]. gradient: like `run`, the gradient with respect to the floating rows of the sum of outputs weighted by a
    fixed cotangent that is the same for every row, concatenated to [N, ...]; None where there is no backward pass.
    """

    operator: str
    name: str
    dtype: str
    rows: Rows
    run: Callable[[ModuleType, Rows], torch.Tensor]
    reference: Callable[[Rows], torch.Tensor]
    gradient: Callable[[ModuleType, Rows], torch.Tensor] | None = None


@dataclass(frozen=True)
class Feeding:
    """How sequences reach an operator. Changing it must not change a bit.

    cuts: for each sequence the rising ends of its chunks, the last one being its length. pages: for each sequence the
    cache block of each logical block. shared: (sequence, prefix tokens): this sequence reads its first tokens from the
    cache blocks of sequence 0 (whose first tokens are the same) instead of computing them (T7), or None; the prefix is
    whole blocks, that sequence's cuts lie beyond it and its outputs begin there. stale: what cache slots hold until
    somebody writes them, as blocks do that another request used (T4). `feeding.feed` turns all this into calls.
    """

    cuts: tuple[tuple[int, ...], ...]
    pages: tuple[tuple[int, ...], ...] | None = None
    shared: tuple[int, int] | None = None
    stale: float = 0.0


@dataclass(frozen=True)
class SequenceCase:
    """An operator over whole sequences with a cache: T1 to T7 apply.

    sequences: several, of different lengths (one of 1 token, one above 128). block: tokens to a cache block. run:
    (backend module, sequences, feeding) -> per sequence the outputs of all tokens that were computed, [T, ...].
    reference: one sequence -> float32 [T, ...]. gradient: (backend module, sequences packed and whole) -> per sequence
    the gradients of its operands, concatenated to [T, ...], under a cotangent that is the same for every token.
    """

    operator: str
    name: str
    dtype: str
    sequences: Sequence[Sequence_]
    block: int
    run: Callable[[ModuleType, Sequence[Sequence_], Feeding], list[torch.Tensor]]
    reference: Callable[[Sequence_], torch.Tensor]
    gradient: Callable[[ModuleType, Sequence[Sequence_]], list[torch.Tensor]] | None = None


@dataclass(frozen=True)
class MaskedCase:
    """A reduction over the active values of many rows: T3, T4 and T6 apply to what is not active.

    rows: operands with one leading dimension N. mask_N: bool. run: (backend module, rows, mask) -> the result, of any
    shape. reference: (rows, mask) -> float32 of the same shape.
    """

    operator: str
    name: str
    dtype: str
    rows: Rows
    mask_N: torch.Tensor
    run: Callable[[ModuleType, Rows, torch.Tensor], torch.Tensor]
    reference: Callable[[Rows, torch.Tensor], torch.Tensor]


Case = RowCase | SequenceCase | MaskedCase


def moved(case: Case, device: str) -> Case:
    """The case with its operands on `device`; what `run` closes over follows its operands by itself."""
    if isinstance(case, SequenceCase):
        return replace(case, sequences=[tuple(part.to(device) for part in one) for one in case.sequences])
    rows = tuple(operand.to(device) for operand in case.rows)
    if isinstance(case, MaskedCase):
        return replace(case, rows=rows, mask_N=case.mask_N.to(device))
    return replace(case, rows=rows)


def copied(case: Case) -> Case:
    """The case with operands of its own."""
    if isinstance(case, SequenceCase):
        return replace(case, sequences=[tuple(part.clone() for part in one) for one in case.sequences])
    return replace(case, rows=tuple(operand.clone() for operand in case.rows))


@dataclass(frozen=True)
class Wrong:
    """A deliberately wrong operator that a suite must catch.

    suite: invariance, accuracy or parity. mistake: what is wrong, as a reader would say it. case: the case with the
    mistake in its `run` (the backend module passed in may be ignored). right: the same code without the mistake, which
    the suite must not accuse; the parity suite compares the two.
    """

    suite: str
    mistake: str
    case: Case
    right: Case | None = None
