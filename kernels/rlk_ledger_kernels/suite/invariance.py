"""The batch-invariance suite for operators that map rows to rows: bitwise, `+0`/`-0` and NaN bits included.

Each transform changes only what it names, and results are taken out by index. An operator that fails returns
the first mismatch in row order; one that passes returns None.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from rlk_ledger_kernels.bits import bits, same_bits

RowOperator = Callable[[torch.Tensor], torch.Tensor]

_POPULATIONS = (1, 2, 3, 5, 8, 15, 16, 17, 31, 37, 64, 100, 129)


@dataclass(frozen=True)
class Mismatch:
    """Where an operator against itself first differed. transform: T1, T2, T3, T4 or T6 and its parameter."""

    transform: str
    row: int
    expected: float
    got: float


def first_mismatch(operator: RowOperator, x_NK: torch.Tensor, seed: int = 0) -> Mismatch | None:
    """Run `operator` on `x_NK` and on its transforms.

    x_NK: at least 130 rows. Returns the first mismatch of the first transform that has one, or None.
    """
    base = operator(x_NK)
    for name, rows_N, changed in _transforms(x_NK, torch.Generator().manual_seed(seed)):
        got = operator(changed[0])[changed[1]]
        expected = base[rows_N]
        if not same_bits(got, expected):
            flat_got, flat_expected = got.reshape(len(got), -1), expected.reshape(len(expected), -1)
            different = (bits(flat_got) != bits(flat_expected)).nonzero()
            at, element = int(different[0, 0]), int(different[0, 1])
            return Mismatch(name, int(rows_N[at]), float(flat_expected[at, element]), float(flat_got[at, element]))
    return None


def _transforms(
    x_NK: torch.Tensor, generator: torch.Generator
) -> Iterator[tuple[str, torch.Tensor, tuple[torch.Tensor, torch.Tensor]]]:
    """(name, rows of the base that are compared, (transformed input, where those rows are in its output))."""
    count = x_NK.shape[0]
    every = torch.arange(count)
    for population in _POPULATIONS:
        first = torch.arange(population)
        yield f"T1 population {population}", first, (x_NK[:population].clone(), first)
    for shift in (1, 7, 16, 33):
        yield f"T2 position +{shift}", every, (x_NK.roll(shift, 0), (every + shift) % count)
    noise = torch.randn(x_NK.shape, generator=generator).to(x_NK.dtype)
    for value in (0.0, 1e30, float("nan"), float("inf")):
        neighbours = (noise * value) if value else noise
        kept = torch.arange(0, count, 3)
        neighbours[kept] = x_NK[kept]
        yield f"T3 neighbours x {value}", kept, (neighbours, kept)
    for amount in (1, 13, 16, 100):
        padding = torch.full((amount, x_NK.shape[1]), float("nan"), dtype=x_NK.dtype)
        yield f"T4 {amount} rows on the left", every, (torch.cat((padding, x_NK)), every + amount)
        yield f"T4 {amount} rows on the right", every, (torch.cat((x_NK, padding * 0)), every)
    chosen = torch.randperm(count, generator=generator)[: count // 2]
    yield "T6 selection", chosen, (x_NK[chosen], torch.arange(len(chosen)))
