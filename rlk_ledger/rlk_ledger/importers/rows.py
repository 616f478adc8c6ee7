"""Checked access to what a file holds: every length and type is looked at before a value is believed."""

import math
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from rlk_ledger.importers.model import Ids, Mask, Values
from rlk_ledger.importers.numpy_pickles import LateArray
from rlk_ledger.importers.torch_files import Tensor
from rlk_ledger_schemas.errors import FormatError

_INT32 = np.iinfo(np.int32)
_FLOAT32_MAX = float(np.finfo(np.float32).max)


class Row:
    """A mapping of a file. `where` names it in errors, such as `samples[3]`."""

    def __init__(self, value: Any, where: str) -> None:
        if type(value) is not dict:
            raise FormatError(f"{where} is a {type(value).__name__}, not a mapping.")
        self.value: dict[str, Any] = value
        self.where = where

    def __contains__(self, name: str) -> bool:
        return self.value.get(name) is not None

    def get(self, name: str) -> Any:
        """The value as it is in the file, None where it is absent."""
        return self.value.get(name)

    def fail(self, problem: str) -> FormatError:
        """A FormatError about this row."""
        return FormatError(f"{self.where}: {problem}")

    def count(self, name: str) -> int:
        """A whole number from 0 on; raises FormatError."""
        value = self.maybe_count(name)
        if value is None:
            raise self.fail(f"`{name}` is missing.")
        return value

    def maybe_count(self, name: str) -> int | None:
        """`count`, or None where the field is absent."""
        value = self.value.get(name)
        if value is None:
            return None
        if type(value) is not int or not 0 <= value < 2**63:
            raise self.fail(f"`{name}` must be a whole number from 0 on, got {shown(value)}.")
        return value

    def maybe_text(self, name: str) -> str | None:
        """A name of 1 to 512 characters, or None where it is absent or empty."""
        value = self.value.get(name)
        if value is None or value == "":
            return None
        if type(value) is not str or len(value) > 512 or not _is_text(value):
            raise self.fail(f"`{name}` must be a short text, got {shown(value)}.")
        return value

    def maybe_number(self, name: str) -> float | None:
        """A finite number, or None for anything else a framework keeps there (a mapping of rewards, a NaN)."""
        value = self.value.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            return None
        return float(value)

    def rows(self, name: str) -> list[Any]:
        """A list; raises FormatError."""
        value = self.value.get(name)
        if not isinstance(value, list | tuple):
            raise self.fail(f"`{name}` must be a list, got {shown(value)}.")
        return list(value)

    def ids(self, name: str) -> Ids:
        """Token ids as int32[n]; raises FormatError."""
        items = vector(self.value.get(name), f"{self.where}: `{name}`", whole=True)
        if items.size and not (_INT32.min <= items.min() and items.max() <= _INT32.max):
            raise self.fail(f"`{name}` holds a token id that does not fit 32 bits.")
        return items.astype(np.int32)

    def mask(self, name: str, length: int) -> Mask:
        """0 and 1 (bools and whole floats too) as uint8[length]; raises FormatError."""
        items = vector(self.value.get(name), f"{self.where}: `{name}`", whole=None)
        self._fits(name, items, length)
        if not np.isin(items, (0, 1)).all():
            raise self.fail(f"`{name}` must hold 0 and 1 only.")
        return items.astype(np.uint8)

    def values(self, name: str, length: int) -> Values:
        """Log-probabilities as float32[length], NaN where the file has null; raises FormatError."""
        items = vector(self.value.get(name), f"{self.where}: `{name}`", whole=False)
        self._fits(name, items, length)
        if items.dtype == np.float64 and (np.isfinite(items) & (np.abs(items) > _FLOAT32_MAX)).any():
            raise self.fail(f"`{name}` holds a number that does not fit 32 bits.")
        return items.astype(np.float32)

    def nulls(self, name: str, length: int) -> npt.NDArray[np.bool_]:
        """Where a list of the file holds null (bool[length])."""
        value = self.value.get(name)
        if type(value) is not list or None not in value:
            return np.zeros(length, np.bool_)
        return np.array([item is None for item in value], np.bool_)

    def _fits(self, name: str, items: npt.NDArray[Any], length: int) -> None:
        if len(items) != length:
            raise self.fail(f"`{name}` has {len(items)} entries for {length} tokens.")


def vector(value: Any, where: str, whole: bool | None) -> npt.NDArray[Any]:
    """A list, tensor or numpy array of numbers in one dimension.

    `whole`: True for integers, False for floats (null becomes NaN), None for masks (integers, bools, floats). Raises
    FormatError.
    """
    if isinstance(value, Tensor | LateArray):
        shape = value.shape if isinstance(value, Tensor) else value.array.shape
        if len(shape) != 1:
            raise FormatError(f"{where} has shape {tuple(shape)}; one dimension was expected.")
        items = value.numpy() if isinstance(value, Tensor) else value.array
        kinds = {True: "iu", False: "f", None: "iubf"}[whole]
        if items.dtype.kind not in kinds:
            raise FormatError(f"{where} has dtype {items.dtype}.")
        return items
    if type(value) not in (list, tuple):
        raise FormatError(f"{where} must be a list of numbers, got {shown(value)}.")
    expected: Any = {True: list[int], False: list[float | None], None: list[bool | int | float]}[whole]
    try:
        checked = msgspec.convert(value, expected)
        return np.array(checked, {True: np.int64, False: np.float64, None: np.float64}[whole])
    except (msgspec.ValidationError, TypeError, ValueError, OverflowError):
        what = "whole numbers" if whole else "numbers"
        raise FormatError(f"{where} must be a list of {what}; it holds something else.") from None


def shown(value: Any) -> str:
    """A value in an error: short, whatever it is."""
    if isinstance(value, dict | list | tuple | set | bytes):
        return f"a {type(value).__name__} of {len(value)}"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > 1 << 64:
        return "a huge integer"
    text = repr(value) if isinstance(value, str | int | float | bool | None) else type(value).__name__
    return "nothing" if value is None else text if len(text) <= 60 else text[:57] + "..."


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeError:
        return False
    return True
