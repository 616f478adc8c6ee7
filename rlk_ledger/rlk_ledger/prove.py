"""Proof bundles: one event, and the hashes that lead from its bytes to a checkpoint.

    event's bytes -> leaf -> content root, in the receipt -> receipt's leaf -> root of the newest checkpoint
                                                          -> root of an older checkpoint kept elsewhere (`since`)

A bundle is one JSON object (`Bundle`), checked offline by `tools/check_proof.py`; it says nothing that cannot be
recomputed from it. Hashes, envelopes and array bytes are base64.
"""

import base64
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec
import pyarrow.compute as pc

from rlk_ledger import layout
from rlk_ledger.chain import held_ranges
from rlk_ledger.checkpoints import read_checkpoints
from rlk_ledger.ledger import Run
from rlk_ledger.records import Record, rows
from rlk_ledger.segments import content_root, read_segment
from rlk_ledger.store import Missing
from rlk_ledger_schemas import merkle
from rlk_ledger_schemas.checkpoints import Checkpoint
from rlk_ledger_schemas.codec import leaf_hash
from rlk_ledger_schemas.errors import FormatError, LedgerError, UsageError
from rlk_ledger_schemas.fingerprints import sha256
from rlk_ledger_schemas.objects import Receipt, decode_receipt

KIND, FORMAT = "rlk-ledger proof", 1


class NotCovered(LedgerError):
    """No checkpoint covers the event's receipt yet."""


class Diverged(LedgerError):
    """The ledger's checkpoints do not continue one that was kept elsewhere: its history was rewritten."""


class BundledArray(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An array of the event: `n` items of `dtype`, and either its little-endian bytes or their SHA-256."""

    name: str
    dtype: str
    n: int
    data: str | None = None
    sha256: str | None = None


class BundledEvent(msgspec.Struct, frozen=True, kw_only=True):
    """The event's envelope and arrays, its leaf, and the path from it, entry `index`, to the receipt's content root."""

    envelope: str
    arrays: tuple[BundledArray, ...]
    leaf: str
    index: int
    path: tuple[str, ...]


class BundledPath(msgspec.Struct, frozen=True, kw_only=True):
    """The path from the receipt, entry `index` of the log, to the checkpoint's root."""

    index: int
    path: tuple[str, ...]


class BundledPrefix(msgspec.Struct, frozen=True, kw_only=True):
    """The path that proves that the log of `size` receipts under `root` is how the checkpoint's log begins."""

    size: int
    root: str
    path: tuple[str, ...]


class Bundle(msgspec.Struct, frozen=True, kw_only=True):
    """A proof bundle, format 1: `receipt` and `checkpoint` are the objects' texts, byte for byte.

    `event` is None when the segment is gone: then what is proved is that a receipt names the event.
    """

    kind: str
    format: int
    writer_id: str
    seq: int
    event: BundledEvent | None
    receipt: str
    log: BundledPath
    checkpoint: str
    since: BundledPrefix | None


class EventName(NamedTuple):
    """What names an event in a ledger."""

    run_id: str
    writer_id: str
    seq: int

    def __str__(self) -> str:
        return f"{self.run_id}/{self.writer_id}/{self.seq}"


def parse_event(text: str) -> EventName:
    """The name in `<run>/<writer id>/<number>`; the writer id may be cut to what is unique. Raises UsageError."""
    parts = text.split("/")
    if len(parts) != 3 or not all(parts) or not parts[2].isascii() or not parts[2].isdigit():
        raise UsageError(
            f"{text!r} names no event: it is <run>/<writer id>/<sequence number>, or a run with --sample ID."
        )
    return EventName(parts[0], parts[1], int(parts[2]))


def prove(run: Run, writer: str, seq: int, *, arrays: bool = True, since: Checkpoint | None = None) -> Bundle:
    """The proof that event `seq` of `writer` (an id, or how one begins) is under the run's newest checkpoint.

    `since` is an older checkpoint of the run, kept elsewhere. Raises NotCovered, Diverged, UsageError for a writer that
    several ids begin with, and LedgerError when there is no such event or the ledger is damaged.
    """
    writer_id = _writer(run, writer)
    holders = [r for r in run.receipts if any(_holds(r, writer_id, seq))]
    if not holders:
        raise LedgerError(f"run {run.run_id!r} holds no event {seq} of writer {writer_id}.")
    checkpoints = read_checkpoints(run.store, run.run_id)
    places = _places(checkpoints, {(r.shipper, r.n) for r in holders})
    covered = [r for r in holders if (r.shipper, r.n) in places]
    if not covered:
        at = f"receipt {holders[0].n} of shipper {holders[0].shipper}"
        raise NotCovered(f"event {seq} of writer {writer_id} is in {at}, which no checkpoint covers yet.")
    leaves = [leaf for checkpoint in checkpoints for leaf in checkpoint.leaves]
    raw = [_covered_receipt(run, r, leaves[places[r.shipper, r.n]]) for r in covered]
    (receipt, text), records = _readable(run, raw)
    index = places[receipt.shipper, receipt.n]
    return Bundle(
        kind=KIND,
        format=FORMAT,
        writer_id=writer_id,
        seq=seq,
        event=None if records is None else _event(receipt, records, writer_id, seq, arrays),
        receipt=text,
        log=BundledPath(index=index, path=_encoded(merkle.inclusion(leaves, index))),
        checkpoint=checkpoints[-1].data.decode(),
        since=_prefix(checkpoints[-1], leaves, since),
    )


def encode_bundle(bundle: Bundle) -> bytes:
    """The bundle as JSON for a file: two spaces of indentation, a newline at the end."""
    return msgspec.json.format(msgspec.json.encode(bundle), indent=2) + b"\n"


def find_sample(run: Run, sample_id: str) -> Iterator[tuple[EventName, str]]:
    """Name and type of every event of a sample, each once, in the order of receipts; pruned ones are not found."""
    seen = set()
    for segment in run.segments(samples=[sample_id]):
        try:
            table = read_segment(run.intact(segment))
        except Missing:
            continue
        except FormatError as error:
            raise LedgerError(f"{segment.path}: {error} Run `rlk-ledger verify {run.run_id}`.") from None
        found = table.select(["writer_id", "seq", "type"]).filter(pc.equal(table["sample_id"], sample_id))
        for row in found.sort_by([("writer_id", "ascending"), ("seq", "ascending")]).to_pylist():
            name = EventName(run.run_id, row["writer_id"], row["seq"])
            if name not in seen:
                seen.add(name)
                yield name, row["type"]


def _writer(run: Run, start: str) -> str:
    known = [writer_id for writer_id in run.held.writers if writer_id.startswith(start)]
    if len(known) > 1 and start not in known:
        raise UsageError(f"{len(known)} writers of run {run.run_id!r} begin with {start!r}; give more of the id.")
    if not known:
        raise LedgerError(f"run {run.run_id!r} has no writer {start!r}; `rlk-ledger show {run.run_id}` lists them.")
    return start if start in known else known[0]


def _holds(receipt: Receipt, writer_id: str, seq: int) -> Iterator[bool]:
    for writer in receipt.writers:
        if writer.writer_id == writer_id:
            yield any(first <= seq <= last for first, last in held_ranges(writer))


def _places(checkpoints: Sequence[Checkpoint], wanted: set[tuple[str, int]]) -> dict[tuple[str, int], int]:
    """Where in the log the receipts `wanted` are, those that are."""
    out = {}
    for checkpoint in checkpoints:
        for i, (shipper, n, _) in enumerate(checkpoint.receipts(), checkpoint.first):
            if (shipper, n) in wanted:
                out[shipper, n] = i
    return out


def _covered_receipt(run: Run, receipt: Receipt, leaf: bytes) -> tuple[Receipt, str]:
    """The receipt and its text as they are in the store, if they are those the checkpoint covers."""
    path = layout.receipt_path(run.run_id, receipt.shipper, receipt.n)
    try:
        data = run.store.read(path)
        if merkle.leaf(data) != leaf:
            raise FormatError(f"{path} is not the receipt a checkpoint covers.")
        return decode_receipt(data, path), data.decode()
    except (Missing, FormatError) as error:
        raise LedgerError(f"{error} Run `rlk-ledger verify {run.run_id}`.") from None


def _readable(run: Run, receipts: Sequence[tuple[Receipt, str]]) -> tuple[tuple[Receipt, str], list[Record] | None]:
    """The first of `receipts` whose segment is there, with its records in leaf order; else the first, with None."""
    for receipt, text in receipts:
        path = layout.segment_path(run.run_id, receipt.segment.name)
        try:
            data = run.store.read(path)
            if sha256(data) != receipt.segment.sha256:
                raise FormatError("its bytes are not those its receipt describes.")
            records = sorted(rows(read_segment(data)), key=lambda r: (r.writer_id, r.seq))
            if f"sha256:{content_root(records).hex()}" != receipt.root:
                raise FormatError("its leaves do not add up to the receipt's root.")
        except Missing:
            continue
        except FormatError as error:
            raise LedgerError(f"{path}: {error} Run `rlk-ledger verify {run.run_id}`.") from None
        return (receipt, text), records
    return receipts[0], None


def _event(receipt: Receipt, records: Sequence[Record], writer_id: str, seq: int, arrays: bool) -> BundledEvent:
    index = next((i for i, r in enumerate(records) if (r.writer_id, r.seq) == (writer_id, seq)), None)
    if index is None or leaf_hash(records[index].envelope, records[index].arrays) != records[index].leaf:
        raise LedgerError(
            f"{receipt.segment.name} does not hold event {seq} of writer {writer_id} as its receipt says; "
            f"`rlk-ledger verify {receipt.run_id} --deep` says more."
        )
    record = records[index]
    return BundledEvent(
        envelope=_base64(record.envelope),
        arrays=tuple(_array(name, record, arrays) for name in sorted(record.arrays)),
        leaf=_base64(record.leaf),
        index=index,
        path=_encoded(merkle.inclusion([r.leaf for r in records], index)),
    )


def _array(name: str, record: Record, whole: bool) -> BundledArray:
    array = record.arrays[name]
    digest = bytes.fromhex(sha256(array.data).removeprefix("sha256:"))
    return BundledArray(
        name=name,
        dtype=array.dtype,
        n=len(array),
        data=_base64(array.data) if whole else None,
        sha256=None if whole else _base64(digest),
    )


def _prefix(newest: Checkpoint, leaves: Sequence[bytes], since: Checkpoint | None) -> BundledPrefix | None:
    """The consistency proof from `since` to `newest`; None without one, and when the two are one."""
    if since is None:
        return None
    if since.origin != newest.origin:
        raise UsageError(f"--since: that checkpoint is of {since.origin}, this run's are of {newest.origin}.")
    if since.size > len(leaves) or merkle.root(leaves[: since.size]) != since.root:
        raise Diverged(
            f"the ledger's {len(leaves)} receipts do not continue the checkpoint of {since.size} that was kept "
            f"elsewhere: its history was rewritten or cut. `rlk-ledger verify {newest.info.run_id} --checkpoint FILE`."
        )
    if since.size == newest.size:
        return None
    path = _encoded(merkle.consistency(leaves, since.size))
    return BundledPrefix(size=since.size, root=_base64(since.root), path=path)


def _encoded(hashes: Iterable[bytes]) -> tuple[str, ...]:
    return tuple(_base64(item) for item in hashes)


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()
