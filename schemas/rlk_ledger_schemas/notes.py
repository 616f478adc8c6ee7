"""C2SP signed notes: a text, and under it lines that say who signed it.

    <text, any number of lines, each ending in a newline>
    <an empty line>
    — <key name> <base64 of a 4-byte key id and the signature>        (any number, none for an unsigned note)

Formats of c2sp.org/signed-note; the limits are those of Go's golang.org/x/mod/sumdb/note. A note without a signature is
no C2SP note: it is what a maker without a key leaves, and what a copy kept elsewhere makes evidence of.
"""

import base64
import binascii
import hashlib
from collections.abc import Sequence
from typing import NamedTuple

from rlk_ledger_schemas.errors import FormatError, UsageError

LONGEST_NOTE = 1_000_000
MOST_SIGNATURES = 100
ED25519 = 1
"""The signature type of Ed25519 over the text, first byte of an encoded key."""
_DASH = "— "
_ID_BYTES = 4
_KEY_BYTES = 32


class NoteSignature(NamedTuple):
    """One signature line: the key's name, its 4-byte id, and the signature's bytes."""

    name: str
    key_id: bytes
    signature: bytes


class Note(NamedTuple):
    """A note's text (bytes, the final newline included: what signatures are over) and its signature lines in order."""

    text: bytes
    signatures: tuple[NoteSignature, ...]


class VerifierKey(NamedTuple):
    """A public Ed25519 key (32 bytes) under a name, as `<name>+<8 hex digits>+<base64>` carries it."""

    name: str
    public_key: bytes

    @property
    def key_id(self) -> bytes:
        """The 4 bytes that name this key beside its name in a signature line."""
        return key_id(self.name, self.public_key)

    def encode(self) -> str:
        """The key as one word (a vkey)."""
        encoded = base64.b64encode(bytes([ED25519]) + self.public_key).decode()
        return f"{self.name}+{self.key_id.hex()}+{encoded}"


def key_id(name: str, public_key: bytes) -> bytes:
    """SHA-256(name | 0x0A | 0x01 | 32-byte Ed25519 key), its first four bytes (c2sp.org/signed-note)."""
    return hashlib.sha256(name.encode() + b"\n" + bytes([ED25519]) + public_key).digest()[:_ID_BYTES]


def check_key_name(name: str) -> str:
    """`name` if a key can bear it: not empty, no Unicode space, no plus, no control character; raises UsageError."""
    if not _is_key_name(name):
        raise UsageError(f"key name {name!r} is no name for a key: it may hold no space, no '+' and must not be empty.")
    return name


def _is_key_name(name: str) -> bool:
    return bool(name) and "+" not in name and not any(c.isspace() or c < " " or "\ud800" <= c <= "\udfff" for c in name)


def decode_vkey(text: str) -> VerifierKey:
    """The key in `text`; raises FormatError when it is no Ed25519 vkey or its id is not that of its name and key."""
    parts = text.strip().split("+", 2)
    if len(parts) != 3 or not _is_key_name(parts[0]):
        raise FormatError(
            f"{text!r} is no verifier key: <name>+<8 hex digits>+<base64>, as `rlk-ledger keygen` prints."
        )
    raw = _base64(parts[2])
    if raw is None or len(raw) != 1 + _KEY_BYTES or raw[0] != ED25519:
        raise FormatError(f"verifier key {text!r} does not hold a 32-byte Ed25519 key.")
    key = VerifierKey(parts[0], raw[1:])
    if parts[1] != key.key_id.hex():
        raise FormatError(f"verifier key {text!r}: the id of this name and key is {key.key_id.hex()}; it was mistyped.")
    return key


def encode_note(text: bytes, signatures: Sequence[NoteSignature] = ()) -> bytes:
    """The bytes of a note; raises FormatError where `decode_note` would refuse or misread them."""
    lines = [_DASH + s.name + " " + base64.b64encode(s.key_id + s.signature).decode() + "\n" for s in signatures]
    data = text + b"\n" + "".join(lines).encode()
    if decode_note(data, "note") != Note(text, tuple(signatures)):
        raise FormatError("note: a text with an empty line at its end, or a signature, that could not be read back.")
    return data


def decode_note(data: bytes, where: str) -> Note:
    """The note in `data`, no signature checked; raises FormatError, which begins with `where`."""
    if len(data) > LONGEST_NOTE:
        raise FormatError(f"{where}: {len(data)} bytes; a note has at most {LONGEST_NOTE}.")
    try:
        whole = data.decode()
    except UnicodeDecodeError as error:
        raise FormatError(f"{where}: byte {error.start} is not UTF-8; it was changed or cut.") from None
    odd = next((i for i, c in enumerate(whole) if c < " " and c != "\n"), None)
    if odd is not None:
        raise FormatError(f"{where}: character {odd} is the control character {whole[odd]!r}, which no note holds.")
    text, empty, lines = whole.rpartition("\n\n")
    if not empty or not text.strip("\n"):
        raise FormatError(f"{where}: no empty line ends the note's text; it was cut, or is no note.")
    if lines and not lines.endswith("\n"):
        raise FormatError(f"{where}: the last signature line does not end; it was cut.")
    found = lines.split("\n")[:-1]
    if len(found) > MOST_SIGNATURES:
        raise FormatError(f"{where}: {len(found)} signature lines; a note has at most {MOST_SIGNATURES}.")
    return Note((text + "\n").encode(), tuple(_signature(line, i, where) for i, line in enumerate(found)))


def _signature(line: str, i: int, where: str) -> NoteSignature:
    name, _, encoded = line.removeprefix(_DASH).partition(" ")
    raw = _base64(encoded)
    if not line.startswith(_DASH) or not _is_key_name(name) or raw is None or len(raw) <= _ID_BYTES:
        raise FormatError(f"{where}: signature line {i} is not `— <key name> <base64>`.")
    return NoteSignature(name, raw[:_ID_BYTES], raw[_ID_BYTES:])


def _base64(text: str) -> bytes | None:
    """The bytes of standard base64, None for anything else: bytes have one encoding, so no other is taken."""
    try:
        raw = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return None
    return raw if base64.b64encode(raw).decode() == text else None


def decode_base64(text: str) -> bytes:
    """The bytes of standard base64 in its one canonical form; raises FormatError."""
    raw = _base64(text)
    if raw is None:
        raise FormatError(f"{text[:40]!r} is not base64 as its encoder writes it.")
    return raw
