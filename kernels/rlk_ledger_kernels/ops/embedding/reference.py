"""embedding, float32 reference: y[n] = table[id[n]], widened."""

from __future__ import annotations

import torch


def embedding(ids_N: torch.Tensor, table_VH: torch.Tensor) -> torch.Tensor:
    """Copy rows.

    ids_N: int64 [N] in 0..V-1. table_VH: [V, H]. Returns float32 [N, H].
    """
    return table_VH[ids_N].to(torch.float32)
