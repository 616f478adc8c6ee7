"""Claim: a transform changes only what it names, and what is compared is the same rows and tokens, found by index."""

from __future__ import annotations

import pytest
import torch

from rlk_ledger_kernels.bits import same_bits
from rlk_ledger_kernels.errors import OperandError
from rlk_ledger_kernels.suite.case import Feeding, MaskedCase, RowCase, SequenceCase
from rlk_ledger_kernels.suite.feeding import Span, feed, pages_of, turns
from rlk_ledger_kernels.suite.layouts import (
    TRANSFORMS,
    masked_layouts,
    prefix_layouts,
    row_layouts,
    sequence_layouts,
    whole,
)

ROWS = (torch.randn((150, 3, 2)), torch.randn((150, 5)), torch.randint(0, 40, (150,)))
SEQUENCES = [(torch.randn(n, 2), torch.randint(0, 9, (n,))) for n in (70, 1, 37)]
CASE = SequenceCase("attention", "made up", "float32", SEQUENCES, 16, lambda *_: [], lambda s: s[0])


def kinds(names: list[str]) -> set[str]:
    return {name.partition(" ")[0] for name in names}


@pytest.mark.parametrize("effort", ["full", "brief"])
def test_every_row_that_is_compared_is_the_row_of_the_case(effort: str) -> None:
    names = []
    for layout in row_layouts(ROWS, effort):
        names.append(layout.transform)
        for before, after in zip(ROWS, layout.rows):
            assert same_bits(after[layout.at_N], before[layout.base_N]), layout.transform
        assert len({len(operand) for operand in layout.rows}) == 1
        assert layout.calls is None or sum(layout.calls) == len(layout.rows[0])
    assert kinds(names) == {"T1", "T2", "T3", "T4", "T5", "T6"}
    assert len(set(names)) == len(names)


def test_integers_only_ever_take_values_the_case_has() -> None:
    known = set(ROWS[2].tolist())
    for layout in row_layouts(ROWS):
        assert set(layout.rows[2].tolist()) <= known


def test_neighbours_really_change() -> None:
    for layout in row_layouts(ROWS):
        if layout.transform.startswith("T3"):
            others = torch.ones(150, dtype=torch.bool)
            others[layout.base_N] = False
            for before, after in zip(ROWS, layout.rows):
                assert not same_bits(before[others], after[others]), layout.transform


def test_inactive_values_change_and_active_ones_stay_in_their_order() -> None:
    mask = torch.arange(150) % 4 == 0
    case = MaskedCase("masked_mean", "made up", "float32", ROWS, mask, lambda *_: ROWS[0], lambda *_: ROWS[0])
    names = []
    for layout in masked_layouts(case):
        names.append(layout.transform)
        for before, after in zip(ROWS, layout.rows):
            assert same_bits(after[layout.mask_N], before[mask]), layout.transform
    assert kinds(names) == {"T3", "T4", "T6"}


@pytest.mark.parametrize("effort", ["full", "brief"])
def test_every_sequence_that_is_compared_is_the_sequence_of_the_case(effort: str) -> None:
    names = []
    for layout in sequence_layouts(CASE, effort):
        names.append(layout.transform)
        assert len(layout.kept) >= 1
        for place, index in layout.kept:
            for before, after in zip(SEQUENCES[index], layout.sequences[place]):
                assert same_bits(after, before), layout.transform
        for cuts, sequence in zip(layout.feeding.cuts, layout.sequences, strict=True):
            assert list(cuts) == sorted(set(cuts)), layout.transform
            assert cuts[-1] == len(sequence[0])
    names += [prefix.transform for prefix in prefix_layouts(CASE, effort)]
    assert kinds(names) == set(TRANSFORMS)


def test_feeding_computes_every_token_once_and_in_order() -> None:
    """The outputs are the tokens' own numbers, whatever the feeding."""
    for layout in sequence_layouts(CASE):
        seen = feed(
            layout.feeding,
            CASE.block,
            lambda spans: [torch.arange(span.first, span.end) for span in spans],
        )
        assert [part.tolist() for part in seen] == [list(range(len(s[0]))) for s in layout.sequences]


def test_pages_are_never_shared_unless_a_prefix_is() -> None:
    for layout in sequence_layouts(CASE):
        pages = [page for one in pages_of(layout.feeding, CASE.block) for page in one]
        assert len(set(pages)) == len(pages)
    for prefix in prefix_layouts(CASE):
        owner, fork = pages_of(prefix.hit, CASE.block)
        shared = prefix.prefix // CASE.block
        assert fork[:shared] == owner[:shared]
        assert not set(fork[shared:]) & set(owner)


def test_a_hit_starts_after_its_owner_has_computed_the_prefix() -> None:
    for prefix in prefix_layouts(CASE):
        for mine, its in zip(prefix.owner, prefix.fork):
            assert same_bits(mine[: prefix.prefix], its[: prefix.prefix])
        calls = list(turns(prefix.hit, CASE.block))
        owner = next(
            i for i, spans in enumerate(calls) if any(s.sequence == 0 and s.end >= prefix.prefix for s in spans)
        )
        fork = next(i for i, spans in enumerate(calls) if any(s.sequence == 1 for s in spans))
        assert fork > owner
        first = next(span for span in calls[fork] if span.sequence == 1)
        assert first == Span(1, prefix.prefix, prefix.hit.cuts[1][0], first.pages)


def test_a_prefix_that_is_no_whole_block_is_refused() -> None:
    with pytest.raises(OperandError, match="a shared prefix of 17 tokens is not whole blocks of 16"):
        pages_of(Feeding(cuts=((70,), (37,)), shared=(1, 17)), 16)


def test_a_case_of_short_sequences_has_no_prefix_to_share() -> None:
    short = SequenceCase("attention", "short", "float32", SEQUENCES[1:2], 16, lambda *_: [], lambda s: s[0])
    assert list(prefix_layouts(short)) == []
    assert whole(3, 1).cuts == ((3,), (1,))


def test_a_row_case_is_compared_under_the_names_of_the_transforms() -> None:
    case = RowCase("linear", "x", "float32", ROWS[:1], lambda _, rows: rows[0], lambda rows: rows[0])
    assert all(name in TRANSFORMS for name in kinds([one.transform for one in row_layouts(case.rows)]))
