"""The transforms of the invariance suite: the same rows or sequences in another layout, and where they are in it.

A transform changes only what it names. What is compared is taken out by index.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch

from rlk_ledger_kernels.suite.case import Feeding, MaskedCase, Rows, Sequence_, SequenceCase

Effort = Literal["full", "brief"]
"""`brief` has one or two of each kind: for Triton's interpreter, and for the second thread count."""

TRANSFORMS = {
    "T1": "population",
    "T2": "position",
    "T3": "neighbour content",
    "T4": "padding",
    "T5": "schedule",
    "T6": "selection and packing",
    "T7": "prefix cache",
}

_POPULATIONS = {"full": (1, 2, 3, 5, 8, 15, 16, 17, 31, 37, 64, 100, 129), "brief": (1, 37)}
_MANY = 520
"""Rows beyond which kernels are known to choose other tiles."""
_SHIFTS = {"full": (1, 7, 16, 33), "brief": (7,)}
_NAN, _INF = float("nan"), float("inf")
_CONTENTS = {"full": (0.0, 1e30, _NAN, _INF), "brief": (_NAN,)}
_PADDINGS = {
    "full": ((1, _NAN), (13, 0.0), (16, _INF), (100, -_INF), (13, -_INF), (1, 1e30)),
    "brief": ((13, _NAN), (1, -_INF)),
}


@dataclass(frozen=True)
class RowLayout:
    """Rows in another layout. base_N: rows of the case that are compared, at_N: where each is in the output.

    calls: row counts of the calls the rows are handed over in, or None for one call.
    """

    transform: str
    rows: Rows
    base_N: torch.Tensor
    at_N: torch.Tensor
    calls: tuple[int, ...] | None = None


def row_layouts(rows: Rows, effort: Effort = "full", seed: int = 0) -> Iterator[RowLayout]:
    """T1 to T6 over operands with one leading dimension; integer operands only ever take values of the case's own."""
    count, device = len(rows[0]), rows[0].device
    every = torch.arange(count, device=device)
    generator = torch.Generator().manual_seed(seed)
    for population in (p for p in _POPULATIONS[effort] if p < count):
        first = every[:population]
        yield RowLayout(f"T1 population {population}", taken(rows, first), first, first)
    if effort == "full":
        copies = -(-_MANY // count)
        yield RowLayout(f"T1 population {copies * count}", taken(rows, every.repeat(copies)), every, every)
    for shift in _SHIFTS[effort]:
        yield RowLayout(f"T2 position +{shift}", taken(rows, every.roll(shift)), every, (every + shift) % count)
    for words, lay in _PLACES[effort]:
        yield RowLayout(f"T2 position in memory, {words}", tuple(lay(operand) for operand in rows), every, every)
    kept = every[::3]
    for value in _CONTENTS[effort]:
        yield RowLayout(f"T3 neighbours of {value}", _surrounded(rows, kept, value), kept, kept)
    noise = torch.randperm(count, generator=generator).to(device)
    others = tuple(torch.where(_column(torch.isin(every, kept), t), t, t[noise]) for t in rows)
    yield RowLayout("T3 other neighbours", others, kept, kept)
    for amount, value in _PADDINGS[effort]:
        what = "masked rows" if value == -_INF else f"rows of {value}"
        padding = _filled(rows, amount, value)
        yield RowLayout(f"T4 {amount} {what} on the left", _joined(padding, rows), every, every + amount)
        yield RowLayout(f"T4 {amount} {what} on the right", _joined(rows, padding), every, every)
    for calls in ((1, count - 1), (count // 2, count - count // 2)) if effort == "full" else ((1, count - 1),):
        yield RowLayout(f"T5 calls of {calls[0]} and {calls[1]} rows", rows, every, every, calls)
    chosen = torch.randperm(count, generator=generator)[: count // 2].to(device)
    yield RowLayout("T6 selection", taken(rows, chosen), chosen, every[: len(chosen)])
    yield RowLayout("T6 packed in reverse", taken(rows, every.flip(0)), every, every.flip(0))


def every_second(operand: torch.Tensor) -> torch.Tensor:
    """The operand as every second element of a tensor twice as wide."""
    wide = torch.stack((operand, torch.full_like(operand, 1)), -1)
    return wide[..., 0]


def column_major(operand: torch.Tensor) -> torch.Tensor:
    """The operand with its rows next to each other in memory; a vector is laid out with gaps."""
    if operand.dim() < 2:
        return every_second(operand)
    return operand.movedim(0, -1).contiguous().movedim(-1, 0)


_PLACES = {
    "full": (("every second element", every_second), ("column-major", column_major)),
    "brief": (("column-major", column_major),),
}


def taken(rows: Rows, index_N: torch.Tensor) -> Rows:
    """The operands at these rows, as tensors of their own."""
    return tuple(operand[index_N] for operand in rows)


def _joined(first: Rows, second: Rows) -> Rows:
    return tuple(torch.cat(pair) for pair in zip(first, second))


def _filled(rows: Rows, amount: int, value: float) -> Rows:
    """`amount` rows: floating operands hold `value`, integers repeat the case's last row."""
    return tuple(
        operand.new_full((amount, *operand.shape[1:]), _held(value, operand))
        if operand.is_floating_point()
        else operand[-1:].expand(amount, *operand.shape[1:])
        for operand in rows
    )


def _surrounded(rows: Rows, kept: torch.Tensor, value: float) -> Rows:
    """The rows in `kept` as they are; all others hold `value`, or the integers of the row before them."""
    out = []
    for operand in rows:
        other = torch.full_like(operand, _held(value, operand)) if operand.is_floating_point() else operand.roll(1, 0)
        other[kept] = operand[kept]
        out.append(other)
    return tuple(out)


def _held(value: float, operand: torch.Tensor) -> float:
    """The value as the operand's dtype holds it: float16 rounds 1e30 to infinity."""
    return float(torch.tensor(value).to(operand.dtype))


def _column(mask_N: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return mask_N.view(-1, *[1] * (like.dim() - 1))


@dataclass(frozen=True)
class MaskedLayout:
    """Rows and mask in another layout; the result must not change."""

    transform: str
    rows: Rows
    mask_N: torch.Tensor


def masked_layouts(case: MaskedCase, effort: Effort = "full") -> Iterator[MaskedLayout]:
    """T3, T4 and T6: what is not active holds other values, is more, or is left out."""
    rows, mask_N = case.rows, case.mask_N
    every = torch.arange(len(mask_N), device=mask_N.device)
    for value in _CONTENTS[effort]:
        yield MaskedLayout(f"T3 inactive rows of {value}", _surrounded(rows, every[mask_N], value), mask_N)
    for amount, value in _PADDINGS[effort]:
        padding, off = _filled(rows, amount, value), mask_N.new_zeros(amount)
        left = MaskedLayout(
            f"T4 {amount} rows of {value} on the left", _joined(padding, rows), torch.cat((off, mask_N))
        )
        yield left
        yield replace(
            left,
            transform=f"T4 {amount} rows of {value} on the right",
            rows=_joined(rows, padding),
            mask_N=torch.cat((mask_N, off)),
        )
    yield MaskedLayout("T6 selection", taken(rows, every[mask_N]), mask_N[mask_N])


@dataclass(frozen=True)
class SequenceLayout:
    """Sequences as they are fed. kept: (place in the output, sequence of the case)."""

    transform: str
    sequences: tuple[Sequence_, ...]
    feeding: Feeding
    kept: tuple[tuple[int, int], ...]


def whole(*lengths: int) -> Feeding:
    """Every sequence in one prefill."""
    return Feeding(cuts=tuple((length,) for length in lengths))


def sequence_layouts(case: SequenceCase, effort: Effort = "full", seed: int = 0) -> Iterator[SequenceLayout]:
    """T1 to T6 over sequences with a cache. T7 needs a sequence of its own: `prefix_layouts`."""
    every = tuple(range(len(case.sequences)))
    for count in range(2, len(every) + 1) if effort == "full" else (len(every),):
        yield _packed(case, f"T1 population {count}", every[:count])
    for shift in every[1:] if effort == "full" else every[1:2]:
        yield _packed(case, f"T2 position +{shift}", every[shift:] + every[:shift])
    yield from _surrounded_sequences(case, effort)
    yield from _fed(case, effort, seed)
    yield _packed(case, "T6 packed in reverse", every[::-1])
    yield _packed(case, "T6 selection", every[::2])


def lengths_of(sequences: tuple[Sequence_, ...]) -> tuple[int, ...]:
    """Tokens of each sequence."""
    return tuple(len(sequence[0]) for sequence in sequences)


def _packed(case: SequenceCase, transform: str, order: tuple[int, ...]) -> SequenceLayout:
    sequences = tuple(case.sequences[index] for index in order)
    kept = tuple((place, index) for place, index in enumerate(order))
    return SequenceLayout(transform, sequences, whole(*lengths_of(sequences)), kept)


def _surrounded_sequences(case: SequenceCase, effort: Effort) -> Iterator[SequenceLayout]:
    """T3: all but one sequence hold other values. T4: sequences of padding, and slots that another request used."""
    longest = max(range(len(case.sequences)), key=lambda index: len(case.sequences[index][0]))
    for value in _CONTENTS[effort]:
        sequences = tuple(
            sequence if index == longest else _poisoned(sequence, value)
            for index, sequence in enumerate(case.sequences)
        )
        alone = ((longest, longest),)
        yield SequenceLayout(f"T3 neighbours of {value}", sequences, whole(*lengths_of(sequences)), alone)
    real = tuple(case.sequences)
    for amount, value in _PADDINGS[effort]:
        padding = tuple(part[:1].expand(amount, *part.shape[1:]) for part in real[0])
        for side, sequences in (
            ("left", (_poisoned(padding, value), *real)),
            ("right", (*real, _poisoned(padding, value))),
        ):
            shift = side == "left"
            kept = tuple((index + shift, index) for index in range(len(real)))
            name = f"T4 {amount} tokens of {value} on the {side}"
            yield SequenceLayout(name, sequences, whole(*lengths_of(sequences)), kept)
    stale = replace(whole(*lengths_of(real)), stale=1e30)
    yield SequenceLayout("T4 stale cache blocks", real, stale, tuple((i, i) for i in range(len(real))))


def _poisoned(sequence: Sequence_, value: float) -> Sequence_:
    """Floating operands hold `value`; integers are taken in reverse."""
    return tuple(
        torch.full_like(part, _held(value, part)) if part.is_floating_point() else part.flip(0) for part in sequence
    )


def _fed(case: SequenceCase, effort: Effort, seed: int) -> Iterator[SequenceLayout]:
    """T5: chunk boundaries, decode, and sequences that are at different places in one call; other pages."""
    sequences = tuple(case.sequences)
    lengths = lengths_of(sequences)
    kept = tuple((index, index) for index in range(len(sequences)))
    block = case.block
    boundaries = (1, block - 1, block, block + 1, 2 * block - 1, max(lengths) - 1)
    for at in boundaries if effort == "full" else (block + 1,):
        cuts = tuple(tuple(sorted({min(at, n), n})) for n in lengths)
        yield SequenceLayout(f"T5 chunk boundary at {at}", sequences, Feeding(cuts), kept)
    steps = 12 if effort == "full" else 2
    decode = tuple((*range(max(1, n - steps), n), n) for n in lengths)
    yield SequenceLayout("T5 prefill, then decode", sequences, Feeding(decode), kept)
    mixed = tuple(
        decode[index] if index % 2 else tuple(sorted({*range(block // 2, n, block // 2), n}))
        for index, n in enumerate(lengths)
    )
    pages = _scattered(lengths, block, seed)
    yield SequenceLayout("T5 decode beside prefill chunks", sequences, Feeding(mixed), kept)
    yield SequenceLayout("T5 cache handed over on other pages", sequences, Feeding(mixed, pages), kept)


def _scattered(lengths: tuple[int, ...], block: int, seed: int) -> tuple[tuple[int, ...], ...]:
    """Pages in random order with unused ones between them."""
    needed = [-(-n // block) for n in lengths]
    order = torch.randperm(sum(needed) + 3, generator=torch.Generator().manual_seed(seed)).tolist()
    return tuple(tuple(order[sum(needed[:i]) : sum(needed[: i + 1])]) for i in range(len(needed)))


@dataclass(frozen=True)
class PrefixLayout:
    """T7: `fork` begins as `owner` does; a hit reads those tokens from the owner's blocks, a miss computes them."""

    transform: str
    owner: Sequence_
    fork: Sequence_
    prefix: int
    hit: Feeding


def prefix_layouts(case: SequenceCase, effort: Effort = "full") -> Iterator[PrefixLayout]:
    """Prefixes of one block and of all whole blocks two sequences of the case have; none where all are too short."""
    order = sorted(case.sequences, key=lambda sequence: len(sequence[0]), reverse=True)
    if len(order) < 2:
        return
    owner, other = order[:2]
    most = min(len(owner[0]) - 1, len(other[0]) - 1) // case.block * case.block
    for prefix in sorted({case.block, most} if effort == "full" else {most}):
        if not 0 < prefix <= most:
            continue
        fork = tuple(torch.cat((mine[:prefix], its[prefix:])) for mine, its in zip(owner, other))
        length = len(fork[0])
        for cuts in ((length,), tuple(sorted({prefix + 1, length}))):
            hit = Feeding(cuts=((len(owner[0]),), cuts), shared=(1, prefix))
            yield PrefixLayout(f"T7 hit of {prefix} tokens, {len(cuts)} calls", owner, fork, prefix, hit)
