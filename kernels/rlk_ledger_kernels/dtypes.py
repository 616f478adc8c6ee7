"""Names of the dtypes a contract may speak of, as strings, so that it can be written into an event as it stands."""

from __future__ import annotations

from typing import Literal

import torch

from rlk_ledger_kernels.errors import ContractError

DType = Literal["float32", "bfloat16", "float16"]

_TORCH = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a contract's dtype name; raises ContractError for any other name."""
    try:
        return _TORCH[name]
    except KeyError:
        raise ContractError(f"dtype {name!r} has no contract; choose one of {', '.join(_TORCH)}") from None


def one_of(where: str, value: object, allowed: tuple[str, ...]) -> None:
    """Raise ContractError naming the field when `value` is not one of `allowed`."""
    if value not in allowed:
        raise ContractError(f"{where} is {value!r}; choose one of {', '.join(allowed)}")
