"""Arrays inside events: a dtype and immutable little-endian bytes.

A float array value never passes through a Python float, so NaN payloads and -0.0 survive. Conversion is duck-typed:
numpy arrays and torch CPU tensors give up their buffers, Python lists go through `array.array`, and nothing heavy is
imported to find out which is which.
"""

import struct
import sys
from array import array
from typing import Any

import msgspec

from rlk_ledger_schemas.errors import EventError

ITEMSIZE = {
    "uint8": 1,
    "int8": 1,
    "bool": 1,
    "float16": 2,
    "bfloat16": 2,
    "int16": 2,
    "uint16": 2,
    "int32": 4,
    "uint32": 4,
    "float32": 4,
    "int64": 8,
    "uint64": 8,
    "float64": 8,
}
_TYPECODE = {"uint8": "B", "int32": "i", "float32": "f", "int64": "q", "uint64": "Q", "float64": "d"}
_NUMPY_CODE = {"uint8": "|u1", "int32": "<i4", "float32": "<f4", "int64": "<i8", "uint64": "<u8", "float64": "<f8"}
_RANGE = {"uint8": (0, 255), "int32": (-(2**31), 2**31 - 1), "int64": (-(2**63), 2**63 - 1), "uint64": (0, 2**64 - 1)}
_numpy_dtype: dict[str, Any] = {}
"""The dtype object numpy was last seen to use for a wire dtype; numpy shares one object per native type."""
_FLOAT32_MAX = 3.4028235677973366e38
_INTEGERS = frozenset(_RANGE)


class Array(msgspec.Struct, frozen=True):
    """A one-dimensional array: `dtype` (a key of ITEMSIZE) and its little-endian `data` bytes."""

    dtype: str
    data: bytes

    def __len__(self) -> int:
        return len(self.data) // ITEMSIZE[self.dtype]

    def tolist(self) -> list[Any]:
        """The items as Python numbers (float16 and bfloat16 are not supported here; read them with numpy)."""
        items = array(_TYPECODE[self.dtype])
        items.frombytes(self.data)
        if sys.byteorder != "little":  # pragma: no cover
            items.byteswap()
        return items.tolist()


class ArraySpec(msgspec.Struct, frozen=True):
    """How an event type holds one array: wire dtype, whether it is required, whether redaction turns it into uint64."""

    dtype: str
    required: bool = False
    tokens: bool = False
    doc: str = ""


def to_array(value: Any, dtype: str, where: str) -> Array:
    """The array `value` in wire dtype `dtype`; `where` names the field in errors.

    Accepts an Array, a numpy array, a torch tensor (CUDA tensors by blocking copy), bytes-free buffers such as
    `array.array`, or a sequence of numbers. Integers are range-checked, floats are cast to the wire dtype (bfloat16
    and float16 widen exactly). Raises EventError.
    """
    kind = type(value)
    if kind is list or kind is tuple:
        return Array(dtype, _from_sequence(value, dtype, where))
    have = getattr(value, "dtype", None)
    if have is not None and have is _numpy_dtype.get(dtype) and value.ndim == 1:
        return Array(dtype, value.tobytes())
    code = getattr(have, "str", None)
    if code is not None:  # a numpy array: torch dtypes have no `str`
        if code == _NUMPY_CODE[dtype] and value.ndim == 1:
            _numpy_dtype[dtype] = have
            return Array(dtype, value.tobytes())
        return Array(dtype, _from_numpy(value, dtype, where))
    if hasattr(value, "detach"):
        value = _torch_to_numpy(value)
        if value.dtype is _numpy_dtype.get(dtype) and value.ndim == 1:
            return Array(dtype, value.tobytes())
        return Array(dtype, _from_numpy(value, dtype, where))
    if isinstance(value, array):
        return Array(dtype, _from_sequence(value.tolist(), dtype, where))
    if kind is Array:
        return _checked(value, dtype, where)
    raise EventError(
        f"`{where}` must be a list of numbers, a numpy array or a torch tensor, got {kind.__module__}.{kind.__name__}; "
        f"convert it before record()."
    )


def _checked(value: Array, dtype: str, where: str) -> Array:
    if value.dtype != dtype and not (dtype == "int32" and value.dtype == "uint64"):
        raise EventError(f"`{where}` is {dtype} on the wire, got an Array of {value.dtype}.")
    if len(value.data) % ITEMSIZE[value.dtype]:
        raise EventError(f"`{where}` has {len(value.data)} bytes, not a multiple of {ITEMSIZE[value.dtype]}.")
    return value


def _from_sequence(items: Any, dtype: str, where: str) -> bytes:
    if dtype in _INTEGERS:
        try:
            msgspec.convert(items, list[int])  # a strict type check of every item at C speed
        except (msgspec.ValidationError, TypeError):
            items = _plain_integers(items, where)
    try:
        return bytes(items) if dtype == "uint8" else struct.pack(f"<{len(items)}{_TYPECODE[dtype]}", *items)
    except (TypeError, ValueError, OverflowError, struct.error) as error:
        raise EventError(_first_bad(items, dtype, where) or f"`{where}`: {error}.") from None


def _plain_integers(items: Any, where: str) -> list[int]:
    mask = where.rpartition(".")[2] == "loss_mask"  # trainers keep masks as bools and floats
    out = []
    for i, item in enumerate(items):
        if isinstance(item, bool) and not mask:
            raise EventError(f"`{where}[{i}]` is a bool, not an int.")
        if mask and isinstance(item, float) and item.is_integer():
            item = int(item)
        if not hasattr(item, "__index__"):
            raise EventError(f"`{where}[{i}]` must be an int, got {item!r}.")
        out.append(item.__index__())
    return out


def _first_bad(items: Any, dtype: str, where: str) -> str | None:
    for i, item in enumerate(items):
        if dtype in _RANGE:
            low, high = _RANGE[dtype]
            if isinstance(item, int) and not low <= item <= high:
                return f"`{where}[{i}]` is {item}, outside {dtype} ({low} to {high})."
        elif not hasattr(item, "__float__"):
            return f"`{where}[{i}]` must be a number, got {item!r}."
        elif abs(float(item)) > _FLOAT32_MAX:
            return f"`{where}[{i}]` is {item!r}, which {dtype} cannot hold."
    return None


def _torch_to_numpy(tensor: Any) -> Any:
    """A numpy view of a torch tensor; CUDA tensors are copied and waited for."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    if not tensor.is_cpu:
        tensor = tensor.cpu()
    if tensor.dtype is sys.modules["torch"].bfloat16:
        tensor = tensor.float()
    return tensor.numpy()


def _from_numpy(value: Any, dtype: str, where: str) -> bytes:
    if value.ndim != 1:
        if value.ndim == 2 and value.shape[0] == 1:
            value = value[0]
        else:
            raise EventError(f"`{where}` must have one dimension, got shape {tuple(value.shape)}; record one sample.")
    have = value.dtype
    if have.str == _NUMPY_CODE[dtype]:
        if have.isnative:
            _numpy_dtype[dtype] = have
        return value.tobytes()  # type: ignore[no-any-return]
    if have.kind not in "iufb" or (dtype in _INTEGERS and have.kind == "f" and dtype != "uint8"):
        raise EventError(f"`{where}` is {dtype} on the wire and {have.name} does not convert to it exactly.")
    if have.kind == "b" and dtype != "uint8":
        raise EventError(f"`{where}` is {dtype} on the wire, got booleans.")
    out = _cast(value, dtype)
    if dtype in _INTEGERS and not (out == value).all():
        low, high = _RANGE[dtype]
        bad = int((out != value).argmax())
        raise EventError(f"`{where}[{bad}]` is {value[bad]}; {dtype} holds whole numbers from {low} to {high}.")
    if dtype == "float32" and have.str == "<f8" and (sys.modules["numpy"].isinf(out) & (abs(value) < 1e308)).any():
        raise EventError(f"`{where}` holds finite values that float32 cannot hold.")
    return out.tobytes()  # type: ignore[no-any-return]


def _cast(value: Any, dtype: str) -> Any:
    numpy = sys.modules["numpy"]
    with numpy.errstate(over="ignore", invalid="ignore"):
        return value.astype(_NUMPY_CODE[dtype])
