"""A dead writer's last file, cut, zeroed or filled with garbage at every byte: `recover` ships the longest valid
prefix of every file and states the bytes that were left, exactly."""

import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rlk_ledger.spools import WriterSpool
from rlk_ledger_schemas.frame import crc_seed, decode_header, frame_size, read_frames
from rlk_ledger_sdk import api, recorder, spool
from rlk_ledger_sdk.filesystem import Method
from rlk_ledger_sdk.recorder import Recorder

Damage = Callable[[bytes, int, int], bytes]


class Spool:
    """The directory of a writer that left several files and no closing event, and its last file's frames."""

    def __init__(self, directory: Path, method: Method) -> None:
        self.directory = directory
        self.method = method
        self.files = sorted(directory.glob("*.spool"))
        self.data = self.files[-1].read_bytes()
        header, self.start = decode_header(self.data)
        frames = list(read_frames(self.data, self.start, crc_seed(header.writer_id, header.file_number)))
        self.frames = [(at, at + 8 + len(payload)) for at, payload in frames]
        self.end = self.frames[-1][0] + frame_size(len(frames[-1][1]))
        self.before = header.first_seq
        """Events in the files before the last one."""

    def expected(self, damaged: bytes) -> tuple[int, int]:
        """(events, bytes lost) that a reader has to find, told from the undamaged frames and not by reading."""
        if damaged[: self.start] != self.data[: self.start]:
            return self.before, len(damaged.rstrip(b"\0"))
        whole = 0
        for begin, end in self.frames:
            if damaged[begin:end] != self.data[begin:end]:
                break
            whole += 1
        used = self.start
        if whole:
            begin, end = self.frames[whole - 1]
            used = begin + frame_size(end - begin - 8)
        return self.before + whole, len(damaged[used:].rstrip(b"\0"))


def read(directory: Path) -> tuple[list[int], int, bool]:
    """(sequence numbers, bytes lost, damaged) as the shipper reads a dead writer's directory."""
    writer = WriterSpool(directory)
    try:
        writer.look()
        records, _ = writer.poll(1 << 30)
        assert writer.ended
        return [record.seq for record in records], writer.lost_bytes, any(file.damaged for file in writer.files)
    finally:
        writer.close()


@pytest.fixture(scope="module", params=["mmap", "pwrite"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Spool]:
    where = tmp_path_factory.mktemp("tails")
    child = os.fork()  # the writer has to be dead, and to have said nothing
    if child == 0:
        code = 1
        try:
            leave_a_spool(where, request.param)
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    (directory,) = (path for path in (where / "spool").iterdir() if path.is_dir())
    yield Spool(directory, request.param)
    shutil.rmtree(where)


def leave_a_spool(where: Path, method: Method) -> None:
    """Two full files and one with four events, written in this process's name."""
    recorder.method_for = lambda kind: method  # type: ignore[attr-defined]
    spool.FIRST_FILE = spool.LARGEST_FILE = 8192
    spool.RESERVE = 2048
    opened = api.init(str(where / "ledger"), run_id="r", spool=where / "spool", shipper="off", on_error="raise")
    assert isinstance(opened, Recorder)
    assert (opened._spool._map is not None) == (method == "mmap")
    while opened._spool.number < 2:
        api.record("knob.applied", path="p", requested=1, status="applied", evidence="e" * 300)
    for n in range(3):
        api.record("logprobs", sample_id=f"s{n}", source="rollout", contract_id="c", values=[-0.5] * (n * 3 + 1))


def cut(data: bytes, at: int, end: int) -> bytes:
    return data[:at]


def zeros(data: bytes, at: int, end: int) -> bytes:
    return data[:at].ljust(end, b"\0")


def garbage(data: bytes, at: int, end: int) -> bytes:
    return data[:at] + random.Random(at).randbytes(end - at + 64)


@pytest.mark.parametrize("damage", [cut, zeros, garbage], ids=lambda damage: damage.__name__)
def test_the_longest_valid_prefix_and_the_exact_bytes_left_at_every_byte(made: Spool, damage: Damage) -> None:
    """Both kinds of file hold the same bytes, so those written with pwrite are damaged at every third byte only."""
    last, stride = made.files[-1], 1 if made.method == "mmap" else 3
    try:
        for at in range(0, made.end + 1, stride):
            damaged = damage(made.data, at, made.end)
            last.write_bytes(damaged)
            seqs, lost, _ = read(made.directory)
            events, left = made.expected(damaged)
            assert (seqs, lost) == (list(range(events)), left), f"byte {at} of {made.end}"
    finally:
        last.write_bytes(made.data)


def test_the_undamaged_spool_is_read_whole(made: Spool) -> None:
    assert read(made.directory) == (list(range(made.before + len(made.frames))), 0, False)
    assert len(made.files) == 3


def test_a_file_in_the_middle_that_is_cut_costs_its_tail_and_no_other_file(made: Spool) -> None:
    """What follows the tear is shipped, and the numbers between are missing, not renumbered."""
    middle = made.files[1]
    data = middle.read_bytes()
    header, start = decode_header(data)
    frames = list(read_frames(data, start, crc_seed(header.writer_id, header.file_number)))
    assert len(frames) > 3
    at = frames[2][0] + 20
    try:
        middle.write_bytes(data[:at])
        seqs, lost, _ = read(made.directory)
    finally:
        middle.write_bytes(data)
    gone = set(range(header.first_seq + 2, made.before))
    assert gone
    assert seqs == [n for n in range(made.before + len(made.frames)) if n not in gone]
    assert lost == 20


def test_recover_and_verify_state_the_same_bytes(made: Spool, tmp_path: Path) -> None:
    """The statement a person reads: for a few cuts end to end, in the receipt, the event, `recover` and `verify`."""
    import rlk_ledger
    from rlk_ledger.recover import recover
    from rlk_ledger.verify import verify

    for number, at in enumerate((made.start + 3, made.frames[1][0] + 11, made.end - 9)):
        folder = tmp_path / str(number)
        shutil.copytree(made.directory, folder / "spool" / made.directory.name)
        damaged = garbage(made.data, at, made.end)
        (folder / "spool" / made.directory.name / made.files[-1].name).write_bytes(damaged)
        events, left = made.expected(damaged)
        url = str(folder / "ledger")
        (saved,) = recover(folder / "spool", url=url)
        assert (saved.state, saved.events, saved.shipped, saved.lost_bytes) == ("dead", events, events, left)
        run = rlk_ledger.open(url).run("r")
        stated = [(w.lost_bytes, w.dead) for r in run.receipts for w in r.writers if w.writer_id == saved.writer_id]
        assert stated == [(left, True)]
        (lost,) = (e for _, _, e, _ in rlk_ledger.open(url).read_events("r", {"writer.lost"}))
        assert (lost["bytes_left"], lost["last_seq"]) == (left, events - 1)
        result = verify(url, deep=True)
        assert int(result.exit_code) == 3
        assert str(left) in str([f for f in result.findings if f.kind == "bytes.lost"])
