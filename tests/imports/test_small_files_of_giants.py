"""A small file cannot make much of itself: by naming one part many times, by strides, by sizes nothing has."""

import struct
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rlk_ledger.importers import read
from rlk_ledger.importers.extent import check_extent
from rlk_ledger.importers.torch_files import TorchFile
from rlk_ledger_schemas.errors import FormatError

MIB = 1 << 20


def text(word: str) -> bytes:
    return b"X" + struct.pack("<I", len(word)) + word.encode()


def whole(n: int) -> bytes:
    return b"K" + bytes([n]) if n < 256 else b"\x8a\x10" + n.to_bytes(16, "little")


def tensor(shape: tuple[int, ...], strides: tuple[int, ...], elements: int = 1, kind: str = "Long") -> bytes:
    """The opcodes of a tensor over storage 0."""
    storage = b"(" + text("storage") + b"ctorch\n" + kind.encode() + b"Storage\n" + text("0") + text("cpu")
    geometry = b"".join(b"(" + b"".join(map(whole, sizes)) + b"t" for sizes in (shape, strides))
    tail = b"\x89ccollections\nOrderedDict\n)RtR"
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + whole(elements) + b"tQK\x00" + geometry + tail


def sample(**fields: bytes) -> bytes:
    given = {"tokens": b"](K\x01K\x02e", "response_length": b"K\x01", **fields}
    return b"}(" + b"".join(text(name) + value for name, value in given.items()) + b"u"


def dump(path: Path, *samples: bytes, before: bytes = b"", storage: bytes = b"\0" * 8) -> Path:
    """A rollout dump of these samples; `before` makes a value they can name (memo 5) and is dropped."""
    body = before + b"}(" + text("rollout_id") + b"K\x00" + text("samples") + b"](" + b"".join(samples) + b"eu"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02" + body + b".")
        archive.writestr("archive/data/0", storage)
    return path


def refused(path: Path) -> str:
    """The sentence a dump is refused with, which must come before memory is spent."""
    tracemalloc.start()
    try:
        with pytest.raises(FormatError) as caught:
            read("slime", path, lambda done, total: None)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 64 * MIB + 20 * path.stat().st_size, f"{peak / MIB:.0f} MiB were spent on {path.stat().st_size} bytes"
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("strides", [(2**80,), (2**61,), (2**63,)])
def test_a_stride_that_no_element_needs_does_not_matter(strides: tuple[int, ...], tmp_path: Path) -> None:
    path = dump(tmp_path / "d.pt", sample(rollout_log_probs=tensor((1,), strides, 2, "Float")))
    batch = read("slime", path, lambda done, total: None)
    assert batch.samples[0].scores[0].values.tolist() == [0.0]


@pytest.mark.parametrize("shape", [(2**62, 0, 4), (2**80, 0, 1), (0, 2**63, 1), (1, 2**100, 0)])
def test_sizes_beside_a_zero_are_bounded_too(shape: tuple[int, ...], tmp_path: Path) -> None:
    path = dump(tmp_path / "d.pt", sample(rollout_routed_experts=tensor(shape, (1, 1, 1))))
    assert "by repeating" in refused(path)


def test_many_tensors_that_each_repeat_one_element_are_refused(tmp_path: Path) -> None:
    big = tensor((MIB,), (0,))
    assert "repeats its parts" in refused(dump(tmp_path / "d.pt", *[sample(tokens=big)] * 100))


def test_many_samples_that_name_one_long_list_are_refused(tmp_path: Path) -> None:
    long = b"](" + b"K\x01" * 200_000 + b"eq\x050"
    assert "repeats its parts" in refused(dump(tmp_path / "d.pt", *[sample(tokens=b"h\x05")] * 500, before=long))


def test_lists_of_lists_of_lists_are_counted_by_every_mention(tmp_path: Path) -> None:
    laughs = b"](" + b"K\x01" * 100 + b"eq\x00"
    for level in range(1, 12):
        laughs += b"0](" + b"h" + bytes([level - 1]) + (b"h" + bytes([level - 1])) * 9 + b"eq" + bytes([level])
    assert "repeats its parts" in refused(dump(tmp_path / "d.pt", sample(prompt=b"h\x0b"), before=laughs + b"0"))


@pytest.mark.parametrize("call", [b"ctorch\nSize\n", b"c__builtin__\nset\n"])
def test_calls_that_copy_a_named_list_are_bounded(call: bytes, tmp_path: Path) -> None:
    long = b"](" + b"K\x01" * 200_000 + b"eq\x050"
    copies = b"](" + (call + b"(h\x05tR") * 1000 + b"e"
    assert "more containers than its size" in refused(dump(tmp_path / "d.pt", sample(prompt=copies), before=long))


def test_a_dump_that_holds_itself_is_refused(tmp_path: Path) -> None:
    assert "holds itself" in refused(dump(tmp_path / "d.pt", sample(prompt=b"]q\x06h\x06a")))


@pytest.mark.parametrize(
    "make",
    [
        lambda: [torch.zeros(1).expand(1000) for _ in range(50)],
        lambda: list(torch.arange(50_000).reshape(50, 1000)),
        lambda: [torch.Size([1, 2])] * 2000,
        lambda: [set(range(5000)), {str(i): {i} for i in range(500)}],
        lambda: [[[1] * 4000] * 16, torch.zeros(0, 5), torch.zeros(3, 0, 70_000)],
        lambda: [torch.tensor(i) for i in range(2000)] + [torch.zeros(2, 2, 2, 2)] * 100,
    ],
)
def test_what_a_real_dump_shares_is_read(make: Callable[[], Any], tmp_path: Path) -> None:
    torch.save(make(), tmp_path / "d.pt")
    with TorchFile(tmp_path / "d.pt") as file:
        assert file.value


def test_the_extent_counts_every_mention_once_per_mention() -> None:
    shared = [1] * (1 << 20)
    check_extent([shared] * 15, 0)
    with pytest.raises(FormatError, match="repeats its parts"):
        check_extent([shared] * 17, 0)
    check_extent([shared] * 17, 1 << 20)
