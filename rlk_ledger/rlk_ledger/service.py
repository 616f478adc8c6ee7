"""Running a shipper: election by lock, the process and its loop, and the inline mode of tests and notebooks."""

import contextlib
import fcntl
import os
import random
import resource
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rlk_ledger.shipper import Shipper
from rlk_ledger.spools import WriterSpool
from rlk_ledger.store import Store, open_store
from rlk_ledger_schemas.errors import ConfigError, SpoolError
from rlk_ledger_sdk.status import LOCK

LINGER_S = 5.0
"""How long a shipper that has nothing to do stays, so that the next writer finds it."""
GIVE_UP = 60
"""Failed attempts in a row (about an hour) after which a shipper without live writers leaves the spool to `recover`."""
_LOOK_S = 0.05
"""Pause between two looks at whether a writer waits; a cycle follows every look only while there is much to carry."""
_LOOKS = 10
"""Looks after which a cycle follows although nobody waits."""
_WORKERS = 4
_STOP_S = 5.0
LEAVE_S = 10.0
"""Seconds after SIGTERM after which the process is gone whatever its bucket does: schedulers send SIGKILL after 30."""


@contextlib.contextmanager
def elected(spool: Path, wait_s: float = 1.0) -> Iterator[int | None]:
    """Holds the spool's shipper lock: yields its descriptor, or None when another shipper serves the spool.

    Waits up to `wait_s`, because writers hold the lock for an instant to see whether it is free. Raises SpoolError.
    """
    try:
        spool.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(spool / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise SpoolError(f"cannot use the spool directory {spool}: {error.strerror}.") from error
    try:
        yield fd if _locked(fd, wait_s) else None
    finally:
        os.close(fd)


def _locked(fd: int, wait_s: float) -> bool:
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.02 * random.uniform(0.5, 1.5))
        else:
            return True


def serve(
    spool: Path,
    until_idle: bool,
    stop: threading.Event | None = None,
    linger_s: float = LINGER_S,
    tell: Callable[[str], None] = lambda error: None,
    grace_s: float = 0.0,
    halt: threading.Event | None = None,
) -> int:
    """Ships until told to stop, or until idle for `linger_s` seconds; 0, or 1 when it gave up on a bucket.

    Returns 0 at once when another shipper serves the spool. `tell` hears of each different error once. After `stop`
    what there is goes out, and for up to `grace_s` seconds also what living writers still record; `halt` ends that.
    """
    stop = stop or threading.Event()
    with elected(spool) as lock:
        if lock is None:
            return 0
        shipper = Shipper(spool, _shared, workers=_WORKERS)
        claim(lock, shipper)
        try:
            code = _loop(shipper, lock, until_idle, stop, linger_s, tell)
            if stop.is_set():
                _finish(shipper, lock, grace_s, halt or threading.Event())
            return code
        finally:
            shipper.close()


def _shared(url: str) -> Store:
    """The store at `url`, refused when what this process puts there dies with it."""
    if url.startswith("memory://"):
        raise ConfigError(f"{url} lives in one process only: record with shipper='inline', or use a directory.")
    return open_store(url)


def _loop(
    shipper: Shipper,
    lock: int,
    until_idle: bool,
    stop: threading.Event,
    linger_s: float,
    tell: Callable[[str], None],
) -> int:
    idle_since = time.monotonic()
    told: set[str] = set()
    while not stop.is_set() and _holds(lock, shipper.spool):
        busy = shipper.cycle(flush=until_idle and not _live(shipper), patient=True)
        for error in {*shipper.errors(), *shipper.checkpoint_errors()} - told:
            told.add(error)
            tell(error)
        if busy or not shipper.idle():
            idle_since = time.monotonic()
        elif until_idle and time.monotonic() - idle_since >= linger_s and not shipper.cover_rest():
            return 0
        if until_idle and shipper.failing_for() >= GIVE_UP and not _live(shipper):
            return 1
        _rest(shipper, stop)
    return 0


def _finish(shipper: Shipper, lock: int, grace_s: float, halt: threading.Event) -> None:
    """Ships what there is; for `grace_s` seconds also what comes yet, after that only what was begun."""
    began = time.monotonic()
    patient = False
    while _holds(lock, shipper.spool) and not halt.is_set():
        shipper.cycle(flush=True, patient=patient)
        shipper.drain(_LOOK_S if patient else _STOP_S)
        patient = True
        spent = time.monotonic() - began
        settled = not shipper.waits() or bool(shipper.errors())
        if shipper.idle() or spent >= max(grace_s, _STOP_S) or (settled and spent >= grace_s):
            break
        halt.wait(_LOOK_S)
    began = time.monotonic()
    while shipper.idle() and shipper.cover_rest() and time.monotonic() - began < _STOP_S and not halt.is_set():
        halt.wait(_LOOK_S)


def _rest(shipper: Shipper, stop: threading.Event) -> None:
    """Waits for the next cycle: one look while much waits to be carried, else all looks or until a writer asks.

    Events that are not due need no cycle: they are safe where they are.
    """
    for _ in range(1 if shipper.pressed() else _LOOKS):
        if stop.wait(_LOOK_S) or shipper.asked():
            return


def _holds(lock: int, spool: Path) -> bool:
    """Whether `lock` still is the spool's lock file: a spool directory that was removed and made anew is another's."""
    try:
        there = (spool / LOCK).stat()
    except OSError:
        return False
    held = os.fstat(lock)
    return (there.st_dev, there.st_ino) == (held.st_dev, held.st_ino)


def _live(shipper: Shipper) -> bool:
    return any(writer.alive is not False and shipper.may_write(writer) for writer in shipper.writers.values())


def main(argv: list[str] | None = None) -> int:
    """The shipper process."""
    import argparse

    parser = argparse.ArgumentParser(prog="python -m rlk_ledger.shipper", description=__doc__)
    parser.add_argument("--spool", type=Path, required=True, help="the spool directory to serve")
    parser.add_argument("--until-idle", action="store_true", help="leave when all is shipped and no writer lives")
    options = parser.parse_args(argv)
    _keep_out_of_the_way()
    sys.modules.setdefault("pandas", None)  # type: ignore[arg-type]  # pyarrow imports it where there is one: 40 MB
    stop = threading.Event()

    def leave(*_: object) -> None:
        """Ends the loop, and the process soon after: a bucket that takes calls and answers none holds up a thread."""
        if not stop.is_set():
            stop.set()
            end = threading.Timer(LEAVE_S, os._exit, (0,))  # at any instruction: a kill loses nothing
            end.daemon = True
            end.start()

    signal.signal(signal.SIGTERM, leave)
    return serve(options.spool, options.until_idle, stop)


def _keep_out_of_the_way() -> None:
    """Lowest priority, any processor: the job's cores are the job's. As many files as allowed: one a living writer."""
    with contextlib.suppress(OSError):
        os.nice(19)
    with contextlib.suppress(OSError, AttributeError):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    with contextlib.suppress(OSError, ValueError):
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


_inline: dict[Path, tuple[int, Shipper]] = {}


def ship_once(
    spool: Path, wait_s: float = 10.0, open_: Callable[[str], Store] = open_store, keep: bool = True
) -> list[str]:
    """Ships, in this process and now, what this process and dead writers left in `spool`; returns what went wrong.

    Waits up to `wait_s` for another process that ships. With `keep` the chain is continued by the next call.
    """
    spool = spool.absolute()
    with elected(spool, wait_s) as lock:
        if lock is None:
            return [f"another shipper serves {spool}"]
        pid, shipper = _inline.get(spool, (0, None))
        if shipper is None or pid != os.getpid():
            shipper = Shipper(spool, open_, only=_mine)
        if keep:
            _inline[spool] = (os.getpid(), shipper)
        else:
            _inline.pop(spool, None)
        if os.pread(lock, 256, 0) != shipper.holder:
            shipper.forget_receipts()
        claim(lock, shipper)
        shipper.cycle(flush=True)
        if not keep:
            shipper.close()
        return shipper.errors()


def claim(lock: int, shipper: Shipper) -> None:
    """Marks the lock file: whoever held it before and finds another mark has to read the receipts again.

    On a full disk no mark can stand there, which is another mark; shipping is what makes room.
    """
    shipper.holder = f"{os.getpid()} {secrets.token_hex(8)}".encode()
    os.ftruncate(lock, 0)
    with contextlib.suppress(OSError):
        os.pwrite(lock, shipper.holder, 0)


def _mine(writer: WriterSpool) -> bool:
    return writer.alive is False or (writer.header is not None and writer.header.pid == os.getpid())
