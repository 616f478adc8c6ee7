"""Files of torch.save read as torch reads them, without torch; what a file claims is checked against its bytes."""

import io
import random
import subprocess
import sys
import tracemalloc
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlk_ledger.importers.torch_files import Tensor, TorchFile
from rlk_ledger_schemas.errors import FormatError

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]


def as_torch(value: Any) -> Any:
    """What torch.load gives, tensors as numpy arrays (bfloat16 widened) and ordered dicts as dicts."""
    if isinstance(value, torch.Tensor):
        return (value.float() if value.dtype is torch.bfloat16 else value).detach().numpy()
    if isinstance(value, dict):
        return {k: as_torch(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(as_torch(v) for v in value) if type(value) in (list, tuple) else tuple(value)
    return value


def as_ours(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.numpy()
    if isinstance(value, dict):
        return {k: as_ours(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(as_ours(v) for v in value)
    return value


def same(left: Any, right: Any) -> bool:
    """Equal types, shapes and bits, recursively."""
    if isinstance(left, np.ndarray):
        return (
            isinstance(right, np.ndarray)
            and left.dtype == right.dtype
            and left.shape == right.shape
            and left.tobytes() == right.tobytes()
        )
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[k], right[k]) for k in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(same(a, b) for a, b in zip(left, right, strict=True))
    return left == right or (left != left and right != right)


def check_as_torch(path: Path) -> None:
    with TorchFile(path) as file:
        assert same(as_ours(file.value), as_torch(torch.load(path, weights_only=True)))


@pytest.mark.parametrize(
    "name",
    [
        "slime/rollout_data/3.pt",
        "slime/train_data/3.pt",
        "slime-gather-order/train_data/3.pt",
        "vime/rollout_data/3.pt",
        "miles/train_data/3_0.pt",
        "miles/train_data/3_1.pt",
    ],
)
def test_the_shipped_dumps_read_as_torch_reads_them(name: str, data: Path) -> None:
    check_as_torch(data / name)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_stride_offset_and_shared_storage(dtype: torch.dtype, tmp_path: Path) -> None:
    base = (torch.arange(120) % 7 - 3).to(dtype).reshape(4, 5, 6)
    views = {
        "whole": base,
        "transposed": base.transpose(0, 2),
        "strided": base[:, ::2, 1::3],
        "offset": base[3, 4],
        "scalar": base[1, 2, 3],
        "empty": base[:, :0],
        "expanded": base[0, 0, :1].expand(6),
        "parameter": torch.nn.Parameter(base.float()) if dtype is torch.float32 else base,
    }
    torch.save(views, tmp_path / "x.pt")
    with zipfile.ZipFile(tmp_path / "x.pt") as archive:
        assert sum("/data/" in name for name in archive.namelist()) <= 2, "the views share a storage"
    check_as_torch(tmp_path / "x.pt")


leaves = (
    st.none()
    | st.booleans()
    | st.integers(-(2**40), 2**40)
    | st.floats()
    | st.text(max_size=10)
    | st.builds(
        lambda dtype, shape, seed: torch.from_numpy(
            np.random.default_rng(seed).integers(-3, 4, shape).astype(np.float32)
        ).to(dtype),
        st.sampled_from(DTYPES),
        st.lists(st.integers(0, 4), max_size=3).map(tuple),
        st.integers(0, 99),
    )
)
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=6), inner, max_size=4)
        | st.dictionaries(st.text(max_size=6), inner, max_size=3).map(OrderedDict)
    ),
    max_leaves=12,
)


@given(trees)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_random_structures_read_as_torch_reads_them(tmp_path: Path, value: Any) -> None:
    path = tmp_path / "x.pt"
    torch.save(value, path)
    with TorchFile(path) as file:
        assert same(as_ours(file.value), as_torch(strip_order(torch.load(path, weights_only=True))))


def strip_order(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: strip_order(v) for k, v in value.items()}
    return type(value)(map(strip_order, value)) if isinstance(value, list | tuple) else value


def refusal(path: Path) -> str:
    """The sentence a file is refused with, at opening or when its tensors are read."""
    with pytest.raises(FormatError) as caught, TorchFile(path) as file:
        as_ours(file.value)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def rewritten(path: Path, change: Any, compress: int = zipfile.ZIP_STORED, extra: Any = ()) -> Path:
    """A copy of a torch file whose members went through `change(name, bytes)`; None drops one."""
    out = path.with_name("changed.pt")
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(out, "w", compress) as new:
        for name in old.namelist():
            data = change(name, old.read(name))
            if data is not None:
                new.writestr(name, data)
        for name, data in extra:
            new.writestr(name, data)
    return out


def saved(tmp_path: Path, value: Any) -> Path:
    torch.save(value, tmp_path / "x.pt")
    return tmp_path / "x.pt"


def in_pickle(old: bytes, new: bytes) -> Any:
    def change(name: str, data: bytes) -> bytes:
        if not name.endswith("data.pkl"):
            return data
        assert data.count(old) == 1, data
        return data.replace(old, new)

    return change


# In the pickle of a vector of 5: storage of 5, then offset 0, shape (5,), stride (1,).
GEOMETRY = b"K\x00K\x05\x85q"


@pytest.mark.parametrize(
    ("geometry", "told"),
    [
        (b"K\x00K\x06\x85q", "which has 5 elements"),
        (b"K\x01K\x05\x85q", "which has 5 elements"),
        (b"K\x00J\x00\xca\x9a\x3b\x85q", "which has 5 elements"),
        (b"K\x00\x8a\x08\x00\x00\x00\x00\x00\x00\x00\x40\x85q", "which has 5 elements"),
        (b"K\x00J\xff\xff\xff\xff\x85q", "no whole number"),
        (b"J\xff\xff\xff\xffK\x05\x85q", "no whole number"),
        (b"K\x00\x88\x85q", "no whole number"),
        (b"K\x00N\x85q", "no whole number"),
        (b"K\x00K\x05K\x01\x86q", "do not fit each other"),
    ],
)
def test_shapes_that_leave_the_storage_are_refused(geometry: bytes, told: str, tmp_path: Path) -> None:
    path = rewritten(saved(tmp_path, torch.arange(5.0)), in_pickle(GEOMETRY, geometry))
    assert told in refusal(path)


def test_a_billion_elements_by_a_stride_of_zero_allocate_nothing(tmp_path: Path) -> None:
    path = saved(tmp_path, torch.zeros(1).expand(10**9))
    tracemalloc.start()
    told = refusal(path)
    assert tracemalloc.get_traced_memory()[1] < 4 << 20
    tracemalloc.stop()
    assert "shape (1000000000,) by repeating the 1 elements" in told


@pytest.mark.parametrize("count", [b"K\x04", b"K\x06", b"J\x00\xca\x9a\x3b", b"J\xff\xff\xff\xff"])
def test_storages_that_claim_another_size_are_refused(count: bytes, tmp_path: Path) -> None:
    path = rewritten(saved(tmp_path, torch.arange(5.0)), in_pickle(b"K\x05tq", count + b"tq"))
    told = refusal(path)
    assert "claims" in told or "no number" in told


def test_members_that_are_missing_doubled_compressed_or_damaged_are_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, {"a": torch.arange(5.0)})
    assert "`data/0` is missing" in refusal(rewritten(path, lambda n, d: None if n.endswith("data/0") else d))
    assert "no single `data.pkl`" in refusal(rewritten(path, lambda n, d: None if n.endswith(".pkl") else d))
    assert "no single" in refusal(rewritten(path, lambda n, d: d, extra=[("y/data.pkl", b"\x80\x02N.")]))
    with pytest.warns(UserWarning, match="Duplicate name"):
        doubled = rewritten(path, lambda n, d: d, extra=[("x/data/0", b"\0" * 20)])
    assert "two members" in refusal(doubled)
    assert "compressed" in refusal(rewritten(path, lambda n, d: d, zipfile.ZIP_DEFLATED))
    assert "byte order" in refusal(rewritten(path, lambda n, d: b"big" if n.endswith("byteorder") else d))
    raw = bytearray(path.read_bytes())
    raw[raw.index(torch.arange(5.0).numpy().tobytes()) + 6] ^= 1
    path.write_bytes(raw)
    assert "`data/0` is damaged" in refusal(path)


def test_a_zip_bomb_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "bomb.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        archive.writestr("x/data.pkl", b"\x80\x02" + b"N0" * (32 << 20) + b"N.")
    assert path.stat().st_size < 1 << 20
    tracemalloc.start()
    assert "compressed" in refusal(path)
    assert tracemalloc.get_traced_memory()[1] < 4 << 20
    tracemalloc.stop()


@pytest.mark.parametrize("content", [b"", b"P", b"PK", b"PK\x03\x04", b"\x80", b"{}", b"\x80\x02N.", b"\0" * 4096])
def test_files_that_are_no_zip_are_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.pt").write_bytes(content)
    refusal(tmp_path / "x.pt")


def test_the_legacy_format_of_torch_is_refused_as_the_bare_pickle_it_is(tmp_path: Path) -> None:
    torch.save({"a": torch.arange(3)}, tmp_path / "x.pt", _use_new_zipfile_serialization=False)
    assert "bare pickle" in refusal(tmp_path / "x.pt")


def test_modules_and_numpy_objects_are_refused_by_name(tmp_path: Path) -> None:
    assert "'torch.nn.modules.linear.Linear'" in refusal(saved(tmp_path, torch.nn.Linear(2, 2)))
    assert "no plain number" in refusal(saved(tmp_path, np.array([{}], object)))
    assert "'torch.float8_e4m3fn'" in refusal(saved(tmp_path, torch.zeros(2).to(torch.float8_e4m3fn)))


def test_nothing_of_a_large_unused_tensor_is_read(tmp_path: Path) -> None:
    path = saved(tmp_path, {"pixels": torch.zeros(16 << 20, dtype=torch.uint8), "small": torch.arange(3)})
    tracemalloc.start()
    with TorchFile(path) as file:
        assert file.value["small"].numpy().tolist() == [0, 1, 2]
        assert file.value["pixels"].shape == (16 << 20,)
    assert tracemalloc.get_traced_memory()[1] < 4 << 20
    tracemalloc.stop()


def test_a_thousand_damaged_copies_are_the_truth_or_one_sentence(data: Path, tmp_path: Path) -> None:
    source = data / "slime/train_data/3.pt"
    whole, path = source.read_bytes(), tmp_path / "x.pt"
    expected = as_torch(torch.load(source, weights_only=True))
    random_ = random.Random(3)
    refused = []
    for number in range(1000):
        damaged = bytearray(whole)
        if number % 4 == 0:
            del damaged[random_.randrange(len(whole)) :]
        for _ in range(random_.choice([0, 1, 3]) if number % 4 == 0 else random_.choice([1, 1, 2, 8])):
            if damaged:
                damaged[random_.randrange(len(damaged))] ^= 1 << random_.randrange(8)
        path.write_bytes(damaged)
        try:
            with TorchFile(path) as file:
                assert same(as_ours(file.value), expected), number
        except FormatError as error:
            refused.append(str(error))
    assert not any("\n" in told for told in refused)
    assert 600 < len(refused) < 1000


def test_torch_is_never_imported(data: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from rlk_ledger.importers import read\n"
        f"read('slime', Path({str(data / 'slime')!r}), lambda a, b: None)\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_newer_pickle_protocol_and_a_root_folder_of_another_name_read_too(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    torch.save([torch.ones(2)], buffer, pickle_protocol=4)
    (tmp_path / "x.pt").write_bytes(buffer.getvalue())
    with TorchFile(tmp_path / "x.pt") as file:
        assert file.value[0].numpy().tolist() == [1.0, 1.0]
