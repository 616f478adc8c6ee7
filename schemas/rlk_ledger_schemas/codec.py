"""An event's bytes: payload, leaf, and back.

    payload = u32 envelope length | envelope | u16 array count | arrays in name order
    array   = u8 name length | name | u8 dtype length | dtype | u64 byte length | bytes
    leaf    = SHA-256(0x00 | u32 envelope length | envelope | arrays in name order:
                      u8 name length | name | u8 dtype length | dtype | u64 item count | SHA-256(bytes))

All integers are little-endian. The envelope is hashed as the recorder wrote it.
"""

import functools
import hashlib
import struct
from typing import Any

import msgspec

from rlk_ledger_schemas.arrays import ITEMSIZE, Array
from rlk_ledger_schemas.errors import FormatError

_U16 = struct.Struct("<H")
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
pack_u32 = _U32.pack
NO_ARRAYS = _U16.pack(0)
_sha256 = hashlib.sha256
_decode = msgspec.msgpack.Decoder().decode


def encode_payload(envelope: bytes, arrays: dict[str, Array]) -> bytes:
    """The payload of one event."""
    if not arrays:
        return pack_u32(len(envelope)) + envelope + NO_ARRAYS
    parts = [_U32.pack(len(envelope)), envelope, _U16.pack(len(arrays))]
    for name in sorted(arrays) if len(arrays) > 1 else arrays:
        array = arrays[name]
        data = array.data
        parts += (_head(name, array.dtype), _U64.pack(len(data)), data)
    return b"".join(parts)


def decode_payload(payload: bytes | memoryview) -> tuple[bytes, dict[str, Array]]:
    """(envelope, arrays) of one payload; raises FormatError when the lengths do not add up."""
    data = payload if type(payload) is bytes else bytes(payload)
    total = len(data)
    try:
        (size,) = _U32.unpack_from(data)
        at = 4 + size
        envelope = data[4:at]
        (count,) = _U16.unpack_from(data, at)
        at += 2
        arrays: dict[str, Array] = {}
        for _ in range(count):
            end = at + 1 + data[at]
            name = data[at + 1 : end].decode()
            at, end = end, end + 1 + data[end]
            dtype = data[at + 1 : end].decode()
            (nbytes,) = _U64.unpack_from(data, end)
            at = end + 8 + nbytes
            if at > total:
                raise IndexError(f"{nbytes} bytes wanted at {end + 8}, {total - end - 8} left")
            if dtype not in ITEMSIZE or nbytes % ITEMSIZE[dtype]:
                raise FormatError(f"an array of {dtype!r} with {nbytes} bytes is not possible.")
            arrays[name] = Array(dtype, data[end + 8 : at])
    except (struct.error, IndexError, UnicodeDecodeError) as error:
        raise FormatError(f"payload of {total} bytes ends early or is garbled ({error}).") from None
    if at != total or len(arrays) != count or (count > 1 and list(arrays) != sorted(arrays)):
        raise FormatError(f"payload has {total} bytes, its contents end at {at}, or its arrays are out of order.")
    return envelope, arrays


def leaf_hash(envelope: bytes, arrays: dict[str, Array]) -> bytes:
    """The 32-byte leaf of one event."""
    parts = [b"\0", _U32.pack(len(envelope)), envelope]
    for name in sorted(arrays) if len(arrays) > 1 else arrays:
        array = arrays[name]
        data = array.data
        parts += (_head(name, array.dtype), _U64.pack(len(data) // ITEMSIZE[array.dtype]), _sha256(data).digest())
    return _sha256(b"".join(parts)).digest()


def decode_envelope(envelope: bytes) -> dict[str, Any]:
    """The envelope as a dict, unknown fields kept; raises FormatError."""
    try:
        fields = _decode(envelope)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise FormatError(f"envelope of {len(envelope)} bytes is not msgpack ({error}).") from None
    if type(fields) is not dict or type(fields.get("type")) is not str:
        raise FormatError("envelope is not a map with a `type`.")
    return fields


@functools.lru_cache(1024)
def _head(name: str, dtype: str) -> bytes:
    n, d = name.encode(), dtype.encode()
    return bytes((len(n),)) + n + bytes((len(d),)) + d
