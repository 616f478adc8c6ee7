"""Events as rows of an Arrow table, and back, bit for bit.

The table's columns are `rlk_ledger_schemas.columns`: fixed, promoted, then one list column per array name and dtype.
Every registered array has its column even where a segment holds none, so ordinary segments share one schema; arrays
this version does not know add columns of their own. `ARRAYS_KEY` of the schema metadata maps array columns back to
(name, dtype). Array bytes go from the event into Arrow buffers and back without becoming Python numbers.
"""

import contextlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa

from rlk_ledger_schemas.arrays import ITEMSIZE, Array
from rlk_ledger_schemas.codec import decode_envelope, leaf_hash
from rlk_ledger_schemas.columns import FIXED, PROMOTED, Promoted, array_column, project
from rlk_ledger_schemas.errors import FormatError
from rlk_ledger_schemas.events import REGISTRY

ARRAYS_KEY = b"rlk_ledger.arrays"
FORMAT_KEY = b"rlk_ledger.format"
LIMIT = 2**53
"""Numbers that receipts repeat stay below this: JSON readers would round larger ones."""
EVENT_BYTES = 1024
"""What an event takes in a shipper's memory beside its payload, as objects and as a row on its way into a segment."""

# Arrow type that holds a wire dtype's bits; bool is a byte an item and bfloat16 is its uint16 bits.
_ARROW = {name: pa.type_for_alias(name) for name in ITEMSIZE if name not in ("bool", "bfloat16")}
_ARROW |= {"bool": pa.uint8(), "bfloat16": pa.uint16()}
_PLAIN = {
    "string": pa.string(),
    "int64": pa.int64(),
    "int32": pa.int32(),
    "float64": pa.float64(),
    "binary": pa.binary(),
}

# Columns computed from the envelope alone; body and leaf are added beside them.
PROJECTIONS: dict[str, Promoted] = {
    **{name: Promoted(kind, (name,)) for name, kind in FIXED.items() if kind != "binary"},
    **PROMOTED,
}
_Projected: Any = msgspec.defstruct(
    "_Projected", [(name, Any, None) for name in sorted({c.path[0] for c in PROJECTIONS.values()})], gc=False
)
_PYTHON: dict[str, type] = {"string": str, "int64": int, "int32": int, "float64": float}
_INT32 = 2**31
_LIMITS = {"int32": _INT32, "int64": 2**63}


class Record(NamedTuple):
    """One event: who wrote it, its number, its envelope as written, its arrays and its 32-byte leaf."""

    writer_id: str
    seq: int
    envelope: bytes
    arrays: dict[str, Array]
    leaf: bytes


_decode_projected = msgspec.msgpack.Decoder(_Projected).decode


def make_record(envelope: bytes, arrays: dict[str, Array]) -> Record:
    """The record of an event's bytes; writer and number are read from the envelope. Raises FormatError.

    The whole envelope is decoded: what no reader could decode must be found here, not when its segment is made.
    """
    fields = decode_envelope(envelope)
    writer, seq = fields.get("writer_id"), fields.get("seq")
    if type(writer) is not str or type(seq) is not int or not 0 <= seq < LIMIT:
        raise FormatError(f"an event of type {fields['type']!r} has writer_id {writer!r} and seq {seq!r}.")
    return Record(sys.intern(writer), seq, envelope, arrays, leaf_hash(envelope, arrays))


def weight(record: Record) -> int:
    """Bytes an event takes in memory while it waits and while its segment is made, EVENT_BYTES included."""
    return len(record.envelope) + sum([len(a.data) for a in record.arrays.values()]) + EVENT_BYTES


def list_type(dtype: str) -> pa.DataType:
    """The Arrow list type of an array column of wire `dtype`."""
    return pa.list_(pa.field("element", _ARROW[dtype], nullable=False))


def _registered_arrays() -> dict[str, tuple[str, str]]:
    found = {(name, spec.dtype) for kind in REGISTRY.values() for name, spec in kind.arrays.items()}
    return {array_column(name, dtype): (name, dtype) for name, dtype in sorted(found)}


REGISTERED = _registered_arrays()
"""Column -> (array name, dtype) of every array an event type of this version can have."""


def projected(envelope: bytes) -> Any:
    """What columns are computed from, as attributes: `type`, `step`, `sample_id` and so on, None where absent.

    The rest of the envelope is passed over, which is most of the cost of decoding one. Raises FormatError.
    """
    found: Any = None
    with contextlib.suppress(msgspec.DecodeError, ValueError, RecursionError):
        found = _decode_projected(envelope)
    if found is None or type(found.type) is not str:  # rare, and read in full to say why or to be lenient as it is
        fields = decode_envelope(envelope)
        found = _Projected(**{name: fields.get(name) for name in _Projected.__struct_fields__})
    return found


def build_table(
    records: Sequence[Record], decoded: Sequence[Any] | None = None, names: dict[str, tuple[str, str]] | None = None
) -> pa.Table:
    """The table of `records`, rows in the order given. Raises FormatError for an envelope that does not decode.

    `decoded` holds what `projected` says of each where the caller has it. `names` are the array columns, as
    `array_names` gives them, where they are not those of this version; they must hold every array of `records`.
    """
    columns = _projections(decoded if decoded is not None else [projected(r.envelope) for r in records])
    columns["body"] = pa.array([r.envelope for r in records], pa.binary())
    columns["leaf"] = pa.array([r.leaf for r in records], pa.binary())
    names = names_of(records) if names is None else names
    for column, cells in _cells(records, names).items():
        columns[column] = _list_array(len(records), cells, names[column][1])
    order = [*FIXED, *PROMOTED, *names]
    metadata = {FORMAT_KEY: b"1", ARRAYS_KEY: msgspec.json.encode(names)}
    schema = pa.schema([pa.field(name, columns[name].type) for name in order], metadata)
    return pa.Table.from_arrays([columns[name] for name in order], schema=schema)


def _projections(decoded: Sequence[Any]) -> dict[str, pa.Array]:
    out = {}
    for name, column in PROJECTIONS.items():
        values = list(map(attrgetter(column.path[0]), decoded))
        kinds = {*map(type, values)}
        kind = _PLAIN[column.type]
        if kinds == {type(None)}:
            out[name] = pa.nulls(len(values), kind)
        else:
            out[name] = pa.array(_projection(column, values, kinds), kind)
    return out


def _projection(column: Promoted, values: list[Any], kinds: set[type]) -> list[Any]:
    """One column. Most hold one plain type and are taken as they are, the others value by value as `project` says."""
    key = column.path[0]
    if len(column.path) == 1 and kinds <= {_PYTHON[column.type], type(None)}:
        limit = _LIMITS.get(column.type, 0)
        known = [value for value in values if value is not None] if limit else []
        if not known or (min(known) > -limit and max(known) < limit):
            return values
    return [_bounded(project({key: value}, column), column.type) for value in values]


def _bounded(value: Any, kind: str) -> Any:
    return None if kind == "int32" and value is not None and abs(value) >= _INT32 else value


def names_of(records: Iterable[Record]) -> dict[str, tuple[str, str]]:
    """Array column -> (array name, dtype): the registered ones first, then what `records` have beyond them, sorted."""
    extra = {(name, a.dtype) for r in records for name, a in r.arrays.items()} - set(REGISTERED.values())
    names = dict(REGISTERED)
    for name, dtype in sorted(extra):
        column = array_column(name, dtype)
        while column in names or column in PROJECTIONS or column in FIXED:
            column += "_"  # two names that differ in `.` and `_` only
        names[column] = (name, dtype)
    return names


def _cells(records: Sequence[Record], names: dict[str, tuple[str, str]]) -> dict[str, list[tuple[int, bytes]]]:
    cells: dict[str, list[tuple[int, bytes]]] = {column: [] for column in names}
    columns = {key: column for column, key in names.items()}
    for row, record in enumerate(records):
        for name, value in record.arrays.items():
            cells[columns[name, value.dtype]].append((row, value.data))
    return cells


def _list_array(rows: int, cells: list[tuple[int, bytes]], dtype: str) -> pa.ListArray:
    kind = list_type(dtype)
    if not cells:
        return pa.nulls(rows, kind)
    offsets = np.zeros(rows + 1, np.int64)
    present = np.zeros(rows, bool)
    where = np.fromiter((row for row, _ in cells), np.int64, len(cells))
    offsets[where + 1] = np.fromiter((len(data) for _, data in cells), np.int64, len(cells)) // ITEMSIZE[dtype]
    present[where] = True
    np.cumsum(offsets, out=offsets)
    if offsets[-1] >= 2**31:
        raise FormatError(f"arrays of {offsets[-1]} items do not fit one segment column; record smaller arrays.")
    data = pa.py_buffer(b"".join([data for _, data in cells]) if len(cells) > 1 else cells[0][1])
    values = pa.Array.from_buffers(_ARROW[dtype], int(offsets[-1]), [None, data])
    bitmap = pa.py_buffer(np.packbits(present, bitorder="little").tobytes())
    buffers = [bitmap, pa.py_buffer(offsets.astype(np.int32).tobytes())]
    return pa.ListArray.from_buffers(kind, rows, buffers, null_count=rows - len(cells), children=[values])


def array_names(table: pa.Table) -> dict[str, tuple[str, str]]:
    """Column -> (array name, dtype) of a segment's table; raises FormatError when the metadata is not a segment's."""
    metadata = table.schema.metadata or {}
    if metadata.get(FORMAT_KEY) != b"1":
        raise FormatError("the Parquet file is not a segment of format 1.")
    try:
        names = msgspec.json.decode(metadata[ARRAYS_KEY], type=dict[str, tuple[str, str]])
    except (KeyError, msgspec.MsgspecError) as error:
        raise FormatError(f"the segment does not say which columns are arrays ({error}).") from None
    unknown = {dtype for _, dtype in names.values()} - ITEMSIZE.keys()
    if unknown:
        raise FormatError(f"the segment holds arrays of {min(unknown)!r}, which format 1 does not know.")
    return {column: key for column, key in names.items() if column in table.schema.names}


def rows(table: pa.Table) -> Iterator[Record]:
    """The records of a segment's table, in its order; raises FormatError when columns are missing or of other types.

    Leaves are the stored ones: whoever must not trust them compares with `codec.leaf_hash`.
    """
    names = array_names(table)
    wanted = [(name, _PLAIN[FIXED[name]]) for name in ("writer_id", "seq", "body", "leaf")]
    wanted += [(column, list_type(dtype)) for column, (_, dtype) in names.items() if dtype in ITEMSIZE]
    for name, kind in wanted:
        index = table.schema.get_field_index(name)
        if index < 0 or table.schema.field(index).type != kind:
            raise FormatError(f"the segment's column `{name}` is missing or not {kind}.")
    try:
        for batch in table.to_batches():
            yield from _batch_rows(batch, names)
    except (pa.ArrowException, UnicodeDecodeError) as error:
        raise FormatError(f"the segment's rows do not decode ({error}).") from None


def _batch_rows(batch: pa.RecordBatch, names: dict[str, tuple[str, str]]) -> Iterator[Record]:
    held: list[dict[str, Array]] = [{} for _ in range(batch.num_rows)]
    for column, (name, dtype) in names.items():
        for row, data in _lists(batch.column(column), ITEMSIZE[dtype]):
            held[row][name] = Array(dtype, data)
    fixed = [batch.column(name).to_pylist() for name in ("writer_id", "seq", "body", "leaf")]
    for writer, seq, body, leaf, arrays in zip(*fixed, held, strict=True):
        if writer is None or seq is None or body is None or leaf is None:
            raise FormatError("a segment row lacks its writer, number, body or leaf.")
        yield Record(writer, seq, body, arrays, leaf)


def _lists(column: pa.ListArray, itemsize: int) -> Iterator[tuple[int, bytes]]:
    """(row, bytes) of the rows that are not null."""
    if column.null_count == len(column):
        return
    offsets = column.offsets.to_numpy()
    values = column.values
    buffer = values.buffers()[1]
    view = memoryview(buffer) if buffer is not None else memoryview(b"")
    base = values.offset
    for row in np.flatnonzero(column.is_valid().to_numpy(zero_copy_only=False)).tolist():
        start, end = int(offsets[row]) + base, int(offsets[row + 1]) + base
        yield row, bytes(view[start * itemsize : end * itemsize])
