"""Where an engine rounds that the reference does not: each is off by default and imitates one practice of engines.

None of them is batch-variant: they round what the operators give, row by row. E entries, N rows, T vocabulary tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from typing import Any, Literal

import torch

from rlk_ledger_kernels.dtypes import DType, torch_dtype
from rlk_ledger_kernels.ops.attention.partials import BlockPartials

AttentionMerge = Literal["state", "output"]


def rounded(x: torch.Tensor, dtype: DType) -> torch.Tensor:
    """x rounded to `dtype` and widened again to float32."""
    return x.to(torch_dtype(dtype)).to(torch.float32)


def rounded_partials(parts: BlockPartials, how: AttentionMerge) -> BlockPartials:
    """Attention's partial results as they arrive in bfloat16.

    `state`: m, l and o are each rounded, as a split-KV workspace in bfloat16 holds them. `output`: o / l is rounded,
    l stays float32, as context-parallel ranks send a normalised output with its log-sum-exp.
    """
    if how == "state":
        m_EKM = torch.where(parts.m_EKM.isfinite(), rounded(parts.m_EKM, "bfloat16"), parts.m_EKM)
        return replace(
            parts, m_EKM=m_EKM, l_EKM=rounded(parts.l_EKM, "bfloat16"), o_EKMD=rounded(parts.o_EKMD, "bfloat16")
        )
    total_EKM1 = parts.l_EKM[..., None]
    mean_EKMD = torch.where(total_EKM1 > 0, parts.o_EKMD / total_EKM1, parts.o_EKMD)
    return replace(parts, o_EKMD=rounded(mean_EKMD, "bfloat16") * torch.where(total_EKM1 > 0, total_EKM1, 1.0))


def split_attention(
    operator: Any, q_NHD: torch.Tensor, cache: Any, plan: Any, contract: Any, how: AttentionMerge, count: int
) -> torch.Tensor:
    """Attention whose blocks meet in bfloat16; padding rows of the query come back as row 0. [P, heads, D]."""
    everything = tuple(tuple(range(len(chunk.blocks))) for chunk in plan.chunks)
    partials = operator.attention_partials(q_NHD[:count].contiguous(), cache, plan, contract, everything)
    out_NHD, _ = operator.merge_partials([rounded_partials(partials, how)], plan, contract)
    padding = q_NHD.shape[0] - count
    return out_NHD if not padding else torch.cat((out_NHD, out_NHD[:1].expand(padding, -1, -1)))


def reduced(parts_NO: Sequence[torch.Tensor], dtype: DType, bias_O: torch.Tensor | None, output: DType) -> torch.Tensor:
    """Shares of ranks rounded to `dtype` and added in it in rank order, as an all-reduce in that dtype does."""
    total_NO = reduce(lambda total, part: total + part, (part.to(torch_dtype(dtype)) for part in parts_NO))
    wide_NO = total_NO.to(torch.float32)
    return (wide_NO if bias_O is None else wide_NO + bias_O.to(torch.float32)).to(torch_dtype(output))


def merged_statistics(statistics: Any, dtype: DType) -> Any:
    """Vocabulary tiles' maxima and sums rounded to `dtype` before they meet; the chosen logit stays as it is."""
    return replace(statistics, top_NT=rounded(statistics.top_NT, dtype), sum_NT=rounded(statistics.sum_NT, dtype))
