"""Cases of linear: one leaf, several leaves, and shapes that are no multiple of any tile; large is Qwen3-8B's.

Large shapes run on a GPU, with the long leaves that a GPU wants.
"""

from __future__ import annotations

from types import ModuleType

import torch

from rlk_ledger_kernels.dtypes import DType, torch_dtype
from rlk_ledger_kernels.ops.linear import reference
from rlk_ledger_kernels.ops.linear.contract import LinearContract
from rlk_ledger_kernels.schedule import Schedule
from rlk_ledger_kernels.suite.case import Case, RowCase, Rows

_SHAPES = {
    "small": ((150, 77, 13), (130, 384, 128), (150, 1536, 96)),
    "large": ((257, 4096, 6144), (257, 4096, 12288), (257, 12288, 4096)),
}
_DTYPES: tuple[DType, ...] = ("float32", "bfloat16")


def cases(size: str = "small") -> list[Case]:
    """Every shape in float32 and bfloat16, with a bias where K is odd."""
    schedule = Schedule(k_leaf=1024) if size == "large" else Schedule()
    return [_case(*shape, dtype, schedule) for shape in _SHAPES[size] for dtype in _DTYPES]


def _case(rows: int, k: int, outputs: int, dtype: DType, schedule: Schedule) -> RowCase:
    generator = torch.Generator().manual_seed(k * outputs)
    x_NK = torch.randn((rows, k), generator=generator, dtype=torch.float32).to(torch_dtype(dtype))
    weight_OK = (torch.randn((outputs, k), generator=generator, dtype=torch.float32) * k**-0.5).to(torch_dtype(dtype))
    bias_O = torch.randn((outputs,), generator=generator, dtype=torch.float32).to(torch_dtype(dtype)) if k % 2 else None
    cotangent_O = torch.randn((outputs,), generator=generator, dtype=torch.float32)
    contract = LinearContract(output=dtype, schedule=schedule)

    def packed(module: ModuleType, device: torch.device) -> object:
        return module.pack_linear(weight_OK.to(device), contract, None if bias_O is None else bias_O.to(device))

    def run(module: ModuleType, operands: Rows) -> torch.Tensor:
        y_NO: torch.Tensor = module.linear(operands[0], packed(module, operands[0].device))
        return y_NO

    def gradient(module: ModuleType, operands: Rows) -> torch.Tensor:
        (x,) = operands
        grad_NO = cotangent_O.to(x.device).expand(len(x), -1).contiguous()
        grad_x_NK: torch.Tensor = module.linear_backward(grad_NO, x, packed(module, x.device))[0]
        return grad_x_NK

    def expected(operands: Rows) -> torch.Tensor:
        return run(reference, operands)

    name = f"{rows} x {k} -> {outputs}, {dtype}"
    return RowCase("linear", name, dtype, (x_NK,), run, expected, gradient)
