"""First contact with a bucket: does it honour put-if-absent, and which ledger.json and run.json are in force.

The first writer of ledger.json and of run.json wins; everyone else adopts what is there. The store is probed when
either is new, and always for a strict run: a bucket may have been copied to a store that keeps no promises.
"""

import contextlib
import secrets
import time
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import msgspec

from rlk_ledger import layout
from rlk_ledger.canary import PutIfAbsent, probe
from rlk_ledger.store import AlreadyThere, Missing, Store
from rlk_ledger_schemas.errors import FormatError, LedgerError, StoreError
from rlk_ledger_schemas.objects import FORMAT, LedgerInfo, RunInfo, decode_ledger, decode_run, encode_object

_Info = TypeVar("_Info", LedgerInfo, RunInfo)


class Ignored(StoreError):
    """The store overwrites although it was told not to, and the run is strict."""


class Contact(NamedTuple):
    """What a chain needs to know of its bucket: the ledger and the run in force, and their bytes."""

    ledger: LedgerInfo
    ledger_bytes: bytes
    run: RunInfo
    run_bytes: bytes

    @property
    def overwrites(self) -> bool:
        """Whether the store was seen to overwrite objects that it was told to create only."""
        return "ignored" in (self.ledger.put_if_absent, self.run.put_if_absent)


def meet(store: Store, declared: RunInfo, strict: bool = False, ledger_id: str | None = None) -> Contact:
    """Creates or adopts ledger.json and the run's run.json.

    `declared` is what this process knows of the run (its ledger_id is filled in here). `ledger_id` pins the
    identity: a new ledger gets it, an existing one must have it. Raises StoreError, Ignored when
    `strict` and the store ignores put-if-absent, LedgerError when what is there is unreadable or another ledger.
    """
    probed: PutIfAbsent | None = None
    ledger_bytes = _read(store, layout.LEDGER)
    if ledger_bytes is None or strict:
        probed = _probe(store, strict)
    if ledger_bytes is None:
        ledger_bytes = _create_ledger(store, probed, ledger_id)
    ledger = _decoded(decode_ledger, ledger_bytes, store, layout.LEDGER)
    if ledger_id is not None and ledger.ledger_id != ledger_id:
        raise LedgerError(f"{store.url} is ledger {ledger.ledger_id}, this writer was given ledger {ledger_id}.")
    path = layout.run_json(declared.run_id)
    run_bytes = _read(store, path)
    if run_bytes is None:
        ignored = "ignored" if (probed or _probe(store, strict)) == "ignored" else None
        mine = msgspec.structs.replace(declared, ledger_id=ledger.ledger_id, put_if_absent=ignored)
        run_bytes = first_wins(store, path, encode_object(mine))
    run = _decoded(decode_run, run_bytes, store, path)
    if run.ledger_id != ledger.ledger_id or run.run_id != declared.run_id:
        raise LedgerError(
            f"{store.locate(path)} belongs to ledger {run.ledger_id}, run {run.run_id!r}; it was copied here."
        )
    contact = Contact(ledger, ledger_bytes, run, run_bytes)
    if strict and contact.overwrites:
        raise Ignored(overwrites(store))
    return contact


def first_wins(store: Store, path: str, data: bytes) -> bytes:
    """The bytes at `path` after trying to put `data` there: ours or those of whoever came first."""
    with contextlib.suppress(AlreadyThere):
        store.create(path, data)
    return store.read(path)


def overwrites(store: Store) -> str:
    """What a store that ignores put-if-absent means, and what to do, in two sentences."""
    return (
        f"{store.url} overwrites objects it was told to create only: two shippers could replace each other's receipts. "
        f"Use a store with conditional writes, or a mode that is not strict."
    )


def _probe(store: Store, strict: bool) -> PutIfAbsent:
    found = probe(store)
    if strict and found == "ignored":
        raise Ignored(overwrites(store))
    return found


def _create_ledger(store: Store, probed: PutIfAbsent | None, ledger_id: str | None) -> bytes:
    info = LedgerInfo(
        format=FORMAT,
        hash="sha256",
        ledger_id=ledger_id or secrets.token_hex(16),
        required_features=(),
        created_us=time.time_ns() // 1000,
        put_if_absent=probed,
    )
    return first_wins(store, layout.LEDGER, encode_object(info))


def _read(store: Store, path: str) -> bytes | None:
    try:
        return store.read(path)
    except Missing:
        return None


def _decoded(decode: Callable[[bytes, str], _Info], data: bytes, store: Store, path: str) -> _Info:
    try:
        return decode(data, path)
    except FormatError as error:
        raise LedgerError(f"{store.url}: {error}") from None
