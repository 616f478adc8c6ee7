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
"""Logits worked on at once: bounds the temporary memory at twice 64 MiB."""
_CPU_ELEMENTS = 1 << 19
"""The same on a CPU: what stays in its cache, and in memory the allocator keeps."""


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
    width, place = vocab[1] - vocab[0], logits.device
    with torch.no_grad():
        if width <= 0 or not targets:
            return _nothing(torch, len(targets), place)
        ids = torch.tensor(list(targets), dtype=torch.int64, device=place)
        inside = (ids >= vocab[0]) & (ids < vocab[1])
        column = (ids - vocab[0]).clamp_(0, width - 1)[:, None]
        batch = logits.shape[1]
        rows = [at * batch + span.row for span in spans for at in range(span.start, span.start + span.tokens)]
        where = torch.tensor(rows, dtype=torch.int64, device=place)
        step = max(1, (_CPU_ELEMENTS if place.type == "cpu" else ELEMENTS) // width)
        parts = [
            _block(_picked(logits, where[low : low + step])[:, :width].float(), column[low : low + step], temperature)
            for low in range(0, len(targets), step)
        ]
        peak, sums, target = (torch.cat(held) for held in zip(*parts))
        return Partials(peak, sums, target.masked_fill_(~inside, 0.0))


def _picked(logits: Any, where: Any) -> Any:
    """The rows [n, v] of logits [S, B, v] at flat places `where` (position x B + row), copied."""
    if logits.is_contiguous():
        return logits.view(-1, logits.shape[-1]).index_select(0, where)
    return logits[where // logits.shape[1], where % logits.shape[1]]


def _block(rows: Any, column: Any, temperature: float) -> tuple[Any, Any, Any]:
    """(largest logit, sum of exponentials, target logit) of float32 `rows` [n, v], which are overwritten."""
    if temperature != 1.0:
        rows /= temperature
    peak = rows.amax(dim=-1)
    target = rows.gather(1, column)[:, 0]
    rows -= peak[:, None]
    return peak, rows.exp_().sum(dim=-1), target


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
