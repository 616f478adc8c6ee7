"""What numpy puts into a pickle - arrays, dtypes, scalars - rebuilt from plain bytes, without numpy's own functions.

A pickle makes an empty array first and fills it later, so an array here is a `LateArray` whose `array` is set by then.
"""

import math
import re
from typing import Any

import numpy as np
import numpy.typing as npt

from rlk_ledger.importers.pickles import Buildable, Function
from rlk_ledger_schemas.errors import FormatError

_MAX_DIMENSIONS = 16


class LateDType(Buildable):
    """A plain numeric dtype: its code such as `f4`, and its byte order once it is known."""

    __slots__ = ("code", "order")

    def __init__(self, code: str) -> None:
        self.code = code
        self.order = "<"

    def build(self, state: Any) -> None:
        """Takes numpy's state tuple, of which only the byte order matters for plain numbers."""
        if type(state) is not tuple or len(state) < 2 or state[1] not in ("<", ">", "|", "="):
            raise FormatError("it describes a numpy dtype that is no plain number.")
        self.order = state[1]

    def dtype(self) -> np.dtype[Any]:
        """The numpy dtype."""
        return np.dtype(self.code).newbyteorder(self.order)  # type: ignore[arg-type]


class LateArray(Buildable):
    """A numpy array of plain numbers, read-only; empty until the pickle fills it."""

    __slots__ = ("array",)

    def __init__(self) -> None:
        self.array: npt.NDArray[Any] = np.empty(0)

    def build(self, state: Any) -> None:
        """Takes (version, shape, dtype, Fortran order, bytes); raises FormatError where they do not fit each other."""
        if type(state) is not tuple or len(state) != 5:
            raise FormatError("it describes a numpy array without a proper state.")
        _, shape, late, fortran, data = state
        if type(late) is not LateDType or type(data) is not bytes or type(shape) is not tuple:
            raise FormatError("it describes a numpy array of something other than plain numbers.")
        if len(shape) > _MAX_DIMENSIONS or any(type(n) is not int or n < 0 for n in shape):
            raise FormatError("it describes a numpy array with an impossible shape.")
        dtype = late.dtype()
        if math.prod(shape) * dtype.itemsize != len(data):
            raise FormatError(f"it describes a numpy array of shape {shape} with {len(data)} bytes.")
        self.array = np.frombuffer(data, dtype).reshape(shape, order="F" if fortran else "C")


def _dtype(code: Any, _align: Any = False, _copy: Any = False) -> LateDType:
    if type(code) is not str or re.fullmatch(r"b1|[iu][1248]|f[248]", code) is None:
        raise FormatError(f"it describes the numpy dtype {str(code)[:40]!r}, which is no plain number.")
    return LateDType(code)


def _reconstruct(_class: Any = None, _shape: Any = None, _code: Any = None) -> LateArray:
    return LateArray()


def _scalar(late: Any, data: Any) -> Any:
    if type(late) is not LateDType or type(data) is not bytes or len(data) != late.dtype().itemsize:
        raise FormatError("it describes a numpy scalar of something other than a plain number.")
    return np.frombuffer(data, late.dtype())[0].item()


def _encode(text: Any, encoding: Any = None) -> bytes:
    """How protocol 2 writes bytes: text and `latin1`."""
    if type(text) is not str or encoding not in ("latin1", "latin-1"):
        raise FormatError("it encodes text other than as protocol 2 writes bytes.")
    return text.encode("latin-1")


def _empty() -> bytes:
    """How protocol 2 writes no bytes at all."""
    return b""


_CORES = ("numpy.core.multiarray", "numpy._core.multiarray")

NUMPY_NAMES: dict[str, Any] = {
    "numpy.ndarray": None,
    "numpy.dtype": Function("dtype", _dtype),
    "_codecs.encode": Function("encode", _encode),
    "builtins.bytes": Function("bytes", _empty),
    **{f"{core}._reconstruct": Function("_reconstruct", _reconstruct) for core in _CORES},
    **{f"{core}.scalar": Function("scalar", _scalar) for core in _CORES},
}
"""What `numpy` in a pickle stands for."""
