"""When a shipper makes checkpoints of a run: every few minutes where there is news, when a writer waits, at the end.

Many shippers serve one run and one checkpoint covers them all, so whoever finds a young one leaves the next to later.
What a writer is told is covered was seen in a checkpoint's marks.
"""

import os
import random
import threading
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from rlk_ledger import signing
from rlk_ledger.anchors import anchor
from rlk_ledger.checkpoints import latest, make
from rlk_ledger.store import Store
from rlk_ledger_schemas.checkpoints import Checkpoint
from rlk_ledger_schemas.errors import RlkError

DEFAULT_PERIOD_S = 300.0
_RETRY_S = 1.0
_LONGEST_RETRY_S = 60.0


class _Wanted(NamedTuple):
    """The receipts that have to be covered, as the last n of each chain, and what of each writer they hold."""

    marks: dict[str, int]
    committed: dict[str, int]

    def covered_by(self, checkpoint: Checkpoint | None) -> bool:
        """Whether the checkpoint's marks reach them all."""
        marks = checkpoint.info.marks if checkpoint is not None else {}
        return all(marks.get(shipper, -1) >= n for shipper, n in self.marks.items())


class Checkpointer:
    """The checkpoints of one run, as one shipper sees them.

    `note` and `adopt` are called by the thread that ships, `round` by one thread at a time, the rest by the thread
    that scans; the lock guards what they share.
    """

    def __init__(
        self,
        run_id: str,
        period_s: float,
        wall_s: Callable[[], float] = time.time,
        mono_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.run_id = run_id
        self.period_s = period_s
        self.error: str | None = None
        self._wall_s = wall_s
        self._mono_s = mono_s
        self._lock = threading.Lock()
        self._wanted = _Wanted({}, {})
        self._covered: dict[str, int] = {}  # of each writer the last number known to be covered
        self._done: dict[str, int] = {}  # the marks of `_wanted` that are covered
        self._newest: Checkpoint | None = None
        self._next_at = mono_s() + period_s * random.uniform(0.5, 1.0)
        self._retry_at = 0.0
        self._vain = 0  # rounds in a row that were to cover what we have and did not

    def adopt(self, marks: Mapping[str, int], committed: Mapping[str, int]) -> None:
        """What other chains hold of the run; `committed` is the last committed number of each writer."""
        with self._lock:
            for shipper, n in marks.items():
                self._wanted.marks[shipper] = max(n, self._wanted.marks.get(shipper, -1))
            self._wanted.committed.update(committed)

    def note(self, shipper: str, n: int, committed: Mapping[str, int]) -> None:
        """A receipt of ours is in the bucket."""
        self.adopt({shipper: n}, committed)

    def news(self) -> bool:
        """Whether there is something that no known checkpoint covers."""
        with self._lock:
            return any(self._done.get(shipper, -1) < n for shipper, n in self._wanted.marks.items())

    def covered_up_to(self, writer_id: str) -> int:
        """The last number of a writer known to be covered, with all committed before it; -1 before the first."""
        with self._lock:
            return self._covered.get(writer_id, -1)

    def due(self, asked: bool) -> bool:
        """Whether to make a round now: a writer asked, or it is time and there is news."""
        now = self._mono_s()
        if now < self._retry_at or not self.news():
            return False
        return asked or (self.period_s > 0 and now >= self._next_at)

    def round(self, store: Store, now: bool) -> bool:
        """Looks for a checkpoint that covers what we have, and makes one: always when `now`, else when none is young.

        Whether it is covered; what went wrong is in `error`. A round in vain is tried again with growing pauses, also
        while a writer waits: a receipt that is gone or damaged must not become a poll of the bucket.
        """
        try:
            self._round(store, now)
            self.error = None
        except RlkError as error:
            self.error = str(error).rstrip(".")
        except Exception as error:  # a defect here must not end the process that ships
            self.error = f"internal error in a checkpoint of run {self.run_id!r}: {type(error).__name__}: {error}"
        at, covered = self._mono_s(), not self.news()
        self._next_at = at + self.period_s * random.uniform(0.75, 1.25)
        self._vain = self._vain + 1 if self.error or (now and not covered) else 0
        pause = min(_LONGEST_RETRY_S, _RETRY_S * 2 ** min(self._vain - 1, 10)) * random.uniform(1.0, 2.0)
        self._retry_at = at + pause if self._vain else 0.0
        return covered

    def _round(self, store: Store, now: bool) -> None:
        with self._lock:
            wanted = _Wanted(dict(self._wanted.marks), dict(self._wanted.committed))
        newest = self._newest = latest(store, self.run_id, self._newest)
        if not wanted.covered_by(newest) and (now or not self._young(newest)):
            try:
                newest = make(store, self.run_id, signing.load_signer(), newest) or newest
            finally:  # what is damaged elsewhere is said; what is ours may be covered all the same
                newest = self._newest = latest(store, self.run_id, newest)
                self._note_covered(wanted, newest)
            self._anchor(store)
        else:
            self._note_covered(wanted, newest)

    def _young(self, newest: Checkpoint | None) -> bool:
        """Whether somebody made one within the period. A clock that is off costs a checkpoint more, never one less."""
        return newest is not None and 0 <= self._wall_s() - newest.info.wall_us / 1e6 < self.period_s * 0.75

    def _note_covered(self, wanted: _Wanted, newest: Checkpoint | None) -> None:
        if not wanted.covered_by(newest):
            return
        with self._lock:
            self._done.update(wanted.marks)
            self._covered.update(wanted.committed)

    def _anchor(self, store: Store) -> None:
        """Copies the newest checkpoint to RLK_ANCHOR, where that is set."""
        url = os.environ.get("RLK_ANCHOR")
        if url:
            anchor(store, self.run_id, url)


def period() -> float:
    """RLK_CHECKPOINT_S: seconds between checkpoints, 300 by default, 0 for none; init() refuses what is no number."""
    try:
        return max(0.0, float(os.environ.get("RLK_CHECKPOINT_S") or DEFAULT_PERIOD_S))
    except ValueError:
        return DEFAULT_PERIOD_S
