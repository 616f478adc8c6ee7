"""Segments: records to Parquet bytes and back.

One table, rows clustered by type, then step, then writer and sequence number. Small types share a row group, a large
type starts its own, so that a reader of one type reads little else. zstd, BYTE_STREAM_SPLIT on arrays, page checksums.
The content root is the RFC 6962 root over the leaves in (writer, sequence number) order: it does not depend on how the
rows lie in the file, nor on the encoding.
"""

import io
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rlk_ledger.records import LIMIT, PROJECTIONS, Record, build_table, names_of, projected, rows
from rlk_ledger_schemas import merkle
from rlk_ledger_schemas.arrays import ITEMSIZE
from rlk_ledger_schemas.columns import PROMOTED, project
from rlk_ledger_schemas.errors import FormatError
from rlk_ledger_schemas.objects import TypeCount
from rlk_ledger_schemas.samples import encode_samples

GROUPS_KEY = b"rlk_ledger.groups"
ENCODING_KEY = b"rlk_ledger.encoding"
ENCODING = 2
"""How arrays are encoded, so that a file can be made again byte for byte. 1, which files that do not say have, split
floats only and had dictionaries of integers; 2 splits every array of more than a byte an item and has none."""
SEGMENT_BYTES = 64 << 20
"""Payload bytes after which a segment is rolled."""
Source = bytes | memoryview | Path
_GROUP_BYTES = 16 << 20
_OWN_GROUP_BYTES = 1 << 20
_SPLIT = {
    1: frozenset({"float16", "float32", "float64"}),
    2: frozenset(name for name, size in ITEMSIZE.items() if size > 1),
}
_ROW_OVERHEAD = 128


class Segment(NamedTuple):
    """A segment as bytes, its content root and what a receipt says about it."""

    data: bytes
    root: bytes
    counts: tuple[TypeCount, ...]
    rows: int
    samples: str | None


class _Row(NamedTuple):
    type: str
    step: int
    writer_id: str
    seq: int
    record: Record
    fields: Any


def write_segment(
    records: Iterable[Record], names: dict[str, tuple[str, str]] | None = None, encoding: int = ENCODING
) -> Segment:
    """The segment of `records` (any order, no (writer, seq) twice), with the array columns `names` of `build_table`.

    Only one row group at a time exists as a table. Raises FormatError.
    """
    clustered = sorted((_clustered(r) for r in records), key=lambda row: row[:4])
    groups = list(_groups(clustered))
    names = names_of(row.record for row in clustered) if names is None else names
    sink = io.BytesIO()
    schema = _table([], names).schema
    said = {} if encoding == 1 else {ENCODING_KEY: b"%d" % encoding}
    schema = schema.with_metadata({**schema.metadata, GROUPS_KEY: _group_types(clustered, groups), **said})
    with pq.ParquetWriter(sink, schema, **_options(names, encoding)) as writer:
        for start, end in groups:
            writer.write_table(_table(clustered[start:end], names).cast(schema), row_group_size=end - start)
    root = content_root([row.record for row in clustered])
    return Segment(sink.getvalue(), root, _counts(clustered), len(clustered), _samples(clustered))


def _table(clustered: Sequence[_Row], names: dict[str, tuple[str, str]]) -> pa.Table:
    return build_table([row.record for row in clustered], [row.fields for row in clustered], names)


def encoding_of(table: pa.Table) -> int:
    """The encoding a segment's table says its file has; 1 where it says none that is known."""
    said = (table.schema.metadata or {}).get(ENCODING_KEY)
    return next((number for number in _SPLIT if said == b"%d" % number), 1)


def read_segment(source: Source, types: Collection[str] | None = None, checksums: bool = False) -> pa.Table:
    """The table of a segment (its bytes, or a local file), of `types` only when given.

    `checksums` also verifies every page's CRC. Raises FormatError when it is not a segment.
    """
    try:
        opened = source if isinstance(source, Path) else pa.BufferReader(source)
        file = pq.ParquetFile(opened, page_checksum_verification=checksums)
        if types is None:
            return file.read(use_threads=False)
        table = file.read_row_groups(_groups_of(file, types), use_threads=False)
        chosen = pc.is_in(table["type"], pa.array(sorted(types), pa.string()))
        return table if pc.all(chosen, min_count=0).as_py() else table.filter(chosen)
    except (pa.ArrowException, OSError, ValueError, KeyError) as error:
        text = str(error).strip().splitlines()
        raise FormatError(f"not a readable Parquet segment ({text[0] if text else type(error).__name__}).") from None


def read_records(source: Source, types: Collection[str] | None = None) -> Iterator[Record]:
    """The records of a segment (its bytes, or a local file), of `types` only when given."""
    yield from rows(read_segment(source, types))


def content_root(records: Iterable[Record]) -> bytes:
    """The RFC 6962 root over the records' leaves in (writer, seq) order."""
    return merkle.root([r.leaf for r in sorted(records, key=lambda r: (r.writer_id, r.seq))])


def type_counts(records: Iterable[Record]) -> tuple[TypeCount, ...]:
    """How many events of each type there are and the steps they span, sorted by type."""
    return _counts(sorted((_clustered(r) for r in records), key=lambda row: row[:4]))


def samples_of(records: Iterable[Record]) -> str | None:
    """What the receipt of a segment with these records says of its samples."""
    return _samples([_clustered(r) for r in records])


def _samples(clustered: Sequence[_Row]) -> str | None:
    named = [row.fields.sample_id for row in clustered if row.fields.sample_id is not None]
    plain = {*map(type, named)} <= {str}
    ids = set(named if plain else [project({"sample_id": name}, PROMOTED["sample_id"]) for name in named])
    return None if None in ids else encode_samples(ids)  # an id that is no text has no print


def _clustered(record: Record) -> _Row:
    fields = projected(record.envelope)
    step = fields.step
    known = step if type(step) is int and 0 <= step < LIMIT else -1
    return _Row(fields.type, known, record.writer_id, record.seq, record, fields)


def _size(record: Record) -> int:
    return len(record.envelope) + sum([len(a.data) for a in record.arrays.values()]) + _ROW_OVERHEAD


def _groups(clustered: Sequence[_Row]) -> Iterator[tuple[int, int]]:
    """Row ranges [start, end) of the row groups."""
    sizes = [_size(row.record) for row in clustered]
    by_type: dict[str, int] = {}
    for row, size in zip(clustered, sizes, strict=True):
        by_type[row.type] = by_type.get(row.type, 0) + size
    start = filled = 0
    for i, size in enumerate(sizes):
        new_type = i > start and clustered[i].type != clustered[i - 1].type
        own = new_type and max(filled, by_type[clustered[i].type]) >= _OWN_GROUP_BYTES
        if own or (i > start and filled + size > _GROUP_BYTES):
            yield start, i
            start, filled = i, 0
        filled += size
    if sizes:
        yield start, len(sizes)


def _group_types(clustered: Sequence[_Row], groups: Sequence[tuple[int, int]]) -> bytes:
    """Per row group the types it holds, as JSON: the index by which a reader of some types skips the rest."""
    return msgspec.json.encode([sorted({row.type for row in clustered[start:end]}) for start, end in groups])


def group_types(records: Iterable[Record]) -> bytes:
    """What GROUPS_KEY of the segment of `records` must hold."""
    clustered = sorted((_clustered(r) for r in records), key=lambda row: row[:4])
    return _group_types(clustered, list(_groups(clustered)))


def _counts(clustered: Sequence[_Row]) -> tuple[TypeCount, ...]:
    found: dict[str, list[int]] = {}
    for row in clustered:
        found.setdefault(row.type, []).append(row.step)
    out = []
    for name, steps in found.items():
        known = [step for step in steps if step >= 0]
        low, high = (min(known), max(known)) if known else (None, None)
        out.append(TypeCount(type=name, count=len(steps), min_step=low, max_step=high))
    return tuple(out)


def _options(names: dict[str, tuple[str, str]], encoding: int) -> dict[str, object]:
    split = {f"{column}.list.element" for column, (_, dtype) in names.items() if dtype in _SPLIT[encoding]}
    every = [f"{column}.list.element" for column in names] if encoding == 1 else []
    coded = [column for column in every if column not in split]
    return {
        "compression": "zstd",
        "compression_level": 1,
        "use_dictionary": [*PROJECTIONS, *coded],
        "column_encoding": dict.fromkeys(split, "BYTE_STREAM_SPLIT"),
        "write_statistics": list(PROJECTIONS),
        "write_page_checksum": True,
    }


def _groups_of(file: pq.ParquetFile, types: Collection[str]) -> list[int]:
    """The row groups that hold `types`. Statistics would say so too, but reading those of a damaged file may abort."""
    try:
        groups = msgspec.json.decode((file.schema_arrow.metadata or {})[GROUPS_KEY], type=list[list[str]])
    except (KeyError, msgspec.MsgspecError):
        raise FormatError("the Parquet file is not a segment of format 1.") from None
    wanted = set(types)
    return [i for i, held in enumerate(groups) if wanted.intersection(held) and i < file.num_row_groups]
