"""embedding, torch: an index-select. The copy is exact, so there is nothing to schedule; its gradient is a sum of
tokens along a fixed tree."""

from __future__ import annotations

import torch

from rlk_ledger_kernels.errors import OperandError
from rlk_ledger_kernels.ops.embedding.shard import check_ids
from rlk_ledger_kernels.token_sum import Adder, add_level, grouped_token_sum


def embedding(ids_N: torch.Tensor, table_VH: torch.Tensor) -> torch.Tensor:
    """Copy rows of a table: y[n] = table[id[n]].

    ids_N: int64 [N] in 0..V-1. table_VH: [V, H], any dtype. Returns [N, H] in the table's dtype.
    Raises OperandError naming the first id outside the table.
    """
    check_ids(ids_N, 0, table_VH.shape[0])
    return table_VH.index_select(0, ids_N)


def embedding_shard(ids_N: torch.Tensor, table_SH: torch.Tensor, first: int) -> torch.Tensor:
    """Copy the rows this shard owns; every other row is +0 throughout.

    ids_N: int64 [N], any rank's. table_SH: rows first..first+S-1 of the table. Returns [N, H] in the table's dtype.
    """
    size = table_SH.shape[0]
    owned_N = (ids_N >= first) & (ids_N < first + size)
    out_NH = table_SH.new_zeros((len(ids_N), table_SH.shape[1]))
    at_M = owned_N.nonzero()[:, 0]
    return out_NH.index_copy_(0, at_M, table_SH.index_select(0, ids_N.index_select(0, at_M) - first))


def embedding_backward(grad_NH: torch.Tensor, ids_N: torch.Tensor, rows: int, first: int = 0) -> torch.Tensor:
    """Gradient of the table: dtable[v] = sum of grad[n] over the tokens with id[n] = v.

    Each row's tokens are added in token order along the fixed tree of `token_sum`. rows: V, or S of a shard that
    starts at `first`; ids of other shards add nothing. Returns float32 [rows, H].
    """
    return table_gradient(grad_NH, ids_N, rows, first, add_level)


def table_gradient(grad_NH: torch.Tensor, ids_N: torch.Tensor, rows: int, first: int, add: Adder) -> torch.Tensor:
    """`embedding_backward` with the adder of a backend."""
    if grad_NH.dim() != 2 or len(grad_NH) != len(ids_N):
        raise OperandError(f"embedding_backward: the gradient is {tuple(grad_NH.shape)} for {len(ids_N)} ids")
    out_VH = torch.zeros((rows, grad_NH.shape[1]), dtype=torch.float32, device=grad_NH.device)
    at_M = ((ids_N >= first) & (ids_N < first + rows)).nonzero()[:, 0]
    if not at_M.numel():
        return out_VH
    groups_G, total_GH = grouped_token_sum(grad_NH.index_select(0, at_M), ids_N.index_select(0, at_M) - first, add)
    return out_VH.index_copy_(0, groups_G, total_GH)
