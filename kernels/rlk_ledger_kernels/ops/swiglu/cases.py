"""Cases of swiglu: one column, a width that is no multiple of a vector, every rounding point; large is Qwen3-8B's."""

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
    SwigluContract(activation="sigmoid"),
    SwigluContract(output="bfloat16"),
    SwigluContract(output="bfloat16", materialise="product"),
    SwigluContract(output="float16"),
)


def cases(size: str = "small") -> list[Case]:
    """The last shape under every contract, the others in the first two."""
    *others, last = _SHAPES[size]
    made: list[Case] = [_case(*last, contract) for contract in _CONTRACTS]
    return made + [_case(*shape, contract) for shape in others for contract in _CONTRACTS[:2]]


def _case(rows: int, width: int, contract: SwigluContract) -> RowCase:
    generator = torch.Generator().manual_seed(width)
    dtype = torch_dtype(contract.output)
    # Half precision leaves 1e-3, which a value above 2 cannot keep once silu(gate) was rounded.
    spread = 0.5 if contract.output == "float16" else 5
    gate, up = (torch.randn((rows, width), generator=generator, dtype=torch.float32).to(dtype) for _ in range(2))
    cotangent_I = torch.randn((width,), generator=generator, dtype=torch.float32).to(dtype)

    def run(module: ModuleType, operands: Rows) -> torch.Tensor:
        y: torch.Tensor = module.swiglu(*operands, contract)
        return y

    def gradient(module: ModuleType, operands: Rows) -> torch.Tensor:
        grad = cotangent_I.to(operands[0].device).expand(operands[0].shape)
        return torch.cat(module.swiglu_backward(grad, *operands, contract), -1)

    def expected(operands: Rows) -> torch.Tensor:
        return run(reference, operands)

    name = f"{rows} x {width}, {contract.output}, {contract.activation}, {contract.materialise}"
    return RowCase("swiglu", name, contract.output, (gate * spread, up), run, expected, gradient)
