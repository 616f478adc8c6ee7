"""The spool budget: how many bytes one writer may leave unshipped on this disk."""

import time
from pathlib import Path

import msgspec

from rlk_ledger_sdk.status import read_status, request_flush

RETRY_S = 0.05
"""How often an exhausted budget is looked at again."""
BLOCK_EVERY_S = 1.0
"""How often a writer may wait for room: a job that is out of room slows down by block_ms a second, never more."""


class _File(msgspec.Struct):
    path: Path
    size: int
    last_seq: int


class Budget:
    """Counts this writer's spool files that are still unshipped. Owned by the recorder's critical section."""

    def __init__(self, directory: Path, limit: int, block_ms: float) -> None:
        self._directory = directory
        self._limit = limit
        self._block_s = block_ms / 1000.0
        self._files: list[_File] = []
        self._refusal: str | None = None
        self._retry_at = 0.0
        self._block_at = 0.0

    def finished(self, path: Path, size: int, last_seq: int) -> None:
        """Notes a file that takes no more frames; idempotent."""
        if all(file.path != path for file in self._files):
            self._files.append(_File(path, size, last_seq))

    def unshipped(self) -> int:
        """Bytes of finished files that are still on disk and hold an event not yet committed."""
        committed = read_status(self._directory).committed
        self._files = [f for f in self._files if f.last_seq > committed and _there(f.path)]
        return sum(f.size for f in self._files)

    def fits(self, size: int, last_seq: int) -> bool:
        """Whether a new file of `size` bytes is within the limit; past half of it the shipper is told to hurry."""
        used = self.unshipped()
        if used + size > self._limit // 2:
            request_flush(self._directory, last_seq)
        return used + size <= self._limit

    def wait(self, size: int, last_seq: int) -> bool:
        """Waits up to block_ms for room, at most once a second; returns whether there is room now."""
        now = time.monotonic()
        if now < self._block_at:
            return self.fits(size, last_seq)
        self._block_at = now + BLOCK_EVERY_S
        while not self.fits(size, last_seq):
            if time.monotonic() - now >= self._block_s:
                return False
            time.sleep(0.0005)
        return True

    def refuse(self, reason: str) -> None:
        """Notes that there was no room for another file, so that the next attempts are cheap for a while."""
        self._refusal = reason
        self._retry_at = time.monotonic() + RETRY_S

    def refusal(self) -> str | None:
        """Why there is no room, until it is time to look again."""
        if self._refusal is not None and time.monotonic() >= self._retry_at:
            self._refusal = None
        return self._refusal


def _there(path: Path) -> bool:
    """Whether the file still uses room: also where the disk does not say."""
    try:
        return path.exists()
    except OSError:
        return True
