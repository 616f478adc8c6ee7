"""The numeric contract of vocab_parallel_logprob is that of selected_logprob: a shard rounds where the whole does."""

from __future__ import annotations

from rlk_ledger_kernels.ops.selected_logprob.contract import LogprobContract

__all__ = ["LogprobContract"]
