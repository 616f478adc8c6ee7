"""The statistics of a vocabulary shard as one tensor that can be sent, and back. T tiles of the shard, N rows."""

from __future__ import annotations

import torch

from rlk_ledger_kernels.ops.selected_logprob.statistics import Statistics


def packed_statistics(part: Statistics) -> torch.Tensor:
    """float32 [2 T + 3, N]: the maxima, the sums, the chosen logit, and the two flags as 0 or 1."""
    flags_2N = torch.stack((part.owned_N, part.ignored_N)).to(torch.float32)
    return torch.cat((part.top_NT.T, part.sum_NT.T, part.chosen_N[None], flags_2N)).contiguous()


def unpacked_statistics(packed: torch.Tensor, span: tuple[int, int], vocabulary: int) -> Statistics:
    """What `packed_statistics` sent; span: [first, end) of the token ids of the shard it came from."""
    tiles = (packed.shape[0] - 3) // 2
    return Statistics(
        first=span[0],
        end=span[1],
        vocabulary=vocabulary,
        top_NT=packed[:tiles].T.contiguous(),
        sum_NT=packed[tiles : 2 * tiles].T.contiguous(),
        chosen_N=packed[2 * tiles],
        owned_N=packed[2 * tiles + 1] > 0,
        ignored_N=packed[2 * tiles + 2] > 0,
    )
