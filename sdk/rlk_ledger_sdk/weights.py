"""Digests of live tensors: `sum64x2`, equal bit for bit to `rlk_ledger_schemas.fingerprints.sum64x2`.

Per canonical tensor two sums mod 2^64 of c_k(name, flat index) x bits(w). Integer sums do not depend on order, so any
shard, order or device gives the same value and partials add. It finds accidents, not adversaries.

numpy arrays use uint64, and so do torch tensors on the CPU where numpy is loaded, because numpy is several times faster
there. Other torch tensors use int64, whose products and sums wrap to the same bits; right shifts are masked because
int64 shifts copy the sign. All work through the array's own module: nothing is imported.
"""

import sys
from collections.abc import Mapping
from typing import Any

from rlk_ledger_schemas.errors import UsageError
from rlk_ledger_schemas.fingerprints import GOLDEN64, MASK64, sum64x2_digest, sum64x2_seeds

CHUNK = 1 << 20
"""Elements worked on at once: bounds the temporary memory at a few times 8 MiB."""
_BLOCK = 1 << 15
"""Elements worked on at once by numpy: its temporaries stay in the cache and are never given back to the system."""
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_SHIFTS = (30, 27, 31)


def sum64x2(name: str, tensor: Any, start: int = 0) -> tuple[int, int]:
    """The pair of sums of one tensor (numpy array or torch tensor, any shape) under its canonical name.

    `start` is the flat index of its first element, for a shard that is a contiguous flat range. Raises UsageError for
    anything that is not an array of 1, 2, 4 or 8 byte elements.
    """
    sums_of, flat, size, chunk = _adapter(name, tensor)
    seeds = sum64x2_seeds(name)
    totals = (0, 0)
    for low in range(0, size, chunk):
        totals = _plus(totals, sums_of(flat[low : low + chunk], _counters(seeds, start + low)))
    return totals


def sum64x2_columns(name: str, tensor: Any, start: int, width: int) -> tuple[int, int]:
    """The pair of sums of a 2-D part [rows, columns] of a tensor whose full rows have `width` elements.

    `start` is the flat index of the part's first element in the whole tensor; row r of the part begins at
    start + r x width. Raises UsageError like `sum64x2`.
    """
    rows, columns = tensor.shape
    if columns == width:
        return sum64x2(name, tensor, start)
    sums_of, flat, size, chunk = _adapter(name, tensor)
    seeds = sum64x2_seeds(name)
    totals = (0, 0)
    step = max(1, chunk // max(1, columns))
    for low in range(0, rows if size else 0, step):
        part = flat[low * columns : (low + step) * columns]
        totals = _plus(totals, sums_of(part, _counters(seeds, start + low * width), columns, width))
    return totals


def state_digest(tensors: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
    """(digest of all, digest of each) of named tensors, as `sum64x2:<32 hex>`; raises UsageError."""
    if not isinstance(tensors, Mapping):
        kind = type(tensors)
        raise UsageError(f"weights: give a mapping of names to tensors, got {kind.__module__}.{kind.__name__}.")
    pairs = {name: sum64x2(name, tensor) for name, tensor in tensors.items()}
    return sum64x2_digest(pairs.values()), {name: sum64x2_digest([pair]) for name, pair in pairs.items()}


def _counters(seeds: tuple[int, int], index: int) -> tuple[int, int]:
    """What splitmix64 counts from at flat index `index`, for both sums."""
    step = (index + 1) * GOLDEN64
    return (seeds[0] + step) & MASK64, (seeds[1] + step) & MASK64


def _plus(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    return (one[0] + other[0]) & MASK64, (one[1] + other[1]) & MASK64


def _adapter(name: str, tensor: Any) -> tuple[Any, Any, int, int]:
    """(function from a chunk of bits and both first counters to both sums, the flat bits, their number, chunk size)."""
    if hasattr(tensor, "detach"):
        flat, size = _torch_bits(name, tensor)
        if flat.device.type != "cpu" or "numpy" not in sys.modules:
            return _torch_sums, flat, size, CHUNK
        return _numpy_sums, flat.numpy().view(f"<u{flat.element_size()}"), size, _BLOCK
    if hasattr(tensor, "__array_interface__") and hasattr(tensor, "view"):
        return (_numpy_sums, *_numpy_bits(name, tensor), _BLOCK)
    kind = type(tensor)
    raise UsageError(
        f"weights: {name!r} must be a numpy array or a torch tensor, got {kind.__module__}.{kind.__name__}."
    )


def _numpy_bits(name: str, tensor: Any) -> tuple[Any, int]:
    numpy = sys.modules["numpy"]
    width = tensor.dtype.itemsize
    if width not in (1, 2, 4, 8) or tensor.dtype.kind in "OSUMmc":
        raise UsageError(f"weights: {name!r} is {tensor.dtype}, whose elements are not 1, 2, 4 or 8 bytes of a number.")
    flat = numpy.ascontiguousarray(tensor, dtype=tensor.dtype.newbyteorder("<")).reshape(-1)
    return flat.view(f"<u{width}"), flat.size


def _numpy_sums(bits: Any, counters: tuple[int, int], columns: int = 0, width: int = 0) -> tuple[int, int]:
    numpy = sys.modules["numpy"]
    u64 = numpy.uint64
    with numpy.errstate(over="ignore"):
        steps = numpy.arange(bits.size, dtype=u64)
        if columns:
            steps += steps // u64(columns) * u64(width - columns)
        steps *= u64(GOLDEN64)
        words = bits.astype(u64)
        shifted = numpy.empty_like(words)
        sums = []
        for counter in counters:
            z = steps + u64(counter)
            for shift, multiplier in zip(_SHIFTS, _MULTIPLIERS):
                z ^= numpy.right_shift(z, u64(shift), out=shifted)
                z *= u64(multiplier)
            z ^= numpy.right_shift(z, u64(_SHIFTS[2]), out=shifted)
            z *= words
            sums.append(int(z.sum(dtype=u64)))
    return sums[0], sums[1]


def _torch_bits(name: str, tensor: Any) -> tuple[Any, int]:
    torch = sys.modules["torch"]
    views = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    width = tensor.element_size()
    if width not in views or tensor.is_complex():
        raise UsageError(f"weights: {name!r} is {tensor.dtype}, whose elements are not 1, 2, 4 or 8 bytes of a number.")
    flat = tensor.detach().reshape(-1).contiguous()
    return flat.view(views[width]), flat.numel()


def _torch_sums(bits: Any, counters: tuple[int, int], columns: int = 0, width: int = 0) -> tuple[int, int]:
    torch = sys.modules["torch"]
    steps = torch.arange(bits.numel(), dtype=torch.int64, device=bits.device)
    if columns:
        steps += steps.div(columns, rounding_mode="floor") * (width - columns)
    steps *= _signed(GOLDEN64)
    words = bits.to(torch.int64)
    if bits.element_size() < 8:
        words &= (1 << (8 * bits.element_size())) - 1  # a tensor of its own: narrower bits were converted
    sums = []
    for counter in counters:
        z = steps + _signed(counter)
        for shift, multiplier in zip(_SHIFTS, _MULTIPLIERS):
            z ^= _logical_shift(z, shift)
            z *= _signed(multiplier)
        z ^= _logical_shift(z, _SHIFTS[2])
        z *= words
        sums.append(z.sum())
    low, high = torch.stack(sums).tolist()  # one wait for the device
    return low & MASK64, high & MASK64


def _logical_shift(z: Any, shift: int) -> Any:
    return (z >> shift).bitwise_and_((1 << (64 - shift)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
