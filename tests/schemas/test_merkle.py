"""The RFC 6962 tree against a slow implementation read off the RFC, published vectors, and paths that lie."""

import hashlib
import random

import pytest

from rlk_ledger_schemas.merkle import (
    Frontier,
    consistency,
    inclusion,
    leaf,
    node,
    root,
    verify_consistency,
    verify_inclusion,
)

SIZES = range(1, 71)
LEAVES = [leaf(bytes((i,))) for i in range(max(SIZES))]

# The 8 entries, the roots of their first n and the paths that certificate transparency's implementations test with.
CT_ENTRIES = ["", "00", "10", "2021", "3031", "40414243", "5051525354555657", "606162636465666768696a6b6c6d6e6f"]
CT_ROOTS = [
    "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
    "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
    "fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125",
    "aeb6bcfe274b70a14fb067a5e5578264db0fa9b51af5e0ba159158f329e06e77",
    "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
    "4e3bbb1f7b478dcfe71fb631631519a3bca12c9aefca1612bfce4c13a86264d4",
    "76e67dadbcdf1e10e1b74ddc608abd2f98dfb16fbce75277b5232a127f2087ef",
    "ddb89be403809e325750d3d263cd78929c2942b7942a34b77e122c9594a74c8c",
    "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328",
]
CT_INCLUSION = {
    (0, 1): [],
    (0, 8): [
        "96a296d224f285c67bee93c30f8a309157f0daa35dc5b87e410b78630a09cfc7",
        "5f083f0a1a33ca076a95279832580db3e0ef4584bdff1f54c8a360f50de3031e",
        "6b47aaf29ee3c2af9af889bc1fb9254dabd31177f16232dd6aab035ca39bf6e4",
    ],
    (5, 8): [
        "bc1a0643b12e4d2d7c77918f44e0f4f79a838b6cf9ec5b5c283e1f4d88599e6b",
        "ca854ea128ed050b41b35ffc1b87b8eb2bde461e9e3b5596ece6b9d5975a0ae0",
        "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
    ],
    (2, 3): ["fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125"],
    (1, 5): [
        "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
        "5f083f0a1a33ca076a95279832580db3e0ef4584bdff1f54c8a360f50de3031e",
        "bc1a0643b12e4d2d7c77918f44e0f4f79a838b6cf9ec5b5c283e1f4d88599e6b",
    ],
}
CT_CONSISTENCY = {
    (1, 1): [],
    (1, 8): CT_INCLUSION[0, 8],
    (6, 8): [
        "0ebc5d3437fbe2db158b9f126a1d118e308181031d0a949f8dededebc558ef6a",
        "ca854ea128ed050b41b35ffc1b87b8eb2bde461e9e3b5596ece6b9d5975a0ae0",
        "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
    ],
    (2, 5): [
        "5f083f0a1a33ca076a95279832580db3e0ef4584bdff1f54c8a360f50de3031e",
        "bc1a0643b12e4d2d7c77918f44e0f4f79a838b6cf9ec5b5c283e1f4d88599e6b",
    ],
    (6, 7): [
        "0ebc5d3437fbe2db158b9f126a1d118e308181031d0a949f8dededebc558ef6a",
        "b08693ec2e721597130641e8211e7eedccb4c26413963eee6c1e2ed16ffb1a5f",
        "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
    ],
}


# -- RFC 6962 section 2.1, as it is written -------------------------------------------------------------------------


def split(n: int) -> int:
    """The largest power of two smaller than n."""
    k = 1
    while k * 2 < n:
        k *= 2
    return k


def slow_root(d: list[bytes]) -> bytes:
    if not d:
        return hashlib.sha256(b"").digest()
    if len(d) == 1:
        return d[0]
    k = split(len(d))
    return node(slow_root(d[:k]), slow_root(d[k:]))


def slow_inclusion(m: int, d: list[bytes]) -> list[bytes]:
    if len(d) == 1:
        return []
    k = split(len(d))
    if m < k:
        return [*slow_inclusion(m, d[:k]), slow_root(d[k:])]
    return [*slow_inclusion(m - k, d[k:]), slow_root(d[:k])]


def slow_subproof(m: int, d: list[bytes], whole: bool) -> list[bytes]:
    if m == len(d):
        return [] if whole else [slow_root(d)]
    k = split(len(d))
    if m <= k:
        return [*slow_subproof(m, d[:k], whole), slow_root(d[k:])]
    return [*slow_subproof(m - k, d[k:], False), slow_root(d[:k])]


def hexes(path: list[bytes]) -> list[str]:
    return [item.hex() for item in path]


# -- the tree -------------------------------------------------------------------------------------------------------


def test_published_roots_and_paths() -> None:
    leaves = [leaf(bytes.fromhex(entry)) for entry in CT_ENTRIES]
    assert [root(leaves[:n]).hex() for n in range(9)] == CT_ROOTS
    for (i, size), path in CT_INCLUSION.items():
        assert hexes(inclusion(leaves[:size], i)) == path
        assert verify_inclusion(leaves[i], i, size, list(map(bytes.fromhex, path)), bytes.fromhex(CT_ROOTS[size]))
    for (m, n), path in CT_CONSISTENCY.items():
        assert hexes(consistency(leaves[:n], m)) == path
        roots = bytes.fromhex(CT_ROOTS[m]), bytes.fromhex(CT_ROOTS[n])
        assert verify_consistency(m, n, *roots, list(map(bytes.fromhex, path)))


def test_every_size_agrees_with_the_definition() -> None:
    frontier = Frontier()
    assert (frontier.size, frontier.root()) == (0, slow_root([]))
    for n in SIZES:
        frontier.append(LEAVES[n - 1])
        assert root(LEAVES[:n]) == slow_root(LEAVES[:n]) == frontier.root()
        assert frontier.size == n
    assert Frontier(LEAVES).root() == frontier.root()
    assert len(frontier._roots) <= frontier.size.bit_length()


def test_every_inclusion_path_is_the_definitions_and_verifies() -> None:
    for n in SIZES:
        whole = root(LEAVES[:n])
        for i in range(n):
            path = inclusion(LEAVES[:n], i)
            assert path == slow_inclusion(i, LEAVES[:n])
            assert verify_inclusion(LEAVES[i], i, n, path, whole)


def test_every_consistency_path_is_the_definitions_and_verifies() -> None:
    roots = [root(LEAVES[:n]) for n in range(max(SIZES) + 1)]
    for n in SIZES:
        for m in range(1, n + 1):
            path = consistency(LEAVES[:n], m)
            assert path == slow_subproof(m, LEAVES[:n], True)
            assert verify_consistency(m, n, roots[m], roots[n], path)


# -- paths that lie -------------------------------------------------------------------------------------------------


def bent(path: list[bytes], extra: bytes) -> list[list[bytes]]:
    """The path cut, lengthened, reordered, repeated, and with each of its hashes changed or of a wrong length."""
    out = [path[:-1], path[1:]] if path else []
    out += [[*path, extra], [extra, *path], [*path, path[-1] if path else extra]]
    out += [path[::-1]] if path != path[::-1] else []
    for k in range(len(path)):
        changed = bytes((path[k][0] ^ 1,)) + path[k][1:]
        out += [[*path[:k], item, *path[k + 1 :]] for item in (changed, path[k][:-1], path[k] + b"\0", b"")]
        out.append([*path[:k], path[k], *path[k:]])
    return out


def test_no_bent_inclusion_path_verifies() -> None:
    for n in range(1, 20):
        whole = root(LEAVES[:n])
        for i in range(n):
            path = inclusion(LEAVES[:n], i)
            for other in bent(path, LEAVES[i]) + bent(path, whole):
                assert not verify_inclusion(LEAVES[i], i, n, other, whole), (n, i)


def test_a_path_is_of_one_leaf_one_index_one_size_and_one_root() -> None:
    """Of sizes: one path may fit two sizes (its shape is the same), never with the root of the other."""
    roots = [root(LEAVES[:n]) for n in range(max(SIZES) + 1)]
    for n in range(1, 20):
        for i in range(n):
            path = inclusion(LEAVES[:n], i)
            for j in {-1, n, n + 1, i + 1, i - 1, i + n, i ^ 1} - {i}:
                assert not verify_inclusion(LEAVES[i], j, n, path, roots[n])
            for size in range(-1, 40):
                fits = 0 <= i < size and len(path) == len(inclusion(LEAVES[:size], i))
                if size != n:
                    assert not verify_inclusion(LEAVES[i], i, size, path, roots[max(size, 0)])
                    assert fits or not verify_inclusion(LEAVES[i], i, size, path, roots[n])
            assert not verify_inclusion(LEAVES[(i + 1) % 70], i, n, path, roots[n])
            assert not verify_inclusion(LEAVES[i][:-1], i, n, path, roots[n])
            assert n == 1 or not verify_inclusion(LEAVES[i], i, n, path, roots[n - 1])


def test_an_inner_node_does_not_pass_as_a_leaf_of_its_own_tree() -> None:
    """The prefixes 0x00 and 0x01 keep them apart; the check also demands the full length of the path."""
    whole = root(LEAVES[:8])
    path = inclusion(LEAVES[:8], 0)
    inner = node(LEAVES[0], LEAVES[1])
    assert not verify_inclusion(inner, 0, 8, path[1:], whole)
    assert verify_inclusion(inner, 0, 4, path[1:], whole), "a size the checker takes from the liar proves nothing"


def test_no_bent_consistency_path_verifies() -> None:
    roots = [root(LEAVES[:n]) for n in range(max(SIZES) + 1)]
    for n in range(1, 18):
        for m in range(1, n + 1):
            path = consistency(LEAVES[:n], m)
            for other in bent(path, roots[m]) + bent(path, roots[n]):
                assert not verify_consistency(m, n, roots[m], roots[n], other), (m, n)


def test_a_consistency_path_is_of_two_sizes_and_two_roots() -> None:
    roots = [root(LEAVES[:n]) for n in range(max(SIZES) + 1)]
    other = [root([leaf(b"else"), *LEAVES[1:n]]) for n in range(max(SIZES) + 1)]
    for n in range(1, 18):
        for m in range(1, n + 1):
            path = consistency(LEAVES[:n], m)
            assert not verify_consistency(m, n, other[m], roots[n], path)
            assert not verify_consistency(m, n, roots[m], other[n], path)
            assert not verify_consistency(0, n, roots[0], roots[n], path)
            assert not verify_consistency(n + 1, n, roots[n + 1], roots[n], path)
            for a, b in ((m - 1, n), (m + 1, n), (m, n - 1), (m, n + 1)):
                if min(a, b) >= 0:
                    assert not verify_consistency(a, b, roots[a], roots[b], path), (m, n, a, b)
    assert not verify_consistency(3, 3, roots[3], roots[3], [roots[3]])
    assert not verify_consistency(3, 3, roots[3], roots[2], [])
    assert not verify_consistency(3, 7, roots[3], roots[7], [])


def test_random_hashes_never_prove_anything() -> None:
    rng = random.Random(6962)
    for _ in range(2000):
        size = rng.randrange(1, 1 << 20)
        i, m = rng.randrange(size), rng.randrange(1, size + 1)
        path = [rng.randbytes(32) for _ in range(rng.randrange(24))]
        assert not verify_inclusion(rng.randbytes(32), i, size, path, rng.randbytes(32))
        assert not verify_consistency(m, size, rng.randbytes(32), rng.randbytes(32), path)


@pytest.mark.parametrize("call", [(inclusion, -1), (inclusion, 3), (consistency, 0), (consistency, 4)])
def test_proofs_of_what_is_not_there_are_refused(call) -> None:
    make, number = call
    with pytest.raises(ValueError, match="of a tree of 3"):
        make(LEAVES[:3], number)
