"""sum64x2 over numpy arrays and torch tensors equals the definition, under any shape, dtype, chunk and shard."""

import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlk_ledger_schemas import fingerprints
from rlk_ledger_schemas.errors import UsageError
from rlk_ledger_sdk import weights

NUMPY = ["f2", "f4", "f8", "i1", "u1", "i4", "i8", "u8", "?"]
TORCH = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.uint8, torch.int64, torch.bool]


def words(raw: bytes, width: int) -> list[int]:
    return [int.from_bytes(raw[i : i + width], "little") for i in range(0, len(raw), width)]


@pytest.mark.parametrize("dtype", NUMPY)
def test_numpy_equals_the_definition(dtype):
    array = (np.random.default_rng(1).standard_normal((3, 5)) * 100).astype(dtype)
    expected = fingerprints.sum64x2("layer.w", words(array.tobytes(), array.dtype.itemsize))
    assert weights.sum64x2("layer.w", array) == expected


def by_torch(call):
    """`call()` in the arithmetic of a device: the one torch tensors have where numpy cannot reach them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(sys.modules, "numpy")
        return call()


@pytest.mark.parametrize("dtype", TORCH, ids=str)
def test_torch_equals_the_definition(dtype):
    tensor = (torch.randn(3, 5, generator=torch.Generator().manual_seed(1)) * 100).to(dtype)
    raw = bytes(tensor.reshape(-1).view(torch.uint8).tolist())
    expected = fingerprints.sum64x2("layer.w", words(raw, tensor.element_size()))
    assert weights.sum64x2("layer.w", tensor) == expected
    assert by_torch(lambda: weights.sum64x2("layer.w", tensor)) == expected
    assert bytes(tensor.reshape(-1).view(torch.uint8).tolist()) == raw


def test_columns_of_a_whole_tensor_add_up_in_both_arithmetics():
    tensor = torch.randn(7, 10, generator=torch.Generator().manual_seed(2))
    whole = weights.sum64x2("w", tensor, 30)

    def parts():
        cut = (tensor[:, :4], 30), (tensor[:, 4:], 34)
        pairs = [weights.sum64x2_columns("w", part, start, 10) for part, start in cut]
        return tuple(sum(pair) & fingerprints.MASK64 for pair in zip(*pairs))

    assert parts() == whole
    assert by_torch(parts) == whole


def test_a_parameter_a_view_and_a_transposed_array_count_by_value():
    tensor = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    expected = weights.sum64x2("w", tensor.t().contiguous())
    assert weights.sum64x2("w", torch.nn.Parameter(tensor).t()) == expected
    assert weights.sum64x2("w", tensor.numpy().T) == expected
    assert weights.sum64x2("w", tensor.numpy().T.astype(">f4")) == expected


@settings(max_examples=40, deadline=None)
@given(
    bits=st.lists(st.integers(0, 2**32 - 1), max_size=40),
    cut=st.integers(0, 40),
    start=st.integers(0, 2**40),
    chunk=st.integers(1, 50),
)
def test_any_bits_any_chunk_and_shards_add(bits, cut, start, chunk):
    array = np.array(bits, dtype="<u4").view("<f4")
    expected = fingerprints.sum64x2("w", bits, start)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weights, "CHUNK", chunk)
        patch.setattr(weights, "_BLOCK", chunk)
        tensor = torch.from_numpy(array.copy())
        assert weights.sum64x2("w", array, start) == expected
        assert weights.sum64x2("w", tensor, start) == expected
        assert by_torch(lambda: weights.sum64x2("w", tensor, start)) == expected
    left = weights.sum64x2("w", array[:cut], start)
    right = weights.sum64x2("w", array[cut:], start + min(cut, len(bits)))
    assert tuple((a + b) & fingerprints.MASK64 for a, b in zip(left, right)) == expected


def test_a_changed_bit_a_swap_and_another_name_change_the_digest():
    array = np.array([1.0, 2.0, 3.0], dtype="f4")
    base = weights.sum64x2("w", array)
    flipped = array.copy()
    flipped.view("u4")[1] ^= 1
    assert (
        len({base, weights.sum64x2("w", flipped), weights.sum64x2("w", array[::-1]), weights.sum64x2("v", array)}) == 4
    )


def test_state_digest_covers_every_tensor_in_any_order():
    state = {"a": np.ones(3, "f4"), "b": torch.zeros(2, dtype=torch.bfloat16) + 2}
    digest, each = weights.state_digest(state)
    assert digest.startswith("sum64x2:")
    assert each.keys() == state.keys()
    assert weights.state_digest(dict(reversed(state.items())))[0] == digest
    assert weights.state_digest({"a": state["a"]})[0] != digest
    assert each["a"] == fingerprints.sum64x2_digest([fingerprints.sum64x2("a", [0x3F800000] * 3)])


@pytest.mark.parametrize(
    "value", [[1.0], b"abc", None, np.array(["a"]), np.ones(2, "c8"), torch.ones(2).to(torch.cfloat)]
)
def test_anything_else_is_refused_by_name(value):
    with pytest.raises(UsageError, match="a mapping of names to tensors"):
        weights.state_digest([value])
    with pytest.raises(UsageError, match=r"'model\.w'"):
        weights.state_digest({"model.w": value})
