"""Cases of selected_logprob: a vocabulary that is no multiple of the tile, masked logits, ignored rows, padding."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import ModuleType

import torch

from rlk_ledger_kernels.dtypes import DType, torch_dtype
from rlk_ledger_kernels.ops.selected_logprob import reference
from rlk_ledger_kernels.ops.selected_logprob.contract import LogprobContract
from rlk_ledger_kernels.schedule import Schedule
from rlk_ledger_kernels.suite.case import Case, RowCase, Rows, Wrong

_SHAPES = {"small": ((131, 301, 64),), "large": ((257, 151936, 1024),)}
"""(rows, vocabulary, tile)."""

PADDING = 3
COTANGENT = 0.75


def cases(size: str = "small") -> list[Case]:
    """Every shape in float32 and bfloat16, at a temperature, with an ignored row and columns of padding."""
    return [_case(rows, vocabulary, tile, dtype) for rows, vocabulary, tile in _SHAPES[size] for dtype in DTYPES[size]]


DTYPES = {"small": ("float32", "bfloat16"), "large": ("bfloat16",)}


def wrong() -> list[Wrong]:
    """A vocabulary tile that is wider for small batches."""
    right = _case(131, 301, 64, "float32")

    def run(module: ModuleType, operands: Rows) -> torch.Tensor:
        tile = 16 if len(operands[0]) < 32 else 64
        return _run(_contract("float32", tile), 301, module, operands)

    return [
        Wrong("invariance", "the vocabulary tile follows the number of rows", replace(right, run=run), right),
    ]


def operands(rows: int, vocabulary: int, dtype: str) -> Rows:
    """Logits of size 30 with padding columns, some of them masked, and tokens of which one is ignored."""
    generator = torch.Generator().manual_seed(vocabulary)
    logits_NV = torch.randn((rows, vocabulary + PADDING), generator=generator, dtype=torch.float32) * 8
    logits_NV[:, :-PADDING].masked_fill_(
        torch.rand((rows, vocabulary), generator=generator, dtype=torch.float32) < 0.1, float("-inf")
    )
    tokens_N = torch.randint(0, vocabulary, (rows,), generator=generator)
    logits_NV[torch.arange(rows), tokens_N] = torch.randn(rows, generator=generator, dtype=torch.float32)
    tokens_N[5] = -100
    return logits_NV.to(torch_dtype(dtype)), tokens_N


def _contract(dtype: str, tile: int) -> LogprobContract:
    schedule = Schedule(vocab_tile=tile)
    logits: DType = "bfloat16" if dtype == "bfloat16" else "float32"
    return LogprobContract(temperature=0.7, logits=logits, ignore_index=-100, schedule=schedule)


def _case(rows: int, vocabulary: int, tile: int, dtype: str) -> RowCase:
    contract = _contract(dtype, tile)

    def expected(these: Rows) -> torch.Tensor:
        return _run(contract, vocabulary, reference, these)

    def gradient(module: ModuleType, these: Rows) -> torch.Tensor:
        grad_N = torch.full_like(these[1], COTANGENT, dtype=torch.float32)
        result: torch.Tensor = module.selected_logprob_backward(grad_N, *these, contract, vocabulary)
        return result

    return RowCase(
        "selected_logprob",
        f"{rows} x {vocabulary}, tile {tile}, {dtype}",
        dtype,
        operands(rows, vocabulary, dtype),
        partial(_run, contract, vocabulary),
        expected,
        gradient,
    )


def _run(contract: LogprobContract, vocabulary: int, module: ModuleType, these: Rows) -> torch.Tensor:
    result: torch.Tensor = module.selected_logprob(*these, contract, vocabulary)
    return result
