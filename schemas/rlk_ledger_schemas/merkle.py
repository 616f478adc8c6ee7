"""The RFC 6962 tree hash over leaves that are already hashed."""

import hashlib
from collections.abc import Sequence


def node(left: bytes, right: bytes) -> bytes:
    """SHA-256(0x01 | left | right)."""
    return hashlib.sha256(b"\1" + left + right).digest()


def root(leaves: Sequence[bytes]) -> bytes:
    """The Merkle tree hash of leaf hashes (RFC 6962 section 2.1); of none it is SHA-256 of the empty string."""
    if not leaves:
        return hashlib.sha256(b"").digest()
    level = list(leaves)
    while len(level) > 1:
        paired = [node(level[i], level[i + 1]) for i in range(0, len(level) - 1, 2)]
        if len(level) % 2:
            paired.append(level[-1])  # an odd last node moves up unchanged, which is what the largest-power split does
        level = paired
    return level[0]
