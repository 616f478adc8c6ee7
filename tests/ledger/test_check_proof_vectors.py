"""tools/check_proof.py against published vectors, other implementations and the ledger's own."""

import base64
import hashlib
from pathlib import Path

import check_proof
import msgspec
import pytest

from rlk_ledger import signing
from rlk_ledger_schemas.arrays import Array
from rlk_ledger_schemas.codec import decode_envelope, leaf_hash

ORDER = 2**252 + 27742317777372353535851937790883648493

# RFC 8032 section 7.1: public key, message, signature
RFC_8032 = [
    (
        "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a",
        "",
        "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e06522490155"
        "5fb8821590a33bacc61e39701cf9b46bd25bf5f0595bbe24655141438e7a100b",
    ),
    (
        "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c",
        "72",
        "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da"
        "085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00",
    ),
    (
        "fc51cd8e6218a1a38da47ed00230f0580816ed13ba3303ac5deb911548908025",
        "af82",
        "6291d657deec24024827e69c3abe01a30ce548a284743a445e3680d7db5ac3ac"
        "18ff9b538d16f290ae67f760984dc6594a7c15e9716ed28dc027beceea1ec40a",
    ),
    (
        "ec172b93ad5e563bf4932c70e1245034c35467ef2efd4d64ebf819683467e2bf",
        hashlib.sha512(b"abc").hexdigest(),
        "dc2a4459e7369633a52b1bf277839a00201009a3efbf3ecb69bea2186c26b589"
        "09351fc9ac90b3ecfdfbc7c66431e0303dca179c138ac17ad9bef1177331a704",
    ),
]
# every encoding of the eight points of small order, the ones that are not canonical included
SMALL_ORDER = [
    "00" * 32,
    "00" * 31 + "80",
    "01" + "00" * 31,
    "01" + "00" * 30 + "80",
    "ec" + "ff" * 30 + "7f",
    "ec" + "ff" * 31,
    "ed" + "ff" * 30 + "7f",
    "ed" + "ff" * 31,
    "ee" + "ff" * 30 + "7f",
    "ee" + "ff" * 31,
    "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05",
    "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc85",
    "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a",
    "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac03fa",
]


def _flipped(data: bytes, i: int) -> bytes:
    changed = bytearray(data)
    changed[i // 8] ^= 1 << (i % 8)
    return bytes(changed)


@pytest.fixture(scope="module")
def signer(tmp_path_factory) -> signing.Signer:
    return signing.new_key(tmp_path_factory.mktemp("key") / "key.pem")


def signed_by(public: bytes, message: bytes, signature: bytes) -> bool:
    try:
        return check_proof.signed(public, message, signature)
    except ValueError:
        return False


@pytest.mark.parametrize(("public", "message", "signature"), RFC_8032)
def test_ed25519_against_rfc_8032(public: str, message: str, signature: str) -> None:
    key, text, good = map(bytes.fromhex, (public, message, signature))
    assert signed_by(key, text, good)
    for i in range(0, 512, 7):
        assert not signed_by(key, text, _flipped(good, i)), f"bit {i} of the signature"
    for i in range(0, 256, 17):
        assert not signed_by(_flipped(key, i), text, good), f"bit {i} of the key"
    assert not signed_by(key, text + b"x", good)
    for length in (0, 31, 32, 63, 65):
        assert not signed_by(key, text, (good * 2)[:length])
    assert not signed_by(key[:31], text, good)
    assert not signed_by(key + b"\0", text, good)


def test_a_signature_has_one_form() -> None:
    """S + L satisfies the equation as S does: it is refused, as is S = L and above."""
    key, text, good = map(bytes.fromhex, RFC_8032[2])
    s = int.from_bytes(good[32:], "little")
    for other in (s + ORDER, s + 2 * ORDER, s + 7 * ORDER, ORDER, 2**256 - 1):
        assert not signed_by(key, text, good[:32] + other.to_bytes(32, "little"))


@pytest.mark.parametrize("point", SMALL_ORDER)
def test_a_key_of_small_order_signs_nothing(point: str) -> None:
    """For such a key a signature of every message can be written down without any secret."""
    for r in SMALL_ORDER:
        for message in (b"", b"a", b"b"):
            assert not signed_by(bytes.fromhex(point), message, bytes.fromhex(r) + bytes(32))


def test_the_pure_python_check_agrees_with_the_library(signer, tmp_path: Path) -> None:
    for i in range(20):
        message = hashlib.sha256(bytes((i,))).digest() * (i + 1)
        assert signed_by(signer.public_key, message, signer.sign(message))
        assert not signed_by(signer.public_key, message + b"\0", signer.sign(message))


# golang.org/x/mod/sumdb/note, the reference implementation of c2sp.org/signed-note
GO_TEXT = "If you think cryptography is the answer to your problem,\nthen you don't know what your problem is.\n"
GO_KEYS = (
    "PeterNeumann+c74f20a3+ARpc2QcUPDhMQegwxbzhKqiBfsVkmqq/LDE4izWy10TW",
    "EnochRoot+af0cfe78+ATtqJ7zOtqQtYqOo0CpvDXNlMhV3HeJDpjrASKGLWdop",
)
GO_LINES = (
    "— PeterNeumann x08go/ZJkuBS9UG/SffcvIAQxVBtiFupLLr8pAcElZInNIuGUgYN1FFYC2pZSNXgKvqfqdngotpRZb6KE6RyyBwJnAM=\n",
    "— EnochRoot rwz+eBzmZa0SO3NbfRGzPCpDckykFXSdeX+MNtCOXm2/5n2tiOHp+vAF1aGrQ5ovTG01oOTGwnWLox33WWd1RvMc+QQ=\n",
)
# c2sp.org/tlog-checkpoint's example
TLOG = (
    "example.com/behind-the-sofa\n20852163\nCsUYapGGPo4dkMgIAUqom/Xajj7h2fB2MPA3j2jxq2I=\n\n"
    "— example.com/behind-the-sofa "
    "Az3grlgtzPICa5OS8npVmf1Myq/5IZniMp+ZJurmRDeOoRDe4URYN7u5/Zhcyv2q1gGzGku9nTo+zyWE+xeMcTOAYQ8=\n"
)


def test_notes_of_the_reference_implementation() -> None:
    check = check_proof.check_signatures
    check(GO_TEXT, [line.rstrip("\n") for line in GO_LINES], GO_KEYS)
    check(GO_TEXT, [GO_LINES[0].rstrip("\n")], GO_KEYS[:1])
    with pytest.raises(ValueError, match="not signed by EnochRoot"):
        check(GO_TEXT, [GO_LINES[0].rstrip("\n")], GO_KEYS)
    with pytest.raises(ValueError, match="not signed by PeterNeumann"):
        check(GO_TEXT.replace("think", "thunk"), [line.rstrip("\n") for line in GO_LINES], GO_KEYS)
    twice = [GO_LINES[0].rstrip("\n"), GO_LINES[0].rstrip("\n").replace("ZJku", "ZJkv")]
    with pytest.raises(ValueError, match="not signed by PeterNeumann"):
        check(GO_TEXT, twice, GO_KEYS[:1])


def test_the_checkpoint_of_the_specification_is_read() -> None:
    text, origin, size, root, _, lines = check_proof.read_note(TLOG)
    assert (origin, size, len(root), len(lines)) == ("example.com/behind-the-sofa", 20852163, 32, 1)
    assert text == TLOG[: TLOG.index("\n\n") + 1]
    for wrong in (TLOG.replace("\n20852163", "\n020852163"), TLOG.replace("\n20852163", "\n+20852163"), TLOG[:-1]):
        with pytest.raises(ValueError, match="no signed note"):
            check_proof.read_note(wrong)
    odd = "base64|no signed note"
    for wrong in (TLOG.replace("jxq2I=", "jxq2J="), TLOG.replace("sofa\n2", "so\tfa\n2"), TLOG.replace("\n\n", "\n")):
        with pytest.raises(ValueError, match=odd):
            check_proof.read_note(wrong)


def test_the_trees_of_the_script_are_those_of_rfc_6962() -> None:
    """Against the ledger's own implementation, which is tested against the RFC's definition and published paths."""
    from rlk_ledger_schemas import merkle

    leaves = [merkle.leaf(bytes((i,))) for i in range(33)]
    for n in range(1, 34):
        whole = merkle.root(leaves[:n])
        for i in range(n):
            path = [base64.b64encode(h).decode() for h in merkle.inclusion(leaves[:n], i)]
            assert check_proof.climb(leaves[i], i, n, path) == whole
            for bad in ([*path, path[0]] if path else ["A" * 43 + "="], *([path[:-1]] if path else [])):
                with pytest.raises(ValueError, match="the path is not of entry"):
                    check_proof.climb(leaves[i], i, n, bad)
        for m in range(1, n + 1):
            path = [base64.b64encode(h).decode() for h in merkle.consistency(leaves[:n], m)]
            old = merkle.root(leaves[:m])
            assert check_proof.prefix(m, n, path, old) == (old, whole)


def test_published_paths_are_taken(request) -> None:
    """The 8-leaf tree of certificate transparency, as its implementations publish it."""
    entries = ["", "00", "10", "2021", "3031", "40414243", "5051525354555657", "606162636465666768696a6b6c6d6e6f"]
    whole = "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328"
    path = [
        "bc1a0643b12e4d2d7c77918f44e0f4f79a838b6cf9ec5b5c283e1f4d88599e6b",
        "ca854ea128ed050b41b35ffc1b87b8eb2bde461e9e3b5596ece6b9d5975a0ae0",
        "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
    ]
    coded = [base64.b64encode(bytes.fromhex(item)).decode() for item in path]
    assert check_proof.climb(check_proof.sha256(b"\0", bytes.fromhex(entries[5])), 5, 8, coded).hex() == whole
    six = "76e67dadbcdf1e10e1b74ddc608abd2f98dfb16fbce75277b5232a127f2087ef"
    path[0] = "0ebc5d3437fbe2db158b9f126a1d118e308181031d0a949f8dededebc558ef6a"
    coded[0] = base64.b64encode(bytes.fromhex(path[0])).decode()
    old, new = check_proof.prefix(6, 8, coded, bytes.fromhex(six))
    assert (old.hex(), new.hex()) == (six, whole)


@pytest.mark.parametrize(
    "value",
    [
        {"a": None, "b": True, "c": False, "d": "x" * 40, "e": "y" * 300, "f": "z" * 70_000, "é": "ü"},
        {"n": [0, 127, 128, 255, 256, 65535, 65536, 2**32, 2**63, -1, -32, -33, -128, -129, -32769, -(2**31) - 1]},
        {"x": [0.5, -0.0, 1e300], "bytes": b"raw", "more": b"r" * 300, "list": list(range(20)), "deep": [[[{}]]]},
        {f"key{i}": i for i in range(70_000)},
    ],
)
def test_the_scripts_msgpack_is_msgpack(value: dict) -> None:
    data = msgspec.msgpack.encode(value)
    assert check_proof.unpack(data) == (value, len(data))
    for cut in {0, 1, len(data) // 2, len(data) - 1}:
        try:
            found, end = check_proof.unpack(data[:cut])
        except Exception:
            continue
        assert end != cut or found != value


def test_the_scripts_leaf_is_the_ledgers() -> None:
    arrays = {"values": Array("float32", b"\0\0\xc0\x7f"), "a": Array("int64", bytes(16)), "ä": Array("uint8", b"")}
    listed = [
        {"name": name, "dtype": a.dtype, "n": len(a), "data": base64.b64encode(a.data).decode()}
        for name, a in arrays.items()
    ]
    envelope = msgspec.msgpack.encode({"type": "x"})
    assert check_proof.event_leaf(envelope, listed) == leaf_hash(envelope, arrays)
    assert decode_envelope(envelope) == {"type": "x"}
