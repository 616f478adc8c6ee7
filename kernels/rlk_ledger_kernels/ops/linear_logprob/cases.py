"""Cases of linear_logprob: a hidden size and a vocabulary that fill no tile, an ignored row; large is Qwen3-8B's."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

import torch

from rlk_ledger_kernels.dtypes import torch_dtype
from rlk_ledger_kernels.ops.linear_logprob import reference
from rlk_ledger_kernels.ops.linear_logprob.contract import LogprobContract
from rlk_ledger_kernels.schedule import Schedule
from rlk_ledger_kernels.suite.case import Case, RowCase, Rows, Wrong

_SHAPES = {"small": ((131, 40, 99, 64),), "large": ((257, 4096, 151936, 1024),)}
"""(rows, hidden size, vocabulary, tile)."""

_DTYPES = {"small": ("float32", "bfloat16"), "large": ("bfloat16",)}


def cases(size: str = "small") -> list[Case]:
    """Every shape in float32 and bfloat16, at a temperature."""
    return [_case(*shape, dtype) for shape in _SHAPES[size] for dtype in _DTYPES[size]]


def wrong() -> list[Wrong]:
    """A vocabulary tile that is wider for small batches."""
    right = _case(131, 40, 99, 64, "float32")

    def run(module: ModuleType, these: Rows) -> torch.Tensor:
        return _run(module, these, 40, 99, _contract("float32", 16 if len(these[0]) < 32 else 64))

    return [Wrong("invariance", "the vocabulary tile follows the number of rows", replace(right, run=run), right)]


def _contract(dtype: str, tile: int) -> LogprobContract:
    return LogprobContract(temperature=0.7, logits="float32", ignore_index=-100, schedule=Schedule(vocab_tile=tile))


def _weight(k: int, vocabulary: int, like: torch.Tensor) -> torch.Tensor:
    weight_VK = torch.randn((vocabulary, k), generator=torch.Generator().manual_seed(k), dtype=torch.float32)
    scaled_VK: torch.Tensor = weight_VK * (3.0 * k**-0.5)
    return scaled_VK.to(like.dtype).to(like.device)


def _case(rows: int, k: int, vocabulary: int, tile: int, dtype: str) -> RowCase:
    contract = _contract(dtype, tile)
    generator = torch.Generator().manual_seed(vocabulary)
    hidden_NK = torch.randn((rows, k), generator=generator, dtype=torch.float32).to(torch_dtype(dtype))
    tokens_N = torch.randint(0, vocabulary, (rows,), generator=generator)
    tokens_N[5] = -100

    def run(module: ModuleType, these: Rows) -> torch.Tensor:
        return _run(module, these, k, vocabulary, contract)

    def expected(these: Rows) -> torch.Tensor:
        return run(reference, these)

    def gradient(module: ModuleType, these: Rows) -> torch.Tensor:
        head = module.pack_head(_weight(k, vocabulary, these[0]), contract)
        grad_N = torch.full_like(these[1], 0.75, dtype=torch.float32)
        grad_hidden_NK: torch.Tensor = module.linear_logprob_backward(grad_N, these[0], head, these[1])[0]
        return grad_hidden_NK

    name = f"{rows} x {k} x {vocabulary}, tile {tile}, {dtype}"
    return RowCase("linear_logprob", name, dtype, (hidden_NK, tokens_N), run, expected, gradient)


def _run(module: ModuleType, these: Rows, k: int, vocabulary: int, contract: LogprobContract) -> torch.Tensor:
    head = module.pack_head(_weight(k, vocabulary, these[0]), contract)
    result: torch.Tensor = module.linear_logprob(these[0], head, these[1])
    return result
