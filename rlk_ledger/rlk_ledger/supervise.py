"""Supervising a job: its exit code is ours, and what it recorded is shipped before we leave.

Imports the standard library and the recorder's own small modules only: this process stays beside a job for days.

The command runs in our process group, with our standard streams and terminal. Every signal is blocked here and taken
from a queue (`sigwaitinfo`), so that none is lost between two steps and none interrupts one; the command starts with
the mask and the dispositions it would have had without us. As process 1 of a container we reap what is left to us.
The shipper is a session of its own and nobody's child: it goes on when we are killed.
"""

import contextlib
import errno
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from rlk_ledger import spawn
from rlk_ledger_schemas.errors import FormatError, SpoolError
from rlk_ledger_schemas.frame import SpoolHeader, decode_header
from rlk_ledger_sdk.presence import held
from rlk_ledger_sdk.process import is_alive, same_kernel
from rlk_ledger_sdk.status import lock_is_free

TOKEN = "RLK_SUPERVISOR"
"""Set for the command: tells its processes from those of another job that shares the spool directory."""
NOT_FOUND, NOT_EXECUTABLE = 127, 126
_FORWARDED = tuple(
    getattr(signal, name) for name in ("SIGHUP", "SIGINT", "SIGQUIT", "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGWINCH")
)
_ENDING = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM)
_TICK_S = 0.2
_LOOK_EVERY_S = 1.0
_LONGEST_BACKOFF_S = 60.0
_QUIET_S = 2.0
_HEADER_BYTES = 1 << 16


class Ended(NamedTuple):
    """How the command ended, and how the wait for its spool did.

    code: what a shell would report (128 + n for signal n). started: there was a command to wait for. drained: nothing
    of the job is left to ship. cut: a signal ended the wait. alive: process ids of the job's writers that still run.
    """

    code: int
    started: bool = True
    drained: bool = False
    cut: bool = False
    alive: tuple[int, ...] = ()


class Supervisor:
    """Runs one command and waits for its spool. Owned by the main thread, which alone changes it."""

    def __init__(self, spool: Path, grace_s: float, say: Callable[[str], None], ship: bool = True) -> None:
        self.spool = spool
        self.grace_s = grace_s
        self.token = secrets.token_hex(8)
        self.earlier = {folder.name for folder in _folders(spool)}
        self._say = say
        self._ship = ship
        self._pid = 0
        self._code: int | None = None
        self._endings = 0  # signals that ask to end, seen so far
        self._look_at = 0.0
        self._start_at = 0.0
        self._backoff_s = 1.0

    def run(self, command: Sequence[str]) -> Ended:
        """Runs `command` to its end and ships what it left, for at most `grace_s` seconds more."""
        with _blocked() as (waited, before):
            try:
                self._pid = _start(command, before, {**os.environ, TOKEN: self.token})
            except OSError as error:
                self._say(_cannot_start(command[0], error))
                code = NOT_FOUND if error.errno in (errno.ENOENT, errno.ENOTDIR) else NOT_EXECUTABLE
                return Ended(code, started=False)
            while self._code is None:
                self._take(waited, _LOOK_EVERY_S)
                self._keep_shipping()
            return self._drain(waited, self._code)

    # -- while the command runs --------------------------------------------------------------------------------------

    def _take(self, waited: set[signal.Signals], timeout: float) -> bool:
        """Waits for one signal and deals with it; whether it asked to end."""
        info = signal.sigtimedwait(waited, timeout)
        if info is None:
            return False
        if info.si_signo == signal.SIGCHLD:
            self._reap()
            return False
        ends = info.si_signo in _ENDING
        self._endings += ends
        from_terminal = info.si_code > 0  # the kernel sent it to the whole foreground group, the command included
        if self._code is None and not from_terminal and info.si_pid != self._pid:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self._pid, info.si_signo)
        return ends

    def _reap(self) -> None:
        """Takes every child that ended: the command, and as process 1 whatever was left to us."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid == self._pid:
                    code = os.waitstatus_to_exitcode(status)
                    self._code = code if code >= 0 else 128 - code

    def _keep_shipping(self) -> None:
        """Starts a shipper where there is something to ship and none serves the spool."""
        now = time.monotonic()
        if not self._ship or now < self._look_at:
            return
        self._look_at = now + _LOOK_EVERY_S
        if next(_spool_files(self.spool), None) is None:
            return
        if not lock_is_free(self.spool):
            self._backoff_s = 1.0
        elif now >= self._start_at:
            self._start_at = now + self._backoff_s
            self._backoff_s = min(2 * self._backoff_s, _LONGEST_BACKOFF_S)
            try:
                spawn.start(self.spool)
            except (SpoolError, OSError) as error:
                self._say(f"no shipper could be started ({error}); what is recorded stays in {self.spool}.")

    # -- after it ----------------------------------------------------------------------------------------------------

    def _drain(self, waited: set[signal.Signals], code: int) -> Ended:
        began = time.monotonic()
        told = not self._ship
        while True:
            alive, waiting = self._left()
            if not waiting or not self._ship:
                return Ended(code, drained=not waiting, alive=alive)
            spent = time.monotonic() - began
            if spent >= self.grace_s:
                return Ended(code, alive=alive)
            if not told and spent >= _QUIET_S:
                told = True
                self._say(f"waiting up to {self.grace_s:g} s for the ledger to take what is left in {self.spool}.")
            self._keep_shipping()
            if self._take(waited, min(_TICK_S, self.grace_s - spent)):
                if self._endings > 1:
                    return Ended(code, cut=True, alive=self._left()[0])
                self._say("shipping what is left; once more leaves it in the spool.")
                told = True

    def _left(self) -> tuple[tuple[int, ...], bool]:
        """(writers of this job that still run, whether something of the spool waits to be shipped)."""
        alive: list[int] = []
        waiting = False
        for path in _newest_files(self.spool):
            header = None if path.parent.name in self.earlier else _header(path)
            if header is None:
                continue  # an earlier job's, or whose it is cannot be told
            lives = is_alive(header)
            if lives is True and not self._ours(header.pid):
                continue  # another job's, it ships on
            if lives is None and header.locked and same_kernel(header):
                lives = held(path.parent)
            if lives:
                alive.append(header.pid)
            waiting = True
        return tuple(alive), waiting

    def _ours(self, pid: int) -> bool:
        """Whether process `pid` descends from the command, whatever became of its parents; True if it hides that."""
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            return True
        return f"{TOKEN}={self.token}".encode() in environment.split(b"\0")


@contextlib.contextmanager
def _blocked() -> Iterator[tuple[set[signal.Signals], set[int]]]:
    """Blocks what we wait for: yields it, and the mask before. What was ignored (nohup) stays ignored."""
    waited = {number for number in _FORWARDED if signal.getsignal(number) != signal.SIG_IGN} | {signal.SIGCHLD}
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # where it is ignored, no child leaves an exit code
    before = signal.pthread_sigmask(signal.SIG_BLOCK, waited)
    try:
        yield waited, {int(number) for number in before}
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start(command: Sequence[str], mask: set[int], environment: dict[str, str]) -> int:
    """The process id of `command`, started with `mask` and without the two signals Python itself ignores."""
    ours = [n for n in (signal.SIGPIPE, signal.SIGXFSZ) if signal.getsignal(n) == signal.SIG_IGN]
    return os.posix_spawnp(command[0], list(command), environment, setsigmask=sorted(mask), setsigdef=ours)


def _cannot_start(name: str, error: OSError) -> str:
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return f"{name}: no such command; give the program after `--`, as a path or a name on PATH."
    if error.errno == errno.ENOEXEC:
        return f"{name} cannot be run: it is no program and has no #! line; name its interpreter before it."
    return f"{name} cannot be run: {error.strerror}."


def _spool_files(spool: Path) -> Iterator[Path]:
    """Every spool file of every writer."""
    for folder in _folders(spool):
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            yield from (Path(e.path) for e in entries if e.name.endswith(".spool") and e.name[:-6].isdecimal())


def _newest_files(spool: Path) -> list[Path]:
    """The newest spool file of each writer that has one."""
    newest: dict[Path, Path] = {}
    for path in _spool_files(spool):
        before = newest.get(path.parent)
        if before is None or int(path.stem) > int(before.stem):
            newest[path.parent] = path
    return list(newest.values())


def _folders(spool: Path) -> list[Path]:
    try:
        with os.scandir(spool) as entries:
            return [Path(entry.path) for entry in entries if len(entry.name) == 32]
    except OSError:
        return []


def _header(path: Path) -> SpoolHeader | None:
    try:
        with path.open("rb") as file:
            return decode_header(file.read(_HEADER_BYTES))[0]
    except (OSError, FormatError):
        return None


def say(text: str) -> None:
    """One line on stderr; nowhere where that is closed: the job's exit code matters more."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(f"rlk-ledger run: {text}\n")
        sys.stderr.flush()
