"""How much a decoded pickle holds once everything that its parts share is written out.

A pickle may name one list or one storage any number of times at two bytes each; an importer that gives every sample
arrays of its own would then make terabytes of a small file.
"""

import math
from collections.abc import Sequence
from typing import Any

from rlk_ledger_schemas.errors import FormatError

_CONTAINERS = (dict, list, tuple, set)
_PER_BYTE = 4
_FREE = 1 << 24


def check_extent(value: Any, file_bytes: int) -> None:
    """Raises FormatError where `value` holds itself, or more numbers than a dump of `file_bytes` bytes can.

    Every mention of a shared part counts. Without sharing a number takes at least a byte of the file.
    """
    if _extent(value, {}) > _PER_BYTE * file_bytes + _FREE:
        raise FormatError("it repeats its parts until they are far more than the file holds; it is not a dump.")


def _extent(value: Any, known: dict[int, int | None]) -> int:
    """Elements of `value`, one for a scalar; `known` has them by identity, None for those being counted."""
    if type(value) not in _CONTAINERS:
        return _elements(value)
    key = id(value)
    if key in known:
        found = known[key]
        if found is None:
            raise FormatError("it holds a part that holds itself; it is not a dump.")
        return found
    known[key] = None
    items: Sequence[Any] = list(value.values()) if type(value) is dict else list(value)
    plain = set(map(type, items)) <= _SCALARS
    known[key] = total = len(items) + (0 if plain else sum(_extent(item, known) for item in items))
    return total


_SCALARS = {int, float, bool, str, bytes, type(None)}


def _elements(value: Any) -> int:
    """1, or the elements of an array: whatever has a shape, or an `array` that has one."""
    shape = getattr(getattr(value, "array", value), "shape", ())
    return max(1, math.prod(shape))
