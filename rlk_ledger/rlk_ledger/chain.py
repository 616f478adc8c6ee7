"""One shipper's chain of receipts in one run: segment first, checked by reading back; receipt last.

A `Draft` is frozen before its first attempt: every retry offers the same bytes under the same name, so that a reply
lost on the way can be told from another shipper's object.
"""

import contextlib
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from rlk_ledger import layout
from rlk_ledger.contact import Contact
from rlk_ledger.records import LIMIT, Record
from rlk_ledger.segments import write_segment
from rlk_ledger.signing import Signer, signed
from rlk_ledger.spans import Spans, merged
from rlk_ledger.store import AlreadyThere, Missing, Store
from rlk_ledger_schemas.codec import decode_envelope
from rlk_ledger_schemas.errors import StoreError
from rlk_ledger_schemas.fingerprints import sha256
from rlk_ledger_schemas.objects import FORMAT, Receipt, SegmentRef, WriterRange, decode_receipt, encode_receipt


class Forked(StoreError):
    """Another shipper writes under this chain's identity: take a new one."""


class Uprooted(StoreError):
    """The ledger.json or run.json this chain began under is gone or another: a chain has to begin anew."""


class Ending(NamedTuple):
    """How a writer ended without saying so.

    `lost_bytes` counts bytes of its spool that were no event, `last_seq` is the last number recovered (-1 for none).
    `dead` is false for a writer that lives, or closed, and whose spool holds bytes that are no event.
    """

    lost_bytes: int
    last_seq: int = -1
    reason: str = "its process is dead"
    dead: bool = True


class Draft(NamedTuple):
    """A segment and the receipt that will make it exist, both as bytes and where they go."""

    segment_path: str
    segment: bytes
    receipt_path: str
    receipt_bytes: bytes
    receipt: Receipt


def new_shipper() -> str:
    """A fresh shipper id: 128 random bits in hex."""
    return secrets.token_hex(16)


def _wall_us() -> int:
    return time.time_ns() // 1000


class Chain:
    """Appends to one chain. Owned by one thread; `n` and `previous` move only after a receipt was read back."""

    def __init__(
        self,
        store: Store,
        contact: Contact,
        shipper: str | None = None,
        wall_us: Callable[[], int] = _wall_us,
        signer: Signer | None = None,
    ) -> None:
        self.store = store
        self.contact = contact
        self.shipper = shipper or new_shipper()
        self.n = 0
        self.previous: str | None = None
        self._wall_us = wall_us
        self.signer = signer  # one for the whole chain: its first receipt names the key

    def draft(self, records: Sequence[Record], endings: Mapping[str, Ending] | None = None) -> Draft:
        """The next segment and receipt for `records`; `endings` names writers found dead. Raises FormatError."""
        segment = write_segment(records)
        run_id = self.contact.run.run_id
        name = layout.segment_name(self.shipper, self.n, segment.root)
        receipt = Receipt(
            format=FORMAT,
            ledger_id=self.contact.ledger.ledger_id,
            run_id=run_id,
            shipper=self.shipper,
            n=self.n,
            previous=self.previous,
            segment=SegmentRef(name=name, bytes=len(segment.data), rows=segment.rows, sha256=sha256(segment.data)),
            writers=writer_ranges(records, endings or {}),
            root=f"sha256:{segment.root.hex()}",
            types=segment.counts,
            samples=segment.samples,
            wall_us=self._wall_us(),
            ledger_json=sha256(self.contact.ledger_bytes) if self.n == 0 else None,
            run_json=sha256(self.contact.run_bytes) if self.n == 0 else None,
        )
        data = encode_receipt(signed(receipt, self.signer))
        path = layout.receipt_path(run_id, self.shipper, self.n)
        return Draft(layout.segment_path(run_id, name), segment.data, path, data, decode_receipt(data, path))

    def publish(self, draft: Draft) -> Receipt:
        """Puts the segment, checks it, puts the receipt, checks it, and moves the chain on. Safe to repeat.

        Raises Forked when another receipt stands in this place, Uprooted when the ledger was removed or replaced, other
        StoreErrors when the outcome is open.
        """
        self._check_roots()
        self._put(draft.segment_path, draft.segment)
        self._put(draft.receipt_path, draft.receipt_bytes)
        self.n = draft.receipt.n + 1
        self.previous = sha256(draft.receipt_bytes)
        return draft.receipt

    def _put(self, path: str, data: bytes) -> None:
        """Puts an object and reads it back. Other bytes are believed when two looks show the same ones.

        A reply that was cut on its way looks like other bytes once; to give up an identity for it would commit its
        events a second time.
        """
        with contextlib.suppress(AlreadyThere):
            self.store.create(path, data)
        looks = []
        for _ in range(2):
            looks.append(self.store.read(path))
            if looks[-1] == data:
                return
        if looks[0] != looks[1]:
            raise StoreError(f"{self.store.locate(path)} reads back differently each time.")
        raise Forked(f"{self.store.locate(path)} holds other bytes, which another shipper or the store put there.")

    def _check_roots(self) -> None:
        """Without its ledger.json and run.json a receipt would be in a ledger that nobody can open."""
        contact = self.contact
        roots = ((layout.LEDGER, contact.ledger_bytes), (layout.run_json(contact.run.run_id), contact.run_bytes))
        for path, data in roots:
            try:
                if self.store.read(path) == data:
                    continue
            except Missing:
                pass
            raise Uprooted(f"{self.store.locate(path)} is no longer the one this chain began under.")

    def renew(self) -> str:
        """Takes a new identity and starts a new chain; returns the old identity."""
        old, self.shipper = self.shipper, new_shipper()
        self.n, self.previous = 0, None
        return old


def writer_ranges(records: Iterable[Record], endings: Mapping[str, Ending]) -> tuple[WriterRange, ...]:
    """What a receipt says of each writer in `records`, and of each dead writer in `endings`, sorted by writer id."""
    held: dict[str, list[int]] = {writer_id: [] for writer_id in endings}
    dropped: dict[str, int] = {}
    closed: set[str] = set()
    for record in records:
        held.setdefault(record.writer_id, []).append(record.seq)
        if b"writer.closed" not in record.envelope and b"gap" not in record.envelope:
            continue  # whatever its type is, it is neither of the two: no need to decode it
        fields = decode_envelope(record.envelope)
        if fields["type"] == "writer.closed":
            closed.add(record.writer_id)
        elif fields["type"] == "gap":
            dropped[record.writer_id] = dropped.get(record.writer_id, 0) + gap_size(fields)
    out = []
    for writer_id, seqs in sorted(held.items()):
        spans = ranges(seqs)
        ending = endings.get(writer_id)
        out.append(
            WriterRange(
                writer_id=writer_id,
                first=spans[0][0] if spans else 0,
                last=spans[-1][1] if spans else 0,
                ranges=None if len(spans) == 1 else spans,
                gaps=dropped.get(writer_id),
                lost_bytes=(ending.lost_bytes or None) if ending else None,
                closed=True if writer_id in closed else None,
                dead=True if ending and ending.dead else None,
            )
        )
    return tuple(out)


def gap_size(fields: Mapping[str, object]) -> int:
    """How many sequence numbers a `gap` event's envelope says were dropped; 0 when it does not say."""
    first, last = fields.get("first"), fields.get("last")
    if type(first) is not int or type(last) is not int or not 0 <= first <= last < LIMIT:
        return 0
    return last - first + 1


def ranges(seqs: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Sorted inclusive ranges that cover `seqs` exactly."""
    out: list[tuple[int, int]] = []
    for seq in sorted(seqs):
        if out and seq <= out[-1][1] + 1:
            out[-1] = (out[-1][0], seq)
        else:
            out.append((seq, seq))
    return tuple(out)


def held_ranges(writer: WriterRange) -> tuple[tuple[int, int], ...]:
    """The inclusive ranges of sequence numbers a receipt says its segment holds of one writer."""
    return ((writer.first, writer.last),) if writer.ranges is None else writer.ranges


def holders(receipts: Iterable[Receipt]) -> dict[str, list[tuple[Receipt, Spans]]]:
    """Of every writer the receipts that hold some of its numbers, in the order given, and which numbers those are."""
    out: dict[str, list[tuple[Receipt, Spans]]] = {}
    for receipt in receipts:
        held: dict[str, Spans] = {}
        for writer in receipt.writers:
            held.setdefault(writer.writer_id, []).extend(held_ranges(writer))
        for writer_id, spans in held.items():
            if spans:
                out.setdefault(writer_id, []).append((receipt, merged(spans)))
    return out
