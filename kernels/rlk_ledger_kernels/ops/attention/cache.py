"""A paged KV cache: blocks of `kv_block` positions in any order, float32 storage.

Values carry sixteen more columns, ones: the product with the softmax numerators then yields the running
denominator in the same sum, and the row stays a multiple of 64 bytes.
"""

from __future__ import annotations

import torch

from rlk_ledger_kernels.dtypes import DType, torch_dtype
from rlk_ledger_kernels.ops.attention.plan import AttentionPlan
from rlk_ledger_kernels.schedule import ALIGNMENT


class KVCache:
    """Keys and values of one layer.

    dtype: keys and values are rounded to it when written (a bf16 cache under float32 arithmetic is a contract
    of its own). keys: [blocks, kv heads, kv_block, D]; values: [blocks, kv heads, kv_block, D' + 16], D' being
    D rounded up to a multiple of 16.
    """

    def __init__(self, blocks: int, kv_heads: int, kv_block: int, head_dim: int, dtype: DType = "float32") -> None:
        """Allocate zeros; slots that were never written are only ever masked."""
        self.head_dim = head_dim
        self.ones_at = -(-head_dim // ALIGNMENT) * ALIGNMENT
        self.dtype = torch_dtype(dtype)
        self.keys = torch.zeros((blocks, kv_heads, kv_block, head_dim))
        self.values = torch.zeros((blocks, kv_heads, kv_block, self.ones_at + ALIGNMENT))
        self.values[..., self.ones_at :] = 1.0

    def write(self, k_NKD: torch.Tensor, v_NKD: torch.Tensor, plan: AttentionPlan) -> None:
        """Store the plan's packed rows; k_NKD, v_NKD: [N, kv heads, D], whose rows beyond the plan's are padding."""
        at = (plan.slot_block_N, slice(None), plan.slot_offset_N)
        self.keys[at] = k_NKD[: plan.rows].to(self.dtype).to(torch.float32)
        self.values[..., : self.head_dim][at] = v_NKD[: plan.rows].to(self.dtype).to(torch.float32)
