"""The files a writer and the shipper exchange inside the spool: status, flush request, shipper lock."""

import contextlib
import fcntl
import os
from pathlib import Path

import msgspec

STATUS = "status.json"
LOCK = "shipper.lock"
FLUSH_REQUEST = "flush"
"""The file in which a writer asks that everything up to the number in it be shipped now."""
CHECKPOINT_REQUEST = "checkpoint"
"""The file in which a writer asks that a checkpoint cover it up to the number in it."""


class Status(msgspec.Struct, frozen=True):
    """What the shipper says about one writer: the last sequence number synced, committed and covered, and its errors.

    `checkpoint_error` is what stands in the way of checkpoints and signatures while shipping goes on; `warning` is
    what the user has to hear although shipping goes on.
    """

    synced: int = -1
    committed: int = -1
    shipped_bytes: int = 0
    error: str | None = None
    shipper: str | None = None
    wall_us: int = 0
    checkpointed: int = -1
    checkpoint_error: str | None = None
    warning: str | None = None


def read_status(directory: Path) -> Status:
    """`status.json` of one writer's directory; the default Status where there is none yet or it does not parse."""
    try:
        return msgspec.json.decode((directory / STATUS).read_bytes(), type=Status)
    except (OSError, msgspec.MsgspecError):
        return Status()


def request_flush(directory: Path, seq: int) -> None:
    """Asks the shipper to ship everything up to `seq` now; atomic, the last request wins, a full disk loses it."""
    _request(directory, FLUSH_REQUEST, seq)


def request_checkpoint(directory: Path, seq: int) -> None:
    """Asks the shipper for a checkpoint that covers everything up to `seq`; like `request_flush`."""
    _request(directory, CHECKPOINT_REQUEST, seq)


def read_request(directory: Path, name: str) -> int:
    """The number in a request file (FLUSH_REQUEST, CHECKPOINT_REQUEST), -1 where nothing is asked for."""
    try:
        return int((directory / name).read_text())
    except (OSError, ValueError):
        return -1


def _request(directory: Path, name: str, seq: int) -> None:
    fresh = directory / f".{name}.tmp"
    with contextlib.suppress(OSError):
        fresh.write_text(str(seq))
        fresh.replace(directory / name)


def lock_is_free(spool: Path) -> bool:
    """Whether no shipper holds this spool directory's lock at this instant."""
    try:
        fd = os.open(spool / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    else:
        return True
    finally:
        os.close(fd)
