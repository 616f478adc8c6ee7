"""Noticing a fork for the price of one memory read.

`os.getpid()` is a system call a record; a page marked MADV_WIPEONFORK reads as zero in every forked child, also when
the fork came from C code that runs no Python hook. Where the kernel refuses the advice, the pid is compared.
"""

import mmap
import os
import sys
from collections.abc import Callable
from typing import Protocol

_WIPE_ON_FORK = 18


class Mark(Protocol):
    """`mark[0]` is true in the process that made it and false in its forked children."""

    def __getitem__(self, index: int, /) -> int: ...


class _PidMark:
    def __init__(self) -> None:
        self._pid = os.getpid()

    def __getitem__(self, index: int, /) -> int:
        return os.getpid() == self._pid


def new_mark() -> Mark:
    """A mark of the calling process."""
    try:
        page = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        page.madvise(_WIPE_ON_FORK)
    except (OSError, ValueError):
        return _PidMark()
    page[0] = 1
    return page


def on_worker_exit(callback: Callable[[], None]) -> None:
    """Runs `callback` when this process ends as a forked multiprocessing worker.

    Such a worker leaves by os._exit, past every atexit hook; a spawned one does not, and needs nothing here.
    """
    process = sys.modules.get("multiprocessing.process")
    if process is None or process.parent_process() is None:
        return
    from multiprocessing import get_start_method
    from multiprocessing.util import Finalize

    if get_start_method(allow_none=True) != "spawn":
        Finalize(None, callback, exitpriority=-100)  # below 0: after the worker joined children of its own


NO_PROCESS: Mark = b"\0"
"""The mark of a recorder that has been closed: no process may use it."""
