"""Indexes: what receipts say, consolidated at each checkpoint, so that opening a run does not read every receipt.

    runs/<run_id>/index/<k>-<sha256, 16 digits>.parquet

Index k is written after checkpoint k. Counted from one (K = k + 1) it covers the checkpoints (K - lowbit(K), K], as the
nodes of a Fenwick tree do: N checkpoints are covered by at most log2(N) + 1 files, and a receipt is copied at most as
often. It says which receipts it covers: those after `before` up to `after`, last n by shipper. So a reader needs no
checkpoint: it takes the newest intact file, goes on where that one begins, and reads itself what no file covers.

An index is never evidence. It can be deleted; a damaged one is passed over; `verify` compares it with the receipts.
"""

import contextlib
import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from rlk_ledger import layout
from rlk_ledger.receipts import SCHEMA, Receipts, to_table
from rlk_ledger.store import Missing, Store
from rlk_ledger_schemas.checkpoints import Checkpoint, decode_checkpoint
from rlk_ledger_schemas.errors import FormatError, LedgerError
from rlk_ledger_schemas.merkle import leaf
from rlk_ledger_schemas.objects import FORMAT, Receipt, decode_receipt

Marks = dict[str, int]
"""The last n of each shipper; a shipper without one has none."""
_META = b"rlk_ledger.index"
READERS = 16
"""Requests under way at once."""
_AT_ONCE = 256
_LOOK_AHEAD = 1024


class IndexInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What an index says of itself: the receipts after `before` up to `after` are its rows.

    `first` and `last` are the numbers of the checkpoints it covers, both included.
    """

    format: int
    ledger_id: str
    run_id: str
    first: int
    last: int
    before: Marks
    after: Marks


class Part(NamedTuple):
    """A decoded index: its rows as a table of `receipts.SCHEMA`, in any order."""

    info: IndexInfo
    table: pa.Table


def misfit(part: Part) -> str | None:
    """How the rows of an index are not the receipts between its marks, None when they are, each once.

    What it costs depends on the rows, whatever its marks claim.
    """
    before, after = part.info.before, part.info.after
    odd = next((s for s, n in [*before.items(), *after.items()] if not layout.is_shipper(s) or n < 0), None)
    if odd is not None or any(n > after.get(s, -1) for s, n in before.items()):
        return "its marks are none"
    chains = [(s, before.get(s, -1) + 1, n) for s, n in sorted(after.items())]
    if sum(last - first + 1 for _, first, last in chains) != len(part.table):
        return f"it has {len(part.table)} rows, which are not as many as receipts lie between its marks"
    shippers = pa.array([s for s, first, last in chains for _ in range(first, last + 1)], pa.string())
    numbers = pa.array([n for _, first, last in chains for n in range(first, last + 1)], pa.int64())
    expected = pa.table({"shipper": shippers, "n": numbers})
    keys = part.table.select(["shipper", "n"]).cast(expected.schema)
    if keys.equals(expected) or keys.sort_by([("shipper", "ascending"), ("n", "ascending")]).equals(expected):
        return None
    return "its rows are not the receipts between its marks"


class Found(NamedTuple):
    """What indexes and the receipts between them give: rows, and how far they go."""

    tables: list[pa.Table]
    after: Marks


def place_of(part: Part) -> tuple[str, str, int, int]:
    """Of which ledger and run, and of which checkpoints, an index says it is."""
    return part.info.ledger_id, part.info.run_id, part.info.first, part.info.last


def lowbit(k: int) -> int:
    """How many checkpoints index `k` covers: the lowest set bit of k + 1."""
    return (k + 1) & -(k + 1)


def encode(info: IndexInfo, table: pa.Table) -> bytes:
    """The bytes of an index: Parquet, digests as they are, numbers and names dictionary-coded."""
    table = table.combine_chunks().replace_schema_metadata({_META: msgspec.json.encode(info, order="sorted")})
    plain = {"sha256", "root", "self", "samples", "ledger_json", "run_json", "public_key"}
    names, sink = _leaves(table.schema), pa.BufferOutputStream()
    pq.write_table(
        table,
        sink,
        compression=dict.fromkeys(names, "zstd") | dict.fromkeys(plain, "none"),
        use_dictionary=[name for name in names if name not in plain],
        write_statistics=False,
        write_page_checksum=True,
    )
    return bytes(sink.getvalue().to_pybytes())


def _leaves(schema: pa.Schema) -> list[str]:
    sink = pa.BufferOutputStream()
    pq.write_table(schema.empty_table(), sink)
    written = pq.ParquetFile(pa.BufferReader(sink.getvalue())).schema
    return [written.column(i).path for i in range(len(written))]


def decode(data: bytes, where: str) -> Part:
    """The index in `data`; raises FormatError, which begins with `where`, when it is none of this format.

    Whoever calls has compared the bytes with the name: page checksums would only say the same again.
    """
    try:
        table = pq.ParquetFile(pa.BufferReader(data)).read(use_threads=False)
        info = msgspec.json.decode((table.schema.metadata or {})[_META], type=IndexInfo)
    except (pa.ArrowException, OSError, ValueError, KeyError) as error:
        text = str(error).strip().splitlines()
        raise FormatError(f"{where}: not a readable index ({text[0] if text else type(error).__name__}).") from None
    if info.format != FORMAT or not table.schema.remove_metadata().equals(SCHEMA):
        raise FormatError(f"{where}: an index of format {info.format} with other columns than this reader knows.")
    return Part(info, table.replace_schema_metadata(None))


# -- reading -------------------------------------------------------------------------------------------------------


Damaged = Callable[[str, Exception], None]
"""Called with the path of a receipt that does not decode or is gone, and why; if it returns, that one is left out."""


class Source:
    """The indexes and receipts of one run in a bucket."""

    def __init__(self, store: Store, ledger_id: str, run_id: str, damaged: Damaged) -> None:
        self.store = store
        self.ledger_id = ledger_id
        self.run_id = run_id
        self._damaged = damaged
        self._files: dict[int, list[str]] | None = None

    def files(self) -> dict[int, list[str]]:
        """Names of the indexes by checkpoint, listed once; several of one checkpoint are as good as each other."""
        if self._files is None:
            self._files = {}
            for name in self.store.children(f"{layout.run_root(self.run_id)}/index"):
                key = layout.parse_index(f"index/{name}")
                if key is not None:
                    self._files.setdefault(key[0], []).append(name)
        return self._files

    def part(self, k: int) -> Part | None:
        """An intact index of checkpoint `k`, None when there is none."""
        for name in self.files().get(k, ()):
            path = f"{layout.run_root(self.run_id)}/index/{name}"
            with contextlib.suppress(Missing, FormatError):
                data = self.store.read(path)
                if layout.index_path(self.run_id, k, hashlib.sha256(data).digest()) != path:
                    continue
                part = decode(data, path)
                if place_of(part) == (self.ledger_id, self.run_id, k + 1 - lowbit(k), k) and misfit(part) is None:
                    return part
        return None

    def covered(self, last: int | None = None, first: int = 0, upto: Marks | None = None) -> tuple[Found, Marks]:
        """What indexes of checkpoints `first` to `last` (the newest) hold, and the receipts between them up to `upto`.

        Returns it with the marks before it: where the indexes do not reach down to `first`, receipts are left to read.
        """
        k = max(self.files(), default=-1) if last is None else last
        tables: list[pa.Table] = []
        after = upto
        while k >= first:
            part = self.part(k) if k in self.files() else None
            if part is None or part.info.first < first or (upto is not None and _beyond(part.info.after, upto)):
                k -= 1
                continue
            if upto is not None and part.info.after != upto:
                tables.append(self.between(part.info.after, upto))
            tables.append(part.table)
            after = part.info.after if after is None else after
            upto = part.info.before
            k = part.info.first - 1
        return Found(tables, after or {}), upto or {}

    def between(self, before: Marks, after: Marks) -> pa.Table:
        """The receipts after `before` up to `after`, read one by one, as a table."""
        keys = ((s, n) for s, last in sorted(after.items()) for n in range(before.get(s, -1) + 1, last + 1))
        return to_table(self.receipts(keys))

    def receipts(self, keys: Iterable[tuple[str, int]]) -> list[Receipt]:
        """The receipts at these places, without those that `damaged` lets pass.

        A thousand places in a row at which nothing can be read end it: marks claim what they like.
        """
        found: list[Receipt] = []
        rest = iter(keys)
        with ThreadPoolExecutor(READERS) as pool:
            while some := list(itertools.islice(rest, _LOOK_AHEAD)):
                there = [r for r in pool.map(self._receipt, some) if r is not None]
                found += there
                if not there:
                    break
        return found

    def _receipt(self, key: tuple[str, int]) -> Receipt | None:
        path = layout.receipt_path(self.run_id, *key)
        try:
            return decode_receipt(self.store.read(path), path)
        except (Missing, FormatError):  # a reply that was cut, or is behind, is no damage: the second look counts
            try:
                return decode_receipt(self.store.read(path), path)
            except (Missing, FormatError) as error:
                self._damaged(path, error)
                return None

    def tail(self, marks: Mapping[str, int]) -> list[Receipt]:
        """The receipts after `marks`: the next of each known chain is asked for by name, a new chain is listed."""
        folder = f"{layout.run_root(self.run_id)}/receipt"
        chains = [name for name in self.store.children(folder) if layout.is_shipper(name)]
        new = [key for name in chains if name not in marks for key in self._listed(f"{folder}/{name}")]
        at = {name: marks[name] + 1 for name in chains if name in marks}
        found = self.receipts(new)
        count = 1
        while at:  # as many at once as a chain has shown to have
            keys = [(name, n + i) for name, n in at.items() for i in range(count)]
            with ThreadPoolExecutor(READERS) as pool:
                there = dict(zip(keys, pool.map(self._next, keys), strict=True))
            found += [receipt for receipt, _ in there.values() if receipt is not None]
            at = {name: n + count for name, n in at.items() if there[name, n + count - 1][1]}
            count = min(2 * count, _AT_ONCE)
        return found

    def _next(self, key: tuple[str, int]) -> tuple[Receipt | None, bool]:
        """The receipt at a place that may be beyond the end of its chain, and whether one stands there."""
        path = layout.receipt_path(self.run_id, *key)
        try:
            return decode_receipt(self.store.read(path), path), True
        except Missing:
            return None, False
        except FormatError:
            return self._receipt(key), True

    def everything(self) -> list[Receipt]:
        """Every receipt, found by a listing and read one by one, in order."""
        return self.receipts(sorted(self._listed(f"{layout.run_root(self.run_id)}/receipt")))

    def _listed(self, folder: str) -> Iterator[tuple[str, int]]:
        for entry in self.store.list(folder):
            key = layout.parse_receipt(entry.path.removeprefix(layout.run_root(self.run_id) + "/"))
            if key is not None:
                yield key


def _beyond(marks: Marks, limit: Marks) -> bool:
    return any(limit.get(shipper, -1) < last for shipper, last in marks.items())


def read(store: Store, ledger_id: str, run_id: str, damaged: Damaged) -> Receipts:
    """The receipts of a run: from its indexes and the tail after them, or one by one where there is no index."""
    source = Source(store, ledger_id, run_id, damaged)
    if source.files():
        found, before = source.covered()
        if found.tables:
            if before:
                found.tables.append(source.between({}, before))
            tables = [*found.tables, to_table(source.tail(found.after))]
            return Receipts(pa.concat_tables(tables), ledger_id, run_id)
    return Receipts(source.everything(), ledger_id, run_id)


# -- writing -------------------------------------------------------------------------------------------------------


def write(store: Store, run_id: str, checkpoint: Checkpoint) -> str:
    """Writes the index of `checkpoint` from those it consolidates and the receipts of the checkpoint; returns its path.

    Safe to repeat and to race for: its name is that of its bytes. Raises LedgerError when a receipt is not the one
    the checkpoint covers, StoreError when the outcome is open.
    """
    k, info = checkpoint.info.k, checkpoint.info
    source = Source(store, info.ledger_id, run_id, _refuse)
    first = k + 1 - lowbit(k)
    before = dict(info.marks)
    for shipper, start, _ in info.appended:
        before[shipper] = start - 1
    before = {shipper: n for shipper, n in before.items() if n >= 0}
    tables = [_own(store, run_id, checkpoint)]
    if first < k:
        origin = _marks(store, run_id, first - 1)
        found, reached = source.covered(last=k - 1, first=first, upto=before)
        tables += [*found.tables, source.between(origin, reached)]
        before = origin
    rows = Receipts(pa.concat_tables(tables)).table
    covers = IndexInfo(
        format=FORMAT,
        ledger_id=info.ledger_id,
        run_id=run_id,
        first=first,
        last=k,
        before=before,
        after=dict(info.marks),
    )
    expected = sum(n - before.get(shipper, -1) for shipper, n in info.marks.items())
    if len(rows) != expected:
        raise LedgerError(f"{len(rows)} of the {expected} receipts that checkpoints {first}-{k} cover are there.")
    data = encode(covers, rows)
    path = layout.index_path(run_id, k, hashlib.sha256(data).digest())
    store.create(path, data)
    return path


def _own(store: Store, run_id: str, checkpoint: Checkpoint) -> pa.Table:
    """The receipts a checkpoint appends, each compared with its leaf and its place."""

    def read_one(item: tuple[str, int, bytes]) -> Receipt:
        shipper, n, digest = item
        path = layout.receipt_path(run_id, shipper, n)
        data = store.read(path)
        if leaf(data) != digest:
            raise LedgerError(f"{path} is not the receipt that checkpoint {checkpoint.info.k} covers.")
        receipt = decode_receipt(data, path)
        _check_place(receipt, checkpoint, shipper, n, path)
        return receipt

    with ThreadPoolExecutor(READERS) as pool:
        return to_table(list(pool.map(read_one, checkpoint.receipts())))


def _check_place(receipt: Receipt, checkpoint: Checkpoint, shipper: str, n: int, path: str) -> None:
    """Raises LedgerError when columns could not give the receipt back: its names must follow from its place."""
    info = checkpoint.info
    place = (receipt.ledger_id, receipt.run_id, receipt.shipper, receipt.n)
    named = layout.parse_segment(receipt.segment.name)
    if place != (info.ledger_id, info.run_id, shipper, n) or named != (shipper, n, receipt.root[7:23]):
        raise LedgerError(f"{path} is a receipt of another place, or names a segment of another: no index holds it.")


def _marks(store: Store, run_id: str, k: int) -> Marks:
    """The marks of checkpoint `k`, none below the first."""
    if k < 0:
        return {}
    path = layout.checkpoint_path(run_id, k)
    return dict(decode_checkpoint(store.read(path), path).info.marks)


def _refuse(path: str, error: Exception) -> None:
    raise LedgerError(f"{path}: {error}") from None
