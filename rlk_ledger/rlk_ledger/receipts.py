"""The receipts of a run as columns, so that a question about 200,000 of them touches numbers and not objects.

One row a receipt, ordered by shipper and n. Digests are their 32 bytes; the segment's name is not held because it
follows from shipper, n and root. `previous` and `signature` are not held either: they prove, and a proof is made from
the receipts themselves.
"""

import base64
import contextlib
from collections.abc import Collection, Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rlk_ledger import layout
from rlk_ledger.spans import Spans, merged
from rlk_ledger_schemas.errors import FormatError
from rlk_ledger_schemas.objects import FORMAT, Receipt, SegmentRef, TypeCount, WriterRange
from rlk_ledger_schemas.samples import PRINT_BYTES, decode_samples, sample_print

_DIGEST = pa.binary(32)
_NUMBER = pa.int64()
_RANGE = pa.struct([pa.field("first", _NUMBER, nullable=False), pa.field("last", _NUMBER, nullable=False)])
_WRITER = pa.struct(
    [
        pa.field("writer_id", pa.string(), nullable=False),
        pa.field("first", _NUMBER, nullable=False),
        pa.field("last", _NUMBER, nullable=False),
        ("ranges", pa.list_(_RANGE)),
        ("gaps", _NUMBER),
        ("lost_bytes", _NUMBER),
        ("closed", pa.bool_()),
        ("dead", pa.bool_()),
    ]
)
_TYPE = pa.struct(
    [
        pa.field("type", pa.string(), nullable=False),
        pa.field("count", _NUMBER, nullable=False),
        ("min_step", _NUMBER),
        ("max_step", _NUMBER),
    ]
)
SCHEMA = pa.schema(
    [
        pa.field("shipper", pa.string(), nullable=False),
        pa.field("n", _NUMBER, nullable=False),
        pa.field("wall_us", _NUMBER, nullable=False),
        pa.field("bytes", _NUMBER, nullable=False),
        pa.field("rows", _NUMBER, nullable=False),
        pa.field("sha256", _DIGEST, nullable=False),
        pa.field("root", _DIGEST, nullable=False),
        ("self", _DIGEST),
        pa.field("writers", pa.list_(_WRITER), nullable=False),
        pa.field("types", pa.list_(_TYPE), nullable=False),
        ("samples", pa.binary()),
        ("ledger_json", _DIGEST),
        ("run_json", _DIGEST),
        ("public_key", pa.string()),
    ]
)
"""The columns; those that may be null are null where the receipt says nothing."""

SAMPLE_TYPES = frozenset({"rollout.sample", "logprobs"})
"""Event types that are about one sample each, the one they name."""
_Mask = npt.NDArray[np.bool_]
_Ints = npt.NDArray[np.int64]


class Held(NamedTuple):
    """What the receipts say of one writer in sum: its numbers, drops, and how it ended.

    `shared` says that two receipts hold one number: a hand-over between shippers repeated some events.
    """

    ranges: Spans
    gaps: int
    lost_bytes: int
    closed: bool
    dead: bool
    shared: bool


class TypeTotal(NamedTuple):
    """How many events of a type there are and the steps they span, None where none is known."""

    events: int
    first_step: int | None
    last_step: int | None


class Receipts:
    """Receipts of one run, by shipper and n; immutable. Made from objects or a table of SCHEMA, whichever is there."""

    def __init__(self, held: Sequence[Receipt] | pa.Table, ledger_id: str = "", run_id: str = "") -> None:
        """Objects in order, or a table in any order with the ledger and run its rows belong to."""
        self.ledger_id = ledger_id
        self.run_id = run_id
        self._objects: tuple[Receipt, ...] | None = None
        if isinstance(held, pa.Table):
            self.table = _in_order(held)
        else:
            self._objects = tuple(held)

    @cached_property
    def table(self) -> pa.Table:
        """The receipts as a table of SCHEMA."""
        return to_table(self._objects or ())

    def __len__(self) -> int:
        return len(self._objects) if self._objects is not None else len(self.table)

    def __iter__(self) -> Iterator[Receipt]:
        return iter(self.all)

    @cached_property
    def all(self) -> tuple[Receipt, ...]:
        """Every receipt as an object."""
        return self._objects if self._objects is not None else tuple(self._made(self.table))

    def holding(
        self,
        types: Collection[str] | None = None,
        steps: Collection[int] | None = None,
        samples: Collection[str] | None = None,
    ) -> list[Receipt]:
        """The receipts whose segment may hold an event of `types`, at one of `steps`, of `samples`; None is no limit.

        `samples` limits SAMPLE_TYPES only.
        """
        mask = np.ones(len(self), np.bool_)
        if types is not None or steps is not None:
            mask &= self._of_types(types, steps)
        if samples is not None:
            rest = self._of_types(
                self.types.keys() - SAMPLE_TYPES if types is None else set(types) - SAMPLE_TYPES, steps
            )
            mask &= rest | self._of_samples(samples)
        at = np.flatnonzero(mask)
        if self._objects is not None:
            return [self._objects[i] for i in at.tolist()]
        return self._made(self.table.take(pa.array(at)))

    @cached_property
    def writers(self) -> dict[str, Held]:
        """What is said of each writer, in the order in which receipts first name them."""
        return _held(_flat(self.table["writers"]))

    @cached_property
    def types(self) -> dict[str, TypeTotal]:
        """What is said of each event type, sorted by name."""
        flat = _flat(self.table["types"])
        table = pa.table({name: flat.field(name) for name in ("type", "count", "min_step", "max_step")})
        sums = table.group_by("type").aggregate([("count", "sum"), ("min_step", "min"), ("max_step", "max")])
        rows = sums.select(["type", "count_sum", "min_step_min", "max_step_max"]).to_pydict()
        return {name: TypeTotal(*rest) for name, *rest in sorted(zip(*rows.values(), strict=True))}

    def total(self, column: str) -> int:
        """The sum of the column `bytes` or `rows`."""
        return int(pc.sum(self.table[column]).as_py() or 0)

    @cached_property
    def marks(self) -> dict[str, int]:
        """The last n of every shipper."""
        last = self.table.select(["shipper", "n"]).group_by("shipper").aggregate([("n", "max")])
        return dict(zip(last["shipper"].to_pylist(), last["n_max"].to_pylist(), strict=True))

    def _of_types(self, types: Collection[str] | None, steps: Collection[int] | None) -> _Mask:
        column = self.table["types"]
        flat = _flat(column)
        wanted = np.ones(len(flat), np.bool_)
        if types is not None:
            wanted &= _numpy(pc.is_in(flat.field("type"), pa.array(sorted(types), pa.string())))
        if steps is not None:
            low, high = (_numpy(pc.fill_null(flat.field(name), -1)) for name in ("min_step", "max_step"))
            found = np.zeros(len(flat), np.bool_)
            for step in steps:
                found |= (low <= step) & (step <= high)
            wanted &= found
        before = np.concatenate([[0], np.cumsum(wanted)])
        ends = np.cumsum(_numpy(pc.list_value_length(column)))
        starts = np.concatenate([[0], ends[:-1]]) if len(ends) else ends
        return np.asarray(before[ends] > before[starts]) if len(ends) else np.zeros(0, np.bool_)

    def _of_samples(self, samples: Collection[str]) -> _Mask:
        """Rows whose prints hold that of one of `samples`, and rows that say nothing."""
        mask = _numpy(self.table["samples"].is_null())
        for sample in samples:
            mask |= self._of_print(np.frombuffer(sample_print(sample), np.uint8))
        return mask

    def _of_print(self, wanted: npt.NDArray[np.uint8]) -> _Mask:
        """Rows whose prints hold `wanted`."""
        parts = []
        for chunk in self.table["samples"].chunks:
            offsets = np.frombuffer(chunk.buffers()[1], np.int32)[chunk.offset : chunk.offset + len(chunk) + 1]
            data = np.frombuffer(chunk.buffers()[2] or b"", np.uint8)[offsets[0] : offsets[-1]]
            prints = data.reshape(-1, PRINT_BYTES)
            hits = np.flatnonzero(
                (prints[:, 0] == wanted[0]) & (prints[:, 1] == wanted[1]) & (prints[:, 2] == wanted[2])
            )
            mask = np.zeros(len(chunk), np.bool_)
            mask[np.searchsorted(offsets - offsets[0], hits * PRINT_BYTES, side="right") - 1] = True
            parts.append(mask)
        return np.concatenate(parts) if parts else np.zeros(0, np.bool_)

    def _made(self, table: pa.Table) -> list[Receipt]:
        return [self._receipt(*row) for row in zip(*(table[name].to_pylist() for name in SCHEMA.names), strict=True)]

    def _receipt(self, shipper: str, n: int, wall_us: int, size: int, rows: int, *rest: Any) -> Receipt:
        digest, root, self_, writers, types, samples, ledger_json, run_json, public_key = rest
        name = layout.segment_name(shipper, n, root)
        return Receipt(
            format=FORMAT,
            ledger_id=self.ledger_id,
            run_id=self.run_id,
            shipper=shipper,
            n=n,
            segment=SegmentRef(name=name, bytes=size, rows=rows, sha256=_text(digest)),
            writers=tuple(map(_writer, writers)),
            root=_text(root),
            types=tuple(TypeCount(**item) for item in types),
            wall_us=wall_us,
            samples=None if samples is None else _prints(samples),
            ledger_json=_optional(ledger_json),
            run_json=_optional(run_json),
            public_key=public_key,
            self_=_optional(self_),
        )


def to_table(receipts: Sequence[Receipt]) -> pa.Table:
    """The receipts as a table of SCHEMA, in the order given; prints that do not decode are as good as none."""
    columns: list[Any] = [
        [r.shipper for r in receipts],
        [r.n for r in receipts],
        [r.wall_us for r in receipts],
        [r.segment.bytes for r in receipts],
        [r.segment.rows for r in receipts],
        [_digest(r.segment.sha256) for r in receipts],
        [_digest(r.root) for r in receipts],
        [_digest(r.self_) for r in receipts],
        _lists([len(r.writers) for r in receipts], _writers_array([w for r in receipts for w in r.writers])),
        _lists([len(r.types) for r in receipts], _types_array([t for r in receipts for t in r.types])),
        [_decoded(r.samples) for r in receipts],
        [_digest(r.ledger_json) for r in receipts],
        [_digest(r.run_json) for r in receipts],
        [r.public_key for r in receipts],
    ]
    arrays = [
        c if isinstance(c, pa.Array) else pa.array(c, field.type) for c, field in zip(columns, SCHEMA, strict=True)
    ]
    return pa.Table.from_arrays(arrays, schema=SCHEMA)


def _writers_array(writers: Sequence[WriterRange]) -> pa.StructArray:
    spans = [span for w in writers for span in w.ranges or ()]
    pairs = pa.StructArray.from_arrays(
        [pa.array([s[0] for s in spans], _NUMBER), pa.array([s[1] for s in spans], _NUMBER)], fields=list(_RANGE)
    )
    fields = ("writer_id", "first", "last", "gaps", "lost_bytes", "closed", "dead")
    columns = {name: pa.array([getattr(w, name) for w in writers], _WRITER.field(name).type) for name in fields}
    columns["ranges"] = _lists([None if w.ranges is None else len(w.ranges) for w in writers], pairs)
    return pa.StructArray.from_arrays([columns[field.name] for field in _WRITER], fields=list(_WRITER))


def _types_array(types: Sequence[TypeCount]) -> pa.StructArray:
    columns = [pa.array([getattr(t, field.name) for t in types], field.type) for field in _TYPE]
    return pa.StructArray.from_arrays(columns, fields=list(_TYPE))


def _lists(lengths: Sequence[int | None], values: pa.Array) -> pa.ListArray:
    """Lists of these lengths, one after the other out of `values`; None is a null."""
    ends = np.cumsum([length or 0 for length in lengths], dtype=np.int64)
    offsets = np.concatenate([[0], ends]).astype(np.int32)
    null = np.array([length is None for length in lengths] + [False], np.bool_)
    return pa.ListArray.from_arrays(pa.array(offsets, mask=null), values)


def _in_order(table: pa.Table) -> pa.Table:
    """The table by shipper and n. A sort of what is in order already would copy every print."""
    keys = table.select(["shipper", "n"])
    order = pc.sort_indices(keys, sort_keys=[("shipper", "ascending"), ("n", "ascending")])
    if not np.array_equal(order.to_numpy(), np.arange(len(table))):
        table = table.take(order)
    return table.combine_chunks()


def _held(flat: pa.StructArray) -> dict[str, Held]:
    coded = flat.field("writer_id").dictionary_encode()
    codes, names = _numpy(coded.indices).astype(np.int64), coded.dictionary.to_pylist()
    sums = {}
    for name in ("gaps", "lost_bytes"):
        sums[name] = np.zeros(len(names), np.int64)
        np.add.at(sums[name], codes, _numpy(pc.fill_null(flat.field(name), 0)))
    ended = {}
    for name in ("closed", "dead"):
        ended[name] = np.zeros(len(names), np.bool_)
        ended[name][codes[_numpy(pc.fill_null(flat.field(name), False))]] = True
    spans, shared = _ranges(*_spans(flat, codes), len(names))
    return {
        name: Held(
            ranges=spans[i],
            gaps=int(sums["gaps"][i]),
            lost_bytes=int(sums["lost_bytes"][i]),
            closed=bool(ended["closed"][i]),
            dead=bool(ended["dead"][i]),
            shared=i in shared,
        )
        for i, name in enumerate(names)
    }


def _spans(flat: pa.StructArray, codes: _Ints) -> tuple[_Ints, _Ints, _Ints]:
    """(writer code, first, last) of every range of sequence numbers, both ends included."""
    ranges = flat.field("ranges")
    whole = _numpy(ranges.is_null())
    lengths = _numpy(pc.fill_null(pc.list_value_length(ranges), 0))
    pairs = ranges.flatten()
    first, last = _numpy(flat.field("first")), _numpy(flat.field("last"))
    owner = np.concatenate([codes[whole], np.repeat(codes, lengths)])
    return (
        owner,
        np.concatenate([first[whole], _numpy(pairs.field("first"))]),
        np.concatenate([last[whole], _numpy(pairs.field("last"))]),
    )


def _ranges(owner: _Ints, first: _Ints, last: _Ints, count: int) -> tuple[list[Spans], set[int]]:
    """The merged ranges of every writer code below `count`, and the codes of which two ranges overlap."""
    order = np.lexsort((last, first, owner))
    owner, first, last = owner[order], first[order], last[order]
    same = owner[1:] == owner[:-1]
    shared = set(owner[1:][same & (first[1:] <= last[:-1])].tolist())
    follows = same & (first[1:] == last[:-1] + 1)
    begin = np.flatnonzero(np.concatenate([[True], ~follows])) if len(owner) else np.zeros(0, np.int64)
    end = np.concatenate([begin[1:] - 1, [len(owner) - 1]]) if len(owner) else begin
    out: list[Spans] = [[] for _ in range(count)]
    for code, a, b in zip(owner[begin].tolist(), first[begin].tolist(), last[end].tolist(), strict=True):
        out[code].append((a, b))
    for code in shared:
        at = owner == code
        out[code] = merged(zip(first[at].tolist(), last[at].tolist(), strict=True))
    return out, shared


def _flat(column: pa.ChunkedArray) -> Any:
    """The items of every list of a column, one after the other."""
    return column.combine_chunks().flatten()


def _numpy(values: pa.Array | pa.ChunkedArray) -> npt.NDArray[Any]:
    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
    return np.array(values.to_numpy(zero_copy_only=False))


def _writer(fields: dict[str, Any]) -> WriterRange:
    ranges = fields.pop("ranges")
    return WriterRange(**fields, ranges=None if ranges is None else tuple((r["first"], r["last"]) for r in ranges))


def _digest(text: str | None) -> bytes | None:
    return None if text is None else bytes.fromhex(text[7:])


def _text(digest: bytes) -> str:
    return f"sha256:{digest.hex()}"


def _optional(digest: bytes | None) -> str | None:
    return None if digest is None else _text(digest)


def _decoded(samples: str | None) -> bytes | None:
    with contextlib.suppress(FormatError):
        return None if samples is None else decode_samples(samples)
    return None


def _prints(data: bytes) -> str:
    return base64.b64encode(data).decode()
