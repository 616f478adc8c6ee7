"""Cases of rope: both styles, part of a head, tables in half precision; large is Qwen3-8B's queries."""

from __future__ import annotations

from types import ModuleType

import torch

from rlk_ledger_kernels.dtypes import torch_dtype
from rlk_ledger_kernels.ops.rope import reference
from rlk_ledger_kernels.ops.rope.contract import RopeContract
from rlk_ledger_kernels.ops.rope.table import frequencies, rope_table
from rlk_ledger_kernels.suite.case import Case, RowCase, Rows

_SHAPES = {"small": (150, 3, 34), "large": (1025, 32, 128)}
_POSITIONS = {"small": 300, "large": 40960}
_CONTRACTS = (
    RopeContract(),
    RopeContract(style="interleaved", rotary=16),
    RopeContract(table="bfloat16", arithmetic="bfloat16"),
    RopeContract(rotary=16, output="bfloat16"),
    RopeContract(table="float16", output="float16", style="interleaved"),
)


def cases(size: str = "small") -> list[Case]:
    """Every contract; positions are operands, so that a row takes its own along."""
    return [_case(_SHAPES[size], _POSITIONS[size], contract) for contract in _CONTRACTS]


def _case(shape: tuple[int, int, int], positions: int, contract: RopeContract) -> RowCase:
    generator = torch.Generator().manual_seed(shape[-1])
    dtype = torch_dtype(contract.output_dtype)
    x_NHD = torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype)
    cotangent_HD = torch.randn(shape[1:], generator=generator, dtype=torch.float32).to(dtype)
    positions_N = torch.randint(0, positions, shape[:1], generator=generator)
    frequencies_F = frequencies(contract.rotary or shape[-1], 1e6)
    table = rope_table(frequencies_F, positions, contract)
    # The reference reads the exact table: rounding it is part of the contract under test.
    exact = rope_table(frequencies_F, positions, RopeContract(style=contract.style, rotary=contract.rotary))

    def run(module: ModuleType, operands: Rows) -> torch.Tensor:
        x, at = operands
        y: torch.Tensor = module.rope(x, table.to(x.device).at(at), contract)
        return y

    def expected(operands: Rows) -> torch.Tensor:
        x, at = operands
        return reference.rope(x, exact.to(x.device).at(at), contract)

    def gradient(module: ModuleType, operands: Rows) -> torch.Tensor:
        x, at = operands
        grad = cotangent_HD.to(x.device).expand(x.shape)
        dx: torch.Tensor = module.rope_backward(grad, table.to(x.device).at(at), contract)
        return dx

    part = "" if contract.rotary is None else f", first {contract.rotary}"
    name = f"{' x '.join(map(str, shape))}, {contract.style}{part}, {contract.arithmetic} to {contract.output_dtype}"
    return RowCase("rope", name, contract.output_dtype, (x_NHD, positions_N), run, expected, gradient)
