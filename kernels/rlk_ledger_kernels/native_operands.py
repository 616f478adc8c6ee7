"""What the backends made of other projects' kernels share: finding the kernels, and refusing what they cannot keep.

Nothing here is imported before a native backend runs, and no native library before it is asked for a kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any, NoReturn

import torch

from rlk_ledger_kernels.dtypes import torch_dtype
from rlk_ledger_kernels.errors import BackendError, ContractError, OperandError
from rlk_ledger_kernels.native_backends import ENABLE


def library(name: str, module: str) -> ModuleType:
    """Import `module` of the native library `name`; raises BackendError that says what would enable it."""
    try:
        return import_module(module)
    except Exception as error:  # a broken build of another project may raise anything when it is imported
        first = str(error).partition("\n")[0]
        raise BackendError(f"{name}: {module} cannot be imported here ({first}); {ENABLE[name]}") from error


def function(name: str, module: ModuleType | object, attribute: str) -> Any:
    """One function of a native library; raises BackendError when this build lacks it."""
    try:
        return getattr(module, attribute)
    except (AttributeError, RuntimeError) as error:  # torch.ops answers an unknown name with either
        raise BackendError(f"{name}: this build has no {attribute}; {ENABLE[name]}") from error


def same_dtype(where: str, output: str, *operands: torch.Tensor) -> None:
    """Native kernels read and write one dtype; raises for operands, or a contract's output, of another."""
    found = {operand.dtype for operand in operands}
    if len(found) > 1:
        names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in found))
        raise OperandError(f"{where}: all operands must have one dtype, got {names}; cast them, or choose torch")
    (dtype,) = found
    if torch_dtype(output) != dtype:
        raise ContractError(
            f"{where}: the kernel writes {str(dtype).removeprefix('torch.')}, the contract's output is {output}; "
            "choose the torch or the triton backend"
        )


def on_cuda(name: str, where: str, operand: torch.Tensor) -> None:
    """Raises BackendError unless the operand lies on a CUDA device."""
    if operand.device.type != "cuda":
        raise BackendError(f"{where}: {name} has kernels for cuda only, the operand is on {operand.device}")


def refused(name: str, operator: str, function_name: str) -> Callable[..., NoReturn]:
    """A function of an operator's surface that a native library has no kernel for; calling it raises ContractError."""

    def refuse(*operands: object, **options: object) -> NoReturn:
        raise ContractError(f"{operator}: {name} has no kernel for {function_name}; choose the torch or triton backend")

    refuse.__name__ = refuse.__qualname__ = function_name
    return refuse
