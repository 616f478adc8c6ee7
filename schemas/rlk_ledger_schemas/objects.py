"""The small JSON objects of a ledger: ledger.json, run.json and receipts, as RFC 8785 bytes.

Unknown fields are kept in the bytes and covered by the digests; readers ignore them, except that an unknown entry in
`required_features` makes a reader refuse.
"""

import re
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from rlk_ledger_schemas.errors import FormatError, UsageError
from rlk_ledger_schemas.fingerprints import canonical_json, sha256

FORMAT = 1
FEATURES: frozenset[str] = frozenset()
"""Required features this reader knows; format 1 has none."""

_NUMBER = rb"-?(?:[0-9]+[.eE]|9[0-9]{15}|[0-9]{17})"  # one that has other spellings, or that JSON readers round
_MEMBER, _ITEM = re.compile(b'":' + _NUMBER), re.compile(rb"[,\[]" + _NUMBER)
_RUN_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
Sha256 = Annotated[str, Meta(pattern=r"^sha256:[0-9a-f]{64}$")]
Seq = Annotated[int, Meta(ge=0)]
Prints = Annotated[str, Meta(pattern=r"^(?:[A-Za-z0-9+/]{4})*$")]


class LedgerInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """ledger.json: written once, the first writer wins."""

    format: int
    hash: Literal["sha256"]
    ledger_id: str
    required_features: tuple[str, ...]
    created_us: int
    put_if_absent: Literal["honoured", "ignored"] | None = None


class RunInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """run.json: what the run's first writer declared.

    `put_if_absent` is there only where the store was seen to ignore it when the run began, whatever ledger.json says.
    """

    format: int
    ledger_id: str
    run_id: str
    roles: dict[str, int]
    mode: dict[str, str]
    redaction: Literal["none", "hash", "drop"]
    created_us: int
    redaction_key_id: str | None = None
    lineage: dict[str, Any] | None = None
    put_if_absent: Literal["ignored"] | None = None


class SegmentRef(msgspec.Struct, frozen=True, kw_only=True):
    """A segment as its receipt describes it: name relative to the run, size, rows, SHA-256 of the file."""

    name: str
    bytes: Seq
    rows: Seq
    sha256: Sha256


class WriterRange(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sequence numbers of one writer held by one segment, both ends included.

    `ranges` lists them when they are not one contiguous range; `lost_bytes` counts bytes of a dead writer's spool
    that were no frame; `closed` and `dead` say how the writer ended, once it has.
    """

    writer_id: str
    first: Seq
    last: Seq
    ranges: tuple[tuple[Seq, Seq], ...] | None = None
    gaps: Seq | None = None
    lost_bytes: Seq | None = None
    closed: bool | None = None
    dead: bool | None = None


class TypeCount(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How many events of a type a segment holds and the steps they span."""

    type: str
    count: Seq
    min_step: Seq | None = None
    max_step: Seq | None = None


class Receipt(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """receipt/<shipper>/<n>.json: one link of a shipper's chain, and the index entry of one segment.

    `samples` says which samples the segment's events name, see `rlk_ledger_schemas.samples`; None says nothing.
    """

    format: int
    ledger_id: str
    run_id: str
    shipper: str
    n: Seq
    previous: Sha256 | None = None
    segment: SegmentRef
    writers: tuple[WriterRange, ...]
    root: Sha256
    types: tuple[TypeCount, ...]
    wall_us: int
    samples: Prints | None = None
    ledger_json: Sha256 | None = None
    run_json: Sha256 | None = None
    public_key: str | None = None
    signature: str | None = None
    self_: Sha256 | None = msgspec.field(default=None, name="self")


def check_run_id(run_id: Any) -> str:
    """`run_id` if it is a name (letters, digits, `._-`, at most 128, not dots alone); raises UsageError otherwise."""
    if type(run_id) is not str or not _RUN_ID.fullmatch(run_id) or not run_id.strip("."):
        raise UsageError(
            f"run id {run_id!r} is not a name: use letters, digits, '.', '_' and '-', at most 128 of them."
        )
    return run_id


def encode_object(value: LedgerInfo | RunInfo) -> bytes:
    """RFC 8785 bytes of ledger.json or run.json."""
    return canonical_json(msgspec.to_builtins(value))


def encode_receipt(receipt: Receipt) -> bytes:
    """RFC 8785 bytes of a receipt, `self` filled in with the SHA-256 of the rest."""
    fields = msgspec.to_builtins(receipt)
    fields.pop("self", None)
    return _canonical({**fields, "self": sha256(_canonical(fields))})


def decode_receipt(data: bytes, where: str) -> Receipt:
    """The receipt in `data`; raises FormatError when it does not parse, is newer, or `self` does not match."""
    fields = _parse(data, where)
    claimed = fields.pop("self", None)
    if claimed != _digest_without_self(data, fields, claimed):
        raise FormatError(f"{where}: `self` does not match the receipt's content; it was changed after it was written.")
    receipt: Receipt = _convert({**fields, "self": claimed}, Receipt, where)
    return receipt


def decode_ledger(data: bytes, where: str = "ledger.json") -> LedgerInfo:
    """ledger.json; raises FormatError, also for a newer format or an unknown required feature."""
    info: LedgerInfo = _convert(_parse(data, where), LedgerInfo, where)
    unknown = sorted(set(info.required_features) - FEATURES)
    if unknown:
        raise FormatError(f"{where}: requires {', '.join(unknown)}, unknown to this reader. Use a newer rlk-ledger.")
    return info


def decode_run(data: bytes, where: str = "run.json") -> RunInfo:
    """run.json; raises FormatError, also for a newer format."""
    info: RunInfo = _convert(_parse(data, where), RunInfo, where)
    return info


def _parse(data: bytes, where: str) -> dict[str, Any]:
    try:
        fields = msgspec.json.decode(data)
        if _is_plain(data) and type(fields) is dict and _sorted(fields) == data:
            return fields
        canonical = canonical_json(fields)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise FormatError(f"{where}: {len(data)} bytes that are not RFC 8785 JSON ({error}).") from None
    if type(fields) is not dict or canonical != data:
        raise FormatError(f"{where}: not the canonical JSON object the writer made; it was changed or cut.")
    return fields


def _is_plain(data: bytes) -> bool:
    """Whether sorted, compact JSON of these bytes' content is its RFC 8785 form, whatever the content is.

    Holds without escapes, characters beyond ASCII, fractions, exponents, deep nesting and integers near 2^53 and
    above: what is left has one spelling. Ten times as fast as `canonical_json`, and every ordinary receipt is such.
    """
    if not data.isascii() or b"\\" in data or b"[[[[" in data:
        return False
    return not _MEMBER.search(data) and not _ITEM.search(data)


def _digest_without_self(data: bytes, fields: dict[str, Any], claimed: Any) -> str:
    """SHA-256 of the canonical bytes of `fields`: those of `data`, which is canonical, without its member `self`."""
    member = b'"self":"%b"' % claimed.encode() if type(claimed) is str and claimed.isascii() else b""
    if member and data.count(member) == 1 and fields:
        return sha256(data.replace(b"," + member, b"") if b"," + member in data else data.replace(member + b",", b""))
    return sha256(canonical_json(fields))


def _canonical(fields: dict[str, Any]) -> bytes:
    data = _sorted(fields)
    return data if _is_plain(data) else canonical_json(fields)


def _sorted(fields: dict[str, Any]) -> bytes:
    return msgspec.json.encode(fields, order="sorted")


def _convert(fields: dict[str, Any], kind: type[Any], where: str) -> Any:
    if type(fields.get("format")) is int and fields["format"] != FORMAT:  # before its fields, which may be others
        raise FormatError(
            f"{where}: format {fields['format']}; this reader knows format {FORMAT}. Use a newer rlk-ledger."
        )
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise FormatError(f"{where}: {error}.") from None
