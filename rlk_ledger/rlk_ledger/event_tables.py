"""Arrow tables of events: one column an envelope field, so that an empty view still has its columns.

Text, numbers and booleans keep their type; anything nested is one JSON text column. Arrays of samples and scores stay
the list columns of the segments (`values__float32`).
"""

import json
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import msgspec
import pyarrow as pa

from rlk_ledger.ledger import Ledger, Run
from rlk_ledger.records import build_table, list_type
from rlk_ledger.segments import read_segment
from rlk_ledger.store import Missing
from rlk_ledger_schemas.arrays import ArraySpec
from rlk_ledger_schemas.codec import decode_envelope
from rlk_ledger_schemas.columns import array_column
from rlk_ledger_schemas.errors import FormatError, LedgerError
from rlk_ledger_schemas.events import REGISTRY, envelope_struct

KEYS = {"run_id": pa.string(), "writer_id": pa.string(), "seq": pa.int64(), "wall_ns": pa.int64(), "step": pa.int64()}
_JSON = msgspec.json.Encoder()
_SCALARS: dict[type, pa.DataType] = {
    str: pa.string(),
    bool: pa.bool_(),
    int: pa.int64(),
    float: pa.float64(),
}


def field_types(kinds: Iterable[str]) -> dict[str, pa.DataType]:
    """Column -> Arrow type of the fields of these event types, keys first."""
    out = dict(KEYS)
    for kind in kinds:
        for field in msgspec.structs.fields(envelope_struct(REGISTRY[kind])):
            if field.name not in out and field.name not in ("schema_version", "mono_ns"):
                out[field.name] = _arrow_type(field.type)
    return out


def _arrow_type(hint: Any) -> pa.DataType:
    """The Arrow type of a field's annotation; JSON text where it is not one plain type."""
    info = msgspec.inspect.type_info(hint)
    options = info.types if isinstance(info, msgspec.inspect.UnionType) else (info,)
    kinds = {type(option) for option in options} - {msgspec.inspect.NoneType}
    plain = {
        msgspec.inspect.StrType: pa.string(),
        msgspec.inspect.BoolType: pa.bool_(),
        msgspec.inspect.IntType: pa.int64(),
        msgspec.inspect.FloatType: pa.float64(),
    }
    return plain[kinds.pop()] if len(kinds) == 1 and next(iter(kinds)) in plain else pa.string()


def event_table(
    ledger: Ledger,
    runs: Sequence[str],
    kinds: Sequence[str],
    arrays: bool = False,
    steps: Collection[int] | None = None,
    samples: Collection[str] | None = None,
) -> pa.Table:
    """The events of `kinds` in `runs` as a table with a `type` column when there are several kinds.

    `steps` and `samples` leave out segments that hold nothing of them; those that are read are given whole.
    """
    types = field_types(kinds)
    specs = {name: spec for kind in kinds for name, spec in REGISTRY[kind].arrays.items()}
    wanted = {array_column(name, dtype): dtype for name, spec in specs.items() for dtype in _dtypes(spec)}
    columns: dict[str, list[Any]] = {name: [] for name in types}
    kind_of: list[str] = []
    lists: dict[str, list[pa.ChunkedArray]] = {name: [] for name in wanted}
    for run_id in runs:
        for table in run_tables(ledger.run(run_id), kinds, steps, samples):
            for body in table["body"].to_pylist():
                fields = decode_envelope(body) | {"run_id": run_id}
                kind_of.append(fields["type"])
                for name, values in columns.items():
                    values.append(_cell(fields.get(name), types[name]))
            for name in lists if arrays else ():
                lists[name].append(_list(table, name, wanted[name]))
    out = {"type": pa.array(kind_of, pa.string())} if len(kinds) > 1 else {}
    out |= {name: pa.array(values, types[name]) for name, values in columns.items()}
    if arrays:
        for name, dtype in wanted.items():
            out[name] = pa.chunked_array([c for part in lists[name] for c in part.chunks], list_type(dtype))
    return pa.table(out)


def _dtypes(spec: ArraySpec) -> tuple[str, ...]:
    """The dtypes an array may be stored in: token ids become uint64 under `redaction = hash`."""
    return (spec.dtype, "uint64") if spec.tokens else (spec.dtype,)


def _list(table: pa.Table, name: str, dtype: str) -> pa.ChunkedArray:
    if name in table.schema.names:
        return table[name]
    return pa.chunked_array([pa.nulls(len(table), list_type(dtype))])


def _cell(value: Any, kind: pa.DataType) -> Any:
    if value is None:
        return None
    if pa.types.is_string(kind):
        return value if isinstance(value, str) else as_json(value)
    if pa.types.is_floating(kind):
        return float(value) if isinstance(value, int | float) else None
    if pa.types.is_boolean(kind):
        return value if isinstance(value, bool) else None
    return value if isinstance(value, int) and abs(value) < 2**63 else None


def as_json(value: Any) -> str:
    """A value as JSON text; floats that JSON lacks become null."""
    try:
        return _JSON.encode(value).decode()
    except (TypeError, ValueError):
        return json.dumps(value, default=str)


def run_tables(
    run: Run,
    kinds: Sequence[str] | None,
    steps: Collection[int] | None = None,
    samples: Collection[str] | None = None,
) -> Iterable[pa.Table]:
    """The tables of a run's segments that hold `kinds`, each (writer, seq) once; of a pruned one, what outlives it."""
    seen: set[tuple[str, int]] = set()
    for segment in run.segments(kinds, steps, samples):
        try:
            try:
                table = read_segment(run.intact(segment), kinds)
            except Missing:
                table = build_table(run.outliving(segment, kinds))
        except (Missing, FormatError) as error:
            raise LedgerError(f"{segment.path}: {error} Run `rlk-ledger verify {run.run_id}`.") from None
        if run.shared_writers:
            table = _once(table, run.shared_writers, seen)
        yield table


def _once(table: pa.Table, shared: frozenset[str], seen: set[tuple[str, int]]) -> pa.Table:
    keep = []
    for writer, seq in zip(table["writer_id"].to_pylist(), table["seq"].to_pylist()):
        first = writer not in shared or (writer, seq) not in seen
        keep.append(first)
        if writer in shared:
            seen.add((writer, seq))
    return table.filter(pa.array(keep))


def events_table(ledger: Ledger, runs: Sequence[str]) -> pa.Table:
    """Every event: keys, type, and `fields`, the envelope as JSON text."""
    names = ("run_id", "writer_id", "seq", "type", "schema_version", "wall_ns", "mono_ns", "step")
    parts = []
    for run_id in runs:
        for table in run_tables(ledger.run(run_id), None):
            fields = [as_json(decode_envelope(body)) for body in table["body"].to_pylist()]
            parts.append(table.select(names).append_column("fields", pa.array(fields, pa.string())))
    if parts:
        return pa.concat_tables([part.replace_schema_metadata(None) for part in parts])
    kinds = {name: pa.string() if name in ("run_id", "writer_id", "type") else pa.int64() for name in names}
    kinds["schema_version"] = pa.int32()
    return pa.schema([*kinds.items(), ("fields", pa.string())]).empty_table()


def runs_table(ledger: Ledger, runs: Sequence[str]) -> pa.Table:
    """One row a run, from run.json and receipts alone."""
    from rlk_ledger.summary import overview

    rows = [overview(ledger.run(run_id)) for run_id in runs]
    names = ("events", "segments", "bytes", "first_step", "last_step", "writers", "open", "killed", "dropped")
    counts = (*names, "lost_bytes", "pruned_segments", "pruned_events")
    out: dict[str, pa.Array] = {
        "run_id": pa.array([row["run_id"] for row in rows], pa.string()),
        "roles": pa.array([as_json(row["roles"]) for row in rows], pa.string()),
        "redaction": pa.array([row["redaction"] for row in rows], pa.string()),
        "created_us": pa.array([row["created_us"] for row in rows], pa.int64()),
    }
    out |= {name: pa.array([row[name] for row in rows], pa.int64()) for name in counts}
    return pa.table(out)
