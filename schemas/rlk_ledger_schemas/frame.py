"""Spool bytes: the file header and the frame.

    header = magic "RLKSPOOL" | u16 format | u16 reserved | u32 header length H | u32 CRC32C of the JSON |
             JSON (RFC 8785) | zeros up to H, a multiple of 64
    frame  = u32 payload length | u32 CRC32C(writer id bytes | u32 file number | u64 offset | payload) | payload |
             zeros to a multiple of 8

The length word is stored last: a frame is there or it is not. A length of 0 means nothing was written yet.
"""

import struct
from collections.abc import Iterator
from typing import Any

import google_crc32c
import msgspec

from rlk_ledger_schemas.errors import FormatError
from rlk_ledger_schemas.fingerprints import canonical_json

MAGIC = b"RLKSPOOL"
FORMAT = 1
FRAME_HEAD = 8
_HEADER = struct.Struct("<8sHHII")
_FRAME = struct.Struct("<II")
_U64 = struct.Struct("<Q")
extend = google_crc32c.extend


class SpoolHeader(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Who writes a spool file and for which ledger; `first_seq` is the sequence number of its first frame.

    `locked`: the writer holds an exclusive `flock` on its directory for as long as it lives.
    """

    writer_id: str
    run_id: str
    ledger_url: str
    file_number: int
    first_seq: int
    pid: int
    process_start: str
    host: str
    boot_id: str
    redaction: str = "none"
    redaction_key_id: str | None = None
    ledger_id: str | None = None
    consistency: str = "off"
    roles: dict[str, int] | None = None
    opened_wall_us: int = 0
    locked: bool = False


def encode_header(header: SpoolHeader) -> bytes:
    """The header block of a spool file; its length is a multiple of 64."""
    body = canonical_json(msgspec.to_builtins(header))
    size = -(-(_HEADER.size + len(body)) // 64) * 64
    return (_HEADER.pack(MAGIC, FORMAT, 0, size, extend(0, body)) + body).ljust(size, b"\0")


def decode_header(data: bytes | memoryview) -> tuple[SpoolHeader, int]:
    """(header, its length) of a spool file; raises FormatError."""
    if len(data) < _HEADER.size:
        raise FormatError(f"spool file of {len(data)} bytes is shorter than a header.")
    magic, version, _, size, crc = _HEADER.unpack_from(data)
    if magic != MAGIC:
        raise FormatError("not a spool file: the magic bytes are missing.")
    if version != FORMAT:
        raise FormatError(f"spool format {version}; this reader knows format {FORMAT}. Use a newer rlk-ledger.")
    body = bytes(data[_HEADER.size : size]).rstrip(b"\0")
    if len(data) < size or extend(0, body) != crc:
        raise FormatError("the spool header is damaged (its checksum does not match).")
    try:
        return msgspec.json.decode(body, type=SpoolHeader), size
    except (msgspec.MsgspecError, RecursionError) as error:
        raise FormatError(f"the spool header does not decode ({error}).") from None


def crc_seed(writer_id: str, file_number: int) -> int:
    """The CRC32C of what is constant over one file; frames extend it."""
    return int(extend(0, bytes.fromhex(writer_id) + struct.pack("<I", file_number)))


def frame_size(payload_length: int) -> int:
    """Bytes a frame takes in the file."""
    return (FRAME_HEAD + payload_length + 7) & ~7


def frame_crc(seed: int, offset: int, payload: bytes) -> int:
    """The checksum of a frame at `offset`."""
    return int(extend(extend(seed, _U64.pack(offset)), payload))


def read_frame(data: Any, offset: int, seed: int, base: int = 0) -> bytes | None:
    """The payload at `data[offset]`, or None where no valid frame stands; `base` is the file offset of `data[0]`."""
    if offset + FRAME_HEAD > len(data):
        return None
    length, crc = _FRAME.unpack_from(data, offset)
    end = offset + FRAME_HEAD + length
    if length == 0 or end > len(data):
        return None
    payload = bytes(data[offset + FRAME_HEAD : end])
    return payload if frame_crc(seed, base + offset, payload) == crc else None


def read_frames(data: Any, offset: int, seed: int, base: int = 0) -> Iterator[tuple[int, bytes]]:
    """(offset in `data`, payload) of every frame of the longest valid prefix from `offset`."""
    while (payload := read_frame(data, offset, seed, base)) is not None:
        yield offset, payload
        offset += frame_size(len(payload))


def unwritten(data: Any, offset: int) -> int:
    """Bytes after `offset` that are not zero-fill, counted to the last non-zero byte: what recovery leaves behind."""
    return len(bytes(data[offset:]).rstrip(b"\0"))
