"""Redaction: what leaves the process when token ids must not.

`hash` replaces every token id by the first 8 bytes of keyed BLAKE2b over (u64 position, i64 id), little-endian, and
every digest of tokens by a keyed digest of that digest: equal stays equal, and nobody without the key can guess.
`drop` leaves token arrays and token digests out. Both drop support sets.
"""

import hashlib
import struct
from typing import Any

import msgspec

from rlk_ledger_schemas.arrays import Array
from rlk_ledger_schemas.errors import ConfigError
from rlk_ledger_schemas.events import REGISTRY
from rlk_ledger_schemas.fingerprints import MASK64

MODES = ("none", "hash", "drop")
_PLACE = struct.Struct("<QQ")  # the bytes of "<Qq", and of 64-bit ids as well
_SUPPORT = ("support", "support_offsets")
_DIGESTS = ("token_digest",)


class Redaction(msgspec.Struct, frozen=True):
    """A redaction mode with its key; `key_id` identifies the key without giving it away."""

    mode: str
    key: bytes = b""
    key_id: str | None = None

    def __repr__(self) -> str:
        return f"Redaction({self.mode!r}, key_id={self.key_id!r})"

    @classmethod
    def load(cls, mode: str, key: str | None) -> "Redaction":
        """The redaction called `mode`; raises ConfigError for an unknown one and for `hash` without a key."""
        if mode not in MODES:
            raise ConfigError(f"init: redaction {mode!r} is unknown; use none, hash or drop.")
        if mode != "hash":
            return cls(mode)
        if not key:
            raise ConfigError("init: redaction 'hash' needs a key; set RLK_REDACTION_KEY.")
        raw = hashlib.blake2b(key.encode(), digest_size=32, person=b"rlk-redact-key").digest()
        key_id = "blake2b:" + hashlib.blake2b(b"rlk-ledger key id", key=raw, digest_size=8).hexdigest()
        return cls(mode, raw, key_id)

    def apply(self, type_name: str, wire: Any, arrays: dict[str, Array]) -> dict[str, Array]:
        """The arrays that may leave; token digests inside `wire` are changed in place."""
        specs = REGISTRY[type_name].arrays
        for name in _DIGESTS:
            digest = getattr(wire, name, None)
            if digest is not None:
                msgspec.structs.force_setattr(wire, name, self._digest(digest))
        kept = {}
        start = getattr(wire, "start", 0) if type_name == "logprobs" else 0
        for name, values in arrays.items():
            if name in _SUPPORT:
                continue
            if not specs[name].tokens:
                kept[name] = values
            elif self.mode == "hash":
                kept[name] = self._tokens(values, start)
        return kept

    def _digest(self, digest: str) -> str | None:
        if self.mode == "drop":
            return None
        return "kblake2b:" + hashlib.blake2b(digest.encode(), key=self.key, digest_size=32).hexdigest()

    def _tokens(self, values: Array, start: int) -> Array:
        keyed = hashlib.blake2b(key=self.key, digest_size=8)
        out = bytearray()
        for position, token in enumerate(values.tolist(), start):
            hasher = keyed.copy()
            hasher.update(_PLACE.pack(position, token & MASK64))
            out += hasher.digest()
        return Array("uint64", bytes(out))
