"""Cases of rms_norm: whole rows, heads with a weight each, and the residual form; large is Qwen3-8B's."""

from __future__ import annotations

from types import ModuleType

import torch

from rlk_ledger_kernels.dtypes import torch_dtype
from rlk_ledger_kernels.ops.rms_norm import reference
from rlk_ledger_kernels.ops.rms_norm.contract import RmsNormContract
from rlk_ledger_kernels.suite.case import Case, RowCase, Rows

_SHAPES: dict[str, tuple[tuple[int, ...], ...]] = {
    "small": ((150, 100), (150, 3, 33)),
    "large": ((1025, 4096), (257, 40, 128)),
}
_FLOAT32 = RmsNormContract()
_BFLOAT16 = RmsNormContract(output="bfloat16")
_KERNEL = RmsNormContract(output="bfloat16", rounding_order="kernel", normalises="unrounded")
_FLOAT16 = RmsNormContract(output="float16")


def cases(size: str = "small") -> list[Case]:
    """Rows and heads, alone and with a residual, in three dtypes and both rounding orders."""
    rows, heads = _SHAPES[size]
    alone = [_norm(rows, _FLOAT32), _norm(rows, _KERNEL), _norm(heads, _BFLOAT16), _norm(heads, _FLOAT16)]
    return [*alone, _add_norm(rows, _FLOAT32), _add_norm(rows, _BFLOAT16), _add_norm(rows, _KERNEL)]


def _operands(shape: tuple[int, ...], contract: RmsNormContract) -> tuple[torch.Tensor, ...]:
    """(x, residual, weight, cotangent)."""
    generator = torch.Generator().manual_seed(shape[-1])
    shapes = (shape, shape, shape[1:], shape[1:])
    drawn = [
        torch.randn(one, generator=generator, dtype=torch.float32).to(torch_dtype(contract.output)) for one in shapes
    ]
    return drawn[0], drawn[1], drawn[2] * 0.2 + 1, drawn[3]


def _norm(shape: tuple[int, ...], contract: RmsNormContract) -> RowCase:
    x, _, weight, cotangent = _operands(shape, contract)

    def run(module: ModuleType, operands: Rows) -> torch.Tensor:
        y: torch.Tensor = module.rms_norm(operands[0], weight.to(operands[0].device), contract)
        return y

    def gradient(module: ModuleType, operands: Rows) -> torch.Tensor:
        grad = cotangent.to(operands[0].device).expand(operands[0].shape)
        dx: torch.Tensor = module.rms_norm_backward(grad, operands[0], weight.to(grad.device), contract)[0]
        return dx

    name = f"{' x '.join(map(str, shape))}, {contract.output}, {contract.rounding_order}"
    return RowCase("rms_norm", name, contract.output, (x,), run, lambda rows: run(reference, rows), gradient)


def _add_norm(shape: tuple[int, ...], contract: RmsNormContract) -> RowCase:
    x, residual, weight, cotangent = _operands(shape, contract)

    def run(module: ModuleType, operands: Rows) -> torch.Tensor:
        return torch.cat(module.add_rms_norm(*operands, weight.to(operands[0].device), contract), -1)

    def gradient(module: ModuleType, operands: Rows) -> torch.Tensor:
        grad = cotangent.to(operands[0].device).expand(operands[0].shape)
        at = (grad, grad.flip(-1), *operands, weight.to(grad.device), contract)
        dx: torch.Tensor = module.add_rms_norm_backward(*at)[0]
        return dx

    name = f"{' x '.join(map(str, shape))} after a residual, {contract.output}, {contract.normalises} sum"
    return RowCase("rms_norm", name, contract.output, (x, residual), run, lambda rows: run(reference, rows), gradient)
