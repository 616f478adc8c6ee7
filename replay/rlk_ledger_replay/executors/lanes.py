"""Lanes of units, each driven by its own thread against its own worker; results come back to one place."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from rlk_ledger_replay.work import Entry, Model, Outcome, Refused, Unit

TRIES = 2
"""Workers a unit may cost before it is cut in halves, or given up when it is one sample."""


class Lost(Exception):
    """A worker is gone, or took too long. late: it ran past its deadline, and would again."""

    def __init__(self, reason: str, late: bool = False) -> None:
        """reason: one clause for the user."""
        super().__init__(reason)
        self.late = late


class Remote(Protocol):
    """A worker somewhere else."""

    def score(self, unit: Unit) -> Outcome:
        """The values of a unit; raises Lost."""

    def close(self) -> Mapping[Model, bool]:
        """Ends it well: whether the weights of each model it held are unchanged; raises Lost."""

    def kill(self) -> None:
        """Ends it at once, with everything it started."""


Take = Callable[[Unit, Outcome], None]


def deal(entries: Sequence[Entry], lanes: int, most: int) -> list[list[tuple[Entry, ...]]]:
    """The entries dealt to lanes in batches of at most `most`.

    By cost and then by identity, back and forth: lanes are even, and who was there first does not matter.
    """
    order = sorted(entries, key=lambda one: (-one.cost, one.sample))
    hands: list[list[Entry]] = [[] for _ in range(lanes)]
    for place, one in enumerate(order):
        turn, at = divmod(place, lanes)
        hands[at if turn % 2 == 0 else lanes - 1 - at].append(one)
    return [[tuple(hand[first : first + most]) for first in range(0, len(hand), most)] for hand in hands]


@dataclass
class _Event:
    """What a lane says: an outcome, the weights' state at its end, or that it cannot go on."""

    unit: Unit | None = None
    outcome: Outcome | None = None
    unchanged: Mapping[Model, bool] | None = None
    error: BaseException | None = None


def drive(lanes: Sequence[Sequence[Unit]], start: Callable[[int], Remote], take: Take) -> dict[Model, bool]:
    """Runs every lane against workers made by `start`; `take` is called here, in this thread, for each unit.

    Returns whether the weights of each model are unchanged, as every worker that ended well found them.
    """
    told: queue.SimpleQueue[_Event] = queue.SimpleQueue()
    runs = [_Lane(index, units, start, told.put) for index, units in enumerate(lanes) if units]
    threads = [threading.Thread(target=run.run, daemon=True) for run in runs]
    unchanged: dict[Model, bool] = {}
    try:
        for thread in threads:
            thread.start()
        left = len(threads)
        while left:
            event = told.get()
            if event.unit is not None and event.outcome is not None:
                take(event.unit, event.outcome)
            elif event.error is not None:
                raise event.error
            else:
                left -= 1
                for model, same in (event.unchanged or {}).items():
                    unchanged[model] = same and unchanged.get(model, True)
    finally:
        for run in runs:
            run.stop()
        for thread in threads:
            if thread.ident is not None:
                thread.join()
    return unchanged


class _Lane:
    """Owns one worker at a time."""

    def __init__(
        self, index: int, units: Sequence[Unit], start: Callable[[int], Remote], tell: Callable[[_Event], None]
    ) -> None:
        self._index, self._start, self._tell = index, start, tell
        self._pending = deque((unit, TRIES) for unit in units)
        self._remote: Remote | None = None
        self._stopped = False

    def run(self) -> None:
        """Every unit in order, then the worker's end."""
        try:
            while self._pending and not self._stopped:
                self._one(*self._pending.popleft())
            unchanged: Mapping[Model, bool] = {}
            if self._remote is not None and not self._stopped:
                try:
                    unchanged = self._remote.close()
                except Lost:  # every value was already handed over; this worker's last look at the weights is missing
                    self._remote.kill()
            self._tell(_Event(unchanged=unchanged))
        except BaseException as error:
            self._tell(_Event(error=error))

    def stop(self) -> None:
        """Ends the worker; a run in progress ends with it."""
        self._stopped = True
        remote = self._remote
        if remote is not None:
            remote.kill()

    def _one(self, unit: Unit, tries: int) -> None:
        try:
            if self._remote is None:
                self._remote = self._start(self._index)
            outcome = self._remote.score(unit)
        except Lost as lost:
            if self._remote is not None:
                self._remote.kill()
            self._remote = None
            outcome, tries = Refused(str(lost), memory=True), 1 if lost.late else tries
            if tries > 1 and not self._stopped:
                self._pending.appendleft((unit, tries - 1))
                return
        if isinstance(outcome, Refused) and outcome.memory and len(unit.entries) > 1 and not self._stopped:
            half = len(unit.entries) // 2
            for part in (unit.entries[half:], unit.entries[:half]):
                self._pending.appendleft((replace(unit, entries=part), 1))
            return
        self._tell(_Event(unit=unit, outcome=outcome))
