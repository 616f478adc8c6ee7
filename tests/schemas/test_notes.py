"""Signed notes and checkpoints: published vectors, one form for every value, no changed byte that reads the same."""

import base64

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlk_ledger_schemas.checkpoints import (
    MOST_RECEIPTS,
    CheckpointInfo,
    checkpoint_text,
    decode_checkpoint,
    encode_checkpoint,
    join_hashes,
    origin,
)
from rlk_ledger_schemas.errors import FormatError, UsageError
from rlk_ledger_schemas.merkle import Frontier, root
from rlk_ledger_schemas.merkle import leaf as leaf_hash
from rlk_ledger_schemas.notes import (
    LONGEST_NOTE,
    Note,
    NoteSignature,
    check_key_name,
    decode_note,
    decode_vkey,
    encode_note,
)

# The public test key and note of golang.org/x/mod/sumdb/note.
VKEY = "PeterNeumann+c74f20a3+ARpc2QcUPDhMQegwxbzhKqiBfsVkmqq/LDE4izWy10TW"
SEED = base64.b64decode("AYEKFALVFGyNhPJEMzD1QIDr+Y7hfZx09iUvxdXHKDFz")[1:]
TEXT = (
    b"If you think cryptography is the answer to your problem,\n"
    b"then you don't know what your problem is.\n"
)  # fmt: skip
LINE = "— PeterNeumann x08go/ZJkuBS9UG/SffcvIAQxVBtiFupLLr8pAcElZInNIuGUgYN1FFYC2pZSNXgKvqfqdngotpRZb6KE6RyyBwJnAM=\n"
NOTE = TEXT + b"\n" + LINE.encode()
# The examples of c2sp.org/signed-note and c2sp.org/tlog-checkpoint.
POEM = """Ognuno sta solo sul cuor della terra
trafitto da un raggio di sole:

ed è subito sera.

— quasimodo.example/salvatore \
NnugSzTjtVAewIS+Z/iJhUPeFDkO/5QQ2i5ddnGITLlC+EhfLW9oJKONrMouFSQU0xMcXxj99ihAQwaqP3ZekRwNtIc=
"""
SOFA = """example.com/behind-the-sofa
20852163
CsUYapGGPo4dkMgIAUqom/Xajj7h2fB2MPA3j2jxq2I=

— example.com/behind-the-sofa \
Az3grlgtzPICa5OS8npVmf1Myq/5IZniMp+ZJurmRDeOoRDe4URYN7u5/Zhcyv2q1gGzGku9nTo+zyWE+xeMcTOAYQ8=
"""
A, B = "0a" * 16, "0b" * 16
LEDGER = "1f" * 16


def test_the_published_key_and_note_read_as_published_and_encode_to_the_same_bytes() -> None:
    key = decode_vkey(VKEY)
    assert (key.name, key.key_id.hex(), key.encode()) == ("PeterNeumann", "c74f20a3", VKEY)
    note = decode_note(NOTE, "note")
    assert note.text == TEXT
    assert [(s.name, s.key_id) for s in note.signatures] == [("PeterNeumann", key.key_id)]
    assert encode_note(note.text, note.signatures) == NOTE


def test_the_published_signature_verifies_and_signing_again_gives_it() -> None:
    ed25519 = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.ed25519")
    private = ed25519.Ed25519PrivateKey.from_private_bytes(SEED)
    assert private.public_key().public_bytes_raw() == decode_vkey(VKEY).public_key
    signature = decode_note(NOTE, "note").signatures[0].signature
    private.public_key().verify(signature, TEXT)
    assert private.sign(TEXT) == signature


@pytest.mark.parametrize(("example", "lines"), [(POEM, 4), (SOFA, 3)])
def test_the_examples_of_the_specifications_read_and_encode_to_the_same_bytes(example: str, lines: int) -> None:
    note = decode_note(example.encode(), "note")
    assert note.text.count(b"\n") == lines
    assert len(note.signatures[0].signature) == 64
    assert encode_note(note.text, note.signatures) == example.encode()


def test_no_part_of_a_key_and_no_changed_character_is_a_key() -> None:
    for i in range(len(VKEY)):
        for j in range(i + 1, len(VKEY) + 1):
            if (i, j) != (0, len(VKEY)):
                with pytest.raises(FormatError):
                    decode_vkey(VKEY[i:j])
        with pytest.raises(FormatError):
            decode_vkey(VKEY[:i] + chr(ord(VKEY[i]) + 1) + VKEY[i + 1 :])


@pytest.mark.parametrize(
    ("what", "data"),
    [
        ("no empty line", TEXT),
        ("no text", b"\n\n" + LINE.encode()),
        ("cut in its signature", NOTE[:-1]),
        ("not UTF-8", NOTE[:-1] + b"\xff"),
        ("a tab", NOTE.replace(b"problem,", b"problem,\t")),
        ("a hyphen for the dash", NOTE.replace("—".encode(), b"-")),
        ("no space after the dash", NOTE.replace("— ".encode(), "—".encode())),
        ("no key name", NOTE.replace("— PeterNeumann ".encode(), "—  ".encode())),
        ("a plus in the key name", NOTE.replace(b"PeterN", b"Peter+N")),
        ("no base64", NOTE.replace(b"x08go/", b"x08go*")),
        ("base64 with bits in its padding", NOTE.replace(b"JnAM=", b"JnAN=")),
        ("four bytes of signature, which is none", TEXT + "\n— PeterNeumann x08gow==\n".encode()),
        ("a line that is no signature", NOTE + b"more\n"),
        ("101 signatures", TEXT + b"\n" + LINE.encode() * 101),
        ("a megabyte", b"x" * LONGEST_NOTE + b"\n\n" + LINE.encode()),
    ],
)
def test_what_is_no_note_is_refused(what: str, data: bytes) -> None:
    with pytest.raises(FormatError, match=r"^here: "):
        decode_note(data, "here")


def test_a_note_without_signatures_is_read_and_sixteen_are_taken() -> None:
    assert decode_note(TEXT + b"\n", "note") == Note(TEXT, ())
    assert len(decode_note(TEXT + b"\n" + LINE.encode() * 16, "note").signatures) == 16


@pytest.mark.parametrize("name", ["", "a b", "a+b", "a\nb", "a\u00a0b", "a\u2003b"])
def test_names_a_key_cannot_bear(name: str) -> None:
    with pytest.raises(UsageError):
        check_key_name(name)
    with pytest.raises(FormatError):
        encode_note(b"text\n", [NoteSignature(name, b"1234", b"x")])


@given(
    text=st.text(st.characters(min_codepoint=32, exclude_categories=["Cs"]), min_size=1),
    more=st.lists(st.text(st.characters(min_codepoint=32, exclude_categories=["Cs"]), min_size=1), max_size=3),
    signatures=st.lists(st.tuples(st.binary(min_size=4, max_size=4), st.binary(min_size=1, max_size=90)), max_size=4),
)
def test_any_note_is_read_back_as_it_was_written(text: str, more: list[str], signatures) -> None:
    note = Note(("\n".join([text, *more]) + "\n").encode(), tuple(NoteSignature("k", *s) for s in signatures))
    assert decode_note(encode_note(*note), "note") == note


def info(**changes) -> CheckpointInfo:
    leaves = changes.pop("hashes", [leaf_hash(b"%d" % i) for i in range(3)])
    fields = {
        "format": 1,
        "ledger_id": LEDGER,
        "run_id": "r1",
        "k": 0,
        "appended": ((A, 0, 1), (B, 0, 0)),
        "leaves": join_hashes(leaves),
        "marks": {A: 1, B: 0},
        "peaks": join_hashes(Frontier(leaves).peaks),
        "wall_us": 5,
        **changes,
    }
    return CheckpointInfo(**fields)


def test_a_checkpoint_is_a_note_whose_first_lines_are_a_tlog_checkpoint() -> None:
    leaves = [leaf_hash(b"%d" % i) for i in range(3)]
    data = encode_checkpoint(info(), 3, root(leaves), [NoteSignature(origin(LEDGER, "r1"), b"1234", b"x" * 64)])
    lines = data.decode().split("\n")
    assert lines[:3] == [f"rlk-ledger/{LEDGER}/r1", "3", base64.b64encode(root(leaves)).decode()]
    assert (lines[4], lines[5].split(" ")[:2], lines[6:]) == ("", ["—", f"rlk-ledger/{LEDGER}/r1"], [""])
    found = decode_checkpoint(data, "checkpoint/00000000")
    assert (found.k, found.size, found.root, found.first, found.data) == (0, 3, root(leaves), 0, data)
    assert list(found.receipts()) == [(A, 0, leaves[0]), (A, 1, leaves[1]), (B, 0, leaves[2])]
    assert found.text == checkpoint_text(info(), 3, root(leaves))
    assert found.frontier().root() == found.root


def test_the_next_checkpoint_goes_on_from_the_peaks_of_the_last() -> None:
    leaves = [leaf_hash(b"%d" % i) for i in range(40)]
    for size in range(1, 40):
        resumed = Frontier.resume(size, Frontier(leaves[:size]).peaks)
        for leaf in leaves[size:]:
            resumed.append(leaf)
        assert resumed.root() == root(leaves)
    with pytest.raises(FormatError):
        Frontier.resume(3, leaves[:1])


def test_any_flipped_bit_of_an_unsigned_checkpoint_is_seen_in_it() -> None:
    leaves = [leaf_hash(b"%d" % i) for i in range(3)]
    data = encode_checkpoint(info(), 3, root(leaves))
    for bit in range(8 * len(data)):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(FormatError, match=r"^here: "):
            decode_checkpoint(bytes(changed), "here")
    for keep in range(len(data)):
        with pytest.raises(FormatError, match=r"^here: "):
            decode_checkpoint(data[:keep], "here")


@pytest.mark.parametrize(
    "changes",
    [
        {"k": 1},
        {"previous": "sha256:" + "0" * 64},
        {"appended": ((B, 0, 0), (A, 0, 1))},
        {"appended": ((A, 0, 0), (A, 1, 1), (B, 0, 0))},
        {"appended": ((A, 0, 1), (B, 0, 1))},
        {"appended": ()},
        {"marks": {A: 1}},
        {"marks": {A: 2, B: 0}},
        {"marks": {A: 1, B: 0, "0c" * 16: 0}},
        {"peaks": join_hashes([b"1" * 32, b"2" * 32])},
        {"peaks": ""},
        {"leaves": "AAAA"},
        {"leaves": "not base64"},
        {"public_key": "AAAA"},
        {"format": 2},
        {"run_id": "r2", "self_": None, "ledger_id": "no id\n"},
    ],
)
def test_a_checkpoint_that_contradicts_itself_is_neither_written_nor_read(changes) -> None:
    leaves = [leaf_hash(b"%d" % i) for i in range(3)]
    with pytest.raises(FormatError):
        encode_checkpoint(info(**changes), 3, root(leaves))
    with pytest.raises(FormatError, match=r"^here: "):
        decode_checkpoint(checkpoint_text(info(**changes), 3, root(leaves)) + b"\n", "here")


def test_unknown_fields_of_a_newer_maker_are_kept_and_covered() -> None:
    class Newer(CheckpointInfo, frozen=True, kw_only=True, omit_defaults=True):
        extra: str = "new"

    leaves = [leaf_hash(b"%d" % i) for i in range(3)]
    newer = Newer(**{**msgspec.structs.asdict(info()), "extra": "thing"})
    data = checkpoint_text(newer, 3, root(leaves)) + b"\n"
    assert decode_checkpoint(data, "here").size == 3
    with pytest.raises(FormatError, match="self"):
        decode_checkpoint(data.replace(b"thing", b"other"), "here")


def test_the_largest_checkpoint_with_a_shipper_for_every_receipt_is_a_note() -> None:
    shippers = sorted(f"{i:032x}" for i in range(MOST_RECEIPTS))
    leaves = [leaf_hash(s.encode()) for s in shippers]
    largest = info(hashes=leaves, appended=tuple((s, 0, 0) for s in shippers), marks=dict.fromkeys(shippers, 0))
    data = encode_checkpoint(largest, MOST_RECEIPTS, root(leaves))
    assert MOST_RECEIPTS * 100 < len(data) <= LONGEST_NOTE
    assert decode_checkpoint(data, "here").leaves == leaves
