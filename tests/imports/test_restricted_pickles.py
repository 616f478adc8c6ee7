"""The reader of pickles gives what pickle gives for plain data, and refuses the rest without running any of it."""

import os
import pickle
import pickletools
import struct
import tracemalloc
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlk_ledger.importers import pickles
from rlk_ledger.importers.numpy_pickles import NUMPY_NAMES, LateArray
from rlk_ledger.importers.pickles import Function, loads
from rlk_ledger_schemas.errors import FormatError

NAMES = {
    "collections.OrderedDict": Function("OrderedDict", pickles.as_dict),
    "builtins.set": Function("set", pickles.as_set),
    **NUMPY_NAMES,
}

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.text(max_size=20)
    | st.binary(max_size=20)
)
keys = st.text(max_size=8) | st.integers(-1000, 1000)
nested = st.recursive(
    scalars
    | st.lists(st.integers(-(2**31), 2**31 - 1), max_size=60)
    | st.lists(st.floats(allow_nan=False), max_size=60),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.tuples(inner, inner)
        | st.dictionaries(keys, inner, max_size=5)
        | st.sets(st.integers(), max_size=5)
        | st.dictionaries(keys, inner, max_size=3).map(OrderedDict)
    ),
    max_leaves=20,
)


def read(data: bytes) -> Any:
    return loads(data, NAMES, persistent=lambda saved: saved)


@given(nested, st.sampled_from([2, 3, 4, 5]))
@settings(max_examples=300, deadline=None)
def test_plain_data_reads_as_pickle_reads_it(value: Any, protocol: int) -> None:
    got = read(pickle.dumps(value, protocol))
    assert got == value
    assert type(got) is (dict if isinstance(value, OrderedDict) else type(value))


@given(st.lists(st.integers(-(2**31), 2**31 - 1) | st.integers(0, 255) | st.integers(0, 65535), max_size=500))
@settings(max_examples=100, deadline=None)
def test_runs_of_integers_of_every_width_are_decoded(values: list[int]) -> None:
    assert read(pickle.dumps(values, 2)) == values


@given(st.lists(st.floats(width=32), min_size=1, max_size=500))
@settings(max_examples=100, deadline=None)
def test_runs_of_floats_keep_their_bits(values: list[float]) -> None:
    got = read(pickle.dumps(values, 2))
    assert struct.pack(f"{len(got)}d", *got) == struct.pack(f"{len(values)}d", *values)


def test_runs_longer_than_a_chunk_are_whole() -> None:
    values = [*range(100_000), *([3] * 50_000), *(i / 3 for i in range(50_000))]
    assert read(pickle.dumps(values, 2)) == values


@pytest.mark.parametrize("dtype", ["f4", "f8", "f2", "i4", "i8", "u1", "b1", ">f4"])
def test_numpy_arrays_and_scalars_read_back(dtype: str) -> None:
    array = np.arange(24).reshape(2, 3, 4).astype(dtype)
    for value in (array, np.asfortranarray(array), array[:, 1]):
        got = read(pickle.dumps({"x": [value]}, 2))["x"][0]
        assert isinstance(got, LateArray)
        assert np.array_equal(got.array, value)
    assert read(pickle.dumps(array[0, 0, 1], 2)) == array[0, 0, 1].item()


class Runs:
    """Pickles as a call of something that leaves a trace."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_call_of_anything_else_is_refused_by_name_and_never_made(protocol: int, tmp_path: Path) -> None:
    canary = tmp_path / "ran"
    data = pickle.dumps({"before": 1, "samples": [Runs(canary)]}, protocol)
    with pytest.raises(FormatError, match=r"'posix\.mkdir'"):
        read(data)
    assert not canary.exists()
    pickle.loads(data)
    assert canary.exists(), "the canary works"


@pytest.mark.parametrize(
    "name",
    [
        "builtins eval",
        "builtins getattr",
        "__builtin__ exec",
        "os system",
        "subprocess Popen",
        "torch load",
        "torch._utils _rebuild_tensor",
        "rlk_ledger.importers.pickles loads",
        "collections OrderedDict.fromkeys",
        "numpy.core.multiarray fromfile",
        "codecs encode",
    ],
)
def test_names_that_are_not_on_the_list_are_refused(name: str) -> None:
    module, attribute = name.split()
    with pytest.raises(FormatError, match="nothing in it ran"):
        read(b"\x80\x02c" + f"{module}\n{attribute}\n".encode() + b".")
    stack = b"\x80\x04" + b"".join(b"\x8c" + bytes([len(p)]) + p.encode() for p in (module, attribute)) + b"\x93."
    with pytest.raises(FormatError, match="nothing in it ran"):
        read(stack)


ORDERED = b"ccollections\nOrderedDict\n"
TEXT = b"X\x01\x00\x00\x00a"

HOSTILE = {
    "state set on a function": b"\x80\x02" + ORDERED + b"N}" + TEXT + TEXT + b"s\x86b.",
    "state set on a dict": b"\x80\x02}}b.",
    "call of a text": b"\x80\x02" + TEXT + b")R.",
    "call with a list": b"\x80\x02" + ORDERED + b"]R.",
    "call with a wrong count": b"\x80\x02" + ORDERED + b"NNN\x87R.",
    "NEWOBJ": b"\x80\x02" + ORDERED + b")\x81.",
    "INST": b"\x80\x02(icollections\nOrderedDict\n.",
    "OBJ": b"\x80\x02(" + ORDERED + b"o.",
    "EXT1": b"\x80\x02\x82\x01.",
    "PERSID": b"\x80\x02Pabc\n.",
    "NEXT_BUFFER": b"\x80\x05\x97.",
    "BYTEARRAY8": b"\x80\x05\x96" + struct.pack("<Q", 1 << 40) + b".",
    "LONG4": b"\x80\x02\x8b" + struct.pack("<i", 1 << 30) + b".",
    "long integer": b"\x80\x02\x8a\xff" + b"\x01" * 255 + b".",
    "text longer than the file": b"\x80\x02X" + struct.pack("<I", 0xFFFFFFFF) + b"a.",
    "text of exabytes": b"\x80\x04\x8d" + struct.pack("<Q", 1 << 62) + b"a.",
    "bytes longer than the file": b"\x80\x03B" + struct.pack("<I", 0xFFFFFFF0) + b".",
    "memo that was never put": b"\x80\x02h\x05.",
    "empty stack": b"\x80\x02.",
    "pop of nothing": b"\x80\x020.",
    "no mark": b"\x80\x02t.",
    "tuple across a mark": b"\x80\x02N(\x85.",
    "append to a dict": b"\x80\x02}Na.",
    "items of a list": b"\x80\x02]NNs.",
    "odd items": b"\x80\x02}(NNNu.",
    "dict as a key": b"\x80\x02}}Ns.",
    "tuple as a key": b"\x80\x02}N\x85Ns.",
    "tuple in a set": b"\x80\x04\x8f(N\x85\x90.",
    "no stop": b"\x80\x02N",
    "nothing": b"",
    "name without an end": b"\x80\x02cos",
    "text that is no UTF-8": b"\x80\x02X\x01\x00\x00\x00\xff.",
    "name that is a number": b"\x80\x04K\x01K\x02\x93.",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_opcodes_are_one_sentence(name: str) -> None:
    with pytest.raises(FormatError) as caught:
        read(HOSTILE[name])
    assert str(caught.value).endswith(".")
    assert "\n" not in str(caught.value)


def peak(data: bytes) -> tuple[int, Any]:
    """(bytes allocated at most, outcome) of reading `data`."""
    tracemalloc.start()
    try:
        outcome: Any = read(data)
    except FormatError as error:
        outcome = error
    finally:
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return most, outcome


def test_a_memo_index_of_two_billion_costs_nothing() -> None:
    most, outcome = peak(b"\x80\x02Nr" + struct.pack("<I", 2**31 - 1) + b"j" + struct.pack("<I", 2**31 - 1) + b".")
    assert outcome is None
    assert most < 1 << 20


@pytest.mark.parametrize("opcode", [b"]", b"}", b"\x8f"])
def test_containers_that_cost_a_byte_each_are_refused_before_they_cost_memory(opcode: bytes) -> None:
    most, outcome = peak(b"\x80\x04" + opcode * 2_000_000 + b".")
    assert isinstance(outcome, FormatError)
    assert most < 200 << 20


def test_many_levels_of_nesting_do_not_reach_the_interpreters_stack() -> None:
    deep = b"\x80\x02" + b"]" * 500 + b"N" + b"a" * 500 + b"."
    assert isinstance(read(deep), list)
    levels = 300_000
    tuples = b"\x80\x02N" + b"\x85" * levels + b"." + b" " * levels * 8
    assert type(read(tuples)) is tuple
    keyed = b"\x80\x02}N" + b"\x85" * levels + b"Ns." + b" " * levels * 8
    with pytest.raises(FormatError, match="as a key"):
        read(keyed)


def test_nothing_a_file_sets_changes_what_the_next_file_finds() -> None:
    before = dict(NAMES)
    for data in HOSTILE.values():
        with pytest.raises(FormatError):
            read(data)
    assert before == NAMES
    assert read(pickle.dumps(OrderedDict(a=1), 2)) == {"a": 1}


def sentence(data: bytes) -> str:
    """What `data` is refused with; empty when it is read. Anything but a FormatError fails the test."""
    try:
        read(data)
    except FormatError as error:
        return str(error)
    return ""


@given(nested, st.data())
@settings(max_examples=300, deadline=None)
def test_damaged_pickles_are_data_or_one_sentence(value: Any, data: st.DataObject) -> None:
    whole = bytearray(pickle.dumps(value, data.draw(st.sampled_from([2, 4]))))
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(whole)))
    for damaged in (bytes(whole), bytes(whole[:cut])):
        assert "\n" not in sentence(damaged)


@given(st.binary(max_size=200))
@settings(max_examples=500, deadline=None)
def test_any_bytes_are_data_or_one_sentence(data: bytes) -> None:
    assert "\n" not in sentence(data)


def test_the_opcodes_read_are_those_of_the_standard_library() -> None:
    known = {ord(opcode.code) for opcode in pickletools.opcodes}
    assert set(pickles._TABLE) < known
