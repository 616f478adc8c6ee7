"""Redaction: what leaves the process when token ids and text must not.

`hash` replaces every token id by the first 8 bytes of keyed BLAKE2b over (u64 position, i64 id), little-endian, and
every digest of tokens by a keyed digest of that digest, named after the key: equal stays equal under one key, digests
under two keys do not compare, and nobody without the key can guess. `drop` leaves token arrays and token digests out.

Both leave out what gives tokens away beside them: support sets, routes, tensors. Text is what is no word (letters,
digits and a few signs, no spaces): it becomes a keyed digest, or `redacted`. `README.md` has the table.
"""

import hashlib
import re
import struct
from typing import Any

import msgspec

from rlk_ledger_schemas.arrays import Array
from rlk_ledger_schemas.errors import ConfigError, EventError
from rlk_ledger_schemas.events import ASSIGNED, REGISTRY
from rlk_ledger_schemas.fingerprints import MASK64

MODES = ("none", "hash", "drop")
SHORTEST_KEY = 16
"""Characters of a key: a shorter one is found by trying, with the key id to try against."""
REDACTED = "redacted"
NO_DIGEST = "dropped:00"
"""Stands for a digest that an event must have and `drop` does not let out; it compares with nothing."""

_PLACE = struct.Struct("<QQ")  # the bytes of "<Qq", and of 64-bit ids as well
_WORD = re.compile(r"[A-Za-z0-9_.:/@+=,#%~\[\]-]{1,256}")
_FILE_DIGEST = re.compile(r"(?:[a-z0-9]+:)?[0-9a-f]{64}")
_PENALTY = re.compile(r"[a-z_]{1,64}")
# Arrays that are no token ids and give them away: what was kept at a position, which experts served it.
_TELLING = frozenset({"support", "support_offsets", "routed_experts.array"})
_DIGESTS = ("token_digest",)
# Fields of the caller's own making, where a digest is that of a file or of whatever else he took.
_FREE = frozenset({"labels", "job", "lineage", "sampling_policy", "environment"})
# Names that events are joined by: under `drop` one that is text cannot be replaced, so the event is refused.
_NAMES = frozenset({"sample_id", "prompt_id", "prefix_of", "group_id", "session_id", "pass_id", "layout_id"})
# Fields whose text the recorder or an engine wrote about itself, never about a sample.
_OWN_WORDS: dict[str, frozenset[str]] = {
    "run.opened": frozenset({"roles", "mode"}),
    "writer.opened": frozenset({"host", "engine", "parallel", "revision", "environment"}),
    "writer.closed": frozenset({"reason"}),
    "writer.lost": frozenset({"reason"}),
    "gap": frozenset({"reason"}),
    "contract.declared": frozenset({"body"}),  # its id is the digest of its body
    "knob.applied": frozenset({"evidence"}),
    "operator.decided": frozenset({"reason", "rejected"}),
    "segment.timed": frozenset({"evidence", "overlap_fallback"}),
}
# Written about a ledger by who reads it: what was redacted there is redacted here.
_ABOUT = frozenset({"segments.pruned"}) | {
    name for name, kind in REGISTRY.items() if kind.public.__module__.endswith((".replays", ".certificates"))
}


class Redaction(msgspec.Struct, frozen=True):
    """A redaction mode with its key; `key_id` identifies the key without giving it away."""

    mode: str
    key: bytes = b""
    key_id: str | None = None

    def __repr__(self) -> str:
        return f"Redaction({self.mode!r}, key_id={self.key_id!r})"

    @classmethod
    def load(cls, mode: str, key: str | None) -> "Redaction":
        """The redaction called `mode`; raises ConfigError for an unknown one and for `hash` without a good key."""
        if mode not in MODES:
            raise ConfigError(f"init: redaction {mode!r} is unknown; use none, hash or drop.")
        if mode != "hash":
            return cls(mode)
        if not key:
            raise ConfigError("init: redaction 'hash' needs a key; set RLK_REDACTION_KEY.")
        if len(key) < SHORTEST_KEY:
            raise ConfigError(
                f"init: RLK_REDACTION_KEY has {len(key)} characters and would be found by trying; use at least "
                f"{SHORTEST_KEY} random ones, such as those of `openssl rand -hex 32`."
            )
        raw = hashlib.blake2b(key.encode(), digest_size=32, person=b"rlk-redact-key").digest()
        key_id = "blake2b:" + hashlib.blake2b(b"rlk-ledger key id", key=raw, digest_size=8).hexdigest()
        return cls(mode, raw, key_id)

    @property
    def text(self) -> str:
        """What it means for whoever reads the ledger, in one sentence."""
        if self.mode == "hash":
            return f"token ids leave as hashes under key {self.key_id}; audit compares them, replay cannot score them"
        return "token ids and their digests do not leave the process; audit cannot compare them, replay cannot score"

    def apply(self, type_name: str, wire: Any, arrays: dict[str, Array]) -> dict[str, Array]:
        """The arrays that may leave; digests of tokens and text inside `wire` are changed in place.

        Raises EventError under `drop` for a name that is text: without it nothing could be joined.
        """
        if type_name not in _ABOUT:
            own = _OWN_WORDS.get(type_name, frozenset())
            for name in wire.__struct_fields__:
                value = getattr(wire, name)
                if value is not None and name not in own and name not in ASSIGNED:
                    self._field(type_name, wire, name, value)
        return self._arrays(type_name, wire, arrays)

    def fields(self, type_name: str, fields: dict[str, Any]) -> dict[str, Any]:
        """The fields of an event the recorder makes itself, as they may leave."""
        if self.mode == "none":
            return fields
        own = _OWN_WORDS.get(type_name, frozenset())
        return {n: v if n in own else self._clean(v, digests=n in _FREE) for n, v in fields.items()}

    def free(self, value: Any) -> Any:
        """Anything a caller made up himself, as it may leave."""
        return value if self.mode == "none" else self._clean(value, digests=True)

    def name_of(self, token_digest: str) -> str | None:
        """A name for what has `token_digest`, equal for equal tokens in every process with the key; None under drop."""
        if self.mode == "none":
            return token_digest.partition(":")[2][:16]
        return None if self.mode == "drop" else self._keyed(token_digest)[:16]

    def refusal(self, type_name: Any, error: Exception) -> tuple[str, str]:
        """(reason, event type) of the gap of an event that was refused: the fields in question, no value of any."""
        kind = REGISTRY.get(type_name) if isinstance(type_name, str) else None
        words = re.findall(r"[a-z_]+", str(error))
        named = [w for w in dict.fromkeys(words) if kind is not None and w in kind.names]
        about = f" about {', '.join(named)}" if named else ""
        return f"{type(error).__name__}{about}; values are left out", "unknown" if kind is None else str(type_name)

    def _field(self, type_name: str, wire: Any, name: str, value: Any) -> None:
        """Changes one field of `wire` to what may leave."""
        if name in _DIGESTS or (type_name == "boundary.captured" and name == "digest"):
            digest = self._digest(value)
            clean: Any = NO_DIGEST if digest is None and name not in _DIGESTS else digest
        elif name == "routed_experts" and value.digest is not None:
            clean = msgspec.structs.replace(value, digest=self._digest(value.digest))
        elif name == "sampling" and value.penalties:
            kept = {key: v for key, v in value.penalties.items() if _PENALTY.fullmatch(key)}
            clean = msgspec.structs.replace(value, penalties=kept)
        elif self.mode == "drop" and name in _NAMES and isinstance(value, str) and not _WORD.fullmatch(value):
            raise EventError(
                f"{type_name}: `{name}` holds text, which redaction 'drop' can neither let out nor replace; name it "
                "with letters, digits and signs."
            )
        else:
            clean = self._clean(value, digests=name in _FREE)
        if clean is not value:
            msgspec.structs.force_setattr(wire, name, clean)

    def _clean(self, value: Any, digests: bool) -> Any:
        """`value` with its text replaced, at any depth; `digests` replaces digests as well. The same object if none."""
        if isinstance(value, str):
            if not _WORD.fullmatch(value):
                return self._text(value)
            return self._text(value) if digests and _FILE_DIGEST.fullmatch(value) else value
        if isinstance(value, dict):
            clean = {self._clean(k, digests): self._clean(v, digests) for k, v in value.items()}
            return clean if clean != value else value
        if isinstance(value, list | tuple):
            items = [self._clean(v, digests) for v in value]
            return value if all(a is b for a, b in zip(items, value, strict=True)) else type(value)(items)
        if isinstance(value, msgspec.Struct):
            changed = {
                n: new
                for n in value.__struct_fields__
                if (new := self._clean(old := getattr(value, n), digests)) is not old
            }
            return msgspec.structs.replace(value, **changed) if changed else value
        return value

    def _text(self, text: str) -> str:
        return REDACTED if self.mode == "drop" else f"text:{self._keyed(text)[:32]}"

    def _keyed(self, text: str) -> str:
        return hashlib.blake2b(text.encode(errors="surrogatepass"), key=self.key, digest_size=32).hexdigest()

    def _digest(self, digest: str) -> str | None:
        """The keyed digest of a digest; its algorithm is named after the key, and only equal algorithms compare."""
        if self.mode == "drop":
            return None
        return f"k{(self.key_id or '').replace(':', 'x')}:{self._keyed(digest)}"

    def _arrays(self, type_name: str, wire: Any, arrays: dict[str, Array]) -> dict[str, Array]:
        specs = REGISTRY[type_name].arrays
        kept = {}
        start = getattr(wire, "start", 0) if type_name == "logprobs" else 0
        for name, values in arrays.items():
            if name in _TELLING or (type_name == "boundary.captured" and name == "values"):
                continue
            if not specs[name].tokens:
                kept[name] = values
            elif self.mode == "hash":
                kept[name] = self._tokens(values, start)
        return kept

    def _tokens(self, values: Array, start: int) -> Array:
        keyed = hashlib.blake2b(key=self.key, digest_size=8)
        out = bytearray()
        for position, token in enumerate(values.tolist(), start):
            hasher = keyed.copy()
            hasher.update(_PLACE.pack(position, token & MASK64))
            out += hasher.digest()
        return Array("uint64", bytes(out))
