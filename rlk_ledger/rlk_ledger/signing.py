"""Ed25519 keys: whose they are, what they sign, and checking what others signed.

Keys and signatures need `cryptography` (the extra `signing`). Without it everything is made and read unsigned, and who
asks for a key or for a check is told so.

A key says who made an object only to somebody who knows the key. A shipper's key is *registered* once a checkpoint
covers the first receipt of its chain, which names the key; from then on what the chain adds is known to be the
shipper's, although no checkpoint covers it yet.
"""

import base64
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from rlk_ledger_schemas.errors import ConfigError, FormatError, UsageError
from rlk_ledger_schemas.fingerprints import canonical_json
from rlk_ledger_schemas.notes import NoteSignature, VerifierKey, decode_base64, decode_vkey, key_id
from rlk_ledger_schemas.objects import Receipt

VARIABLE = "RLK_SIGNING_KEY"
KEY_NAME = "rlk-ledger"
"""The name in a vkey that is not of one run; in signatures the name is the origin, whatever the vkey said."""
INSTALL = 'pip install "rlk-ledger[signing]"'
_RECEIPT = b"rlk-ledger receipt\n"
_KEY_BYTES = 32
_SIGNATURE_BYTES = 64


class Signer:
    """A private key. `kept` tells one that outlives the process from one that was made for it. Safe to share."""

    def __init__(self, private: Any, kept: bool) -> None:
        self._private = private
        self.kept = kept
        self.public_key: bytes = private.public_key().public_bytes_raw()

    def sign(self, message: bytes) -> bytes:
        """The 64 bytes of Ed25519 (RFC 8032): the same for the same message."""
        return bytes(self._private.sign(message))

    def vkey(self, name: str = KEY_NAME) -> str:
        """The public key under `name`, as other tools that read signed notes want it."""
        return VerifierKey(name, self.public_key).encode()

    def note_signature(self, name: str, text: bytes) -> NoteSignature:
        """The signature line of a note."""
        return NoteSignature(name, key_id(name, self.public_key), self.sign(text))


def _ed25519() -> Any:
    from cryptography.hazmat.primitives.asymmetric import ed25519

    return ed25519


@cache
def available() -> bool:
    """Whether `cryptography` is here."""
    try:
        _ed25519()
    except Exception:  # a broken build raises what it likes
        return False
    return True


def fresh_signer() -> Signer | None:
    """A key that lives in this process only, None without `cryptography`."""
    return Signer(_ed25519().Ed25519PrivateKey.generate(), kept=False) if available() else None


def load_signer(path: str | None = None) -> Signer | None:
    """The key in the PEM file at `path`, else at RLK_SIGNING_KEY, None where neither is given; raises ConfigError."""
    path = path or os.environ.get(VARIABLE)
    if not path:
        return None
    if not available():
        raise ConfigError(f"the signing key {path} cannot be used: cryptography is not installed; {INSTALL}.")
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        private = load_pem_private_key(Path(path).expanduser().read_bytes(), password=None)
    except OSError as error:
        raise ConfigError(f"the signing key {path} cannot be read: {error.strerror}.") from None
    except Exception as error:
        raise ConfigError(
            f"{path} holds no private key in PEM without a password ({error}); `rlk-ledger keygen` makes one."
        ) from None
    if not isinstance(private, _ed25519().Ed25519PrivateKey):
        raise ConfigError(f"{path} holds a key that is not Ed25519; `rlk-ledger keygen` makes one.")
    return Signer(private, kept=True)


def shipper_signer() -> tuple[Signer | None, str | None]:
    """What a shipper signs receipts with, and what is wrong with the key it was given.

    The key at RLK_SIGNING_KEY, else one that lives in this process. A key that cannot be used stops no shipping.
    """
    try:
        return load_signer() or fresh_signer(), None
    except ConfigError as error:
        return fresh_signer(), str(error).rstrip(".")


def new_key(path: Path) -> Signer:
    """Writes a fresh private key to `path` (PKCS8 PEM, mode 0600); raises UsageError when something is there."""
    if not available():
        raise UsageError(f"keygen: cryptography is not installed; {INSTALL}.")
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    private = _ed25519().Ed25519PrivateKey.generate()
    data = private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise UsageError(
            f"keygen: {path} exists; a key is never overwritten. --public prints the public key of one."
        ) from None
    except OSError as error:
        raise UsageError(f"keygen: cannot write {path}: {error.strerror}.") from None
    with os.fdopen(fd, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return Signer(private, kept=True)


def read_public_key(text: str) -> bytes:
    """The 32 bytes of a public key given as a vkey or as a file that holds one (or a PEM public key).

    The name in a vkey is not checked: a key signs for many runs, each under its own origin. Raises UsageError.
    """
    try:
        path = Path(text)
        if "+" not in text or path.is_file():
            content = path.read_bytes()
            if b"-----BEGIN" in content:
                return _pem_public_key(text, content)
            text = content.decode().strip()
        return decode_vkey(text).public_key
    except UsageError:  # also a ValueError
        raise
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise UsageError(f"--key {text!r} is no verifier key and no file that holds one ({why}).") from None
    except FormatError as error:
        raise UsageError(f"--key: {error}") from None


def public_keys(keys: Sequence[str | bytes]) -> list[bytes]:
    """Public keys given as `read_public_key` takes them or as 32 bytes; raises UsageError, also without the means."""
    if keys and not available():
        raise UsageError(f"a key checks nothing here: cryptography is not installed; {INSTALL}.")
    return [key if isinstance(key, bytes) else read_public_key(key) for key in keys]


def _pem_public_key(path: str, content: bytes) -> bytes:
    if b"PRIVATE KEY" in content:
        raise UsageError(
            f"--key: {path} holds a private key; give the public one, `rlk-ledger keygen --public {path}`."
        )
    if not available():
        raise UsageError(f"--key: {path} is PEM, and cryptography is not installed; {INSTALL}, or give the vkey.")
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    key = load_pem_public_key(content)
    if not isinstance(key, _ed25519().Ed25519PublicKey):
        raise UsageError(f"--key: {path} holds a key that is not Ed25519.")
    return bytes(key.public_bytes_raw())


def text_of(public_key: bytes) -> str:
    """A public key as receipts and checkpoints hold it: base64 of its 32 bytes."""
    return base64.b64encode(public_key).decode()


def check(public_key: bytes, signature: bytes, message: bytes) -> bool:
    """Whether `signature` is that of `public_key` over `message`; False for what is no key or no signature.

    Needs `cryptography`: ask `available` first.
    """
    if len(public_key) != _KEY_BYTES or len(signature) != _SIGNATURE_BYTES:
        return False
    from cryptography.exceptions import InvalidSignature

    try:
        _ed25519().Ed25519PublicKey.from_public_bytes(public_key).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True


def signed(receipt: Receipt, signer: Signer | None) -> Receipt:
    """The receipt with the signer's signature, and with its public key when it begins a chain."""
    if signer is None:
        return receipt
    if receipt.n == 0:
        receipt = msgspec.structs.replace(receipt, public_key=text_of(signer.public_key))
    fields = msgspec.to_builtins(receipt)
    fields.pop("self", None)
    signature = signer.sign(_RECEIPT + canonical_json(fields))
    return msgspec.structs.replace(receipt, signature=base64.b64encode(signature).decode())


def receipt_message(data: bytes) -> bytes:
    """What the signature of the receipt in `data` is over: its RFC 8785 bytes without `self` and `signature`.

    From the bytes, not from a decoded receipt: fields of a newer writer are signed too. `data` is canonical, as
    `decode_receipt` demands; members that stand there once are cut out of it, which is what encoding again would give.
    """
    fields = msgspec.json.decode(data)
    rest = data
    for name in ("self", "signature"):
        value = fields.pop(name, None)
        member = f'"{name}":"{value}",'.encode()
        if type(value) is not str or rest.count(member) != 1 or rest.count(member[:-1]) != 1:
            rest = b""
            break
        rest = rest.replace(member, b"")
    fields.pop("signature", None)
    return _RECEIPT + (rest or canonical_json(fields))


def receipt_signed_by(data: bytes, receipt: Receipt, public_key: bytes) -> bool:
    """Whether the receipt in `data` bears a signature of `public_key`."""
    try:
        signature = decode_base64(receipt.signature or "")
    except FormatError:
        return False
    return check(public_key, signature, receipt_message(data))
