"""First contact with a bucket: does it honour put-if-absent, and which ledger.json and run.json are in force.

The first writer of ledger.json and of run.json wins; everyone else adopts what is there.
"""

import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, NamedTuple, TypeVar

import msgspec

from rlk_ledger import layout
from rlk_ledger.store import AlreadyThere, Missing, Store
from rlk_ledger_schemas.errors import FormatError, LedgerError, StoreError
from rlk_ledger_schemas.objects import FORMAT, LedgerInfo, RunInfo, decode_ledger, decode_run, encode_object

_Info = TypeVar("_Info", LedgerInfo, RunInfo)
PutIfAbsent = Literal["honoured", "ignored"]


class Ignored(StoreError):
    """The store overwrites although it was told not to, and the run is strict."""


class Contact(NamedTuple):
    """What a chain needs to know of its bucket: the ledger and the run in force, and their bytes."""

    ledger: LedgerInfo
    ledger_bytes: bytes
    run: RunInfo
    run_bytes: bytes


def meet(store: Store, declared: RunInfo, strict: bool = False, ledger_id: str | None = None) -> Contact:
    """Creates or adopts ledger.json and the run's run.json.

    `declared` is what this process knows of the run (its ledger_id is filled in here). `ledger_id` pins the
    identity: a new ledger gets it, an existing one must have it. Raises StoreError, Ignored when
    `strict` and the store ignores put-if-absent, LedgerError when what is there is unreadable or another ledger.
    """
    ledger_bytes = _read(store, layout.LEDGER)
    if ledger_bytes is None:
        ledger_bytes = _create_ledger(store, strict, ledger_id)
    ledger = _decoded(decode_ledger, ledger_bytes, store, layout.LEDGER)
    if ledger_id is not None and ledger.ledger_id != ledger_id:
        raise LedgerError(f"{store.url} is ledger {ledger.ledger_id}, this writer was given ledger {ledger_id}.")
    if strict and ledger.put_if_absent == "ignored":
        raise Ignored(_ignored(store))
    path = layout.run_json(declared.run_id)
    mine = msgspec.structs.replace(declared, ledger_id=ledger.ledger_id)
    run_bytes = _read(store, path)
    if run_bytes is None:
        run_bytes = first_wins(store, path, encode_object(mine))
    run = _decoded(decode_run, run_bytes, store, path)
    if run.ledger_id != ledger.ledger_id or run.run_id != declared.run_id:
        raise LedgerError(
            f"{store.locate(path)} belongs to ledger {run.ledger_id}, run {run.run_id!r}; it was copied here."
        )
    return Contact(ledger, ledger_bytes, run, run_bytes)


def first_wins(store: Store, path: str, data: bytes) -> bytes:
    """The bytes at `path` after trying to put `data` there: ours or those of whoever came first."""
    try:
        store.create(path, data)
    except AlreadyThere:
        return store.read(path)
    return store.read(path)


def probe(store: Store) -> PutIfAbsent:
    """Whether the store honours put-if-absent: creates one fixed name twice and races for another.

    The names are fixed and never overwritten by a store that honours the condition, so the probe may be repeated and
    leaves two small objects behind.
    """
    twice, race = f"{layout.CANARY}/twice", f"{layout.CANARY}/race"
    if _wins(store, twice) + _wins(store, twice) > 1:
        return "ignored"
    with ThreadPoolExecutor(4) as pool:
        wins = sum(pool.map(lambda _: _wins(store, race), range(4)))
    return "ignored" if wins > 1 else "honoured"


def _wins(store: Store, path: str) -> bool:
    mine = secrets.token_hex(16).encode()
    try:
        store.create(path, mine)
    except AlreadyThere:
        return False
    return store.read(path) == mine


def _create_ledger(store: Store, strict: bool, ledger_id: str | None) -> bytes:
    honoured = probe(store)
    if strict and honoured == "ignored":
        raise Ignored(_ignored(store))
    info = LedgerInfo(
        format=FORMAT,
        hash="sha256",
        ledger_id=ledger_id or secrets.token_hex(16),
        required_features=(),
        created_us=time.time_ns() // 1000,
        put_if_absent=honoured,
    )
    return first_wins(store, layout.LEDGER, encode_object(info))


def _ignored(store: Store) -> str:
    return (
        f"{store.url} overwrites objects it was told to create only: two shippers could replace each other's receipts. "
        f"Use a store with conditional writes, or a mode that is not strict."
    )


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
