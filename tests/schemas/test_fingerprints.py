"""Fingerprints: canonical JSON refuses what it cannot hold; digests equal their plain definitions."""

import hashlib
import json
import math
import struct
from typing import Any

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from rlk_ledger_schemas import fingerprints as fp
from rlk_ledger_schemas.errors import EventError, FingerprintError

SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**53) + 1, 2**53 - 1),
    st.floats(allow_nan=False, allow_infinity=False).filter(lambda x: x != 0 or math.copysign(1, x) > 0),
    st.text(st.characters(exclude_categories=["Cs"])),
)  # fmt: skip
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner, max_size=3),
    ),
)


@given(VALUES)
def test_canonical_json_reads_back_equal(value: object) -> None:
    """JSON has one number type, a double; so integers are read back as doubles."""
    assert json.loads(fp.canonical_json(value), parse_int=float) == value


@given(st.dictionaries(st.text("abcé𝄞", max_size=3), st.integers(0, 9), max_size=6))
def test_key_order_does_not_matter(value: dict[str, int]) -> None:
    assert fp.canonical_json(value) == fp.canonical_json(dict(reversed(value.items())))


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ({"a": [1, float("nan")]}, "$.a[1]"),
        ({"a": float("inf")}, "$.a"),
        (-0.0, "$"),
        ({"a": {"b": b"x"}}, "$.a.b"),
        ([2**53 + 1], "$[0]"),
        ({1: 2}, "$"),
        ({"a": {1, 2}}, "$.a"),
        ("\ud800", "$"),
    ],
)
def test_what_json_cannot_hold_is_refused_never_stringified(value: object, place: str) -> None:
    with pytest.raises(FingerprintError) as caught:
        fp.canonical_json(value)
    assert f"`{place}`" in str(caught.value)


@pytest.mark.parametrize(
    ("declared", "name"), [((1, "1", {}), "kind"), (("logprob", 1, {}), "version"), (("logprob", "1", []), "body")]
)
def test_what_cannot_be_declared_has_no_contract_id(declared: Any, name: str) -> None:
    with pytest.raises(FingerprintError, match=f"`{name}` must be a"):
        fp.contract_id(*declared)


def test_two_to_the_53_is_the_last_integer() -> None:
    assert fp.canonical_json(2**53) == b"9007199254740992"


def test_rfc8785_number_and_key_vectors() -> None:
    value = {"numbers": [333333333.33333329, 1e30, 4.50, 2e-3, 0.000000000000000000000000001], "€": 1, "\r": 2, "1": 3}
    want = '{"\\r":2,"1":3,"numbers":[333333333.3333333,1e+30,4.5,0.002,1e-27],"€":1}'
    assert fp.canonical_json(value) == want.encode()


def test_digests_are_their_definitions() -> None:
    ids, mask = [3, 70000, 5], [1, 0, 1]
    assert fp.token_digest(ids) == "sha256:" + hashlib.sha256(struct.pack("<3i", *ids)).hexdigest()
    assert fp.mask_digest(mask) == "sha256:" + hashlib.sha256(bytes(mask)).hexdigest()
    body = {"kind": "logprob", "version": "1", "body": {"temperature": 1.0}}
    text = b'{"body":{"temperature":1},"kind":"logprob","version":"1"}'
    assert fp.contract_id(**body) == "sha256:" + hashlib.sha256(text).hexdigest()


def test_a_mask_of_other_numbers_has_no_digest() -> None:
    assert fp.mask_digest([1.0, 0.0]) == fp.mask_digest([True, False]) == fp.mask_digest([1, 0])
    with pytest.raises(EventError, match="0 and 1 only"):
        fp.mask_digest([2])


def test_file_digest_reads_whole_files(tmp_path) -> None:
    data = bytes(range(256)) * 9000
    (tmp_path / "f").write_bytes(data)
    assert fp.file_digest(tmp_path / "f") == "blake3:" + blake3(data).hexdigest()


def test_tensors_digest_ignores_order_and_sees_names() -> None:
    left, _ = fp.tensors_digest([("a", b"1"), ("b", b"2")])
    assert fp.tensors_digest([("b", b"2"), ("a", b"1")])[0] == left
    assert fp.tensors_digest([("a", b"2"), ("b", b"1")])[0] != left


@given(st.lists(st.integers(0, 2**16 - 1), min_size=1, max_size=30), st.data())
def test_sum64x2_partials_add_under_any_split(words: list[int], data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(words)))
    whole = fp.sum64x2_digest([fp.sum64x2("w", words)])
    assert fp.sum64x2_digest([fp.sum64x2("w", words[cut:], cut), fp.sum64x2("w", words[:cut])]) == whole


def test_sum64x2_sees_a_swap_a_bit_and_a_name() -> None:
    base = fp.sum64x2("w", [1, 2, 3])
    assert fp.sum64x2("w", [2, 1, 3]) != base
    assert fp.sum64x2("w", [1, 2, 2]) != base
    assert fp.sum64x2("v", [1, 2, 3]) != base


def test_sum64x2_vector_is_frozen() -> None:
    assert (
        fp.sum64x2_digest([fp.sum64x2("layers.0.w", [0x3F80, 0, 0xBF80])]) == "sum64x2:c5df356bf25d20802aa7a60cfaa7b480"
    )


def test_splitmix64_published_vector() -> None:
    state, out = 1234567, []
    for _ in range(3):
        state += fp.GOLDEN64
        out.append(fp.splitmix64(state))
    assert out == [6457827717110365317, 3203168211198807973, 9817491932198370423]
