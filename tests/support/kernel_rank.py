"""One of four processes over gloo: attention and log-probabilities on its share, in the whole group and in a pair.

Usage: kernel_rank.py RANK FOLDER. Writes RANK.pt, written with torch.save: results by (operator, ranks).
"""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))

import attention_rank
import logprob_rank

from rlk_ledger_kernels.parallel.group import DistributedGroup

RANKS = 4
OWNERSHIP = {2: "contiguous", RANKS: "zigzag"}
"""Who holds which blocks of keys, by the number of ranks that share them."""


def main(rank: int, folder: Path) -> None:
    """Join the group, compute, write, leave."""
    torch.set_num_threads(1)
    meeting = f"file://{folder}/meet"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=RANKS, timeout=timedelta(seconds=60))
    pair, found = dist.new_group([0, 1]), dict[tuple[str, int], Any]()
    for ranks, group in ((RANKS, dist.group.WORLD), (2, pair)):
        if rank < ranks:
            found["attention", ranks] = attention_rank.results(rank, ranks, group, OWNERSHIP[ranks])
            found["logprob", ranks] = logprob_rank.shard_results(rank, ranks, DistributedGroup(group))
    torch.save(found, folder / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
