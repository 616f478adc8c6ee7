"""A batch's log-probabilities as flat columns of active tokens, from whatever a trainer holds them in.

Padded `[samples, positions]` arrays and tensors, packed one-dimensional ones with `lengths`, and lists of one sequence
a sample, mixed as they come. Active tokens are selected where the values are (on the device), so only they are copied.
numpy is used when the process has it loaded; without it the columns are `array.array`.
"""

import sys
from array import array
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import msgspec

from rlk_ledger_schemas.errors import UsageError

_NO_NUMBERS = frozenset({bool, str, bytes})


class Columns(msgspec.Struct, frozen=True):
    """Active tokens of one batch, samples one after the other.

    `rollout` and `training` hold float32 values (numpy array or `array("f")`), NaN where nothing was given;
    `missing` the indices of those, per side. `counts` is the number of active tokens of each sample and `row(i)` the
    response positions of sample i's active tokens.
    """

    rollout: Any
    training: Any
    missing: tuple[list[int], list[int]]
    counts: list[int]
    row: Callable[[int], list[int]]


def columns(rollout: Any, training: Any, mask: Any = None, lengths: Any = None) -> Columns:
    """The columns of a batch; raises UsageError where the sides or the mask do not have the same shape.

    rollout, training: log-probabilities in nats. mask: 1 where a token enters the loss, default everywhere. lengths:
    tokens of each sample, for values packed into one dimension. Where a mask is given a side may end early: what it
    lacks is missing.
    """
    np = sys.modules.get("numpy")
    if np is not None and lengths is None and _is_matrix(rollout) and _is_matrix(training):
        return _from_matrices(np, rollout, training, mask)
    sides = [_rows(side, lengths, what) for side, what in ((rollout, "rollout"), (training, "training"))]
    masks = None if mask is None else _rows(mask, lengths, "mask")
    if len(sides[0]) != len(sides[1]) or (masks is not None and len(masks) != len(sides[0])):
        told = f"rollout {len(sides[0])}, training {len(sides[1])}" + (f", mask {len(masks)}" if masks else "")
        raise UsageError(f"diagnose: the sides have different numbers of samples ({told}).")
    return _from_rows(np, sides[0], sides[1], masks)


def _is_matrix(value: Any) -> bool:
    return getattr(value, "ndim", None) == 2


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "detach")


def _host(value: Any) -> Any:
    """A tensor's values as a numpy array; its memory is shared where dtype and device allow. Others as they are."""
    if not _is_tensor(value):
        return value
    value = value.detach()
    if value.is_floating_point():
        value = value.float()
    return value.cpu().numpy()


def _float32(np: Any, value: Any) -> Any:
    """A float32 array of what are numbers; raises UsageError for truths, texts, times and complex numbers."""
    value = np.asarray(value)
    if value.dtype.kind not in "fiu":
        raise UsageError(f"diagnose: log-probabilities are floating-point numbers, got an array of {value.dtype}.")
    with np.errstate(over="ignore", invalid="ignore"):
        return value.astype(np.float32, copy=False)


def _from_matrices(np: Any, rollout: Any, training: Any, mask: Any) -> Columns:
    shape = tuple(rollout.shape)
    for what, value in (("training", training), ("mask", mask)):
        if value is not None and tuple(getattr(value, "shape", ())) != shape:
            have = tuple(value.shape) if hasattr(value, "shape") else type(value).__name__
            raise UsageError(f"diagnose: rollout has shape {shape}, {what} {have}; give all of them one shape.")
    given = [v for v in (rollout, training, mask) if v is not None]
    if not all(map(_is_tensor, given)) or len({str(v.device) for v in given}) > 1:
        rollout, training, mask = (_host(v) for v in (rollout, training, mask))
    rollout, training = (v.detach() if _is_tensor(v) else v for v in (rollout, training))
    if mask is None:
        flat = [_float32(np, _host(v)).reshape(-1) for v in (rollout, training)]
        return Columns(flat[0], flat[1], ([], []), [shape[1]] * shape[0], lambda i: list(range(shape[1])))
    active = mask != 0
    chosen = [_float32(np, _host(v[active])) for v in (rollout, training)]
    counts = active.sum(1).tolist()
    return Columns(chosen[0], chosen[1], ([], []), counts, lambda i: _on(active[i]))


def _rows(value: Any, lengths: Any, what: str) -> list[Any]:
    """One sequence a sample."""
    if _is_matrix(value):
        return list(_host(value))
    if getattr(value, "ndim", None) == 1:
        value = _host(value)
        flat = True
    elif isinstance(value, array):
        flat = True
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        flat = len(value) > 0 and _is_number(value[0])
    else:
        raise UsageError(
            f"diagnose: {what} must be an array, a tensor or a list of one sequence a sample, got "
            f"{type(value).__module__}.{type(value).__name__}."
        )
    if not flat:
        return list(value)
    if lengths is None:
        return [value]
    sizes = [int(n) for n in (lengths.tolist() if hasattr(lengths, "tolist") else lengths)]
    if any(n < 0 for n in sizes) or sum(sizes) != len(value):
        raise UsageError(f"diagnose: lengths add up to {sum(sizes)}, {what} has {len(value)} entries.")
    out, at = [], 0
    for size in sizes:
        out.append(value[at : at + size])
        at += size
    return out


def _is_number(value: Any) -> bool:
    return value is None or (hasattr(value, "__float__") and getattr(value, "ndim", 0) == 0)


def _from_rows(np: Any, rollout: list[Any], training: list[Any], masks: list[Any] | None) -> Columns:
    parts: tuple[list[Any], list[Any]] = ([], [])
    missing: tuple[list[int], list[int]] = ([], [])
    rows: list[list[int] | range] = []
    at = 0
    for i in range(len(rollout)):
        row = _positions(None if masks is None else masks[i], rollout[i], training[i], i)
        rows.append(row)
        vector, absent = _vector(np, rollout[i], row, i)
        for side, values in enumerate((rollout[i], training[i])):
            if values is not rollout[i]:
                vector, absent = _vector(np, values, row, i)
            parts[side].append(vector)
            missing[side].extend(at + k for k in absent)
        at += len(row)
    flat = [_joined(np, part) for part in parts]
    return Columns(flat[0], flat[1], missing, [len(row) for row in rows], lambda i: list(rows[i]))


def _positions(mask: Any, rollout: Any, training: Any, sample: int) -> "list[int] | range":
    """The active response positions of a sample."""
    sizes = [_length(side, sample) for side in (rollout, training)]
    if mask is None:
        if sizes[0] != sizes[1]:
            raise UsageError(f"diagnose: sample {sample} has {sizes[0]} rollout and {sizes[1]} training values.")
        return range(sizes[0])
    items = _host(mask)
    size = _length(items, sample)
    if max(sizes) > size:
        raise UsageError(f"diagnose: sample {sample} has {max(sizes)} values for a mask of {size}.")
    return _on(items)


def _on(mask: Any) -> list[int]:
    """Where a one-dimensional mask is not zero."""
    mask = _host(mask)
    if hasattr(mask, "nonzero"):
        return list(mask.nonzero()[0].tolist())
    return [k for k, on in enumerate(mask) if on]


def _length(values: Any, sample: int) -> int:
    wrong = isinstance(values, str | bytes | bytearray | Mapping | Set)
    if wrong or getattr(values, "ndim", 1) != 1 or not hasattr(values, "__len__"):
        raise UsageError(f"diagnose: sample {sample} must be one sequence of numbers, got {type(values).__name__}.")
    return len(values)


def _vector(np: Any, values: Any, row: "list[int] | range", sample: int) -> tuple[Any, list[int]]:
    """The values at the positions of `row` as float32, and which of them (by index in `row`) are missing."""
    values = _host(values)
    size = len(values)
    tail = [k for k, position in enumerate(row) if position >= size] if row and row[-1] >= size else []
    try:
        if np is not None and hasattr(values, "dtype") and values.dtype.kind != "O":
            return _picked(np, _float32(np, values), row, tail), tail
        picked = [values[position] for position in row[: len(row) - len(tail)]]
        absent = [k for k, value in enumerate(picked) if value is None] + tail
        if not _NO_NUMBERS.isdisjoint(map(type, picked)):
            raise TypeError("a truth or a text")
        for k in absent:
            picked[k : k + 1] = [float("nan")]  # appends past the end, where the tail is
        return (_float32(np, picked) if np is not None else array("f", picked)), absent
    except (TypeError, ValueError) as error:
        raise UsageError(f"diagnose: sample {sample} holds what is no number ({error}).") from None


def _picked(np: Any, vector: Any, row: "list[int] | range", tail: list[int]) -> Any:
    if len(row) == len(vector) and not tail:
        return vector
    out = np.full(len(row), np.nan, np.float32)
    kept = len(row) - len(tail)
    out[:kept] = vector[np.array(row[:kept], np.int64)]
    return out


def _joined(np: Any, parts: list[Any]) -> Any:
    if np is not None:
        return np.concatenate(parts) if parts else np.empty(0, np.float32)
    out = array("f")
    for part in parts:
        out.extend(part)
    return out
