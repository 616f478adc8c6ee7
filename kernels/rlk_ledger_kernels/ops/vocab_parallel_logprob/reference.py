"""vocab_parallel_logprob, float32 reference: one log-sum-exp per shard, then one over the shards.

Legend: N rows, S columns of a shard.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rlk_ledger_kernels.ops.selected_logprob.contract import LogprobContract
from rlk_ledger_kernels.ops.selected_logprob.statistics import Statistics, check_tokens, part_end, whole


def shard_statistics(
    logits_NS: torch.Tensor, first: int, vocabulary: int, tokens_N: torch.Tensor, contract: LogprobContract
) -> Statistics:
    """One (max, sum) for the whole shard: the meaning of its tiles, not their order.

    logits_NS: [N, S], columns of tokens first..first+S-1. tokens_N: int64 [N], global ids.
    """
    end = part_end(first, logits_NS.shape[1], vocabulary, contract)
    ignored_N = check_tokens(tokens_N, logits_NS.shape[0], vocabulary, contract)
    owned_N = (tokens_N >= first) & (tokens_N < end)
    wide_NS = logits_NS[:, : end - first].to(torch.float32)
    if end == first:
        empty_N0 = wide_NS.new_zeros((wide_NS.shape[0], 0))
        zeros_N = wide_NS.new_zeros(wide_NS.shape[0])
        return Statistics(first, end, vocabulary, empty_N0, empty_N0, zeros_N, owned_N, ignored_N)
    top_N1 = wide_NS.amax(-1, keepdim=True)
    sum_N1 = ((wide_NS - _finite(top_N1)) / contract.temperature).exp().sum(-1, keepdim=True)
    local_N1 = (tokens_N.to(torch.int64) - first).clamp(0, end - first - 1)[:, None]
    chosen_N = torch.where(owned_N, wide_NS.gather(1, local_N1)[:, 0], 0.0)
    return Statistics(first, end, vocabulary, top_N1, sum_N1, chosen_N, owned_N, ignored_N)


def normaliser(parts: Sequence[Statistics], contract: LogprobContract) -> tuple[torch.Tensor, torch.Tensor]:
    """(largest logit, sum of exp((z - largest) / temperature)) of each row, float32 [N]."""
    ordered = whole(parts)
    top_NT = torch.cat([part.top_NT for part in ordered], dim=1)
    sum_NT = torch.cat([part.sum_NT for part in ordered], dim=1)
    top_N1 = top_NT.amax(-1, keepdim=True)
    weight_NT = ((top_NT - _finite(top_N1)) / contract.temperature).exp()
    return top_N1[:, 0], (sum_NT * weight_NT).sum(-1)


def merge_statistics(parts: Sequence[Statistics], contract: LogprobContract) -> torch.Tensor:
    """(chosen - max) / temperature - log(sum), float32 [N]; +0 for ignored rows."""
    top_N, total_N = normaliser(parts, contract)
    chosen_N = torch.full_like(top_N, float("nan"))
    for part in parts:
        chosen_N = torch.where(part.owned_N, part.chosen_N, chosen_N)
    logprob_N = (chosen_N - top_N) / contract.temperature - total_N.log()
    return torch.where(parts[0].ignored_N, 0.0, logprob_N)


def shard_backward(
    grad_N: torch.Tensor,
    logits_NS: torch.Tensor,
    first: int,
    vocabulary: int,
    tokens_N: torch.Tensor,
    normal: tuple[torch.Tensor, torch.Tensor],
    contract: LogprobContract,
) -> torch.Tensor:
    """The gradient of a shard's logits, float32 [N, S]: grad / temperature * (onehot - softmax)."""
    end = part_end(first, logits_NS.shape[1], vocabulary, contract)
    ignored_N = check_tokens(tokens_N, logits_NS.shape[0], vocabulary, contract)
    top_N, total_N = normal
    wide_NS = logits_NS[:, : end - first].to(torch.float32)
    share_NS = ((wide_NS - _finite(top_N)[:, None]) / contract.temperature).exp() / total_N[:, None]
    column_S = torch.arange(first, end, device=logits_NS.device)
    onehot_NS = (column_S == tokens_N[:, None]).to(torch.float32)
    out_NS = torch.zeros(logits_NS.shape, dtype=torch.float32, device=logits_NS.device)
    out_NS[:, : end - first] = (onehot_NS - share_NS) * (grad_N.to(torch.float32) / contract.temperature)[:, None]
    return torch.where(ignored_N[:, None], 0.0, out_NS)


def _finite(top: torch.Tensor) -> torch.Tensor:
    return torch.where(top == float("-inf"), 0.0, top)
