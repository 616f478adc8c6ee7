"""One import into a run at a time: two that looked at the run together would both add what neither saw there."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from rlk_ledger_schemas.errors import SpoolError
from rlk_ledger_schemas.fingerprints import sha256


@contextlib.contextmanager
def alone(folder: Path, url: str, run_id: str) -> Iterator[None]:
    """Waits for this user's other imports into that run from this machine, and keeps them waiting in the block.

    The lock is a file in `folder` (the spool) that the kernel forgets with its process. Imports from two machines are
    not kept apart. Raises SpoolError where the folder cannot be used.
    """
    path = folder / f"import-{sha256(f'{url} {run_id}'.encode()).partition(':')[2][:16]}.lock"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = _locked(path)
    except OSError as error:
        raise SpoolError(
            f"cannot use the spool directory {folder}: {error.strerror}; set RLK_SPOOL to a local directory."
        ) from error
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
        fcntl.flock(fd, fcntl.LOCK_UN)  # a forked child may hold this descriptor too
        os.close(fd)


def _locked(path: Path) -> int:
    """A descriptor that holds the lock at `path`: of the file that is there now, not of one its last holder removed."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            if os.path.samestat(os.fstat(fd), path.stat()):
                return fd
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
