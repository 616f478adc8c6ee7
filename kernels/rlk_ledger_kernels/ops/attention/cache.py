"""A paged KV cache: blocks of `kv_block` positions in any order, stored wide (float32) or in its own dtype.

Wide values carry sixteen more columns, ones: the product with the softmax numerators then yields the running
denominator in the same sum, and the row stays a multiple of 64 bytes. A narrow cache is widened when read.
"""

from __future__ import annotations

import torch

from rlk_ledger_kernels.dtypes import DType, torch_dtype
from rlk_ledger_kernels.ops.attention.plan import AttentionPlan
from rlk_ledger_kernels.schedule import ALIGNMENT


class KVCache:
    """Keys and values of one layer.

    dtype: keys and values are rounded to it when written (a bf16 cache under float32 arithmetic is a contract
    of its own). wide: store float32 whatever the dtype, which no bit depends on and the torch backend is fastest
    with; a cache in device memory is better narrow. keys: [blocks, kv heads, kv_block, D]; values: the same, and
    when wide [blocks, kv heads, kv_block, D' + 16], D' being D rounded up to a multiple of 16.
    """

    def __init__(
        self,
        blocks: int,
        kv_heads: int,
        kv_block: int,
        head_dim: int,
        dtype: DType | torch.dtype = "float32",
        *,
        device: torch.device | str = "cpu",
        wide: bool = True,
    ) -> None:
        """Allocate zeros; slots that were never written are only ever masked."""
        self.head_dim = head_dim
        self.ones_at = -(-head_dim // ALIGNMENT) * ALIGNMENT
        self.dtype = dtype if isinstance(dtype, torch.dtype) else torch_dtype(dtype)
        self.wide = wide
        stored = torch.float32 if wide else self.dtype
        self.keys = torch.zeros((blocks, kv_heads, kv_block, head_dim), dtype=stored, device=device)
        columns = self.ones_at + ALIGNMENT if wide else head_dim
        self.values = torch.zeros((blocks, kv_heads, kv_block, columns), dtype=stored, device=device)
        if wide:
            self.values[..., self.ones_at :] = 1.0

    def write(
        self, k_NKD: torch.Tensor, v_NKD: torch.Tensor, plan: AttentionPlan, rows_W: torch.Tensor | None = None
    ) -> None:
        """Store the plan's packed rows; k_NKD, v_NKD: [N, kv heads, D], whose rows beyond the plan's are padding.

        rows_W: the packed rows that k_NKD and v_NKD hold, where a rank holds only some; None means all.
        """
        block_N, offset_N = plan.slot_block_N, plan.slot_offset_N
        if rows_W is not None:
            block_N, offset_N = block_N[rows_W], offset_N[rows_W]
        at = (block_N, slice(None), offset_N)
        self.keys[at] = k_NKD[: len(block_N)].to(self.dtype).to(self.keys.dtype)
        self.values[..., : self.head_dim][at] = v_NKD[: len(block_N)].to(self.dtype).to(self.values.dtype)

    def read_keys(self, blocks_A: torch.Tensor) -> torch.Tensor:
        """Float32 keys of these cache blocks, [A, kv heads, kv_block, D]."""
        return self.keys.index_select(0, blocks_A).to(torch.float32)

    def read_values(self, blocks_A: torch.Tensor) -> torch.Tensor:
        """Float32 values of these cache blocks with their columns of ones, [A, kv heads, kv_block, D' + 16]."""
        stored = self.values.index_select(0, blocks_A)
        if self.wide:
            return stored
        columns = torch.zeros((*stored.shape[:3], self.ones_at + ALIGNMENT), dtype=torch.float32, device=stored.device)
        columns[..., : self.head_dim] = stored
        columns[..., self.ones_at :] = 1.0
        return columns
