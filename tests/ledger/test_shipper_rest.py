"""What a shipper does between two cycles: it looks whether anyone waits, and carries nothing that is not due."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from rlk_ledger import service
from rlk_ledger.service import serve
from rlk_ledger.shipper import Shipper
from rlk_ledger_sdk.status import read_status, request_flush


class Looks(threading.Event):
    """A stop event whose waiting takes no time: counts how often it was waited for and stops after `last` times."""

    def __init__(self, last: int, at: dict[int, Callable[[], None]] | None = None) -> None:
        super().__init__()
        self.count, self._last, self._at = 0, last, at or {}

    def wait(self, timeout: float | None = None) -> bool:
        self.count += 1
        self._at.get(self.count, lambda: None)()
        if self.count >= self._last:
            self.set()
        return self.is_set()


@pytest.fixture
def cycles(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """One entry a cycle of any shipper, with whether it was told to ship everything."""
    seen: list[bool] = []
    plain = Shipper.cycle

    def cycle(self: Shipper, flush: bool = False, patient: bool = False) -> bool:
        seen.append(flush)
        return plain(self, flush, patient)

    monkeypatch.setattr(Shipper, "cycle", cycle)
    return seen


def test_an_event_that_is_not_due_is_looked_after_and_not_polled(new_writer, spool: Path, cycles: list[bool]) -> None:
    writer = new_writer()
    writer.many(3)
    looks = Looks(last=10 * service._LOOKS)
    serve(spool, until_idle=False, stop=looks)
    assert looks.count == 10 * service._LOOKS
    assert len(cycles) <= 12  # one after the other for each round of looks, and the last one


def test_a_writer_that_asks_is_heard_at_the_next_look(new_writer, spool: Path, cycles: list[bool]) -> None:
    writer = new_writer()
    writer.many(3)
    before: list[int] = []

    def ask() -> None:
        before.append(len(cycles))
        request_flush(writer.directory, 2)

    third = 2 * service._LOOKS + 3  # in the middle of a round
    looks = Looks(third, {third - 1: ask, third: lambda: before.append(len(cycles))})
    serve(spool, until_idle=False, stop=looks)
    assert before[1] == before[0] + 1
    assert read_status(writer.directory).committed == 2


def test_much_that_waits_is_carried_without_rest(
    new_writer, spool: Path, cycles: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlk_ledger.shipper.SEGMENT_BYTES", 1)  # whatever waits is much
    new_writer().many(3)
    looks = Looks(last=20)
    serve(spool, until_idle=False, stop=looks)
    assert len(cycles) >= 20
