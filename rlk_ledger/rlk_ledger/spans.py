"""Inclusive integer ranges as sorted, disjoint lists of (first, last)."""

from collections.abc import Iterable, Sequence

Spans = list[tuple[int, int]]


def merged(spans: Iterable[tuple[int, int]]) -> Spans:
    """The same numbers as sorted, disjoint, non-adjacent ranges."""
    out: Spans = []
    for first, last in sorted(spans):
        if out and first <= out[-1][1] + 1:
            out[-1] = (out[-1][0], max(last, out[-1][1]))
        else:
            out.append((first, last))
    return out


def intersect(left: Sequence[tuple[int, int]], right: Sequence[tuple[int, int]]) -> Spans:
    """The numbers in both of two merged lists."""
    out: Spans = []
    i = j = 0
    while i < len(left) and j < len(right):
        first, last = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if first <= last:
            out.append((first, last))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return out


def subtract(left: Sequence[tuple[int, int]], right: Sequence[tuple[int, int]]) -> Spans:
    """The numbers of merged list `left` that are not in merged list `right`."""
    out: Spans = []
    j = 0
    for first, last in left:
        at = first
        while j < len(right) and right[j][0] <= last:
            a, b = right[j]
            if at < a:
                out.append((at, a - 1))
            at = max(at, b + 1)
            if b > last:
                break  # it reaches into the next one
            j += 1
        if at <= last:
            out.append((at, last))
    return out


def repeated(held: Iterable[Sequence[tuple[int, int]]]) -> Spans:
    """The numbers that two or more of these merged lists hold."""
    twice: Spans = []
    reach = -1
    for first, last in sorted(span for spans in held for span in spans):
        if first <= reach:
            twice.append((first, min(last, reach)))
        reach = max(reach, last)
    return merged(twice)


def total(spans: Iterable[tuple[int, int]]) -> int:
    """How many numbers the ranges hold."""
    return sum(last - first + 1 for first, last in spans)
