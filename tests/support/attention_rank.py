"""One context-parallel rank: it holds the keys of its own blocks and exchanges partial results over gloo."""

from __future__ import annotations

import torch
import torch.distributed as dist
from attention_model import drawn

from rlk_ledger_kernels.ops.attention import partials
from rlk_ledger_kernels.ops.attention.cache import KVCache
from rlk_ledger_kernels.ops.attention.contract import AttentionContract
from rlk_ledger_kernels.ops.attention.plan import Chunk, plan_attention
from rlk_ledger_kernels.ops.attention.torch import attention_partials, merge_partials
from rlk_ledger_kernels.schedule import Schedule

LENGTHS, BLOCK, HEADS = (150, 1, 67), 16, (4, 2, 16)
CONTRACT = AttentionContract(scale=0.25, schedule=Schedule(kv_block=BLOCK), window=90)


def results(rank: int, ranks: int, group: dist.ProcessGroup, ownership: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(output, log-sum-exp) of the tokens of all ranks of the group, as this rank computes them."""
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
    dist.all_gather(gathered, mine, group)
    back = torch.from_numpy(partials.restored_order([one.numpy() for one in rows]))
    q = torch.cat([one[: len(r)] for one, r in zip(gathered, rows)])[back]
    cache = KVCache(sum(counts), HEADS[1], BLOCK, HEADS[2])
    cache.write(k[rows[rank]], v[rows[rank]], plan, rows[rank])
    size = max(len(partials.entries(plan, blocks)[0]) for blocks in owned)
    sent = attention_partials(q, cache, plan, CONTRACT, owned[rank]).packed(size)
    received = [torch.empty_like(sent) for _ in range(ranks)]
    dist.all_gather(received, sent, group)
    parts = [partials.unpacked(one, plan, blocks, len(q)) for one, blocks in zip(received, owned)]
    return merge_partials(parts, plan, CONTRACT)
