"""Cases of masked_mean: log-probabilities with a third of the tokens active, in three dtypes."""

from __future__ import annotations

from types import ModuleType

import torch

from rlk_ledger_kernels.dtypes import DType, torch_dtype
from rlk_ledger_kernels.ops.masked_mean import reference
from rlk_ledger_kernels.suite.case import Case, MaskedCase, Rows

_TOKENS = {"small": 1003, "large": 1_000_003}
_DTYPES: tuple[DType, ...] = ("float32", "bfloat16", "float16")


def cases(size: str = "small") -> list[Case]:
    """One case to a dtype."""
    return [_case(_TOKENS[size], dtype) for dtype in _DTYPES]


def _case(tokens: int, dtype: DType) -> MaskedCase:
    generator = torch.Generator().manual_seed(tokens)
    values_N = -torch.rand((tokens,), generator=generator, dtype=torch.float32).to(torch_dtype(dtype))
    mask_N = torch.rand((tokens,), generator=generator, dtype=torch.float32) < 1 / 3

    def run(module: ModuleType, operands: Rows, mask: torch.Tensor) -> torch.Tensor:
        return torch.tensor([module.masked_mean(operands[0], mask)], dtype=torch.float64)

    def expected(operands: Rows, mask: torch.Tensor) -> torch.Tensor:
        return run(reference, operands, mask).to(torch.float32)

    return MaskedCase("masked_mean", f"{tokens} tokens, {dtype}", dtype, (values_N,), mask_N, run, expected)
