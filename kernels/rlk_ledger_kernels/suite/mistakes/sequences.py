"""Wrong attention: its bits depend on how a sequence was fed, packed or cached.

Shapes: T tokens of a call, S cached tokens, H heads, D of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType

import torch

from rlk_ledger_kernels.suite.case import Feeding, Sequence_, SequenceCase, Wrong
from rlk_ledger_kernels.suite.feeding import Span, feed
from rlk_ledger_kernels.suite.mistakes.plain import draw

BLOCK, HEADS, D = 16, 1, 4
LENGTHS = (41, 1, 34)


@dataclass(frozen=True)
class Habits:
    """How an attention goes about it; the defaults are right.

    kv_block: (cached tokens, sequences in the call) -> keys per partial sum. hide: minus infinity, or arithmetic.
    forgets: a shared prefix is taken for granted and its keys are not read.
    """

    kv_block: Callable[[int, int], int] = lambda cached, sequences: BLOCK
    hide: str = "infinity"
    forgets: bool = False


def sequence_mistakes() -> list[Wrong]:
    """A KV block chosen by length or by batch, a mask by arithmetic, and a cache that forgets its prefix."""
    right = _case(Habits())
    mistakes = {
        "short contexts take short KV blocks (block chosen by length)": Habits(
            lambda cached, _: 8 if cached <= 32 else 32
        ),
        "few sequences split the keys to keep more cores busy (split-KV by batch)": Habits(
            lambda _, sequences: 8 if sequences == 1 else BLOCK
        ),
        "hidden keys are multiplied by 0 after the exponential (mask by arithmetic)": Habits(hide="arithmetic"),
        "a prefix that another request cached is skipped (cache that forgets a prefix)": Habits(forgets=True),
    }
    return [Wrong("invariance", mistake, _case(habits), right) for mistake, habits in mistakes.items()]


def _case(habits: Habits) -> SequenceCase:
    sequences = [tuple(draw(10 * seed + part, n, HEADS, D) for part in range(3)) for seed, n in enumerate(LENGTHS)]

    def run(_: ModuleType, given: Sequence[Sequence_], feeding: Feeding) -> list[torch.Tensor]:
        return _attention(habits, given, feeding)

    return SequenceCase("attention", "plain sums", "float32", sequences, BLOCK, run, lambda sequence: sequence[0])


def _attention(habits: Habits, sequences: Sequence[Sequence_], feeding: Feeding) -> list[torch.Tensor]:
    device = sequences[0][0].device
    blocks = sum(-(-len(one[0]) // BLOCK) for one in sequences) + 3
    keys, values = (
        torch.full((blocks, BLOCK, HEADS, D), feeding.stale, dtype=torch.float32, device=device) for _ in range(2)
    )

    def call(spans: list[Span]) -> list[torch.Tensor]:
        for span in spans:
            position = torch.arange(span.first, span.end, device=device)
            at = (torch.tensor(span.pages, device=device)[position // BLOCK], position % BLOCK)
            _, keys[at], values[at] = (part[span.first : span.end] for part in sequences[span.sequence])
        return [_attend(habits, sequences[s.sequence][0], keys, values, s, feeding, len(spans)) for s in spans]

    return feed(feeding, BLOCK, call)


def _attend(
    habits: Habits,
    q_THD: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    span: Span,
    feeding: Feeding,
    sequences: int,
) -> torch.Tensor:
    """Online softmax over the pages of one sequence; what lies behind the last token is hidden like later tokens."""
    begin = feeding.shared[1] if habits.forgets and feeding.shared and feeding.shared[0] == span.sequence else 0
    pages = list(span.pages)[: -(-span.end // BLOCK)]
    k_SHD, v_SHD = keys[pages].flatten(0, 1), values[pages].flatten(0, 1)
    q = q_THD[span.first : span.end]
    position_T = torch.arange(span.first, span.end, device=q.device)
    top = torch.full((len(q), HEADS), float("-inf"), dtype=torch.float32, device=q.device)
    denominator, out = torch.zeros_like(top), torch.zeros_like(q)
    step = habits.kv_block(span.end, sequences)
    for start in range(begin, len(k_SHD), step):
        k, v = k_SHD[start : start + step], v_SHD[start : start + step]
        scores_TSH = torch.zeros((len(q), len(k), HEADS), dtype=torch.float32, device=q.device)
        for d in range(D):
            scores_TSH = scores_TSH + q[:, None, :, d] * k[None, :, :, d]
        hidden_TS1 = (torch.arange(start, start + len(k), device=q.device)[None] > position_T[:, None])[..., None]
        if habits.hide == "infinity":
            scores_TSH = scores_TSH.masked_fill(hidden_TS1, float("-inf"))
        new = torch.maximum(top, scores_TSH.amax(1))
        weights_TSH = (scores_TSH - new[:, None]).exp()
        if habits.hide == "arithmetic":
            weights_TSH = weights_TSH * (~hidden_TS1)
        decay = (top - new).exp()
        denominator, out = denominator * decay, out * decay[..., None]
        for s in range(len(k)):
            denominator = denominator + weights_TSH[:, s]
            out = out + weights_TSH[:, s, :, None] * v[s]
        top = new
    return out / denominator[..., None]
