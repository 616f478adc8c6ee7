"""embedding, torch: an index-select. The copy is exact, so there is nothing to schedule."""

from __future__ import annotations

import torch

from rlk_ledger_kernels.errors import OperandError


def embedding(ids_N: torch.Tensor, table_VH: torch.Tensor) -> torch.Tensor:
    """Copy rows of a table.

    ids_N: int64 [N] in 0..V-1. table_VH: [V, H], any dtype. Returns [N, H] in the table's dtype.
    Raises OperandError naming the first id outside the table.
    """
    outside = (ids_N < 0) | (ids_N >= table_VH.shape[0])
    if bool(outside.any()):
        at = int(outside.nonzero()[0, 0])
        raise OperandError(f"embedding: token id {int(ids_N[at])} at row {at} is outside 0..{table_VH.shape[0] - 1}")
    return table_VH.index_select(0, ids_N)
