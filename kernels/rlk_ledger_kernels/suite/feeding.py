"""How a `Feeding` reaches an operator with a cache: turn by turn, the chunks that arrive together and their pages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from rlk_ledger_kernels.errors import OperandError
from rlk_ledger_kernels.suite.case import Feeding


@dataclass(frozen=True)
class Span:
    """Tokens `first` to `end` (exclusive) of one sequence. pages: the cache block of each of its logical blocks."""

    sequence: int
    first: int
    end: int
    pages: tuple[int, ...]


def pages_of(feeding: Feeding, block: int) -> tuple[tuple[int, ...], ...]:
    """The pages of every sequence: those of the feeding, else consecutive ones; a shared prefix lies in sequence 0's.

    Raises OperandError for a shared prefix that is not whole blocks.
    """
    needed = [-(-cuts[-1] // block) for cuts in feeding.cuts]
    starts = [sum(needed[:index]) for index in range(len(needed))]
    pages = feeding.pages or tuple(tuple(range(start, start + count)) for start, count in zip(starts, needed))
    if feeding.shared is None:
        return pages
    who, prefix = feeding.shared
    if prefix % block:
        raise OperandError(f"a shared prefix of {prefix} tokens is not whole blocks of {block}")
    whole = prefix // block
    joined = (*pages[0][:whole], *pages[who][whole:])
    return tuple(joined if index == who else one for index, one in enumerate(pages))


def turns(feeding: Feeding, block: int) -> Iterator[list[Span]]:
    """The calls in their order: each advances every unfinished sequence by one chunk, side by side.

    A sequence that shares a prefix waits until sequence 0 has computed it in an earlier call.
    """
    pages = pages_of(feeding, block)
    shared = {} if feeding.shared is None else {feeding.shared[0]: feeding.shared[1]}
    done = [shared.get(index, 0) for index in range(len(feeding.cuts))]
    left = [list(cuts) for cuts in feeding.cuts]
    while any(left):
        spans = []
        for index, cuts in enumerate(left):
            if cuts and not (index in shared and done[0] < shared[index]):
                spans.append(Span(index, done[index], cuts[0], pages[index]))
        for span in spans:
            done[span.sequence] = left[span.sequence].pop(0)
        yield spans


def feed(feeding: Feeding, block: int, call: Callable[[list[Span]], Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    """Per sequence the outputs of all its tokens that were computed; `call` gives those of each span, in order."""
    parts: list[list[torch.Tensor]] = [[] for _ in feeding.cuts]
    for spans in turns(feeding, block):
        for span, part in zip(spans, call(spans), strict=True):
            parts[span.sequence].append(part)
    return [torch.cat(part) for part in parts]
