"""Cases of attention: sequences of 1 token to several blocks, grouped heads, a window; large is Qwen3-8B's layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import ModuleType

import torch

from rlk_ledger_kernels.dtypes import DType, torch_dtype
from rlk_ledger_kernels.ops.attention import reference
from rlk_ledger_kernels.ops.attention.cache import KVCache
from rlk_ledger_kernels.ops.attention.contract import AttentionContract
from rlk_ledger_kernels.ops.attention.partials import contiguous
from rlk_ledger_kernels.ops.attention.plan import AttentionPlan, Chunk, plan_attention
from rlk_ledger_kernels.schedule import Schedule
from rlk_ledger_kernels.suite.case import Case, Feeding, Sequence_, SequenceCase, Wrong
from rlk_ledger_kernels.suite.feeding import Span, feed, pages_of
from rlk_ledger_kernels.suite.layouts import whole


@dataclass(frozen=True)
class _Shape:
    """heads: query heads, kv heads, head dimension. lengths: of the sequences. dtype: of operands, cache and output.

    tensor_cores: the scale is applied to the score and the weights are rounded to dtype.
    """

    heads: tuple[int, int, int]
    lengths: tuple[int, ...]
    dtype: DType
    window: int | None = None
    tensor_cores: bool = False


_LENGTHS = (150, 1, 70)
_SHAPES = {
    "small": (
        _Shape((4, 2, 32), _LENGTHS, "float32"),
        _Shape((4, 2, 32), _LENGTHS, "bfloat16"),
        _Shape((8, 2, 16), _LENGTHS, "float16", None, True),
        _Shape((4, 2, 32), _LENGTHS, "float32", 40),
        _Shape((3, 3, 6), _LENGTHS, "float32", 70),
        _Shape((8, 1, 16), _LENGTHS, "bfloat16", 40, True),
    ),
    "large": (
        _Shape((32, 8, 128), (1537, 1, 700), "float32"),
        _Shape((32, 8, 128), (4096, 1, 700), "bfloat16", None, True),
        _Shape((32, 8, 128), (4096, 1, 700), "bfloat16", 1024, True),
    ),
}


def cases(size: str = "small") -> list[Case]:
    """Full attention and a sliding window, 1 to 8 query heads to a kv head, in three dtypes."""
    return [_case(shape) for shape in _SHAPES[size]]


def wrong() -> list[Wrong]:
    """Two context-parallel ranks whose normalised outputs and log-sum-exps are averaged."""
    right = _case(_SHAPES["small"][0])
    contract = AttentionContract(scale=_SHAPES["small"][0].heads[2] ** -0.5)

    def run(module: ModuleType, given: Sequence[Sequence_], feeding: Feeding) -> list[torch.Tensor]:
        return _fed(_MeanOfRanks(module), given, feeding, contract)

    return [Wrong("accuracy", "ranks average what each normalised (mean of rank LSEs)", replace(right, run=run), right)]


class _MeanOfRanks:
    """A backend that computes each half of the blocks rightly and merges the halves wrongly."""

    def __init__(self, module: ModuleType) -> None:
        self.module = module

    def attention(
        self, q_NHD: torch.Tensor, cache: KVCache, plan: AttentionPlan, contract: AttentionContract
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What `attention` returns where one rank holds everything; a mean over the ranks that hold something else."""
        results = []
        for rank in range(2):
            owned = [contiguous(len(chunk.blocks), 2)[rank] for chunk in plan.chunks]
            others = [contiguous(len(chunk.blocks), 2)[1 - rank] for chunk in plan.chunks]
            mine = self.module.attention_partials(q_NHD, cache, plan, contract, owned)
            rest = self.module.attention_partials(q_NHD, cache, plan, contract, others)
            rest.m_EKM.fill_(float("-inf"))
            rest.l_EKM.zero_()
            rest.o_EKMD.zero_()
            results.append(self.module.merge_partials([mine, rest], plan, contract))
        (out_a, lse_a), (out_b, lse_b) = results
        one_N1 = (lse_a == float("-inf")) | (lse_b == float("-inf"))
        lse = torch.where(one_N1, torch.maximum(lse_a, lse_b), (lse_a + lse_b) / 2)
        return torch.where(one_N1[..., None], out_a + out_b, (out_a + out_b) / 2), lse


def _case(shape: _Shape) -> SequenceCase:
    (heads, kv_heads, dim), lengths, dtype, window = shape.heads, shape.lengths, shape.dtype, shape.window
    generator = torch.Generator().manual_seed(heads * dim)
    sequences = [
        tuple(
            torch.randn((length, many, dim), generator=generator, dtype=torch.float32).to(torch_dtype(dtype))
            for many in (heads, kv_heads, kv_heads)
        )
        for length in lengths
    ]
    schedule = Schedule()
    contract = AttentionContract(
        scale=dim**-0.5,
        output=dtype,
        window=window,
        schedule=schedule,
        scale_at="score" if shape.tensor_cores else "query",
        weights=dtype if shape.tensor_cores else "float32",
    )

    def run(module: ModuleType, given: Sequence[Sequence_], feeding: Feeding) -> list[torch.Tensor]:
        return _fed(module, given, feeding, contract)

    def expected(sequence: Sequence_) -> torch.Tensor:
        return run(reference, [sequence], whole(len(sequence[0])))[0]

    def gradient(module: ModuleType, given: Sequence[Sequence_]) -> list[torch.Tensor]:
        return _gradients(module, given, contract)

    sliding = "" if window is None else f", window {window}"
    sliding += ", for tensor cores" if shape.tensor_cores else ""
    name = f"{heads} over {kv_heads} heads of {dim}, {'+'.join(map(str, lengths))} tokens, {dtype}{sliding}"
    return SequenceCase("attention", name, dtype, sequences, schedule.kv_block, run, expected, gradient)


def _fed(
    module: ModuleType | _MeanOfRanks, sequences: Sequence[Sequence_], feeding: Feeding, contract: AttentionContract
) -> list[torch.Tensor]:
    """Per sequence float32 [T, heads x (D + 1)]: the output, which widens exactly, and the log-sum-exp."""
    block = contract.schedule.kv_block
    q_THD, k_TKD, _ = sequences[0]
    device = q_THD.device
    blocks = max(max(pages, default=0) for pages in pages_of(feeding, block)) + 1
    cache = _cache(blocks, k_TKD, contract)
    stale = torch.tensor(feeding.stale, device=device)  # rounded, where a number would be refused, to the cache's dtype
    cache.keys.copy_(stale)
    cache.values[..., : cache.head_dim].copy_(stale)

    def call(spans: list[Span]) -> Sequence[torch.Tensor]:
        chunks = [Chunk(span.first, span.end - span.first, span.pages) for span in spans]
        plan = plan_attention(chunks, contract.schedule, window=contract.window).to(device)
        q, k, v = (torch.cat([sequences[s.sequence][part][s.first : s.end] for s in spans]) for part in range(3))
        cache.write(k, v, plan)
        out_NHD, lse_NH = module.attention(q, cache, plan, contract)
        both = torch.cat((out_NHD.to(torch.float32).flatten(1), lse_NH), dim=1)
        return torch.split(both, [chunk.count for chunk in chunks])

    return feed(feeding, block, call)


def _cache(blocks: int, k_TKD: torch.Tensor, contract: AttentionContract) -> KVCache:
    """A cache in the contract's dtype, stored wide on a CPU."""
    device = k_TKD.device
    block, kv_heads, dim = contract.schedule.kv_block, *k_TKD.shape[1:]
    return KVCache(blocks, kv_heads, block, dim, contract.output, device=device, wide=device.type == "cpu")


def _gradients(module: ModuleType, sequences: Sequence[Sequence_], contract: AttentionContract) -> list[torch.Tensor]:
    """Per sequence float32 [T, (heads + 2 kv heads) x D]: dq, dk and dv of one packed prefill."""
    block, counts = contract.schedule.kv_block, [len(sequence[0]) for sequence in sequences]
    q, k, v = (torch.cat(parts) for parts in zip(*sequences))
    pages = pages_of(whole(*counts), block)
    plan = plan_attention(
        [Chunk(0, n, page) for n, page in zip(counts, pages)], contract.schedule, window=contract.window
    )
    plan = plan.to(q.device)
    cache = _cache(max(max(page) for page in pages) + 1, k, contract)
    cache.write(k, v, plan)
    out_NHD, lse_NH = module.attention(q, cache, plan, contract)
    generator = torch.Generator().manual_seed(block)
    cotangent_HD = torch.randn(q.shape[1:], generator=generator, dtype=torch.float32).to(q.device)
    grad_NHD, grad_lse_NH = cotangent_HD.expand_as(q).contiguous(), torch.full_like(lse_NH, 0.5)
    three = module.attention_backward(grad_NHD, grad_lse_NH, q, out_NHD, lse_NH, cache, plan, contract)
    return list(torch.split(torch.cat([part.flatten(1) for part in three], dim=1), counts))
