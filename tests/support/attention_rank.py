"""One context-parallel rank: it holds the keys of its own blocks and exchanges partial results over gloo.

Usage: attention_rank.py RANK RANKS STORE OUT zigzag|contiguous
"""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))

from attention_model import drawn

from rlk_ledger_kernels.ops.attention import partials
from rlk_ledger_kernels.ops.attention.cache import KVCache
from rlk_ledger_kernels.ops.attention.contract import AttentionContract
from rlk_ledger_kernels.ops.attention.plan import Chunk, plan_attention
from rlk_ledger_kernels.ops.attention.torch import attention_partials, merge_partials
from rlk_ledger_kernels.schedule import Schedule

LENGTHS, BLOCK, HEADS = (150, 1, 67), 16, (4, 2, 16)
CONTRACT = AttentionContract(scale=0.25, schedule=Schedule(kv_block=BLOCK), window=90)


def main(rank: int, ranks: int, store: str, out: str, ownership: str) -> None:
    """Score the tokens of all ranks and save output and log-sum-exp of this one."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
    )
    counts = [-(-length // BLOCK) for length in LENGTHS]
    starts = [sum(counts[:i]) for i in range(len(counts))]
    chunks = [Chunk(0, length, range(a, a + n)) for length, a, n in zip(LENGTHS, starts, counts)]
    plan = plan_attention(chunks, CONTRACT.schedule, window=CONTRACT.window)
    cut = getattr(partials, ownership)
    owned = [[cut(count, ranks)[r] for count in counts] for r in range(ranks)]
    rows = [torch.from_numpy(partials.owned_rows(plan, blocks)) for blocks in owned]
    q, k, v = (torch.cat(parts) for parts in zip(*(drawn(i, n, *HEADS, torch.float32) for i, n in enumerate(LENGTHS))))
    # Queries live where their tokens live: gather them padded, then restore the order of the tokens.
    longest = max(len(one) for one in rows)
    mine = torch.zeros((longest, *q.shape[1:]))
    mine[: len(rows[rank])] = q[rows[rank]]
    gathered = [torch.empty_like(mine) for _ in range(ranks)]
    dist.all_gather(gathered, mine)
    back = torch.from_numpy(partials.restored_order([one.numpy() for one in rows]))
    q = torch.cat([one[: len(r)] for one, r in zip(gathered, rows)])[back]
    cache = KVCache(sum(counts), HEADS[1], BLOCK, HEADS[2])
    cache.write(k[rows[rank]], v[rows[rank]], plan, rows[rank])
    size = max(len(partials.entries(plan, blocks)[0]) for blocks in owned)
    sent = attention_partials(q, cache, plan, CONTRACT, owned[rank]).packed(size)
    received = [torch.empty_like(sent) for _ in range(ranks)]
    dist.all_gather(received, sent)
    parts = [partials.unpacked(one, plan, blocks, len(q)) for one, blocks in zip(received, owned)]
    torch.save(merge_partials(parts, plan, CONTRACT), out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:6])
