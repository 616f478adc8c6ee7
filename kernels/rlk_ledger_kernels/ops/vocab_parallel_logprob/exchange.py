"""What the ranks of a vocabulary-parallel group tell each other: the statistics of their shards, bytes unchanged.

Legend: N rows, T vocabulary tiles of a shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from rlk_ledger_kernels.ops.selected_logprob.statistics import Statistics
from rlk_ledger_kernels.parallel.group import Group


def gather_statistics(parts: Sequence[Statistics], tokens_N: torch.Tensor, group: Group) -> list[Statistics]:
    """The statistics of every rank's shard, in rank order.

    parts: one per rank held by this process. tokens_N: int64 [N], the same on every rank. Two exchanges: where shards
    lie and how many tiles they have, then one float32 [2T + 1, N] block per rank.
    """
    device = tokens_N.device
    bounds = [torch.tensor([[p.first, p.end, p.top_NT.shape[1]]], device=device) for p in parts]
    told = [one[0].tolist() for one in group.all_gather(bounds, [1] * group.size, "global_vocab_shard_index")]
    blocks = [torch.cat((p.top_NT.T, p.sum_NT.T, p.chosen_N[None])).contiguous() for p in parts]
    gathered = group.all_gather(blocks, [2 * tiles + 1 for _, _, tiles in told], "global_vocab_shard_index")
    return [
        replace(
            parts[0],
            first=first,
            end=end,
            top_NT=block[:tiles].T.contiguous(),
            sum_NT=block[tiles : 2 * tiles].T.contiguous(),
            chosen_N=block[2 * tiles],
            owned_N=(tokens_N >= first) & (tokens_N < end),
        )
        for (first, end, tiles), block in zip(told, gathered, strict=True)
    ]
