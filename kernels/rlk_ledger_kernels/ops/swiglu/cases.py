"""Cases of swiglu: one column, a width that is no multiple of a vector, both rounding points; large is Qwen3-8B's."""

from __future__ import annotations

from types import ModuleType

import torch

from rlk_ledger_kernels.dtypes import torch_dtype
from rlk_ledger_kernels.ops.swiglu import reference
from rlk_ledger_kernels.ops.swiglu.contract import SwigluContract
from rlk_ledger_kernels.suite.case import Case, RowCase, Rows

_SHAPES = {"small": ((150, 1), (150, 1001)), "large": ((1025, 12288),)}
_CONTRACTS = (
    SwigluContract(),
    SwigluContract(output="bfloat16"),
    SwigluContract(output="bfloat16", materialise="product"),
)


def cases(size: str = "small") -> list[Case]:
    """Every shape under every contract."""
    return [_case(rows, width, contract) for rows, width in _SHAPES[size] for contract in _CONTRACTS]


def _case(rows: int, width: int, contract: SwigluContract) -> RowCase:
    generator = torch.Generator().manual_seed(width)
    gate, up = (torch.randn((rows, width), generator=generator).to(torch_dtype(contract.output)) for _ in range(2))

    def run(module: ModuleType, operands: Rows) -> torch.Tensor:
        y: torch.Tensor = module.swiglu(*operands, contract)
        return y

    def expected(operands: Rows) -> torch.Tensor:
        return run(reference, operands)

    name = f"{rows} x {width}, {contract.output}, {contract.materialise}"
    return RowCase("swiglu", name, contract.output, (gate * 5, up), run, expected)
