"""The short check of canonical bytes accepts exactly what RFC 8785 accepts; what a receipt says of samples."""

import json

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rlk_ledger_schemas import objects
from rlk_ledger_schemas.errors import FormatError
from rlk_ledger_schemas.fingerprints import canonical_json, sha256
from rlk_ledger_schemas.samples import AT_MOST, decode_samples, encode_samples, sample_print

_NUMBERS = st.integers(-(2**60), 2**60) | st.floats() | st.sampled_from([2**53, 2**53 - 1, -(2**53), 10**15, 1.0, -0.0])
_TEXT = st.text(max_size=8) | st.sampled_from(["sha256:63e4", 'a"b', "\\", "é", "\x7f", "/", "1e5", ":1.5", "self"])
_VALUES = st.recursive(
    _NUMBERS | _TEXT | st.none() | st.booleans(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXT, inner, max_size=3),
    max_leaves=8,
)


def _is_canonical(data: bytes) -> bool:
    try:
        fields = msgspec.json.decode(data)
        return type(fields) is dict and canonical_json(fields) == data
    except (ValueError, RecursionError):
        return False


def _accepted(data: bytes) -> bool:
    try:
        objects._parse(data, "x")
    except FormatError:
        return False
    return True


@example({"a": 1.5}, True, (",", ":"))
@example({"a": 2**53}, True, (",", ":"))
@example({"b": 1, "a": "sha256:63e4"}, False, (",", ":"))
@given(st.dictionaries(_TEXT, _VALUES, max_size=4), st.booleans(), st.sampled_from([(",", ":"), (", ", ":")]))
def test_an_object_is_accepted_if_and_only_if_its_bytes_are_rfc_8785(fields, ordered, separators) -> None:
    for ascii_ in (True, False):
        text = json.dumps(fields, sort_keys=ordered, separators=separators, ensure_ascii=ascii_)
        data = text.encode(errors="surrogatepass")
        assert _accepted(data) == _is_canonical(data), data


@given(st.dictionaries(_TEXT, _VALUES, max_size=4), st.sampled_from(["", "sha256:00", '"', "é", None, 7]))
def test_the_digest_without_self_is_that_of_the_other_fields(fields, claimed) -> None:
    fields.pop("self", None)
    try:
        data, without = canonical_json({**fields, "self": claimed}), canonical_json(fields)
        read = objects._parse(without, "x")
    except (ValueError, FormatError):  # numbers that no object can hold
        return
    assert objects._digest_without_self(data, read, claimed) == sha256(without)


@given(st.sets(st.text(max_size=12), max_size=50))
def test_prints_hold_every_sample_and_are_sorted(ids) -> None:
    prints = decode_samples(encode_samples(ids))
    each = [prints[i : i + 3] for i in range(0, len(prints), 3)]
    assert each == sorted({sample_print(name) for name in ids})


def test_more_samples_than_a_receipt_says_are_not_said() -> None:
    assert encode_samples(str(i) for i in range(AT_MOST)) is not None
    assert encode_samples(str(i) for i in range(AT_MOST + 1)) is None


@pytest.mark.parametrize("text", ["A", "AAAAAA==", "AAA=", "????", "AAAA\n"])
def test_prints_that_are_none_are_a_format_error(text: str) -> None:
    with pytest.raises(FormatError):
        decode_samples(text)
