"""A few samples being scored together: their KV caches, and what has been fed so far.

Every path (prefill, chunks, decode) is a sequence of `feed` calls; they differ only in which positions arrive
together, which by the promise of the operators changes no bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rlk_ledger_kernels.ops.attention.plan import DECODE_TILE, Chunk, plan_attention
from rlk_ledger_kernels.probe import Admission, using_threads
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

    def __init__(self, network: Network, admission: Admission, samples: Sequence[Sample]) -> None:
        """Allocate caches for `samples`."""
        self._network = network
        self._admission = admission
        self._samples = samples
        block = network.numerics.schedule.kv_block
        self._blocks: list[range] = []
        taken = 0
        for sample in samples:
            needed = -(-sample.inputs // block)
            self._blocks.append(range(taken, taken + needed))
            taken += needed
        self._caches = network.new_caches(taken)
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
        chunks = [Chunk(span.first, span.count, self._blocks[span.sample]) for span in spans]
        small = all(span.count <= DECODE_TILE for span in spans)
        q_tile = self._admission.q_tiles[0 if small else 1]
        plan = plan_attention(chunks, self._network.numerics.schedule, q_tile)
        ids_P = torch.zeros(plan.scatter_P.numel(), dtype=torch.int64)
        positions_P = torch.zeros_like(ids_P)
        torch.cat([self._samples[s.sample].ids_T[s.first : s.first + s.count] for s in spans], out=ids_P[: plan.rows])
        torch.cat([torch.arange(s.first, s.first + s.count) for s in spans], out=positions_P[: plan.rows])
        work = plan.rows * self._network.parameters
        with torch.no_grad(), using_threads(1 if work < SMALL_WORK else self._admission.threads):
            self._score(spans, self._network.forward(ids_P, positions_P, self._caches, plan))

    def _score(self, spans: Sequence[Span], hidden_PH: torch.Tensor) -> None:
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
        scores_N = self._network.logprobs(hidden_PH.index_select(0, torch.cat(rows)), torch.cat(targets))
        for span, part in zip(spans, torch.split(scores_N, counts), strict=True):
            if part.numel():
                self._scores[span.sample].append(part)

    def scores(self) -> list[torch.Tensor]:
        """What has been scored, per sample: float32 [response length] once everything was fed."""
        return [torch.cat(parts) for parts in self._scores]
