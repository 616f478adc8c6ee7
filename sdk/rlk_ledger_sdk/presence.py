"""A lock that lasts as long as its writer: how a reader in another container, which sees no process of it, tells.

The writer holds an exclusive `flock` on its directory in the spool. The kernel lets go of it when the last descriptor
is closed, which is when the process ends, however it ends. A forked child closes its copy, an exec does.
"""

import contextlib
import fcntl
import os
from pathlib import Path


class Presence:
    """One writer's lock on its own directory. Owned by the recorder's critical section."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._fd = -1

    def hold(self) -> bool:
        """Takes the lock where it is not held yet; False on a file system that has none. The directory exists."""
        if self._fd >= 0 and self._is_the_directory():
            return True
        self.close()
        try:
            self._fd = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.close()
            return False
        return True

    def close(self) -> None:
        """Lets go of this process's descriptor; the lock goes with the last one."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):
                os.close(fd)

    def _is_the_directory(self) -> bool:
        """Whether what is locked is still what stands there: a directory removed and made anew is another."""
        try:
            there, held = self._directory.stat(), os.fstat(self._fd)
        except OSError:
            return False
        return (there.st_dev, there.st_ino) == (held.st_dev, held.st_ino)


def held(directory: Path) -> bool | None:
    """Whether some process holds a writer's directory; None where that cannot be told."""
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    else:
        return False
    finally:
        os.close(fd)
