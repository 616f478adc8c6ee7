"""Holds: small JSON objects that forbid pruning a run, and those that release them, as RFC 8785 bytes with `self`."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from rlk_ledger_schemas.errors import FormatError
from rlk_ledger_schemas.fingerprints import canonical_json, sha256
from rlk_ledger_schemas.objects import FORMAT, Sha256

HoldId = Annotated[str, Meta(pattern=r"^[0-9a-f]{16}$")]
Text = Annotated[str, Meta(min_length=1, max_length=4096)]


class Hold(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """hold/<id>.json, or with `released` hold/<id>-released.json: who, why and when by that machine's clock."""

    format: int
    ledger_id: str
    run_id: str
    hold_id: HoldId
    by: Text
    reason: Text | None = None
    released: bool | None = None
    wall_us: int
    self_: Sha256 | None = msgspec.field(default=None, name="self")


def encode_hold(hold: Hold) -> bytes:
    """RFC 8785 bytes of a hold or a release, `self` filled in with the SHA-256 of the rest."""
    fields = msgspec.to_builtins(hold)
    fields.pop("self", None)
    return canonical_json({**fields, "self": sha256(canonical_json(fields))})


def decode_hold(data: bytes, where: str) -> Hold:
    """The hold or release in `data`; raises FormatError when it does not parse or `self` does not match."""
    try:
        fields: Any = msgspec.json.decode(data)
        if type(fields) is not dict or canonical_json(fields) != data:
            raise FormatError(f"{where}: not the canonical JSON object the writer made; it was changed or cut.")
        claimed = fields.pop("self", None)
        if claimed != sha256(canonical_json(fields)):
            raise FormatError(f"{where}: `self` does not match its content; it was changed after it was written.")
        hold = msgspec.convert({**fields, "self": claimed}, Hold)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise FormatError(f"{where}: {len(data)} bytes that are no hold ({error}).") from None
    if hold.format != FORMAT:
        raise FormatError(f"{where}: format {hold.format}; this reader knows format {FORMAT}. Use a newer rlk-ledger.")
    return hold
