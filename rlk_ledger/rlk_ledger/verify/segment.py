"""One segment against its receipt. Everything here depends on nothing but the two, so segments may be checked apart."""

import hashlib
from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rlk_ledger import layout
from rlk_ledger.chain import writer_ranges
from rlk_ledger.records import PROJECTIONS, Record, array_names, build_table, rows
from rlk_ledger.segments import (
    GROUPS_KEY,
    content_root,
    encoding_of,
    group_types,
    read_segment,
    samples_of,
    type_counts,
    write_segment,
)
from rlk_ledger.store import FileStore, Missing, Store
from rlk_ledger.verify.finding import Finding, finding
from rlk_ledger.verify.footer import chunks, footer_start, pages
from rlk_ledger_schemas.codec import decode_envelope, leaf_hash
from rlk_ledger_schemas.columns import FIXED, PROMOTED, array_column
from rlk_ledger_schemas.errors import FormatError, StoreError
from rlk_ledger_schemas.fingerprints import sha256
from rlk_ledger_schemas.objects import Receipt, WriterRange

_BLOCK = 1 << 20
_AT_MOST = 20
"""Findings of one kind listed for one segment; the rest is counted."""


def check_segment(store: Store, run_id: str, receipt: Receipt, deep: bool) -> list[Finding]:
    """What is wrong with the segment of `receipt`: its file always, its every event when `deep`. Raises StoreError."""
    path = layout.segment_path(run_id, receipt.segment.name)
    try:
        if not deep and _digest(store, path) == (receipt.segment.bytes, receipt.segment.sha256):
            return []
        data = store.read(path)
    except Missing:
        return [finding("segment.missing", path, f"the segment of receipt {receipt.n} is gone", **_span(receipt))]
    if len(data) != receipt.segment.bytes or sha256(data) != receipt.segment.sha256:
        return [_changed(path, data, receipt)]
    if not deep:  # it changed between two looks, and is right now
        return []
    try:
        return list(_check_events(path, read_segment(data, checksums=True), receipt))
    except (FormatError, pa.ArrowException, ValueError, KeyError) as error:  # whoever forged it need not obey a format
        return [finding("segment.unreadable", path, str(error), **_span(receipt))]


def _digest(store: Store, path: str) -> tuple[int, str]:
    """(size, sha256) of an object; a local file goes through one small buffer, which is twice as fast as reading it."""
    if not isinstance(store, FileStore):
        data = store.read(path)
        return len(data), sha256(data)
    hasher, size = hashlib.sha256(), 0
    buffer = memoryview(bytearray(_BLOCK))
    with store.open(path) as file:
        try:
            while count := file.readinto(buffer):
                hasher.update(buffer[:count])
                size += count
        except OSError as error:
            raise StoreError(f"cannot read {path}: {error.strerror}.") from error
    return size, f"sha256:{hasher.hexdigest()}"


def _span(receipt: Receipt) -> dict[str, int | str]:
    """Writer and range of a segment that holds one writer's events; of several, none is named."""
    held = [w for w in receipt.writers if w.ranges != ()]
    return {"writer": held[0].writer_id, "first": held[0].first, "last": held[0].last} if len(held) == 1 else {}


# -- the file ------------------------------------------------------------------------------------------------------


def _changed(path: str, data: bytes, receipt: Receipt) -> Finding:
    """The finding for bytes that are not the receipt's, with the place of the change as narrow as it can be told."""
    size = receipt.segment.bytes
    if len(data) != size:
        what = "cut short" if len(data) < size else "longer"
        text = f"{what}: {len(data)} bytes, the receipt says {size}"
        return finding("segment.changed", path, text, byte=min(len(data), size), **_span(receipt))
    start, end, text = _rewritten(data, receipt) or _damaged_page(data)
    return finding("segment.changed", path, text, byte=start, end_byte=end, **_span(receipt))


def _rewritten(data: bytes, receipt: Receipt) -> tuple[int, int, str] | None:
    """The bytes that differ from what the writer made, known when the events still decode and re-encode to it."""
    try:
        table = read_segment(data, checksums=True)
        again = write_segment(list(rows(table)), array_names(table), encoding_of(table)).data
    except (FormatError, pa.ArrowException):
        return None
    footer = footer_start(data)
    if sha256(again) != receipt.segment.sha256 or len(again) != len(data):
        same = again[:footer] == data[:footer]
        return (footer, len(data), "the footer was changed, every page is as written") if same else None
    differing = np.flatnonzero(np.frombuffer(again, np.uint8) != np.frombuffer(data, np.uint8))
    first, last = int(differing[0]), int(differing[-1])
    changed = "1 byte was" if len(differing) == 1 else f"{len(differing)} bytes were"
    return first, last + 1, f"{changed} changed, the events still decode"


def _damaged_page(data: bytes) -> tuple[int, int, str]:
    """The first page that does not pass its checksum, or the footer, or the whole file when neither tells."""
    start = footer_start(data)
    try:
        listed = chunks(data)
    except ValueError:
        listed = []
    for page in pages(data):
        if not page.intact:
            column = next((c.column for c in listed if c.start <= page.start < c.end), None)
            text = "a page fails its checksum" + (f", in column `{column}`" if column else "")
            return page.start, page.end, text
    try:
        pq.ParquetFile(pa.BufferReader(data))
    except (pa.ArrowException, OSError, ValueError):
        listed = []
    if not listed:
        return start, len(data), "the footer does not parse"
    return 0, len(data), "a page header or the footer was changed; the data of every page passes its checksum"


# -- the events ----------------------------------------------------------------------------------------------------


def _check_events(path: str, table: pa.Table, receipt: Receipt) -> Iterator[Finding]:
    records = list(rows(table))
    yield from _limited(_check_leaves(path, records, receipt))
    yield from _check_receipt(path, records, receipt)
    yield from _limited(_check_projections(path, table, records))


def _check_leaves(path: str, records: Sequence[Record], receipt: Receipt) -> Iterator[Finding]:
    for record in records:
        where: dict[str, int | str] = {"writer": record.writer_id, "first": record.seq, "last": record.seq}
        if leaf_hash(record.envelope, record.arrays) != record.leaf:
            yield finding("leaf.differs", path, "the event's bytes do not give its leaf", **where)
            continue
        fields = decode_envelope(record.envelope)
        inside = (fields.get("writer_id"), fields.get("seq"), fields.get("run_id"))
        if inside != (record.writer_id, record.seq, receipt.run_id):
            yield finding("projection.differs", path, f"the event says it is {inside[1]} of {inside[0]}", **where)


def _check_receipt(path: str, records: Sequence[Record], receipt: Receipt) -> Iterator[Finding]:
    root = content_root(records)
    if f"sha256:{root.hex()}" != receipt.root:
        yield finding("segment.contradicts", path, "the leaves do not add up to the receipt's root")
    if layout.segment_name(receipt.shipper, receipt.n, root) != receipt.segment.name:
        yield finding("segment.contradicts", path, f"a segment with this content has another name than {path}")
    if len(records) != receipt.segment.rows:
        yield finding("segment.contradicts", path, f"{len(records)} events, the receipt says {receipt.segment.rows}")
    if len({(r.writer_id, r.seq) for r in records}) != len(records):
        yield finding("segment.contradicts", path, "it holds one (writer, sequence number) twice")
    said = {w.writer_id: _plain(w) for w in receipt.writers}
    found = {w.writer_id: _plain(w) for w in writer_ranges(records, {})}
    for writer_id in sorted(said.keys() | found.keys()):
        if said.get(writer_id, ((), 0, False)) != found.get(writer_id, ((), 0, False)):
            text = f"the receipt says {said.get(writer_id)} of this writer, the segment holds {found.get(writer_id)}"
            yield finding("segment.contradicts", path, text, writer=writer_id)
    if receipt.samples is not None and samples_of(records) != receipt.samples:
        yield finding("segment.contradicts", path, "its samples are not those the receipt says it holds")
    if type_counts(records) != receipt.types:
        yield finding("segment.contradicts", path, "types, counts or steps are not those of the receipt")


def _plain(writer: WriterRange) -> tuple[object, ...]:
    spans = ((writer.first, writer.last),) if writer.ranges is None else writer.ranges
    return tuple(tuple(span) for span in spans), writer.gaps or 0, bool(writer.closed)


def _check_projections(path: str, table: pa.Table, records: Sequence[Record]) -> Iterator[Finding]:
    """Compares every column that is computed from the event with what it must be, bit for bit.

    Array columns are those of the version that wrote the segment: which names it knew beyond the ones its events have
    is not known here, so a column that holds nothing may be there or not.
    """
    names = array_names(table)
    if not _own_columns(table, names):
        yield finding("projection.differs", path, "the segment has other columns than its events give it")
        return
    expected = build_table(records, names=names)
    if (table.schema.metadata or {}).get(GROUPS_KEY) != group_types(records):
        yield finding("projection.differs", path, "its list of types per row group is not that of its events")
    for name in PROJECTIONS:
        have, want = table[name], expected[name]
        if have.type != want.type:
            yield finding("projection.differs", path, f"column `{name}` is {have.type}, it must be {want.type}")
            continue
        if _bits(have) == _bits(want):
            continue
        for row, (a, b) in enumerate(zip(_bits(have), _bits(want), strict=True)):
            if a != b:
                where: dict[str, int | str] = {"writer": records[row].writer_id, "first": records[row].seq}
                yield finding("projection.differs", path, f"column `{name}` does not say what the event says", **where)


def _own_columns(table: pa.Table, names: dict[str, tuple[str, str]]) -> bool:
    """Whether the columns are those of format 1 and then one a listed array, called as that array is called."""
    if table.schema.names != [*FIXED, *PROMOTED, *names] or len(set(names.values())) != len(names):
        return False
    return all(column.rstrip("_") == array_column(*key).rstrip("_") for column, key in names.items())


def _bits(column: pa.ChunkedArray) -> list[object]:
    """The column's values, floats as their bits: a NaN equals itself and -0.0 is not 0.0."""
    if column.type != pa.float64():
        return column.to_pylist()  # type: ignore[no-any-return]
    chunks = [chunk.view(pa.int64()) for chunk in column.chunks]
    return pa.chunked_array(chunks, pa.int64()).to_pylist()  # type: ignore[no-any-return]


def _limited(findings: Iterator[Finding]) -> Iterator[Finding]:
    for count, item in enumerate(findings):
        if count < _AT_MOST:
            yield item
        else:
            more = 1 + sum(1 for _ in findings)
            yield finding(item.kind, item.object, f"and {more} more of this kind")
