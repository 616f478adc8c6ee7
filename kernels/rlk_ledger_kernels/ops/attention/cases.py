"""Cases of attention: sequences of 1 token to several blocks, grouped heads, a window; large is Qwen3-8B's layer."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import torch

from rlk_ledger_kernels.dtypes import DType, torch_dtype
from rlk_ledger_kernels.ops.attention import reference
from rlk_ledger_kernels.ops.attention.cache import KVCache
from rlk_ledger_kernels.ops.attention.contract import AttentionContract
from rlk_ledger_kernels.ops.attention.plan import Chunk, plan_attention
from rlk_ledger_kernels.schedule import Schedule
from rlk_ledger_kernels.suite.case import Case, Feeding, Sequence_, SequenceCase
from rlk_ledger_kernels.suite.feeding import Span, feed, pages_of
from rlk_ledger_kernels.suite.layouts import whole

_SHAPES = {"small": ((4, 2, 32), (150, 1, 70)), "large": ((32, 8, 128), (1537, 1, 700))}
"""(query heads, kv heads, head dimension), lengths of the sequences."""
_VARIANTS: tuple[tuple[DType, int | None], ...] = (("float32", None), ("bfloat16", None), ("float32", 40))


def cases(size: str = "small") -> list[Case]:
    """Full attention in float32 and bfloat16, and a sliding window."""
    return [_case(size, dtype, window) for dtype, window in _VARIANTS]


def _case(size: str, dtype: DType, window: int | None) -> SequenceCase:
    (heads, kv_heads, dim), lengths = _SHAPES[size]
    generator = torch.Generator().manual_seed(heads * dim)
    sequences = [
        tuple(
            torch.randn((length, many, dim), generator=generator).to(torch_dtype(dtype))
            for many in (heads, kv_heads, kv_heads)
        )
        for length in lengths
    ]
    schedule = Schedule()
    contract = AttentionContract(scale=dim**-0.5, output=dtype, window=window, schedule=schedule)

    def run(module: ModuleType, given: Sequence[Sequence_], feeding: Feeding) -> list[torch.Tensor]:
        return _fed(module, given, feeding, contract)

    def expected(sequence: Sequence_) -> torch.Tensor:
        return run(reference, [sequence], whole(len(sequence[0])))[0]

    def gradient(module: ModuleType, given: Sequence[Sequence_]) -> list[torch.Tensor]:
        return _gradients(module, given, contract)

    sliding = "" if window is None else f", window {window}"
    name = f"{heads} over {kv_heads} heads of {dim}, {'+'.join(map(str, lengths))} tokens, {dtype}{sliding}"
    return SequenceCase("attention", name, dtype, sequences, schedule.kv_block, run, expected, gradient)


def _fed(
    module: ModuleType, sequences: Sequence[Sequence_], feeding: Feeding, contract: AttentionContract
) -> list[torch.Tensor]:
    """Per sequence float32 [T, heads x (D + 1)]: the output, which widens exactly, and the log-sum-exp."""
    block = contract.schedule.kv_block
    q_THD, k_TKD, _ = sequences[0]
    device = q_THD.device
    blocks = max(max(pages, default=0) for pages in pages_of(feeding, block)) + 1
    cache = KVCache(blocks, k_TKD.shape[1], block, q_THD.shape[2], contract.output, device=device)
    cache.keys.fill_(feeding.stale)
    cache.values[..., : cache.head_dim].fill_(feeding.stale)

    def call(spans: list[Span]) -> Sequence[torch.Tensor]:
        chunks = [Chunk(span.first, span.end - span.first, span.pages) for span in spans]
        plan = plan_attention(chunks, contract.schedule, window=contract.window).to(device)
        q, k, v = (torch.cat([sequences[s.sequence][part][s.first : s.end] for s in spans]) for part in range(3))
        cache.write(k, v, plan)
        out_NHD, lse_NH = module.attention(q, cache, plan, contract)
        both = torch.cat((out_NHD.to(torch.float32).flatten(1), lse_NH), dim=1)
        return torch.split(both, [chunk.count for chunk in chunks])

    return feed(feeding, block, call)


def _gradients(module: ModuleType, sequences: Sequence[Sequence_], contract: AttentionContract) -> list[torch.Tensor]:
    """Per sequence float32 [T, (heads + 2 kv heads) x D]: dq, dk and dv of one packed prefill."""
    block, counts = contract.schedule.kv_block, [len(sequence[0]) for sequence in sequences]
    q, k, v = (torch.cat(parts) for parts in zip(*sequences))
    pages = pages_of(whole(*counts), block)
    plan = plan_attention(
        [Chunk(0, n, page) for n, page in zip(counts, pages)], contract.schedule, window=contract.window
    )
    plan = plan.to(q.device)
    cache = KVCache(
        max(max(page) for page in pages) + 1, k.shape[1], block, q.shape[2], contract.output, device=q.device
    )
    cache.write(k, v, plan)
    out_NHD, lse_NH = module.attention(q, cache, plan, contract)
    generator = torch.Generator().manual_seed(block)
    cotangent_HD = torch.randn(q.shape[1:], generator=generator).to(q.device)
    grad_NHD, grad_lse_NH = cotangent_HD.expand_as(q).contiguous(), torch.full_like(lse_NH, 0.5)
    three = module.attention_backward(grad_NHD, grad_lse_NH, q, out_NHD, lse_NH, cache, plan, contract)
    return list(torch.split(torch.cat([part.flatten(1) for part in three], dim=1), counts))
