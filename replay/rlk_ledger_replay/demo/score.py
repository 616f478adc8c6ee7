"""Teacher forcing: log-probabilities of given responses by full forward over right-padded micro-batches."""

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from rlk_ledger_replay.demo.exchange import Rolled
from rlk_ledger_replay.demo.network import log_softmax
from rlk_ledger_replay.demo.settings import Numerics
from rlk_ledger_replay.demo.tasks import PAD

T = TypeVar("T")


def micro_batches(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """`items` in order, `size` at a time."""
    for start in range(0, len(items), size):
        yield items[start : start + size]


def response_logprobs(network: Any, samples: Sequence[Rolled], numerics: Numerics) -> list[Tensor]:
    """Per sample the log-probability [n] (nats, head dtype) of each response token given all tokens before it.

    The entry at position j of the full sequence scores token j + 1, so a response that begins at position p is read
    from p - 1; `numerics.lag` shifts that reading.
    """
    rows = [s.prompt + s.response for s in samples]
    width = max(map(len, rows))
    padding = [width - len(row) for row in rows]
    ids = torch.tensor([row + [PAD] * pad for row, pad in zip(rows, padding)])
    mask = torch.tensor([[1] * (width - pad) + [0] * pad for pad in padding])
    hidden = network.model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
    following = torch.cat([ids[:, 1:], torch.full((len(rows), 1), PAD)], dim=1)
    out = []
    for row, sample in enumerate(samples):
        first = len(sample.prompt) - 1 + numerics.lag
        span = slice(first, first + len(sample.response))
        logprobs = log_softmax(network, hidden[row, span], numerics)
        out.append(logprobs.gather(1, following[row, span, None])[:, 0])
    return out


@torch.no_grad()
def score(network: Any, samples: Sequence[Rolled], numerics: Numerics) -> list[Tensor]:
    """`response_logprobs` in float32, without gradients."""
    return [values.float() for values in response_logprobs(network, samples, numerics)]
