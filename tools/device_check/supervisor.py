"""Runs the sections within their time in a worker process, and gives every item a row whatever becomes of it."""

from __future__ import annotations

import queue
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from device_check.card import copy_bandwidth
from device_check.report import Row, State
from device_check.work import SECTIONS, Item, items
from device_check.worker import BROKEN, DONE, ROW, SM

ITEM_LIMIT_S = 60.0
_LEAST_ITEM_S = 12.0
_START_S = 3.0
LATE = "no answer within"
_END_S = 5.0


class Worker:
    """One worker process. Not shared between threads; `stop` is called by whoever made it."""

    def __init__(self, command: Sequence[str]) -> None:
        """Start the process; it imports torch while the first item waits."""
        self._process = subprocess.Popen(
            list(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._errors: deque[str] = deque(maxlen=20)
        self._threads = [
            threading.Thread(target=self._read, daemon=True),
            threading.Thread(target=self._read_errors, daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def do(self, item: Item, limit_s: float) -> Iterator[Row | str]:
        """The rows of an item, then a sentence when it did not end well; the worker is of no use after a sentence."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(msgspec.json.encode(item).decode() + "\n")
            self._process.stdin.flush()
        except OSError:
            yield self._ended()
            return
        deadline = time.monotonic() + limit_s
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                yield f"{LATE} {limit_s:.0f} s"
                return
            if line is None:
                yield self._ended()
                return
            if line.startswith(ROW):
                yield msgspec.json.decode(line[len(ROW) :], type=Row)
            elif line.startswith(BROKEN):
                yield line[len(BROKEN) :].strip()
                return
            elif line.strip() == DONE:
                return

    def stop(self) -> None:
        """End the process, by force when it does not end by itself."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._process.kill()
        self._process.wait()
        for thread in self._threads:
            thread.join(_END_S)
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            stream.close()

    def _ended(self) -> str:
        code = self._process.wait()
        last = next((line for line in reversed(self._errors) if line.strip()), "nothing on its standard error")
        return f"the process ended with {code}: {last.strip()}"

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        self._errors.extend(self._process.stderr)


def check(
    device: str,
    size: str,
    names: tuple[str, ...],
    sections: tuple[str, ...],
    budget_s: float,
    tell: Callable[[Row], None],
    item_limit_s: float = ITEM_LIMIT_S,
) -> list[Row]:
    """Run every section that is asked for within `budget_s`; each row is told as it comes.

    A section may run until its own share and all shares before it are used up, an item for what `allotted` says.
    Items there is no time for are rows that say so.
    """
    rows: list[Row] = []
    chosen = [section for section in SECTIONS if not sections or section.name in sections]
    whole = sum(section.share for section in chosen)
    started, share = time.monotonic(), 0.0
    worker: Worker | None = None
    try:
        for section in chosen:
            share += section.share / whole
            deadline = started + share * budget_s
            waiting = items(section, names, "cuda" if device.startswith(SM) else device, size)
            for place, item in enumerate(waiting):
                limit_s = min(item_limit_s, allotted(deadline - time.monotonic(), len(waiting) - place))
                worker = _item(worker, device, _informed(item, rows), limit_s, rows, tell)
    finally:
        if worker is not None:
            worker.stop()
    return rows


def allotted(left_s: float, waiting: int) -> float:
    """Seconds the first of `waiting` items may take of what is left to its section: three fair shares, at least 12 s.

    The last one gets all of it. What is less than the start of a process is nothing.
    """
    share = min(left_s, max(_LEAST_ITEM_S, left_s * 3 / (waiting + 2)))
    return share if share >= _START_S else 0.0


def _item(
    worker: Worker | None, device: str, item: Item, limit_s: float, rows: list[Row], tell: Callable[[Row], None]
) -> Worker | None:
    """Do one item and keep its rows; returns the worker for the next one, or None when a new one is needed."""

    def keep(row: Row) -> None:
        rows.append(row)
        tell(row)

    subject = f"{item.operator} {item.backend}".strip() or item.section
    if limit_s <= 0:
        keep(Row(section=item.section, name=subject, state="not measured", detail="the section's time was used up"))
        return worker
    worker = worker or Worker((sys.executable, str(Path(__file__).parent), "--worker", device))
    for answer in worker.do(item, limit_s):
        if isinstance(answer, Row):
            keep(answer)
            continue
        state: State = "not measured" if answer.startswith(LATE) else "failed"
        keep(Row(section=item.section, name=f"{subject}: the rest of it", state=state, detail=answer))
        worker.stop()
        return None
    return worker


def _informed(item: Item, rows: list[Row]) -> Item:
    """The item with the copy bandwidth that was measured, where one was."""
    measured = [row for row in rows if row.name == "copy bandwidth" and row.state == "measured"]
    return msgspec.structs.replace(item, bandwidth=copy_bandwidth(measured)) if measured else item
