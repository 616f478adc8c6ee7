"""From the spool to the bucket: keeping a shipper alive, asking it to hurry, waiting for a level."""

import logging
import time
from pathlib import Path

from rlk_ledger_schemas.errors import FlushTimeout, UsageError
from rlk_ledger_sdk.config import Config
from rlk_ledger_sdk.hooks import installed
from rlk_ledger_sdk.status import Status, lock_is_free, read_status, request_checkpoint, request_flush

LEVELS = ("spooled", "synced", "committed", "checkpointed")
LONGEST_BACKOFF_S = 60.0
_log = logging.getLogger("rlk_ledger")


class Durability:
    """One writer's view of its shipper. Touches the spool directory only, never the network."""

    def __init__(self, config: Config, directory: Path) -> None:
        self._config = config
        self._directory = directory
        self._backoff_s = 1.0
        self._start_at = 0.0
        self._warned = False
        self._told = False

    def ensure_shipper(self) -> bool:
        """Starts the shipper when nobody holds its lock (with backoff); returns whether one can be expected."""
        hooks = installed()
        if not lock_is_free(self._config.spool):
            self._backoff_s = 1.0
            return True
        if self._config.shipper != "process" or hooks is None:
            return False
        now = time.monotonic()
        if now < self._start_at:
            return True
        self._start_at = now + self._backoff_s
        self._backoff_s = min(self._backoff_s * 2, LONGEST_BACKOFF_S)
        try:
            hooks.start_shipper(self._config)
        except Exception as error:
            if not self._warned:
                self._warned = True
                _log.warning("the shipper did not start (%s); events stay in %s", error, self._config.spool)
            return False
        return True

    def wait(self, level: str, seq: int, timeout: float) -> dict[str, int]:
        """Waits until `seq` has reached `level`; returns the watermark per level (the last sequence number, or -1).

        Raises FlushTimeout, which says what is outstanding and why, and UsageError for an unknown level.
        """
        if level not in LEVELS:
            raise UsageError(f"flush: level {level!r} is unknown; use one of {', '.join(LEVELS)}.")
        if level == "spooled" or seq < 0:
            return self._marks(seq, read_status(self._directory) if seq >= 0 else Status())
        deadline = time.monotonic() + timeout
        expected = self.ask(seq, checkpoint=level == "checkpointed")
        pause = 0.002
        while True:
            status = read_status(self._directory)
            self._pass_on(status)
            marks = self._marks(seq, status)
            if marks[level] >= seq:
                return marks
            if not expected or time.monotonic() >= deadline:
                raise FlushTimeout(self._outstanding(level, seq, marks[level], timeout, status, expected))
            time.sleep(min(pause, max(deadline - time.monotonic(), 0.0)))
            pause = min(pause * 1.5, 0.05)
            expected = self.ensure_shipper()

    def ask(self, seq: int, checkpoint: bool = False) -> bool:
        """Ships inline, or asks the shipper to ship up to `seq` now; returns whether waiting can help."""
        hooks = installed()
        if checkpoint:
            request_checkpoint(self._directory, seq)
        if self._config.shipper == "inline" and hooks is not None:
            try:
                hooks.ship_inline(self._config)
            except Exception as error:
                raise FlushTimeout(f"flush: shipping inline failed: {error}") from error
            return False
        request_flush(self._directory, seq)
        return self.ensure_shipper()

    def leave(self, seq: int, timeout: float) -> str | None:
        """Asks for the rest up to `seq` on the way out, waiting at most `timeout` seconds; what went wrong, if any."""
        if self._config.shipper == "off":
            return None
        try:
            if timeout > 0 or self._config.shipper == "inline":
                self.wait("committed", seq, timeout)
            else:
                self.ask(seq)
        except FlushTimeout as error:
            return str(error)
        except Exception as error:
            return f"close() could not wait for the shipper: {error}"
        return None

    def _pass_on(self, status: Status) -> None:
        """Says once what the shipper found wrong with the store although it ships."""
        if status.warning and not self._told:
            self._told = True
            _log.warning("%s", status.warning)

    @staticmethod
    def _marks(seq: int, status: Status) -> dict[str, int]:
        synced = max(status.synced, status.committed)
        return {
            "spooled": seq,
            "synced": synced,
            "committed": status.committed,
            "checkpointed": min(status.checkpointed, status.committed),
        }

    def _outstanding(self, level: str, seq: int, mark: int, timeout: float, status: Status, expected: bool) -> str:
        what = f"flush: {seq - mark} events of writer {self._directory.name} are not {level}"
        if expected:
            why = f" after {timeout:g} s"
        else:
            why = "; nothing ships the spool"
        said = status.error or (status.checkpoint_error if level == "checkpointed" else None)
        error = f"; the shipper says: {said}" if said else ""
        if status.committed >= seq:
            run_id = self._config.run_id
            return f"{what}{why}{error}. They are committed; `rlk-ledger checkpoint {run_id}` covers them."
        spool = self._config.spool
        return f"{what}{why}{error}. They are safe in the spool; `rlk-ledger recover {spool}` ships them later."
