"""The put-if-absent probe: fixed names below `canary/`, created twice and in a race, on every first contact.

A canary says of itself what it is (`self` is the SHA-256 of the rest), so that a change of it shows. A store that
honours the condition never overwrites one: the probe may be repeated, also where nothing can be deleted.
"""

import contextlib
import re
import secrets
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import msgspec

from rlk_ledger import layout
from rlk_ledger.store import AlreadyThere, Missing, Store
from rlk_ledger_schemas.errors import FormatError, StoreError
from rlk_ledger_schemas.fingerprints import canonical_json, sha256
from rlk_ledger_schemas.objects import FORMAT

PutIfAbsent = Literal["honoured", "ignored"]
TWICE, RACE, AGAIN = NAMES = ("twice", "race", "again")
_RACERS = 4
_FIRST_FORM = re.compile(rb"[0-9a-f]{32}")
"""What the first release wrote: a random number, which says nothing about itself."""


def probe(store: Store) -> PutIfAbsent:
    """Whether the store honours put-if-absent. Raises StoreError while that cannot be told.

    Of all creators of one name at most one may be told that it succeeded, and what stands there never changes. One
    reply that went wrong looks like a store that overwrites, and would brand the ledger for good: it is asked again,
    after a race with a race for a name of its own, because the first is taken.
    """
    if _twice(store) and _twice(store):
        return "ignored"
    return "ignored" if _race(store, RACE) and _race(store, AGAIN) else "honoured"


def _twice(store: Store) -> bool:
    return _overwritten(store, TWICE, [_create(store, TWICE), _create(store, TWICE)])


def _race(store: Store, name: str) -> bool:
    with ThreadPoolExecutor(_RACERS) as pool:
        return _overwritten(store, name, list(pool.map(lambda _: _create(store, name), range(_RACERS))))


def path_of(name: str) -> str:
    """Path of the canary `name`."""
    return f"{layout.CANARY}/{name}"


def encode_canary(name: str, nonce: str) -> bytes:
    """RFC 8785 bytes of a canary; `nonce` tells its creators apart."""
    fields = {"canary": name, "format": FORMAT, "nonce": nonce}
    return canonical_json({**fields, "self": sha256(canonical_json(fields))})


def check_canary(name: str, data: bytes) -> None:
    """Raises FormatError unless `data` is the canary `name` as somebody wrote it."""
    if _FIRST_FORM.fullmatch(data):
        return
    with contextlib.suppress(msgspec.MsgspecError, ValueError, RecursionError):
        fields = msgspec.json.decode(data)
        if type(fields) is dict and fields.get("canary") == name and canonical_json(fields) == data:
            claimed = fields.pop("self", None)
            if claimed == sha256(canonical_json(fields)):
                return
    raise FormatError(f"{path_of(name)}: not what the put-if-absent probe wrote there; it was changed.")


def _create(store: Store, name: str) -> bytes | None:
    """What was put at the canary's place, None when the store refused."""
    mine = encode_canary(name, secrets.token_hex(16))
    with contextlib.suppress(AlreadyThere):
        store.create(path_of(name), mine)
        return mine
    return None


def _overwritten(store: Store, name: str, attempts: list[bytes | None]) -> bool:
    """Whether two creators were told that they succeeded, or something else stands where one did."""
    created = [data for data in attempts if data is not None]
    path = path_of(name)
    try:
        there = store.read(path)
        check_canary(name, there)
    except Missing as error:
        raise StoreError(f"{store.locate(path)} was written and is not there.") from error
    except FormatError as error:  # a body that was cut says nothing about the store's promises
        raise StoreError(f"{store.locate(path)} reads back as {len(there)} bytes that are no canary.") from error
    return len(created) > 1 or (bool(created) and created[0] != there)
