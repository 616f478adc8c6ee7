"""Local worker processes: a fresh interpreter each, never forked, ended with this process.

Frames go over pipes as a length and pickled bytes between processes of the same user and build. A worker whose pipe
closes ends itself, so that a killed replay leaves nobody behind.
"""

from __future__ import annotations

import contextlib
import pickle
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from typing import IO, Any

from rlk_ledger_replay.executors.lanes import Lost
from rlk_ledger_replay.scorers.child import child_environment, end_group, ending
from rlk_ledger_replay.work import Model, Outcome, Unit

LENGTH_BYTES = 8
CLOSE = "close"
TAIL_BYTES = 2000
ENDING_SECONDS = 10.0


class Process:
    """A worker in a process of its own."""

    def __init__(self, threads: int, timeout: float | None) -> None:
        """Starts it. timeout: seconds one unit may take, None for as long as it likes."""
        self._timeout = timeout
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(
            [sys.executable, "-m", "rlk_ledger_replay.executors.serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=child_environment(threads),
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def score(self, unit: Unit) -> Outcome:
        """The values of a unit; raises Lost when the process ends or the deadline passes."""
        found: Outcome = self._ask(unit)
        return found

    def close(self) -> Mapping[Model, bool]:
        """Whether the weights it held are unchanged; it ends. Raises Lost."""
        unchanged: Mapping[Model, bool] = self._ask(CLOSE)
        self.kill()
        return unchanged

    def kill(self) -> None:
        """Ends it at once."""
        end_group(self._process)
        for pipe in (self._process.stdin, self._process.stdout, self._log):
            with contextlib.suppress(OSError, ValueError):
                if pipe is not None:
                    pipe.close()

    def _ask(self, message: object) -> Any:
        deadline = None if self._timeout is None else time.monotonic() + self._timeout
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            write_message(self._process.stdin, message)
            size = int.from_bytes(self._read(LENGTH_BYTES, deadline), "little")
            return pickle.loads(self._read(size, deadline))
        except (OSError, EOFError, ValueError):
            code = self._ended()
            raise Lost(f"its worker is gone: {ending(code) or 'it ended'}{self._tail()}") from None

    def _ended(self) -> int:
        """The exit code of a worker that no longer talks; one that closed its pipe and lives on is ended."""
        try:
            return self._process.wait(ENDING_SECONDS)
        except subprocess.TimeoutExpired:
            end_group(self._process)
            return self._process.wait()

    def _read(self, size: int, deadline: float | None) -> bytes:
        assert self._process.stdout is not None
        pipe, data = self._process.stdout, bytearray()
        with selectors.DefaultSelector() as selector:  # select() knows no descriptor above 1,023
            selector.register(pipe, selectors.EVENT_READ)
            while len(data) < size:
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                if not selector.select(left):
                    raise Lost(f"it was ended after its {self._timeout:g} s; --deadline gives it more", late=True)
                part = pipe.read1(size - len(data))  # type: ignore[attr-defined]
                if not part:
                    raise EOFError
                data += part
        return bytes(data)

    def _tail(self) -> str:
        self._log.seek(0, 2)
        self._log.seek(max(0, self._log.tell() - TAIL_BYTES))
        lines = self._log.read().decode(errors="replace").splitlines()
        kept = [line.strip() for line in lines if line.strip()]
        return f"; its output ends: {' | '.join(kept[-4:])}" if kept else ""


def write_message(pipe: IO[bytes], message: object) -> None:
    """One frame."""
    data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    pipe.write(len(data).to_bytes(LENGTH_BYTES, "little") + data)
    pipe.flush()


def read_message(pipe: IO[bytes]) -> Any:
    """One frame; raises EOFError at the end of the pipe."""
    head = pipe.read(LENGTH_BYTES)
    if len(head) < LENGTH_BYTES:
        raise EOFError
    size = int.from_bytes(head, "little")
    data = pipe.read(size)
    if len(data) < size:
        raise EOFError
    return pickle.loads(data)
