"""A checkpoint: every receipt of a run so far under one root, as a C2SP tlog-checkpoint with one extension line.

    rlk-ledger/<ledger id>/<run id>       the origin, which names the log
    <number of receipts>
    <base64 of the RFC 6962 root over them, in the order of their integration>
    <RFC 8785 JSON of CheckpointInfo: what this checkpoint adds, and to what>

    — <origin> <base64>                   signature lines, none when no key was at hand

Leaf = SHA-256(0x00 | receipt bytes). The order of integration is what checkpoint 0 appends, then what 1 appends, each
sorted by (shipper, n). `self` is the SHA-256 of the text without it, so that a changed bit shows before anything else
is known. A signature's key name is the origin (c2sp.org/tlog-checkpoint), whatever name the vkey bears elsewhere.
"""

import base64
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from rlk_ledger_schemas.errors import FormatError
from rlk_ledger_schemas.fingerprints import canonical_json, sha256
from rlk_ledger_schemas.merkle import Frontier
from rlk_ledger_schemas.notes import NoteSignature, decode_base64, decode_note, encode_note
from rlk_ledger_schemas.objects import FORMAT, Seq, Sha256

MOST_RECEIPTS = 8192
"""Receipts one checkpoint appends at most: a note stays under a million bytes."""
_HASH = 32
_SIZE = re.compile(rb"0|[1-9][0-9]{0,15}")
_ID = Annotated[str, Meta(pattern=r"^[0-9a-f]{32}$")]
Appended = tuple[tuple[_ID, Seq, Seq], ...]


class CheckpointInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The extension line of checkpoint `k`.

    `appended` lists (shipper, first n, last n), sorted, at most one range a shipper; `leaves` is the base64 of their
    leaf hashes in that order; `marks` the last n covered of every shipper, this checkpoint included; `peaks` the base64
    of the roots of the full subtrees of the tree, largest first, from which the next checkpoint goes on; `public_key`
    the base64 of the Ed25519 key this note is signed with. `previous` is absent in checkpoint 0 only.
    """

    format: int
    ledger_id: str
    run_id: str
    k: Seq
    previous: Sha256 | None = None
    appended: Appended
    leaves: str
    marks: dict[str, Seq]
    peaks: str
    wall_us: int
    public_key: str | None = None
    self_: Sha256 | None = msgspec.field(default=None, name="self")


class Checkpoint(NamedTuple):
    """A decoded checkpoint; `data` are the object's bytes, `text` what signatures are over, `leaves` 32 bytes each."""

    info: CheckpointInfo
    origin: str
    size: int
    root: bytes
    leaves: list[bytes]
    signatures: tuple[NoteSignature, ...]
    text: bytes
    data: bytes

    @property
    def k(self) -> int:
        """The checkpoint's number; the first is 0."""
        return self.info.k

    @property
    def digest(self) -> str:
        """`sha256:<hex>` of its bytes, which the next checkpoint names as `previous`."""
        return sha256(self.data)

    @property
    def first(self) -> int:
        """The number of receipts covered before this checkpoint: the place of its first leaf in the tree."""
        return self.size - len(self.leaves)

    def frontier(self) -> Frontier:
        """The tree as far as it goes, to append to."""
        return Frontier.resume(self.size, split_hashes(self.info.peaks))

    def receipts(self) -> Iterator[tuple[str, int, bytes]]:
        """(shipper, n, leaf hash) of every receipt this checkpoint appends, in the order of integration."""
        keys = ((shipper, n) for shipper, first, last in self.info.appended for n in range(first, last + 1))
        for (shipper, n), leaf in zip(keys, self.leaves, strict=True):
            yield shipper, n, leaf


def origin(ledger_id: str, run_id: str) -> str:
    """The first line of a run's checkpoints: which log this is."""
    return f"rlk-ledger/{ledger_id}/{run_id}"


def checkpoint_text(info: CheckpointInfo, size: int, root: bytes) -> bytes:
    """The note text of a checkpoint, `self` filled in: what signatures are over."""
    fields = msgspec.to_builtins(info)
    fields.pop("self", None)
    head = f"{origin(info.ledger_id, info.run_id)}\n{size}\n{base64.b64encode(root).decode()}\n".encode()
    return _text(head, {**fields, "self": sha256(_text(head, fields))})


def _text(head: bytes, fields: Mapping[str, Any]) -> bytes:
    return head + canonical_json(fields) + b"\n"


def encode_checkpoint(info: CheckpointInfo, size: int, root: bytes, signatures: Sequence[NoteSignature] = ()) -> bytes:
    """The bytes of a checkpoint; raises FormatError when they could not be read back, also for more than a million."""
    data = encode_note(checkpoint_text(info, size, root), signatures)
    decode_checkpoint(data, f"checkpoint {info.k} of run {info.run_id!r}")
    return data


def decode_checkpoint(data: bytes, where: str) -> Checkpoint:
    """The checkpoint in `data`, whole in itself; raises FormatError, which begins with `where`.

    Checked: the note's form, `self`, that origin, ranges, leaves, marks, peaks, size and root agree with each other.
    Not checked: signatures, and that it follows any other checkpoint or covers what the bucket holds.
    """
    note = decode_note(data, where)
    lines = note.text.split(b"\n")
    if len(lines) != 5 or not _SIZE.fullmatch(lines[1]):
        raise FormatError(f"{where}: a checkpoint has four lines, of which the second is the number of receipts.")
    fields = _fields(lines[3], note.text[: -len(lines[3]) - 1], where)
    try:
        info = msgspec.convert(fields, CheckpointInfo)
        found = Checkpoint(
            info=info,
            origin=lines[0].decode(),
            size=int(lines[1]),
            root=decode_base64(lines[2].decode()),
            leaves=split_hashes(info.leaves),
            signatures=note.signatures,
            text=note.text,
            data=data,
        )
        _check(found)
    except (FormatError, msgspec.ValidationError) as error:
        raise FormatError(f"{where}: {str(error).rstrip('.')}.") from None
    return found


def _fields(line: bytes, head: bytes, where: str) -> dict[str, Any]:
    """The extension line's fields; raises FormatError when they are not canonical, newer, or `self` does not match."""
    try:
        fields = msgspec.json.decode(line)
        canonical = canonical_json(fields)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise FormatError(f"{where}: its fourth line is not RFC 8785 JSON ({error}).") from None
    if type(fields) is not dict or canonical != line:
        raise FormatError(f"{where}: its fourth line is not the canonical JSON its maker wrote; it was changed.")
    if type(fields.get("format")) is int and fields["format"] != FORMAT:
        raise FormatError(
            f"{where}: format {fields['format']}; this reader knows format {FORMAT}. Use a newer rlk-ledger."
        )
    rest = {name: value for name, value in fields.items() if name != "self"}
    if fields.get("self") != sha256(_text(head, rest)):
        raise FormatError(f"{where}: `self` does not match the text; it was changed after it was written.")
    return fields


def _check(checkpoint: Checkpoint) -> None:
    """Raises FormatError when a checkpoint contradicts itself."""
    info = checkpoint.info
    if checkpoint.origin != origin(info.ledger_id, info.run_id):
        raise FormatError(f"its origin is {checkpoint.origin!r}, not that of run {info.run_id!r}")
    if (info.previous is None) != (info.k == 0):
        raise FormatError("checkpoint 0, and no other, follows nothing")
    shippers = [shipper for shipper, _, _ in info.appended]
    if shippers != sorted(set(shippers)) or any(first > last for _, first, last in info.appended):
        raise FormatError("`appended` is not a sorted list of ranges")
    count = sum(last - first + 1 for _, first, last in info.appended)
    if not 1 <= count <= MOST_RECEIPTS or len(checkpoint.leaves) != count or checkpoint.size < count:
        raise FormatError(f"{count} receipts, {len(checkpoint.leaves)} leaves and size {checkpoint.size} do not agree")
    if any(info.marks.get(shipper) != last for shipper, _, last in info.appended):
        raise FormatError("`marks` do not end where `appended` does")
    if sum(mark + 1 for mark in info.marks.values()) != checkpoint.size:
        raise FormatError("`marks` do not add up to the size")
    if info.public_key is not None and len(decode_base64(info.public_key)) != _HASH:
        raise FormatError("`public_key` is no Ed25519 key")
    if checkpoint.frontier().root() != checkpoint.root:
        raise FormatError("`peaks` do not give the root")


def join_hashes(hashes: Sequence[bytes]) -> str:
    """Base64 of hashes of 32 bytes, one after the other."""
    return base64.b64encode(b"".join(hashes)).decode()


def split_hashes(text: str) -> list[bytes]:
    """The hashes of 32 bytes in `text`; raises FormatError."""
    raw = decode_base64(text)
    if len(raw) % _HASH:
        raise FormatError(f"{len(raw)} bytes are no whole number of hashes")
    return [raw[i : i + _HASH] for i in range(0, len(raw), _HASH)]
