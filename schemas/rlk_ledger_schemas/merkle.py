"""The RFC 6962 tree over leaves that are already hashed: roots, inclusion and consistency proofs, and their checks.

A hash is 32 bytes. Paths are lists of hashes, from the leaves to the root, exactly as RFC 6962 section 2.1 orders them;
the checks are those of RFC 9162 section 2.1.3.2 and 2.1.4.2. A leaf here is a leaf *hash*: SHA-256(0x00 | bytes).
"""

import hashlib
from collections.abc import Iterable, Sequence

from rlk_ledger_schemas.errors import FormatError

_BYTES = 32


def node(left: bytes, right: bytes) -> bytes:
    """SHA-256(0x01 | left | right)."""
    return hashlib.sha256(b"\1" + left + right).digest()


def leaf(data: bytes) -> bytes:
    """SHA-256(0x00 | data): the leaf hash of an entry."""
    return hashlib.sha256(b"\0" + data).digest()


def root(leaves: Sequence[bytes]) -> bytes:
    """The Merkle tree hash of leaf hashes (RFC 6962 section 2.1); of none it is SHA-256 of the empty string."""
    if not leaves:
        return hashlib.sha256(b"").digest()
    level = list(leaves)
    while len(level) > 1:
        level = _above(level)
    return level[0]


def _above(level: list[bytes]) -> list[bytes]:
    paired = [node(level[i], level[i + 1]) for i in range(0, len(level) - 1, 2)]
    if len(level) % 2:
        paired.append(level[-1])  # an odd last node moves up unchanged, which is what the largest-power split does
    return paired


def inclusion(leaves: Sequence[bytes], i: int) -> list[bytes]:
    """The path that proves leaf `i` is in the tree of `leaves` (RFC 6962 section 2.1.1). Raises ValueError."""
    if not 0 <= i < len(leaves):
        raise ValueError(f"leaf {i} of a tree of {len(leaves)} leaves")
    path = []
    level = list(leaves)
    while len(level) > 1:
        if i ^ 1 < len(level):
            path.append(level[i ^ 1])
        level, i = _above(level), i >> 1
    return path


def consistency(leaves: Sequence[bytes], m: int) -> list[bytes]:
    """The path that proves the tree of the first `m` leaves is a prefix of that of all (RFC 6962 section 2.1.2).

    Raises ValueError unless 1 <= m <= the number of leaves: every tree begins with the empty one.
    """
    if not 1 <= m <= len(leaves):
        raise ValueError(f"a prefix of {m} leaves of a tree of {len(leaves)}")
    low, high = 0, len(leaves)
    path = []
    while m < high:  # the subtree over [low, high) is the smallest one found so far that leaf m - 1 is in
        middle = low + (1 << (high - low - 1).bit_length() - 1)
        if m <= middle:
            path.append(root(leaves[middle:high]))
            high = middle
        else:
            path.append(root(leaves[low:middle]))
            low = middle
    if low:
        path.append(root(leaves[low:high]))
    return path[::-1]


def verify_inclusion(leaf: bytes, i: int, size: int, path: Sequence[bytes], root: bytes) -> bool:
    """Whether `path` proves that `leaf` is number `i` of the `size` leaves under `root`."""
    if not 0 <= i < size or not _hashes((leaf, root, *path)):
        return False
    last = size - 1
    found = leaf
    for other in path:
        if last == 0:
            return False
        if i & 1 or i == last:
            found = node(other, found)
            while not i & 1 and i:
                i, last = i >> 1, last >> 1
        else:
            found = node(found, other)
        i, last = i >> 1, last >> 1
    return last == 0 and found == root


def verify_consistency(m: int, n: int, root_m: bytes, root_n: bytes, path: Sequence[bytes]) -> bool:
    """Whether `path` proves that the tree of `m` leaves under `root_m` is a prefix of that of `n` under `root_n`.

    False for m = 0: the empty tree says nothing about another.
    """
    if not 1 <= m <= n or not _hashes((root_m, root_n, *path)):
        return False
    if m == n:
        return not path and root_m == root_n
    rest = iter(path if m & (m - 1) else (root_m, *path))
    first, last = m - 1, n - 1
    while first & 1:
        first, last = first >> 1, last >> 1
    found_m = found_n = next(rest, b"")
    for other in rest:
        if last == 0:
            return False
        if first & 1 or first == last:
            found_m, found_n = node(other, found_m), node(other, found_n)
            while not first & 1 and first:
                first, last = first >> 1, last >> 1
        else:
            found_n = node(found_n, other)
        first, last = first >> 1, last >> 1
    return last == 0 and found_m == root_m and found_n == root_n


def _hashes(values: Iterable[bytes]) -> bool:
    return all(len(value) == _BYTES for value in values)


class Frontier:
    """A tree that leaves are appended to, remembered as the roots of its full subtrees: one a bit of its size.

    Owned by one thread. `append` and `root` cost O(log size) hashes.
    """

    def __init__(self, leaves: Iterable[bytes] = ()) -> None:
        self.size = 0
        self._roots: list[bytes] = []  # of full subtrees, largest first
        for item in leaves:
            self.append(item)

    @classmethod
    def resume(cls, size: int, peaks: Sequence[bytes]) -> "Frontier":
        """A frontier of `size` leaves from what `peaks` of it was; raises FormatError when there is another number."""
        if len(peaks) != size.bit_count() or not _hashes(peaks):
            raise FormatError(f"a tree of {size} leaves has {size.bit_count()} full subtrees, not {len(peaks)}.")
        out = cls()
        out.size, out._roots = size, list(peaks)
        return out

    @property
    def peaks(self) -> tuple[bytes, ...]:
        """The roots of the full subtrees, largest first: all that is needed to go on."""
        return tuple(self._roots)

    def append(self, leaf: bytes) -> None:
        """Adds one leaf hash."""
        full = self.size
        while full & 1:
            leaf = node(self._roots.pop(), leaf)
            full >>= 1
        self._roots.append(leaf)
        self.size += 1

    def root(self) -> bytes:
        """The root over all leaves so far."""
        if not self._roots:
            return root(())
        found = self._roots[-1]
        for left in reversed(self._roots[:-1]):
            found = node(left, found)
        return found
