"""Ranges of sequence numbers against plain sets of numbers."""

from hypothesis import given
from hypothesis import strategies as st

from rlk_ledger.spans import Spans, intersect, merged, repeated, subtract, total

ranges = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 8)).map(lambda pair: (pair[0], sum(pair))), max_size=12)


def numbers(spans: Spans) -> set[int]:
    return {n for first, last in spans for n in range(first, last + 1)}


@given(ranges, ranges)
def test_ranges_hold_the_numbers_that_sets_would(one: Spans, other: Spans) -> None:
    left, right = merged(one), merged(other)
    assert numbers(left) == numbers(one)
    assert total(left) == len(numbers(one))
    for found, wanted in (
        (intersect(left, right), numbers(one) & numbers(other)),
        (subtract(left, right), numbers(one) - numbers(other)),
    ):
        assert numbers(found) == wanted
        assert merged(found) == found, "sorted, disjoint, never adjacent"


@given(st.lists(ranges, max_size=5))
def test_repeated_numbers_are_those_of_two_lists(held: list[Spans]) -> None:
    counts: dict[int, int] = {}
    for spans in held:
        for n in numbers(spans):
            counts[n] = counts.get(n, 0) + 1
    found = repeated(map(merged, held))
    assert numbers(found) == {n for n, count in counts.items() if count > 1}
    assert merged(found) == found
