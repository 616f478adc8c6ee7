"""Contracts an integration declares on behalf of the engine it watches."""

from collections.abc import Mapping
from typing import Any

from rlk_ledger_schemas.fingerprints import contract_id
from rlk_ledger_sdk.api import record


def declare(kind: str, body: Mapping[str, Any], version: str = "1") -> str:
    """The contract id of {kind, version, body}, declared in this process's record unless it already is.

    Entries whose value is None are left out: what was not read is not declared. Raises EventError for a body that JSON
    cannot hold.
    """
    known = {name: value for name, value in body.items() if value is not None}
    reference = record("contract.declared", kind=kind, version=version, body=known)
    return reference.contract_id or contract_id(kind, version, known)
