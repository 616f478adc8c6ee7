"""An outage, then SIGKILL: what was lost for want of room is stated to the last event, wherever the kill struck.

A forked child records with a budget of two small files and nobody who ships: it stores, loses, gets room again, loses
again and closes, and is killed at its n-th traced line. Shared memory says how many record() calls returned and which
of them had been stored. Then the ledger must hold every stored event and gap events that cover exactly the others.
RLK_TEST_STRIDE=1 visits every line, which takes some minutes.
"""

import contextlib
import json
import mmap
import os
import signal
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlk_ledger.shipper import Shipper
from rlk_ledger.verify import verify
from rlk_ledger_schemas.findings import Exit
from rlk_ledger_sdk import api, budget, spool
from rlk_ledger_sdk.loss_page import NAME, read_losses
from rlk_ledger_sdk.recorder import Recorder
from rlk_ledger_sdk.spool import SpoolWriter
from rlk_ledger_sdk.testing import read_spool, unaccounted

RUN = "outage"
TRACED = ("recorder.py", "spool.py", "gaps.py", "loss_page.py", "budget.py")
_HEAD = struct.Struct("<QQQ")  # calls begun, calls lost, calls stored; the stored numbers follow
Step = Callable[["Account"], None]


class Account:
    """What record() said, in memory that outlives the child."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 1 << 16)
        self.begun = self.lost = 0
        self.stored: list[int] = []

    def record(self, values: int = 200) -> int | None:
        """Records one event of `values` numbers; returns its number, None when it was lost."""
        self.begun += 1
        _HEAD.pack_into(self._memory, 0, self.begun, self.lost, len(self.stored))
        seq = api.record("logprobs", sample_id="s", source="rollout", contract_id="c", values=[-1.0] * values).seq
        if seq is None:
            self.lost += 1
        else:
            struct.pack_into("<Q", self._memory, _HEAD.size + 8 * len(self.stored), seq)
            self.stored.append(seq)
        _HEAD.pack_into(self._memory, 0, self.begun, self.lost, len(self.stored))
        return seq

    def load(self) -> "Account":
        """What the child had noted when it ended."""
        self.begun, self.lost, stored = _HEAD.unpack_from(self._memory)
        self.stored = list(struct.unpack_from(f"<{stored}Q", self._memory, _HEAD.size))
        return self


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts back what `start` sets for the test's own process."""
    for name in ("FIRST_FILE", "LARGEST_FILE", "RESERVE"):
        monkeypatch.setattr(spool, name, getattr(spool, name))
    monkeypatch.setattr(budget, "RETRY_S", budget.RETRY_S)


def start(where: Path, method: str) -> Recorder:
    spool.FIRST_FILE, spool.LARGEST_FILE, spool.RESERVE, budget.RETRY_S = 8192, 8192, 2048, 0.0
    api.close(timeout=0)
    recorder = api.init(
        str(where / "ledger"), run_id=RUN, spool=where / "spool", shipper="off", on_error="raise", block_ms=0
    )
    assert isinstance(recorder, Recorder)
    recorder._spool._budget._limit = 16384
    recorder._spool._method = method  # type: ignore[assignment]
    return recorder


def commit(recorder: Recorder) -> None:
    """Plays the shipper's part in making room: says that all is committed."""
    seq = recorder._spool.at[1]
    (recorder.directory / "status.json").write_text(json.dumps({"synced": seq, "committed": seq}))


def outage(account: Account) -> None:
    """Stores until there is no room, loses five events, gets room, stores, loses again, closes."""
    recorder = api.current()
    assert isinstance(recorder, Recorder)
    while account.record() is not None:
        pass
    for _ in range(4):
        account.record()
    commit(recorder)
    account.record()
    account.record()
    (recorder.directory / "status.json").unlink()
    for _ in range(6):
        account.record(900)
    with contextlib.suppress(ValueError):
        api.record("logprobs", sample_id=7)
    account.record(900)
    api.close(timeout=0)


def traced(step: Step, account: Account, kill_at: int) -> int:
    """Runs `step`, killing the process at its `kill_at`-th traced line; returns how many lines there were."""
    lines = 0

    def trace(frame: Any, event: str, arg: Any) -> Any:
        nonlocal lines
        if Path(frame.f_code.co_filename).name not in TRACED:
            return None
        if event == "line":
            lines += 1
            if lines == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    sys.settrace(trace)
    try:
        step(account)
    finally:
        sys.settrace(None)
    return lines


def killed(where: Path, kill_at: int, method: str, prepare: Callable[[], None] = lambda: None) -> tuple[Account, int]:
    """One child killed at a line (-1: never): what it noted, and the lines traced when it came to its end."""
    account, count = Account(), mmap.mmap(-1, 8)
    child = os.fork()
    if child == 0:
        code = 3
        try:
            prepare()
            start(where, method)
            struct.pack_into("<Q", count, 0, traced(outage, account, kill_at))
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or status == 0, f"line {kill_at}: status {status}"
    return account.load(), struct.unpack("<Q", count)[0]


def complaints(where: Path, account: Account) -> list[str]:
    """What the spool left by a kill does not say exactly."""
    (directory,) = (where / "spool").glob("*/")
    events = read_spool(directory).events
    wrong = []
    if missing := unaccounted(events):
        wrong.append(f"numbers {missing} are missing or doubled")
    if lost := set(account.stored) - {e.seq for e in events if e.type == "logprobs"}:
        wrong.append(f"acknowledged and lost: {sorted(lost)}")
    dropped = [e for e in events if e.type == "gap" and e.fields["kind"] != "rejected"]
    stated = sum(e.fields["last"] - e.fields["first"] + 1 for e in dropped)
    stated -= sum("rejected" in e.fields["reason"] for e in dropped)  # one refusal may be counted with the losses
    inflight = account.begun - account.lost - len(account.stored)
    if not account.lost <= stated <= account.lost + inflight + 1:  # + 1: writer.closed itself may find no room
        wrong.append(f"{stated} losses are stated, {account.lost} record() calls said so, {inflight} were under way")
    return wrong


@pytest.mark.parametrize("method", ["mmap", "pwrite"])
def test_killed_at_every_line_of_an_outage_the_losses_are_stated_to_the_last_one(tmp_path: Path, method: str) -> None:
    whole, total = killed(tmp_path / "count", -1, method)
    assert whole.lost >= 8
    assert complaints(tmp_path / "count", whole) == []
    first = next(n for n in range(0, total, 20) if killed(tmp_path / f"seek-{n}", n + 1, method)[0].lost)
    stride = int(os.environ.get("RLK_TEST_STRIDE", "29"))
    for kill_at in range(max(1, first - 100), total, stride):
        where = tmp_path / str(kill_at)
        account, _ = killed(where, kill_at, method)
        assert complaints(where, account) == [], f"killed at line {kill_at} of {total}"


def test_the_check_notices_losses_that_are_stated_only_now_and_then(tmp_path: Path) -> None:
    """The guard of the test above, broken on purpose: nothing is kept between two gap events."""

    def forgetful() -> None:
        SpoolWriter.keep = lambda self, payload: None  # type: ignore[method-assign]

    _, total = killed(tmp_path / "count", -1, "mmap", forgetful)
    found = []
    for kill_at in range(total // 3, total, total // 40):
        where = tmp_path / str(kill_at)
        found += complaints(where, killed(where, kill_at, "mmap", forgetful)[0])
    assert any("losses are stated" in text for text in found)


@pytest.mark.parametrize("part", [0.45, 0.6, 0.75, 0.9, 0.97])
def test_the_ledger_says_so_too_and_two_shippers_say_it_once(tmp_path: Path, part: float) -> None:
    """The gap that a dead writer owed is an event like any other: shipped once, the folder gone, verify exact."""
    _, total = killed(tmp_path / "count", -1, "mmap")
    account, _ = killed(tmp_path / "x", int(total * part), "mmap")
    where = tmp_path / "x"
    image = read_spool(next((where / "spool").glob("*/")))
    stated = sum(e.fields["last"] - e.fields["first"] + 1 for e in image.events if e.type == "gap")
    assert stated >= account.lost > 0
    for _ in range(2):
        shipper = Shipper(where / "spool")
        shipper.cycle(flush=True)
        shipper.close()
    assert list((where / "spool").glob("*/")) == []
    result = verify(str(where / "ledger"), deep=True)
    assert result.exit_code == Exit.GAP
    assert {f.kind for f in result.findings} <= {"seqs.dropped", "writer.killed", "bytes.lost", "rank.missing"}
    dropped = [(f.first, f.last) for f in result.findings if f.kind == "seqs.dropped"]
    assert sum(last - first + 1 for first, last in dropped if first is not None and last is not None) == stated


def test_a_gap_that_is_kept_and_the_one_in_the_file_are_the_same_bytes(tmp_path: Path) -> None:
    """A copy of the spool made during an outage can be shipped beside the original: a duplicate, never a fork."""
    recorder = start(tmp_path, "mmap")
    account = Account()
    while account.record() is not None:
        pass
    account.record()
    account.record()
    number = recorder._spool.at[1]
    kept = read_losses(recorder.directory, recorder.writer_id, number - 1)
    assert kept is not None
    commit(recorder)
    assert account.record() == number + 1, "the gap takes its number before any other event"
    api.close(timeout=0)
    assert any(kept in path.read_bytes() for path in recorder.directory.glob("*.spool"))
    assert read_losses(recorder.directory, recorder.writer_id, -1) is None, "nothing is owed any more"


def test_a_page_damaged_at_any_byte_is_no_gap_and_no_error(tmp_path: Path) -> None:
    recorder = start(tmp_path, "mmap")
    account = Account()
    while account.record() is not None:
        pass
    account.record()
    account.record()
    page = recorder.directory / NAME
    whole = page.read_bytes()
    last = recorder._spool.at[1] - 1
    kept = read_losses(recorder.directory, recorder.writer_id, last)
    assert kept is not None
    at = whole.index(kept)
    for byte in range(at - 8, at + len(kept)):
        page.write_bytes(whole[:byte] + bytes([whole[byte] ^ 1]) + whole[byte + 1 :])
        assert read_losses(recorder.directory, recorder.writer_id, last) in (None, kept)
    for size in range(0, at + len(kept), 97):
        page.write_bytes(whole[:size])
        read_losses(recorder.directory, recorder.writer_id, last)
    api.close(timeout=0)
