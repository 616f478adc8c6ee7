"""A few samples being scored together: their KV caches, and what has been fed so far.

Every path (prefill, chunks, decode) is a sequence of `feed` calls; they differ only in which positions arrive
together, which by the promise of the operators changes no bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rlk_ledger_kernels.ops.attention.plan import DECODE_TILE
from rlk_ledger_kernels.probe import Admission, using_threads
from rlk_ledger_replay.experts import Routes
from rlk_ledger_replay.feed import Feed, Pages, Piece, plan_feed
from rlk_ledger_replay.network import Network

SMALL_WORK = 1 << 26
"""Rows times parameters below which one thread is used: waking others costs more, and the bits are the same."""


@dataclass(frozen=True)
class Sample:
    """Token ids (int64 [T]) of prompt and response, and the length of the prompt (1..T-1)."""

    ids_T: torch.Tensor
    start: int

    @property
    def inputs(self) -> int:
        """How many tokens are fed: all but the last, which is only scored."""
        return int(self.ids_T.numel()) - 1


@dataclass(frozen=True)
class Span:
    """`count` consecutive positions of one sample, from `first`."""

    sample: int
    first: int
    count: int


class Session:
    """Owns the caches of its samples; blocks are given out once, for each sample's full length."""

    def __init__(
        self, network: Network, admission: Admission, samples: Sequence[Sample], routes: Routes | None = None
    ) -> None:
        """Allocate caches for `samples`. routes: for a single feed of all samples."""
        self._network = network
        self._admission = admission
        self._samples = samples
        self._routes = routes
        self._pages, held = assign_pages([sample.inputs for sample in samples], network)
        self._caches = network.new_caches(held)
        self._scores: list[list[torch.Tensor]] = [[] for _ in samples]

    def prefill(self) -> None:
        """Feed every sample whole."""
        self.feed([Span(index, 0, sample.inputs) for index, sample in enumerate(self._samples)])

    def decode(self) -> None:
        """Feed every prompt, then one token of each unfinished sample at a time."""
        self.feed([Span(index, 0, sample.start) for index, sample in enumerate(self._samples)])
        for step in range(max(sample.inputs - sample.start for sample in self._samples)):
            self.feed(
                [
                    Span(index, sample.start + step, 1)
                    for index, sample in enumerate(self._samples)
                    if sample.start + step < sample.inputs
                ]
            )

    def feed(self, spans: Sequence[Span]) -> None:
        """Run these positions through the network and score the tokens that follow them, where they are response.

        A sample's spans must arrive in order, each beginning where the last one ended.
        """
        pieces = [
            Piece(self._samples[s.sample].ids_T[s.first : s.first + s.count], s.first, self._pages[s.sample])
            for s in spans
        ]
        feed = lay_out(pieces, self._network, self._admission)
        work = feed.rows * self._network.parameters
        with torch.no_grad(), using_threads(1 if work < SMALL_WORK else self._admission.threads):
            self._score(spans, feed, self._network.forward(feed, self._caches, self._routes))

    def _score(self, spans: Sequence[Span], feed: Feed, hidden: Sequence[torch.Tensor]) -> None:
        rows: list[torch.Tensor] = []
        targets: list[torch.Tensor] = []
        counts: list[int] = []
        offset = 0
        for span in spans:
            sample = self._samples[span.sample]
            skipped = min(max(sample.start - 1 - span.first, 0), span.count)
            rows.append(torch.arange(offset + skipped, offset + span.count))
            targets.append(sample.ids_T[span.first + skipped + 1 : span.first + span.count + 1])
            counts.append(span.count - skipped)
            offset += span.count
        if sum(counts) == 0:
            return
        scores_N = self._network.scored(hidden, feed, torch.cat(rows), torch.cat(targets)).cpu()
        for span, part in zip(spans, torch.split(scores_N, counts), strict=True):
            if part.numel():
                self._scores[span.sample].append(part)

    def scores(self) -> list[torch.Tensor]:
        """What has been scored, per sample: float32 [response length] once everything was fed; on the CPU."""
        return [torch.cat(parts) for parts in self._scores]


def assign_pages(lengths: Sequence[int], network: Network) -> tuple[list[Pages], list[int]]:
    """Cache blocks for sequences of these lengths, and how many blocks each cp rank held here needs (at least one)."""
    block, held = network.numerics.schedule.kv_block, network.mesh.cp.ranks
    taken = [0] * len(held)
    pages = []
    for length in lengths:
        blocks = -(-length // block)
        owned = network.layout.owned_blocks(blocks)
        tables = []
        for local, rank in enumerate(held):
            table = [0] * blocks
            for logical in owned[rank]:
                table[logical] = taken[local]
                taken[local] += 1
            tables.append(tuple(table))
        pages.append(Pages(owned, tuple(tables)))
    return pages, [max(count, 1) for count in taken]


def lay_out(pieces: Sequence[Piece], network: Network, admission: Admission) -> Feed:
    """One pass over `pieces` as the network's layout holds it."""
    small = all(piece.ids_T.numel() <= DECODE_TILE for piece in pieces)
    return plan_feed(
        pieces,
        network.layout,
        network.mesh.cp.ranks,
        network.windows,
        network.numerics.schedule,
        admission.q_tiles[0 if small else 1],
        network.device,
    )
