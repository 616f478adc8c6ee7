"""Payload, leaf, frame and header: round trips, every cut, and the definitions written out a second time."""

import hashlib
import struct

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rlk_ledger_schemas import codec, frame
from rlk_ledger_schemas.arrays import ITEMSIZE, Array
from rlk_ledger_schemas.errors import FormatError

WRITER = "00112233445566778899aabbccddeeff"
HEADER = frame.SpoolHeader(
    writer_id=WRITER, run_id="r", ledger_url="file:///x", file_number=3, first_seq=17, pid=1, process_start="5:6",
    host="h", boot_id="b",
)  # fmt: skip


@st.composite
def arrays(draw: st.DrawFn) -> dict[str, Array]:
    out = {}
    for name in draw(st.lists(st.text(min_size=1, max_size=8), unique=True, max_size=4)):
        dtype = draw(st.sampled_from(sorted(ITEMSIZE)))
        out[name] = Array(dtype, draw(st.binary(max_size=5)) * ITEMSIZE[dtype])
    return out


@given(st.binary(max_size=200), arrays())
def test_payload_round_trips(envelope: bytes, items: dict[str, Array]) -> None:
    assert codec.decode_payload(codec.encode_payload(envelope, items)) == (envelope, items)


@given(st.binary(max_size=60), arrays(), st.data())
def test_a_cut_or_longer_payload_is_refused(envelope: bytes, items: dict[str, Array], data: st.DataObject) -> None:
    payload = codec.encode_payload(envelope, items)
    cut = data.draw(st.integers(0, len(payload) - 1))
    with pytest.raises(FormatError):
        codec.decode_payload(payload[:cut])
    with pytest.raises(FormatError):
        codec.decode_payload(payload + b"\0")


@given(st.binary(max_size=60), arrays())
def test_leaf_is_what_the_format_says(envelope: bytes, items: dict[str, Array]) -> None:
    text = b"\0" + struct.pack("<I", len(envelope)) + envelope
    for name in sorted(items):
        n, d, raw = name.encode(), items[name].dtype.encode(), items[name].data
        text += bytes([len(n)]) + n + bytes([len(d)]) + d
        text += struct.pack("<Q", len(raw) // ITEMSIZE[items[name].dtype]) + hashlib.sha256(raw).digest()
    assert codec.leaf_hash(envelope, items) == hashlib.sha256(text).digest()


def build(payloads: list[bytes], tail: int = 64) -> tuple[bytearray, list[int]]:
    head = frame.encode_header(HEADER)
    seed = frame.crc_seed(WRITER, HEADER.file_number)
    data, ends = bytearray(head), []
    for payload in payloads:
        offset = len(data)
        data += struct.pack("<II", len(payload), frame.frame_crc(seed, offset, payload)) + payload
        data += bytes(-len(data) % 8)
        ends.append(offset + frame.FRAME_HEAD + len(payload))
    return data + bytes(tail), ends


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=5))
def test_frames_round_trip(payloads: list[bytes]) -> None:
    data, _ = build(payloads)
    header, start = frame.decode_header(data)
    assert header == HEADER
    assert [p for _, p in frame.read_frames(data, start, frame.crc_seed(WRITER, 3))] == payloads


def test_cut_at_every_byte_gives_the_longest_valid_prefix() -> None:
    payloads = [b"first", b"second payload", b"x" * 30]
    data, ends = build(payloads)
    start = frame.decode_header(data)[1]
    seed = frame.crc_seed(WRITER, 3)
    for cut in range(start, len(data) + 1):
        whole = sum(end <= cut for end in ends)
        for image in (bytes(data[:cut]), bytes(data[:cut]).ljust(len(data), b"\0")):
            assert [p for _, p in frame.read_frames(image, start, seed)] == payloads[:whole]


def test_any_flipped_bit_of_a_frame_ends_the_prefix_there() -> None:
    payloads = [b"first", b"second payload"]
    data, ends = build(payloads, tail=0)
    start = frame.decode_header(data)[1]
    seed = frame.crc_seed(WRITER, 3)
    for byte in range(start, ends[1]):
        for bit in range(8):
            image = bytearray(data)
            image[byte] ^= 1 << bit
            got = [p for _, p in frame.read_frames(bytes(image), start, seed)]
            padding = ends[0] <= byte < start + frame.frame_size(5)
            assert got == (payloads if padding else payloads[: 0 if byte < ends[0] else 1])


def test_a_frame_of_another_file_or_writer_or_place_is_not_valid() -> None:
    data, _ = build([b"payload"])
    start = frame.decode_header(data)[1]
    assert frame.read_frame(data, start, frame.crc_seed(WRITER, 4)) is None
    assert frame.read_frame(data, start, frame.crc_seed("ff" * 16, 3)) is None
    moved = bytes(data[:start]) + bytes(8) + bytes(data[start:])
    assert frame.read_frame(moved, start + 8, frame.crc_seed(WRITER, 3)) is None


@pytest.mark.parametrize("at", range(0, 64, 3))
def test_a_damaged_header_is_refused(at: int) -> None:
    data = bytearray(frame.encode_header(HEADER))
    data[at] ^= 0x20
    if at in (10, 11):  # reserved
        return
    with pytest.raises(FormatError):
        frame.decode_header(data)


def test_what_recovery_leaves_is_counted_to_the_last_written_byte() -> None:
    assert frame.unwritten(b"abc\0\0x\0\0\0", 3) == 3
    assert frame.unwritten(b"abc\0\0\0", 3) == 0


@given(st.binary(max_size=60))
@example(b"\x82\xa4type\xa1x\xa1a" + b"\x91" * 100_000 + b"\xc0")
@example(b"\x82\xa4type\xa1x\x81\xa1a\xa1b\xc0")
@example(b"\x81\xa4type\x01")
@example(b"\xc0")
def test_any_bytes_are_an_envelope_or_a_format_error(data: bytes) -> None:
    try:
        fields = codec.decode_envelope(data)
    except FormatError:
        return
    assert isinstance(fields["type"], str)


def test_a_header_nested_too_deep_is_a_format_error() -> None:
    body = b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    size = -(-(20 + len(body)) // 64) * 64
    head = struct.pack("<8sHHII", frame.MAGIC, frame.FORMAT, 0, size, frame.extend(0, body))
    with pytest.raises(FormatError, match="does not decode"):
        frame.decode_header((head + body).ljust(size, b"\0"))
