"""The whole decoder as one operator over sequences, so that the invariance suite runs T1 to T7 over it.

Every position is scored, whatever the feeding: the log-probability that the token at a position is followed by itself,
which depends on this position's hidden state alone and needs no next token.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import torch

from rlk_ledger_kernels.errors import OperandError
from rlk_ledger_kernels.suite.case import Feeding, Sequence_, SequenceCase
from rlk_ledger_kernels.suite.feeding import Span, feed, pages_of
from rlk_ledger_replay.decoder import Decoder
from rlk_ledger_replay.feed import Pages, Piece
from rlk_ledger_replay.session import lay_out


def decoder_case(decoder: Decoder, name: str, sequences: Sequence[torch.Tensor]) -> SequenceCase:
    """A case of the suites. sequences: token ids, int64 [T] each. The backend module a suite passes is not looked at:
    the decoder's own were decided when it was made."""

    def run(_: ModuleType, given: Sequence[Sequence_], feeding: Feeding) -> list[torch.Tensor]:
        return score_positions(decoder, given, feeding)

    def reference(sequence: Sequence_) -> torch.Tensor:
        whole = Feeding(cuts=((len(sequence[0]),),))
        return score_positions(decoder, [sequence], whole)[0]

    return SequenceCase(
        operator="decoder",
        name=name,
        dtype=decoder.numerics.compute,
        sequences=[(ids_T,) for ids_T in sequences],
        block=decoder.numerics.schedule.kv_block,
        run=run,
        reference=reference,
    )


def score_positions(decoder: Decoder, sequences: Sequence[Sequence_], feeding: Feeding) -> list[torch.Tensor]:
    """Score every position that `feeding` computes, in its chunks, pages and shared prefix; float32 [T] per sequence.

    Raises OperandError for a shared prefix under context parallelism, where two sequences of different length would
    place its blocks on different ranks.
    """
    if feeding.shared is not None and decoder.layout.cp > 1:
        raise OperandError("a prefix is shared between sequences of one cp rank only; use a layout with cp 1")
    admission = decoder.admission()
    network = decoder.network(admission)
    pages = pages_of(feeding, decoder.numerics.schedule.kv_block)
    held = len(network.mesh.cp.ranks)
    caches = network.new_caches([1 + max(page for table in pages for page in table)] * held)
    for cache in (cache for rank in caches for layers in rank for cache in layers):
        cache.keys.fill_(feeding.stale)
        cache.values[..., : cache.head_dim].fill_(feeding.stale)

    def call(spans: list[Span]) -> Sequence[torch.Tensor]:
        pieces = [
            Piece(
                sequences[span.sequence][0][span.first : span.end],
                span.first,
                Pages(decoder.layout.owned_blocks(len(span.pages)), (span.pages,) * held),
            )
            for span in spans
        ]
        planned = lay_out(pieces, network, admission)
        with torch.no_grad():
            hidden = network.forward(planned, caches)
            targets_N = torch.cat([piece.ids_T for piece in pieces])
            scores_N = network.scored(hidden, planned, torch.arange(planned.rows), targets_N)
        return torch.split(scores_N.cpu(), [span.end - span.first for span in spans])

    return feed(feeding, decoder.numerics.schedule.kv_block, call)
