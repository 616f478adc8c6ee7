"""Cases of embedding: a whole table and one cut into shards of unequal size; large is Qwen3-8B's."""

from __future__ import annotations

from functools import lru_cache
from types import ModuleType

import torch

from rlk_ledger_kernels.dtypes import DType, torch_dtype
from rlk_ledger_kernels.ops.embedding import reference
from rlk_ledger_kernels.ops.embedding.shard import merge_embedding
from rlk_ledger_kernels.suite.case import Case, RowCase, Rows

_SHAPES = {"small": (150, 97, 33), "large": (1025, 151936, 4096)}
_DTYPES: tuple[DType, ...] = ("float32", "bfloat16", "float16")


def cases(size: str = "small") -> list[Case]:
    """Whole and sharded, every dtype (large: bfloat16 alone, a table of 1.2 GB)."""
    dtypes = _DTYPES if size == "small" else ("bfloat16",)
    return [_case(*_SHAPES[size], dtype, cuts) for dtype in dtypes for cuts in (1, 3)]


@lru_cache(1)
def _operands(tokens: int, vocabulary: int, width: int, dtype: DType) -> tuple[torch.Tensor, torch.Tensor]:
    """The table and the ids, drawn once for all cuts: the large table takes seconds."""
    generator = torch.Generator().manual_seed(width)
    table_VH = torch.randn((vocabulary, width), generator=generator, dtype=torch.float32).to(torch_dtype(dtype))
    table_VH[0] = -0.0
    ids_N = torch.randint(0, vocabulary, (tokens,), generator=generator)
    ids_N[:2] = 0
    return table_VH, ids_N


def _case(tokens: int, vocabulary: int, width: int, dtype: DType, shards: int) -> RowCase:
    table_VH, ids_N = _operands(tokens, vocabulary, width, dtype)
    firsts = [vocabulary * rank // shards for rank in range(shards)]

    def run(module: ModuleType, operands: Rows) -> torch.Tensor:
        (ids,) = operands
        table = table_VH.to(ids.device)
        if shards == 1:
            y: torch.Tensor = module.embedding(ids, table)
            return y
        ends = (*firsts[1:], vocabulary)
        parts = [module.embedding_shard(ids, table[a:b], a) for a, b in zip(firsts, ends, strict=True)]
        return merge_embedding(parts, ids, firsts)

    def expected(operands: Rows) -> torch.Tensor:
        return reference.embedding(operands[0], table_VH.to(operands[0].device))

    name = f"{tokens} of {vocabulary} x {width} in {shards} shard(s), {dtype}"
    return RowCase("embedding", name, dtype, (ids_N,), run, expected)
