"""Checkpoints of a run: finding them, and making the next one.

A checkpoint is one object, put only if nothing is there, so it exists whole or not at all. Any number of makers may
try: whoever comes second at a number reads what the first put there and goes on from it. A maker integrates what it
sees: a receipt it does not see (a listing that is behind) is integrated by a later one, and never before the receipt
it follows. What is damaged is never integrated.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from rlk_ledger import layout
from rlk_ledger.news import Arrival, News, unfinished
from rlk_ledger.signing import Signer, text_of
from rlk_ledger.store import AlreadyThere, Missing, Store
from rlk_ledger_schemas.checkpoints import (
    MOST_RECEIPTS,
    Checkpoint,
    CheckpointInfo,
    checkpoint_text,
    decode_checkpoint,
    encode_checkpoint,
    join_hashes,
    origin,
)
from rlk_ledger_schemas.errors import FormatError, LedgerError, StoreError
from rlk_ledger_schemas.merkle import Frontier
from rlk_ledger_schemas.notes import LONGEST_NOTE
from rlk_ledger_schemas.objects import FORMAT, decode_ledger

_READERS = 8
_COLLISIONS = 64
"""Numbers in a row that others may take before a maker gives up for now."""
# At most what a note holds: of itself, and a mark, and of a chain with news its range and mark, and a leaf.
_OWN_BYTES, _MARK_BYTES, _CHAIN_BYTES, _LEAF_BYTES = 3000, 56, 136, 44
_log = logging.getLogger("rlk_ledger")


def read_checkpoint(store: Store, run_id: str, k: int) -> Checkpoint:
    """Checkpoint `k` of a run; raises Missing, StoreError, and LedgerError when what is there is not it."""
    path = layout.checkpoint_path(run_id, k)
    data = store.read(path)
    try:
        found = decode_checkpoint(data, path)
    except FormatError as error:
        if store.read(path) != data:  # a reply that was cut is no damage
            raise StoreError(f"{store.locate(path)} reads differently each time.") from None
        raise LedgerError(f"{error} {_verify(run_id)}") from None
    if (found.info.run_id, found.k) != (run_id, k):
        raise LedgerError(f"{path}: it is checkpoint {found.k} of run {found.info.run_id!r}. {_verify(run_id)}")
    return found


def read_checkpoints(store: Store, run_id: str) -> list[Checkpoint]:
    """Every checkpoint of a run, from 0 on, each following the one before it; raises LedgerError on damage."""
    newest = latest(store, run_id)
    if newest is None:
        return []
    with ThreadPoolExecutor(_READERS) as pool:
        found = [*pool.map(lambda k: _present(store, run_id, k), range(newest.k)), newest]
    before: Checkpoint | None = None
    for checkpoint in found:
        check_follows(checkpoint, before, layout.checkpoint_path(run_id, checkpoint.k), run_id)
        before = checkpoint
    return found


def _present(store: Store, run_id: str, k: int) -> Checkpoint:
    try:
        return read_checkpoint(store, run_id, k)
    except Missing:
        raise LedgerError(f"{layout.checkpoint_path(run_id, k)} is gone. {_verify(run_id)}") from None


def check_follows(checkpoint: Checkpoint, before: Checkpoint | None, where: str, run_id: str) -> None:
    """Raises LedgerError unless `checkpoint` follows `before` and its tree is that of `before` and its own leaves."""
    wrong = departs(checkpoint, before)
    if wrong is not None:
        raise LedgerError(f"{where}: {wrong}. {_verify(run_id)}")


def departs(checkpoint: Checkpoint, before: Checkpoint | None) -> str | None:
    """How `checkpoint` fails to follow `before` (None for checkpoint 0), None when it does follow."""
    info = checkpoint.info
    if info.previous != (None if before is None else before.digest):
        return f"it follows {info.previous}, the checkpoint before it is {before.digest if before else 'none'}"
    if before is not None and checkpoint.origin != before.origin:
        return f"its origin is {checkpoint.origin!r}, that of the one before it {before.origin!r}"
    marks = dict(_marks(before))
    for shipper, first, last in info.appended:
        if first != marks.get(shipper, -1) + 1:
            return f"it appends receipts {first}-{last} of shipper {shipper} after {marks.get(shipper, -1)}"
        marks[shipper] = last
    if marks != info.marks:
        return "its marks are not those before it and what it appends"
    tree = before.frontier() if before is not None else Frontier()
    for leaf in checkpoint.leaves:
        tree.append(leaf)
    if (tree.size, tree.root()) != (checkpoint.size, checkpoint.root):
        return "its root is not that of the leaves before it and its own"
    return None


def newest_k(store: Store, run_id: str, at_least: int = -1) -> int:
    """The number of the newest checkpoint, -1 without one. `at_least` is one known to be there: then nothing is listed.

    A listing may be behind, so what follows it is asked for by name.
    """
    k = at_least
    if k < 0:
        names = store.children(f"{layout.run_root(run_id)}/checkpoint")
        numbers = [layout.parse_checkpoint(f"checkpoint/{name}") for name in names]
        k = max((n for n in numbers if n is not None), default=-1)
    while store.stat(layout.checkpoint_path(run_id, k + 1)) is not None:
        k += 1
    return k


def latest(store: Store, run_id: str, known: Checkpoint | None = None) -> Checkpoint | None:
    """The newest checkpoint of a run, None without one; `known` saves the way to it. Raises LedgerError, StoreError."""
    k = newest_k(store, run_id, known.k if known is not None else -1)
    if k < 0:
        return None
    return known if known is not None and known.k == k else _present(store, run_id, k)


def make(
    store: Store,
    run_id: str,
    signer: Signer | None = None,
    known: Checkpoint | None = None,
    wall_us: Callable[[], int] = lambda: time.time_ns() // 1000,
) -> Checkpoint | None:
    """Covers every receipt that can be seen; returns the newest checkpoint this call made, None when nothing was new.

    Receipts beyond 8,192 get checkpoints of their own. Damaged receipts, and what follows them in their chain, are left
    out; what is intact is covered first, then LedgerError names them. Raises StoreError when the outcome is open:
    trying again is safe. `known` is any earlier checkpoint of the run, which saves requests.
    """
    news = News(store, run_id, _ledger_id(store))
    newest, made = latest(store, run_id, known), None
    chains = news.chains(_marks(newest))
    damaged: list[str] = []
    while chains:
        found = news.follow(chains, _marks(newest), MOST_RECEIPTS)
        damaged += news.damaged
        composer = _Composer(news.ledger_id, run_id, signer, wall_us)
        newest, mine = _cover(store, composer, newest, found)
        made = mine or made
        chains = unfinished(chains, found, MOST_RECEIPTS)
    if damaged:
        more = f" and {len(damaged) - 1} more" if len(damaged) > 1 else ""
        raise LedgerError(f"{damaged[0]}{more}: it was not covered. {_verify(run_id)}")
    return made


class _Composer(NamedTuple):
    """What is the same in every checkpoint of one maker."""

    ledger_id: str
    run_id: str
    signer: Signer | None
    wall_us: Callable[[], int]


def _cover(
    store: Store, composer: _Composer, newest: Checkpoint | None, found: Sequence[Sequence[Arrival]]
) -> tuple[Checkpoint | None, Checkpoint | None]:
    """Puts checkpoints until `found` is covered, by whomever; returns the newest there is and the newest made here."""
    made, collisions = None, 0
    while batch := _next_batch(found, _marks(newest), composer.run_id):
        written = _put(store, composer.run_id, _compose(composer, newest, batch))
        if isinstance(written, Checkpoint):
            newest = made = written
            _write_index(store, composer.run_id, made)
            continue
        newest = latest(store, composer.run_id, _present(store, composer.run_id, written))
        collisions += 1
        if collisions == _COLLISIONS:
            raise StoreError(f"run {composer.run_id!r}: {collisions} checkpoints in a row were others'; try again.")
    return newest, made


def _marks(checkpoint: Checkpoint | None) -> Mapping[str, int]:
    return checkpoint.info.marks if checkpoint is not None else {}


def _next_batch(found: Sequence[Sequence[Arrival]], marks: Mapping[str, int], run_id: str) -> list[Sequence[Arrival]]:
    """Of every chain in `found` what is beyond its mark, in order of the shippers, as much as one note holds."""
    out: list[Sequence[Arrival]] = []
    room, left = LONGEST_NOTE - _OWN_BYTES - _MARK_BYTES * len(marks), MOST_RECEIPTS
    for chain in found:
        waiting = [arrival for arrival in chain if arrival.n > marks.get(arrival.shipper, -1)]
        taken = waiting[: max(0, min(left, (room - _CHAIN_BYTES) // _LEAF_BYTES))]
        if taken:
            out.append(taken)
            room, left = room - _CHAIN_BYTES - _LEAF_BYTES * len(taken), left - len(taken)
        elif waiting and not out:
            raise LedgerError(f"run {run_id!r} has {len(marks)} shippers, more than a checkpoint can name.")
    return out


def _put(store: Store, run_id: str, data: bytes) -> Checkpoint | int:
    """Puts a checkpoint and reads it back; its number when somebody else's stands there."""
    mine = decode_checkpoint(data, f"checkpoint of run {run_id!r}")
    path = layout.checkpoint_path(run_id, mine.k)
    try:
        store.create(path, data)
    except AlreadyThere:
        return mine.k
    return mine if data in (store.read(path), store.read(path)) else mine.k  # once more: a reply may be cut


def _verify(run_id: str) -> str:
    return f"`rlk-ledger verify {run_id}` says what else is damaged."


def _ledger_id(store: Store) -> str:
    try:
        return decode_ledger(store.read(layout.LEDGER)).ledger_id
    except Missing:
        raise LedgerError(f"no ledger at {store.url}: {layout.LEDGER} is not there; check the URL.") from None
    except FormatError as error:
        raise LedgerError(f"{store.url}: {error}") from None


def _compose(composer: _Composer, before: Checkpoint | None, batch: Sequence[Sequence[Arrival]]) -> bytes:
    """The bytes of the checkpoint that appends `batch`, sorted by shipper, to `before`; raises LedgerError."""
    ledger_id, run_id, signer, wall_us = composer
    name = origin(ledger_id, run_id)
    if before is not None and before.origin != name:
        raise LedgerError(f"checkpoint {before.k} is of {before.origin!r}, not of {name!r}. {_verify(run_id)}")
    tree = before.frontier() if before is not None else Frontier()
    arrivals = [arrival for chain in batch for arrival in chain]
    for arrival in arrivals:
        tree.append(arrival.leaf)
    info = CheckpointInfo(
        format=FORMAT,
        ledger_id=ledger_id,
        run_id=run_id,
        k=before.k + 1 if before is not None else 0,
        previous=before.digest if before is not None else None,
        appended=tuple((chain[0].shipper, chain[0].n, chain[-1].n) for chain in batch),
        leaves=join_hashes([arrival.leaf for arrival in arrivals]),
        marks={**_marks(before), **{chain[0].shipper: chain[-1].n for chain in batch}},
        peaks=join_hashes(tree.peaks),
        wall_us=wall_us(),
        public_key=text_of(signer.public_key) if signer is not None else None,
    )
    text = checkpoint_text(info, tree.size, tree.root())
    try:
        signatures = [signer.note_signature(name, text)] if signer is not None else []
        return encode_checkpoint(info, tree.size, tree.root(), signatures)
    except FormatError as error:
        raise LedgerError(f"no checkpoint can be made of run {run_id!r}: {error}") from None


def _write_index(store: Store, run_id: str, checkpoint: Checkpoint) -> None:
    """The index is a convenience: whatever goes wrong with it, the checkpoint stands."""
    try:
        from rlk_ledger import index

        index.write(store, run_id, checkpoint)
    except Exception as error:
        _log.warning("checkpoint %d of run %s has no index: %s", checkpoint.k, run_id, error)
