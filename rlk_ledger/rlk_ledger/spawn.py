"""Starting the shipper process. Runs inside the job, so it imports nothing but the standard library."""

import contextlib
import os
import sys
from pathlib import Path

from rlk_ledger_schemas.errors import SpoolError

LOG = "shipper.log"
FRUGAL = {
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": f"{1 << 20}",
    "MALLOC_TRIM_THRESHOLD_": f"{16 << 20}",
}
"""What makes a shipper give memory back that it no longer uses: Arrow's pools and the arenas of threads keep it.

Thresholds of 128 KiB save no more and cost a fifth of its processor time in page faults.
"""
_MALLOPT = ((-8, 1), (-3, 1 << 20), (-1, 16 << 20))  # the last three, as glibc's mallopt() takes them


def start(spool: Path) -> None:
    """Starts a detached shipper process for `spool`; returns at once, raises SpoolError when it cannot be started.

    The process is exec'd, has its own session, inherits no GPU, and is not a child of this process: a job that waits
    for all its children never waits for it.
    """
    spool.mkdir(mode=0o700, parents=True, exist_ok=True)
    command = [sys.executable, "-m", "rlk_ledger.shipper", "--spool", str(spool), "--until-idle"]
    environment = {**FRUGAL, **os.environ, "CUDA_VISIBLE_DEVICES": "", "RLK_DISABLE": "1", "PYTHONPATH": _import_path()}
    log = _log(spool)
    actions = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_DUP2, log, 1),
        (os.POSIX_SPAWN_DUP2, log, 2),
    ]
    try:
        shell = ["/bin/sh", "-c", '"$@" &', "sh", *command]
        # No signal blocked: the caller may hold back its own, and a shipper that cannot be told to stop never leaves.
        pid = os.posix_spawn(shell[0], shell, environment, file_actions=actions, setsid=True, setsigmask=[])
        os.waitpid(pid, 0)
    except FileNotFoundError:
        os.posix_spawn(command[0], command, environment, file_actions=actions, setsid=True, setsigmask=[])
    except OSError as error:
        raise SpoolError(f"cannot start a shipper for {spool}: {error.strerror}.") from error
    finally:
        os.close(log)


def stay_small() -> None:
    """FRUGAL for this process; to be called before pyarrow is imported."""
    import ctypes

    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", FRUGAL["ARROW_DEFAULT_MEMORY_POOL"])
    with contextlib.suppress(OSError, AttributeError):  # no glibc
        mallopt = ctypes.CDLL(None).mallopt
        for option, value in _MALLOPT:
            mallopt(option, value)


def _log(spool: Path) -> int:
    """The shipper's log, or nowhere: a disk too full for a log is one more reason to ship."""
    try:
        return os.open(spool / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    except OSError:
        return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)


def _import_path() -> str:
    """PYTHONPATH with which the shipper finds the same packages this process imported."""
    import rlk_ledger
    import rlk_ledger_schemas
    import rlk_ledger_sdk

    roots = [str(Path(p.__path__[0]).parent) for p in (rlk_ledger, rlk_ledger_schemas, rlk_ledger_sdk)]
    return os.pathsep.join([*dict.fromkeys(roots), *filter(None, [os.environ.get("PYTHONPATH")])])
