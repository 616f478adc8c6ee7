"""Pruned segments, tombstones and holds: what was deleted on purpose is named, and what contradicts itself is found."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from rlk_ledger import layout
from rlk_ledger.chain import holders
from rlk_ledger.holds import damaged as damaged_holds
from rlk_ledger.holds import read_holds
from rlk_ledger.records import Record
from rlk_ledger.segments import read_records
from rlk_ledger.store import Missing, Store
from rlk_ledger.tombstones import Grave, Graves, Tombstone, read_graves, summary
from rlk_ledger.verify.checkpoints import Copy, Coverage
from rlk_ledger.verify.finding import Finding, finding
from rlk_ledger_schemas.errors import FormatError
from rlk_ledger_schemas.fingerprints import sha256
from rlk_ledger_schemas.objects import Receipt


def graves_of(store: Store, run_id: str, receipts: Sequence[Receipt]) -> Graves:
    """What the run's tombstones say, as far as their segments are intact. Raises StoreError."""

    def read(receipt: Receipt, types: set[str]) -> Iterable[Record]:
        try:
            data = store.read(layout.segment_path(run_id, receipt.segment.name))
            return list(read_records(data, types)) if sha256(data) == receipt.segment.sha256 else []
        except (Missing, FormatError):
            return []

    return read_graves(receipts, read)


class Vouched(NamedTuple):
    """By what a receipt is believed: the checkpoints, copies of them kept elsewhere, and whether keys were given."""

    coverage: Coverage
    copies: Sequence[Copy]
    keys: bool

    @property
    def anything(self) -> bool:
        """Whether there is anything at all by which receipts could be believed."""
        return self.keys or bool(self.copies) or self.coverage.newest is not None


def check_pruned(
    store: Store,
    run_id: str,
    receipts: Sequence[Receipt],
    graves: Graves,
    absent: Collection[str],
    vouched: Vouched,
) -> list[Finding]:
    """What tombstones and holds account for and what is wrong with them; `absent` are the named segments that are gone.

    Raises StoreError.
    """
    out = [*_pruned(run_id, receipts, graves, absent), *_refused(run_id, graves)]
    out += _unvouched(run_id, graves, absent, vouched)
    for path, text in damaged_holds(store, run_id):
        out.append(finding("hold.damaged", path, text))
    for state in read_holds(store, run_id):
        if state.stands and state.hold is not None:
            path = layout.hold_path(run_id, state.hold_id)
            text = f"nothing of the run may be pruned, says {state.hold.by}: {state.hold.reason}"
            out.append(finding("run.held", path, text))
    return out


def _pruned(run_id: str, receipts: Sequence[Receipt], graves: Graves, absent: Collection[str]) -> Iterator[Finding]:
    """One finding a tombstone and chain: a run may lose ten thousand segments under one policy."""
    gone: dict[tuple[str, int, str], list[Grave]] = {}
    there: dict[tuple[str, int], list[Grave]] = {}
    for name, grave in graves.by_name.items():
        key = (grave.tombstone.writer_id, grave.tombstone.seq)
        if name in absent:
            gone.setdefault((*key, grave.receipt.shipper), []).append(grave)
        else:
            there.setdefault(key, []).append(grave)
    held = holders(receipts) if gone else {}
    for (_, _, shipper), found in gone.items():
        what = summary(found, held)
        if what is not None:
            numbers = sorted(grave.receipt.n for grave in found)
            stay = f"receipts {numbers[0]}-{numbers[-1]} stay" if len(numbers) > 1 else f"receipt {numbers[0]} stays"
            text = f"{what.text}; {_said(run_id, found[0].tombstone)}; {stay}"
            yield finding("segment.pruned", f"{layout.run_root(run_id)}/segment/{shipper}", text)
    for found in there.values():
        path = layout.segment_path(run_id, found[0].receipt.segment.name)
        what_is = "1 segment is" if len(found) == 1 else f"{len(found)} segments are"
        text = f"{what_is} named by a tombstone and still there; {_said(run_id, found[0].tombstone)}"
        yield finding("prune.unfinished", path, f"{text}; `rlk-ledger prune` under the same policy goes on")


def _unvouched(run_id: str, graves: Graves, absent: Collection[str], vouched: Vouched) -> Iterator[Finding]:
    """Tombstones that anybody could have written who can write to the bucket, where the bucket is not all there is."""
    if not vouched.anything:
        return
    gone: dict[tuple[str, int], list[str]] = {}
    for name in sorted(absent):
        tombstone = graves.by_name[name].tombstone
        if not vouched.coverage.covers(tombstone.receipt.shipper, tombstone.receipt.n):
            gone.setdefault((tombstone.receipt.shipper, tombstone.receipt.n), []).append(name)
    for place, names in gone.items():
        newer = "the copies" if vouched.copies and not vouched.keys else "the newest checkpoint that is believed"
        are = (
            f"1 segment is gone ({names[0]})"
            if len(names) == 1
            else f"{len(names)} segments are gone ({names[0]} first)"
        )
        text = (
            f"{are}; the tombstone in this receipt came after {newer} and "
            "bears no registered signature: whoever can write to the bucket can have written it"
        )
        yield finding("prune.unvouched", layout.receipt_path(run_id, *place), text)


def _said(run_id: str, tombstone: Tombstone) -> str:
    day = datetime.fromtimestamp(tombstone.wall_ns / 1e9, UTC).strftime("%Y-%m-%d %H:%M UTC")
    path = layout.receipt_path(run_id, tombstone.receipt.shipper, tombstone.receipt.n)
    return f"said on {day} by event {tombstone.seq} of writer {tombstone.writer_id} in {path}"


def _refused(run_id: str, graves: Graves) -> Iterator[Finding]:
    for tombstone, name, problem in graves.refused:
        path = layout.segment_path(run_id, tombstone.receipt.segment.name)
        where: dict[str, str | int] = {"writer": tombstone.writer_id, "first": tombstone.seq, "last": tombstone.seq}
        yield finding("tombstone.contradicts", path, f"of {name}: {problem}", **where)
