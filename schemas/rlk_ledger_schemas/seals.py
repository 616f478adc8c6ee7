"""seal.json: what a run was when it was closed, as RFC 8785 bytes with `self`.

A seal names the checkpoint it closes the run with by its digest, and says of what that checkpoint covers: which roles
there were, which of their ranks reported, who closed, who died, who was still open.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from rlk_ledger_schemas.errors import FormatError
from rlk_ledger_schemas.fingerprints import canonical_json, sha256
from rlk_ledger_schemas.objects import FORMAT, Seq, Sha256

Span = tuple[Seq, Seq]


class SealedCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """The checkpoint a seal stands on: its number, its tree's size, base64 of its root, SHA-256 of its bytes."""

    k: Seq
    size: Seq
    root: str
    digest: Sha256


class RoleCount(msgspec.Struct, frozen=True, kw_only=True):
    """One role: ranks `expected` by run.json, and how many writers `opened`, of these `closed`, found `dead`.

    Child processes are no members of a role. A writer that neither closed nor died is in `Seal.open`.
    """

    expected: Seq
    opened: Seq
    closed: Seq
    dead: Seq


class Seal(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """seal.json: put only if nothing is there, so a run is sealed once.

    `open` lists the writers that may still add to the run, `missing` the ranges of ranks of each role that no writer
    opened as; `complete` says that both are empty. `signature` is base64 of Ed25519 by `public_key` over
    b"rlk-ledger seal\\n" and the RFC 8785 bytes of the rest without `self`.
    """

    format: int
    ledger_id: str
    run_id: str
    checkpoint: SealedCheckpoint
    roster: dict[str, RoleCount]
    open: tuple[str, ...]
    missing: dict[str, tuple[Span, ...]]
    complete: bool
    wall_us: int
    public_key: Annotated[str, Meta(min_length=44, max_length=44)] | None = None
    signature: str | None = None
    self_: Sha256 | None = msgspec.field(default=None, name="self")


_SIGNED = b"rlk-ledger seal\n"


def encode_seal(seal: Seal) -> bytes:
    """RFC 8785 bytes of a seal, `self` filled in with the SHA-256 of the rest."""
    fields = msgspec.to_builtins(seal)
    fields.pop("self", None)
    return canonical_json({**fields, "self": sha256(canonical_json(fields))})


def seal_message(seal: Seal) -> bytes:
    """What the signature of a seal is over: its RFC 8785 bytes without `self` and `signature`."""
    fields = msgspec.to_builtins(seal)
    fields.pop("self", None)
    fields.pop("signature", None)
    return _SIGNED + canonical_json(fields)


def decode_seal(data: bytes, where: str) -> Seal:
    """The seal in `data`; raises FormatError when it does not parse, is newer, or contradicts itself."""
    try:
        fields = msgspec.json.decode(data)
        if type(fields) is not dict or canonical_json(fields) != data:
            raise FormatError(f"{where}: not the canonical JSON object the writer made; it was changed or cut.")
        if type(fields.get("format")) is int and fields["format"] != FORMAT:
            raise FormatError(
                f"{where}: format {fields['format']}; this reader knows format {FORMAT}. Use a newer rlk-ledger."
            )
        claimed = fields.pop("self", None)
        if claimed != sha256(canonical_json(fields)):
            raise FormatError(f"{where}: `self` does not match its content; it was changed after it was written.")
        seal = msgspec.convert({**fields, "self": claimed}, Seal)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        if isinstance(error, FormatError):
            raise
        raise FormatError(f"{where}: {len(data)} bytes that are no seal ({error}).") from None
    if seal.complete != (not seal.open and not any(seal.missing.values())):
        raise FormatError(f"{where}: `complete` contradicts its own lists.")
    return seal
