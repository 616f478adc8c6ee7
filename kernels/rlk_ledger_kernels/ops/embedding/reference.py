"""embedding, float32 reference: y[n] = table[id[n]], widened."""

from __future__ import annotations

import torch

from rlk_ledger_kernels.ops.embedding.shard import check_ids


def embedding(ids_N: torch.Tensor, table_VH: torch.Tensor) -> torch.Tensor:
    """Copy rows.

    ids_N: int64 [N] in 0..V-1. table_VH: [V, H]. Returns float32 [N, H].
    """
    check_ids(ids_N, 0, table_VH.shape[0])
    return table_VH[ids_N].to(torch.float32)


def embedding_shard(ids_N: torch.Tensor, table_SH: torch.Tensor, first: int) -> torch.Tensor:
    """Copy the rows whose ids lie in first..first+S-1; the others are zeros. Returns float32 [N, H]."""
    out_NH = torch.zeros((len(ids_N), table_SH.shape[1]), dtype=torch.float32, device=table_SH.device)
    for at, token in enumerate(ids_N.tolist()):
        if first <= token < first + table_SH.shape[0]:
            out_NH[at] = table_SH[token - first].to(torch.float32)
    return out_NH
