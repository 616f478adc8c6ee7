"""Fingerprints: canonical JSON, contract ids, token, mask, file and live-tensor digests.

Digests are `<algorithm>:<hex>`; only equal algorithms compare.
"""

import hashlib
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import rfc8785
from blake3 import blake3

from rlk_ledger_schemas.arrays import to_array
from rlk_ledger_schemas.errors import EventError, FingerprintError

MASK64 = (1 << 64) - 1
GOLDEN64 = 0x9E3779B97F4A7C15
_SAFE = 2**53


def canonical_json(value: Any) -> bytes:
    """RFC 8785 bytes of `value`; raises FingerprintError for NaN, infinities, -0.0, bytes and integers above 2^53."""
    return rfc8785.dumps(_checked(value, "$"))


def _checked(value: Any, path: str) -> Any:
    kind = type(value)
    if kind is str:
        if not value.isascii() and any("\ud800" <= c <= "\udfff" for c in value):
            raise FingerprintError(f"`{path}` holds a lone surrogate, which is not text; encode it first.")
        return value
    if value is None or kind is bool:
        return value
    if kind is int:
        if abs(value) > _SAFE:
            raise FingerprintError(f"`{path}` is {value}, above 2^53; JSON readers would round it. Use a string.")
        return value if abs(value) < _SAFE else float(value)
    if kind is float:
        if not math.isfinite(value) or (value == 0.0 and math.copysign(1.0, value) < 0):
            raise FingerprintError(
                f"`{path}` is {value!r}, which JSON cannot hold exactly; use a string or leave it out."
            )
        return value
    if isinstance(value, Mapping):
        bad = next((k for k in value if type(k) is not str), None)
        if bad is not None:
            raise FingerprintError(f"`{path}` has the key {bad!r}; JSON keys are strings.")
        return {_checked(k, path): _checked(v, f"{path}.{k}") for k, v in value.items()}
    if kind is list or kind is tuple:
        return [_checked(v, f"{path}[{i}]") for i, v in enumerate(value)]
    raise FingerprintError(
        f"`{path}` is a {kind.__module__}.{kind.__name__}, which JSON cannot hold; use plain values."
    )


def sha256(data: bytes) -> str:
    """`sha256:<hex>` of `data`."""
    return "sha256:" + hashlib.sha256(data).hexdigest()


def contract_id(kind: str, version: str, body: Mapping[str, Any]) -> str:
    """The id of a contract: sha256 of the RFC 8785 JSON of {kind, version, body}. Raises FingerprintError.

    Only what `contract.declared` takes has an id: `kind` and `version` are strings, `body` maps names to values.
    """
    for name, value, wanted in (("kind", kind, str), ("version", version, str), ("body", body, Mapping)):
        if not isinstance(value, wanted):
            what = "a string" if wanted is str else "a mapping"
            raise FingerprintError(f"contract_id: `{name}` must be {what}, got {value!r}.")
    try:
        return sha256(canonical_json({"kind": kind, "version": version, "body": body}))
    except RecursionError:
        raise FingerprintError("`$.body` is nested too deep, or holds itself.") from None


def token_digest(token_ids: Any) -> str:
    """SHA-256 over int32 little-endian token ids (list, numpy array or torch tensor)."""
    return sha256(to_array(token_ids, "int32", "token_ids").data)


def mask_digest(loss_mask: Any) -> str:
    """SHA-256 over the mask bytes, one byte a token; raises EventError for anything but 0 and 1."""
    data = to_array(loss_mask, "uint8", "loss_mask").data
    if data.strip(b"\0\1"):
        raise EventError("`loss_mask` must hold 0 and 1 only.")
    return sha256(data)


def file_digest(path: str | Path) -> str:
    """`blake3:<hex>` of a file's bytes."""
    hasher = blake3(max_threads=1)
    with Path(path).open("rb") as file:
        while block := file.read(1 << 20):
            hasher.update(block)
    return "blake3:" + hasher.hexdigest()


def tensors_digest(tensors: Iterable[tuple[str, bytes]]) -> tuple[str, dict[str, str]]:
    """File-scheme digest of named tensors: blake3 per tensor, and blake3 over the sorted `name NUL digest LF` lines."""
    each = {name: "blake3:" + blake3(data).hexdigest() for name, data in tensors}
    lines = "".join(f"{name}\0{digest}\n" for name, digest in sorted(each.items()))
    return "blake3:" + blake3(lines.encode()).hexdigest(), each


def sum64x2_seeds(name: str) -> tuple[int, int]:
    """The two 64-bit seeds of a canonical tensor name in the live-tensor scheme."""
    digest = hashlib.sha256(b"rlk-ledger sum64x2 v1\0" + name.encode()).digest()
    return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:16], "little")


def splitmix64(counter: int) -> int:
    """The SplitMix64 output for a 64-bit counter (Steele, Lea, Flood 2014), used as a counter-based generator."""
    z = counter & MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK64
    return z ^ (z >> 31)


def sum64x2(name: str, bits: Iterable[int], start: int = 0) -> tuple[int, int]:
    """The definition, slow: two sums mod 2^64 of c_k(name, flat index) x bits(w), from flat index `start`.

    c_k(name, i) = splitmix64(seed_k(name) + (i + 1) x golden). Partials of disjoint index ranges add. It finds
    accidents, not adversaries.
    """
    sums = [0, 0]
    seeds = sum64x2_seeds(name)
    for i, word in enumerate(bits, start):
        for k in (0, 1):
            sums[k] = (sums[k] + splitmix64(seeds[k] + (i + 1) * GOLDEN64) * word) & MASK64
    return sums[0], sums[1]


def sum64x2_digest(sums: Iterable[tuple[int, int]]) -> str:
    """`sum64x2:<32 hex>` of the total over tensors (or shards) of their pairs of sums."""
    total = [0, 0]
    for pair in sums:
        total = [(total[0] + pair[0]) & MASK64, (total[1] + pair[1]) & MASK64]
    return f"sum64x2:{total[0]:016x}{total[1]:016x}"
