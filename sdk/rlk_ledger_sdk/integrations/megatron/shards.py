"""Selected log-probabilities from one rank's slice of the vocabulary, without talking to the other ranks.

With m the largest logit, s = sum exp(logit - m) and t the target's logit, log p = t - m - log s. Over tensor ranks m, s
and t are partials: m is the largest of the m, s the sum of s exp(m_rank - m), t the owner's. They are recorded by every
rank and merged by the reader, so nothing is communicated here unless asked for (`reduced`).

Everything is float32, on the logits' own device, on copies of the rows that are needed.

Legend: n response tokens, v vocabulary entries of this rank.
"""

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from rlk_ledger_sdk.integrations.megatron.layout import Span

ELEMENTS = 1 << 24
"""Logits worked on at once: bounds the temporary memory at a few times 64 MiB."""


class Partials(NamedTuple):
    """Per token (float32 tensors [n]) the rank's largest logit, sum of exponentials below it, and target logit."""

    max: Any
    sum_exp: Any
    target_logit: Any

    def logprobs(self) -> Any:
        """Log-probabilities (nats, float32 [n]) where these partials cover the whole vocabulary."""
        return self.target_logit - self.max - self.sum_exp.log()

    def split(self, counts: Sequence[int]) -> list["Partials"]:
        """One Partials a sample."""
        return [Partials(*parts) for parts in zip(*(tensor.split(list(counts)) for tensor in self))]


def partials(
    logits: Any, spans: Sequence[Span], targets: Sequence[int], vocab: tuple[int, int], temperature: float
) -> Partials:
    """The partials of the tokens `targets` [n], scored at `spans` of `logits` [S, B, v], divided by `temperature`.

    vocab: the half-open range of token ids these v columns stand for; columns beyond its length are not counted.
    """
    torch = sys.modules["torch"]
    with torch.no_grad():
        if vocab[1] <= vocab[0] or not targets:
            return _nothing(torch, len(targets), logits.device)
        ids = torch.tensor(list(targets), dtype=torch.int64, device=logits.device)
        chunk = max(1, ELEMENTS // max(1, vocab[1] - vocab[0]))
        parts, done = [], 0
        for span in spans:
            for low in range(0, span.tokens, chunk):
                count = min(chunk, span.tokens - low)
                at = span.start + low
                rows = logits[at : at + count, span.row, : vocab[1] - vocab[0]].float()
                parts.append(_rows(rows, ids[done : done + count], vocab, temperature))
                done += count
        return Partials(*(torch.cat(held) for held in zip(*parts)))


def _rows(logits: Any, ids: Any, vocab: tuple[int, int], temperature: float) -> Partials:
    if temperature != 1.0:
        logits = logits / temperature
    peak = logits.amax(dim=-1)
    sums = (logits - peak[:, None]).exp().sum(dim=-1)
    inside = (ids >= vocab[0]) & (ids < vocab[1])
    column = (ids - vocab[0]).clamp(0, vocab[1] - vocab[0] - 1)
    target = logits.gather(1, column[:, None])[:, 0].masked_fill(~inside, 0.0)
    return Partials(peak, sums, target)


def _nothing(torch: Any, count: int, device: Any) -> Partials:
    """The partials of a rank that counts no vocabulary entry at all: all of its columns are padding."""
    zero = torch.zeros(count, dtype=torch.float32, device=device)
    return Partials(torch.full_like(zero, float("-inf")), zero, zero.clone())


def reduced(held: Partials, group: Any) -> Partials:
    """The same over all ranks of `group`: two all-reduces of [n] and [2, n] float32 that every rank must enter."""
    torch = sys.modules["torch"]
    distributed = torch.distributed
    with torch.no_grad():
        peak = held.max.clone()
        distributed.all_reduce(peak, op=distributed.ReduceOp.MAX, group=group)
        sums = torch.stack([held.sum_exp * (held.max - peak).exp(), held.target_logit])
        distributed.all_reduce(sums, op=distributed.ReduceOp.SUM, group=group)
        return Partials(peak, sums[0], sums[1])
