"""vocab_parallel_logprob, Triton: the kernels of selected_logprob on one shard; its tiles are the vocabulary's tiles.

Legend: N rows, S columns of a shard.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rlk_ledger_kernels.dtypes import torch_dtype
from rlk_ledger_kernels.ops.selected_logprob import triton as kernels
from rlk_ledger_kernels.ops.selected_logprob.contract import LogprobContract
from rlk_ledger_kernels.ops.selected_logprob.statistics import Statistics, check_tokens, part_end, whole


def shard_statistics(
    logits_NS: torch.Tensor, first: int, vocabulary: int, tokens_N: torch.Tensor, contract: LogprobContract
) -> Statistics:
    """(max, sum of exp((z - max) / temperature)) of each tile of a shard, and the chosen logit where it is owned.

    logits_NS: [N, S], columns of tokens first..first+S-1; those from `vocabulary` on are padding. tokens_N: int64 [N],
    global ids. Raises OperandError for a cut inside a vocabulary tile and for a token outside the vocabulary.
    """
    end = part_end(first, logits_NS.shape[1], vocabulary, contract)
    ignored_N = check_tokens(tokens_N, logits_NS.shape[0], vocabulary, contract)
    owned_N = (tokens_N >= first) & (tokens_N < end)
    top_NT, sum_NT = kernels.tile_statistics(logits_NS, first, end, contract)
    chosen_N = torch.zeros(logits_NS.shape[0], dtype=torch.float32, device=logits_NS.device)
    if end > first:
        local_N = (tokens_N.to(torch.int64) - first).clamp(0, end - first - 1)
        found_N = logits_NS.gather(1, local_N[:, None])[:, 0].to(torch_dtype(contract.logits)).to(torch.float32)
        chosen_N = torch.where(owned_N, found_N, chosen_N)
    return Statistics(first, end, vocabulary, top_NT, sum_NT, chosen_N, owned_N, ignored_N)


def normaliser(parts: Sequence[Statistics], contract: LogprobContract) -> tuple[torch.Tensor, torch.Tensor]:
    """(largest logit, sum of exp((z - largest) / temperature)) of each row over a whole vocabulary, float32 [N]."""
    return _merged(parts, contract)[1:]


def merge_statistics(parts: Sequence[Statistics], contract: LogprobContract) -> torch.Tensor:
    """(chosen - max) / temperature - log(sum), from the parts of one vocabulary in any order; float32 [N].

    Raises OperandError when the parts leave a gap, overlap or disagree about the vocabulary.
    """
    score_N = _merged(parts, contract)[0]
    return torch.where(parts[0].ignored_N, 0.0, score_N)


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
    return kernels.columns_backward(grad_N, logits_NS, first, vocabulary, tokens_N, normal, contract)


def _merged(parts: Sequence[Statistics], contract: LogprobContract) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ordered = whole(parts)
    top_NT = torch.cat([part.top_NT for part in ordered], dim=1)
    sum_NT = torch.cat([part.sum_NT for part in ordered], dim=1)
    chosen_N = torch.full_like(ordered[0].chosen_N, float("nan"))
    for part in ordered:
        chosen_N = torch.where(part.owned_N, part.chosen_N, chosen_N)
    return kernels.merged(top_NT, sum_NT, chosen_N, None, contract, ordered[0].vocabulary)
