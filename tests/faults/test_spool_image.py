"""A spool image damaged at any byte yields its longest valid prefix, counted exactly, with the bytes left stated."""

import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlk_ledger_schemas.errors import FormatError
from rlk_ledger_schemas.frame import crc_seed, decode_header, frame_size, read_frames
from rlk_ledger_sdk import api
from rlk_ledger_sdk.recorder import Recorder
from rlk_ledger_sdk.testing import read_spool

EVENTS = 8


class Image:
    """The used bytes of one spool file, and where each of its frames starts and its content ends."""

    def __init__(self, data: bytes) -> None:
        header, self.start = decode_header(data)
        self.seed = crc_seed(header.writer_id, header.file_number)
        frames = list(read_frames(data, self.start, self.seed))
        self.contents = [(at, at + 8 + len(payload)) for at, payload in frames]
        self.end = frames[-1][0] + frame_size(len(frames[-1][1]))
        self.data = data[: self.end]

    def untouched(self, damaged: bytes) -> int:
        """How many leading frames are byte for byte as they were written."""
        for count, (start, end) in enumerate(self.contents):
            if damaged[start:end] != self.data[start:end]:
                return count
        return len(self.contents)


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Image]:
    where = tmp_path_factory.mktemp("image")
    recorder = api.init(str(where / "ledger"), run_id="r", spool=where / "spool", shipper="off", on_error="raise")
    assert isinstance(recorder, Recorder)
    for n in range(EVENTS):
        api.record("logprobs", sample_id=f"s{n}", source="rollout", contract_id="c", values=[-0.5] * (n * 3 + 1))
    directory = recorder.directory
    api.close()
    yield Image((directory / "00000000.spool").read_bytes())
    shutil.rmtree(where)


def recovered(tmp_path: Path, data: bytes) -> tuple[int, int]:
    """(events read, bytes left) of a directory that holds one spool file with these bytes."""
    (tmp_path / "00000000.spool").write_bytes(data)
    found = read_spool(tmp_path)
    assert [event.seq for event in found.events] == list(range(len(found.events)))
    return len(found.events), sum(found.bytes_left)


def test_the_whole_image_is_read_and_nothing_is_left(image: Image, tmp_path: Path) -> None:
    assert recovered(tmp_path, image.data) == (EVENTS + 3, 0)


def test_cut_at_every_byte(image: Image, tmp_path: Path) -> None:
    for cut in range(image.start, image.end):
        whole = sum(end <= cut for _, end in image.contents)
        events, left = recovered(tmp_path, image.data[:cut])
        assert events == whole, f"cut at byte {cut}"
        used = min(image.contents[whole][0], cut) if whole < len(image.contents) else cut
        assert left == len(image.data[used:cut].rstrip(b"\0"))


def test_a_cut_header_is_an_error_and_not_an_empty_file(image: Image, tmp_path: Path) -> None:
    for cut in range(image.start):
        with pytest.raises(FormatError):
            recovered(tmp_path, image.data[:cut])


def test_zero_filled_from_every_byte(image: Image, tmp_path: Path) -> None:
    for at in range(image.start, image.end):
        damaged = image.data[:at].ljust(image.end, b"\0")
        assert recovered(tmp_path, damaged)[0] == image.untouched(damaged), f"zeros from byte {at}"


def test_a_garbage_tail_from_every_byte(image: Image, tmp_path: Path) -> None:
    noise = random.Random(11)
    for at in range(image.start, image.end):
        damaged = image.data[:at] + noise.randbytes(image.end - at + 64)
        assert recovered(tmp_path, damaged)[0] == image.untouched(damaged), f"garbage from byte {at}"


def test_a_flipped_bit_ends_the_prefix_at_its_frame(image: Image, tmp_path: Path) -> None:
    for at in range(image.start, image.end):
        damaged = bytearray(image.data)
        damaged[at] ^= 1 << (at % 8)
        assert recovered(tmp_path, bytes(damaged))[0] == image.untouched(bytes(damaged)), f"bit flipped in byte {at}"


def test_a_frame_moved_to_another_offset_is_not_accepted(image: Image, tmp_path: Path) -> None:
    """The checksum covers the offset: a frame copied elsewhere, as a misdirected write would, ends the prefix."""
    (first, _), (second, end) = image.contents[3], image.contents[4]
    moved = image.data[:first] + image.data[second:end]
    assert recovered(tmp_path, moved)[0] == 3


def test_a_checksum_that_ignores_the_offset_would_accept_the_moved_frame(
    image: Image, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The guard of the test above, broken on purpose."""
    from rlk_ledger_schemas import frame

    def weak(seed: int, offset: int, payload: bytes) -> int:
        return int(frame.extend(0, payload))

    monkeypatch.setattr(frame, "frame_crc", weak)
    data = bytearray(image.data)
    for start, end in image.contents:
        data[start + 4 : start + 8] = weak(0, 0, bytes(data[start + 8 : end])).to_bytes(4, "little")
    (first, _), (second, end) = image.contents[3], image.contents[4]
    (tmp_path / "00000000.spool").write_bytes(bytes(data[:first] + data[second:end]))
    assert len(read_spool(tmp_path).events) == 4
