"""Where a damaged Parquet file is damaged, read from its pages and footer without trusting a byte of it.

The Arrow reader ends the process on some damaged footers, so the few numbers needed here are read by hand: the thrift
compact protocol of parquet-format's `PageHeader` and `FileMetaData`. Anything odd is a ValueError.
"""

import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

_CONTAINERS = (9, 10)  # list, set
_LIMIT = 1_000_000
_HEADER = 4096


class Chunk(NamedTuple):
    """One column chunk: its row group, its column path and its bytes [start, end)."""

    group: int
    column: str
    start: int
    end: int


def footer_start(data: bytes) -> int:
    """Where the footer begins, as far as the file's own words can be believed."""
    return max(len(data) - 8 - int.from_bytes(data[-8:-4], "little"), 0) if len(data) >= 12 else 0


def chunks(data: bytes) -> list[Chunk]:
    """The column chunks the footer lists; raises ValueError when it does not parse."""
    try:
        meta = _Reader(data[footer_start(data) : -8]).struct(0)
        out = []
        for number, group in enumerate(meta[4]):
            for chunk in group[1]:
                column = chunk[3]
                start = min(int(column.get(11, column[9])), int(column[9]))
                name = b".".join(column[3]).decode("utf-8", "replace")
                out.append(Chunk(number, name, start, start + int(column[7])))
        return out
    except (IndexError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"the footer does not parse ({type(error).__name__})") from None


class Page(NamedTuple):
    """One page with its header, bytes [start, end), and whether its data passes the checksum in the header."""

    start: int
    end: int
    intact: bool


def pages(data: bytes) -> Iterator[Page]:
    """The pages from the file's first byte on; what cannot be a page ends the walk as one that is not intact."""
    at, stop = 4, footer_start(data)
    while at < stop:
        reader = _Reader(data[at : min(stop, at + _HEADER)])
        try:
            header = reader.struct(0)
            size, crc = int(header[3]), int(header[4])
        except (IndexError, KeyError, TypeError, ValueError, RecursionError):
            yield Page(at, stop, False)
            return
        end = at + reader.at + size
        if size < 0 or end > stop:
            yield Page(at, stop, False)
            return
        yield Page(at, end, zlib.crc32(data[at + reader.at : end]) == crc & 0xFFFFFFFF)
        at = end


class _Reader:
    """The thrift compact protocol: structs become {field id: value}, lists become lists."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def byte(self) -> int:
        self.at += 1
        return self.data[self.at - 1]

    def varint(self) -> int:
        value = shift = 0
        while True:
            byte = self.byte()
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7
            if shift > 63:
                raise ValueError("a number is too long")

    def zigzag(self) -> int:
        value = self.varint()
        return (value >> 1) ^ -(value & 1)

    def struct(self, depth: int) -> dict[int, Any]:
        if depth > 16:
            raise ValueError("structs nest too deep")
        out: dict[int, Any] = {}
        field = 0
        while head := self.byte():
            field = field + (head >> 4) if head >> 4 else self.zigzag()
            kind = head & 15
            out[field] = kind == 1 if kind in (1, 2) else self.value(kind, depth)
        return out

    def value(self, kind: int, depth: int) -> Any:
        if kind in (1, 2, 3):
            return self.byte()
        if kind in (4, 5, 6):
            return self.zigzag()
        if kind == 7:
            self.at += 8
            return None
        if kind == 8:
            size = self.varint()
            self.at += size
            return self.data[self.at - size : self.at]
        if kind in _CONTAINERS:
            head = self.byte()
            count = head >> 4 if head >> 4 != 15 else self.varint()
            if count > _LIMIT:
                raise ValueError("a list is too long")
            return [self.value(head & 15, depth + 1) for _ in range(count)]
        if kind == 12:
            return self.struct(depth + 1)
        raise ValueError(f"unknown thrift type {kind}")
