"""What an integration says once on behalf of the engine it watches: contracts, and whatever `Told` keeps track of."""

from collections.abc import Mapping
from typing import Any

from rlk_ledger_schemas.fingerprints import contract_id
from rlk_ledger_sdk.api import acting, current, record

_KEPT = 256
_ids: dict[tuple[Any, ...], str] = {}
"""Ids by writer and content, so that a contract that every sample names is hashed once."""


def declare(kind: str, body: Mapping[str, Any], version: str = "1") -> str:
    """The contract id of {kind, version, body}, declared in this process's record unless it already is.

    Entries whose value is None are left out: what was not read is not declared. Raises EventError for a body that JSON
    cannot hold.
    """
    known = {name: value for name, value in body.items() if value is not None}
    key = (acting().writer(), kind, version, *((name, type(v), v) for name, v in known.items()))
    try:
        found = _ids.get(key)
    except TypeError:  # nested values are hashed every time
        key, found = (), None
    if found is not None:
        return found
    reference = record("contract.declared", kind=kind, version=version, body=known)
    found = reference.contract_id or contract_id(kind, version, known)
    if key and reference.seq is not None:  # else it was not stored, and is declared again
        if len(_ids) >= _KEPT:
            _ids.clear()
        _ids[key] = found
    return found


class Told:
    """Which writer was told what is said once. A second init() opens another one, and a forked child becomes one."""

    def __init__(self) -> None:
        self._writer = current().writer()

    def to_another(self) -> bool:
        """Whether another writer records now than was told last; that one counts as told from here on.

        False while nothing is recorded.
        """
        writer = acting().writer()
        if writer is None or writer == self._writer:
            return False
        self._writer = writer
        return True
