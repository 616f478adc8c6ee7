"""The numeric contract of linear_logprob is that of selected_logprob; `head` is what it adds."""

from __future__ import annotations

from rlk_ledger_kernels.ops.selected_logprob.contract import LogprobContract

__all__ = ["LogprobContract"]
