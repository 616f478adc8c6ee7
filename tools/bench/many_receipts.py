"""A ledger of very many receipts, made quickly: valid chains whose segments are there for a few receipts only.

Opening a run and finding one sample needs no other segment; `verify` of such a ledger names the rest as missing.
"""

import base64
import random
import secrets
from collections.abc import Iterator
from pathlib import Path

from rlk_ledger import checkpoints, layout
from rlk_ledger.build import event
from rlk_ledger.chain import writer_ranges
from rlk_ledger.contact import Contact, meet
from rlk_ledger.segments import write_segment
from rlk_ledger.store import FileStore
from rlk_ledger_schemas.fingerprints import sha256
from rlk_ledger_schemas.objects import FORMAT, Receipt, RunInfo, SegmentRef, TypeCount, WriterRange, encode_receipt
from rlk_ledger_schemas.samples import PRINT_BYTES, sample_print

RUN = "many"
PER_SEGMENT = 64
"""Samples each receipt names."""
REAL = 16
"""Samples that really are there."""


def sample_id(number: int) -> str:
    """The id of a sample that really is in the ledger: of segment `number` of those that exist."""
    return f"there-{number}"


# A print that happens to be that of a sample asked for would send the reader to a segment that is not there. Of a real
# ledger it opens receipts * PER_SEGMENT / 2^24 segments in vain: 0.8 of 200,000.
_THERE = frozenset(sample_print(sample_id(number)) for number in range(REAL))


class Quick(FileStore):
    """A local store that syncs nothing: what is built here is thrown away."""

    def create(self, path: str, data: bytes) -> None:
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)


def make(folder: Path, receipts: int, shippers: int, seed: int = 0) -> int:
    """Writes the ledger into `folder` with its checkpoints and indexes; returns how many objects it has.

    REAL of the receipts, evenly spread, have a segment with one sample of both sides, `sample_id(0)` and so on.
    """
    store = Quick(folder)
    declared = RunInfo(format=FORMAT, ledger_id="", run_id=RUN, roles={}, mode={}, redaction="none", created_us=0)
    contact = meet(store, declared)
    rng = random.Random(seed)
    each = -(-receipts // shippers)
    every, made = max(1, receipts // REAL), 0
    for index in range(shippers):
        count = min(each, receipts - index * each)
        for path, data in _chain(contact, rng, count, index * each, every):
            store.create(path, data)
            made += 1
    checkpoints.make(store, RUN)
    return sum(1 for _ in store.list(""))


def _chain(contact: Contact, rng: random.Random, count: int, start: int, every: int) -> Iterator[tuple[str, bytes]]:
    shipper, writer, previous = secrets.token_hex(16), secrets.token_hex(16), None
    for n in range(count):
        number = start + n
        if number % every == 0:
            receipt, segment = _real(contact, shipper, writer, n, number // every)
            yield layout.segment_path(RUN, receipt.segment.name), segment
        else:
            receipt = _bare(contact, rng, shipper, writer, n)
        if n == 0:
            pins = {"ledger_json": sha256(contact.ledger_bytes), "run_json": sha256(contact.run_bytes)}
        else:
            pins = {"previous": previous}
        data = encode_receipt(_with(receipt, **pins))
        previous = sha256(data)
        yield layout.receipt_path(RUN, shipper, n), data


def _with(receipt: Receipt, **fields: str | None) -> Receipt:
    import msgspec

    return msgspec.structs.replace(receipt, **fields)


def _bare(contact: Contact, rng: random.Random, shipper: str, writer: str, n: int) -> Receipt:
    """A receipt as a segment of PER_SEGMENT samples of both sides would have it, without the segment."""
    root = rng.randbytes(32)
    prints = sorted({rng.randbytes(PRINT_BYTES) for _ in range(PER_SEGMENT)} - _THERE)
    step = n
    first = n * 3 * PER_SEGMENT
    return Receipt(
        format=FORMAT,
        ledger_id=contact.ledger.ledger_id,
        run_id=RUN,
        shipper=shipper,
        n=n,
        segment=SegmentRef(
            name=layout.segment_name(shipper, n, root),
            bytes=rng.randrange(1 << 20, 1 << 24),
            rows=3 * PER_SEGMENT,
            sha256=f"sha256:{rng.randbytes(32).hex()}",
        ),
        writers=(WriterRange(writer_id=writer, first=first, last=first + 3 * PER_SEGMENT - 1),),
        root=f"sha256:{root.hex()}",
        types=(
            TypeCount(type="logprobs", count=2 * PER_SEGMENT, min_step=step, max_step=step),
            TypeCount(type="rollout.sample", count=PER_SEGMENT, min_step=step, max_step=step),
        ),
        wall_us=1_790_000_000_000_000 + n,
        samples=base64.b64encode(b"".join(prints)).decode(),
    )


def _real(contact: Contact, shipper: str, writer: str, n: int, number: int) -> tuple[Receipt, bytes]:
    ids, first = {"sample_id": sample_id(number), "step": n}, n * 3 * PER_SEGMENT
    values = [-0.5] * 256
    records = [
        event(RUN, writer, first, "rollout.sample", response_token_ids=[7] * 256, loss_mask=[1] * 256, **ids),
        event(RUN, writer, first + 1, "logprobs", source="rollout", contract_id="c", values=values, **ids),
        event(RUN, writer, first + 2, "logprobs", source="training", contract_id="c", values=values, **ids),
    ]
    segment = write_segment(records)
    name = layout.segment_name(shipper, n, segment.root)
    receipt = Receipt(
        format=FORMAT,
        ledger_id=contact.ledger.ledger_id,
        run_id=RUN,
        shipper=shipper,
        n=n,
        segment=SegmentRef(name=name, bytes=len(segment.data), rows=segment.rows, sha256=sha256(segment.data)),
        writers=writer_ranges(records, {}),
        root=f"sha256:{segment.root.hex()}",
        types=segment.counts,
        wall_us=1_790_000_000_000_000 + n,
        samples=segment.samples,
    )
    return receipt, segment.data
