"""vocab_parallel_logprob, torch: the tiles of one shard, reduced as in the whole vocabulary.

Legend: N rows, S columns of a shard.
"""

from __future__ import annotations

import torch

from rlk_ledger_kernels.ops.selected_logprob.contract import LogprobContract
from rlk_ledger_kernels.ops.selected_logprob.statistics import Statistics
from rlk_ledger_kernels.ops.selected_logprob.torch import (
    columns_backward,
    columns_statistics,
    merge_statistics,
    normaliser,
)

__all__ = ["merge_statistics", "normaliser", "shard_backward", "shard_statistics"]


def shard_statistics(
    logits_NS: torch.Tensor, first: int, vocabulary: int, tokens_N: torch.Tensor, contract: LogprobContract
) -> Statistics:
    """(max, sum of exp((z - max) / temperature)) of each tile of a shard, and the chosen logit where it is owned.

    logits_NS: [N, S], columns of tokens first..first+S-1; those from `vocabulary` on are padding. tokens_N: int64 [N],
    global ids. Raises OperandError for a cut inside a vocabulary tile and for a token outside the vocabulary.
    """
    return columns_statistics(logits_NS, first, vocabulary, tokens_N, contract)


def shard_backward(
    grad_N: torch.Tensor,
    logits_NS: torch.Tensor,
    first: int,
    vocabulary: int,
    tokens_N: torch.Tensor,
    normal: tuple[torch.Tensor, torch.Tensor],
    contract: LogprobContract,
) -> torch.Tensor:
    """The gradient of a shard's logits, [N, S] in their dtype: grad / temperature * (onehot - softmax).

    normal: what `normaliser` says of the whole vocabulary. Padding columns and ignored rows are exactly 0.
    """
    return columns_backward(grad_N, logits_NS, first, vocabulary, tokens_N, normal, contract)
