"""What stands in a spool directory, counted by reading only: nothing is shipped, moved, locked or asked of a bucket.

The same code reads the frames as when they are shipped, so that what is announced is what will happen.
"""

from pathlib import Path

import msgspec

from rlk_ledger import layout
from rlk_ledger.spools import DAMAGED, SUFFIX, WriterSpool
from rlk_ledger_schemas.errors import SpoolError
from rlk_ledger_sdk.status import read_status

_ROOM = 32 << 20


class Left(msgspec.Struct, frozen=True, kw_only=True):
    """One writer's directory.

    `events` are whole in its files; `waiting` of them come after `committed`, the last number its shipper called
    committed. `state` is closed, dead, alive, unknown (this machine cannot look at its process) or unreadable (no file
    has a header). `lost_bytes` are no event; of a writer that may still write they are not counted. `size` is what its
    files take on disk, `damaged` how many files were set aside. `error` is the shipper's last, `problem` the reader's.
    """

    writer_id: str
    run_id: str
    ledger: str
    state: str
    pid: int
    events: int
    waiting: int
    committed: int
    lost_bytes: int
    size: int
    damaged: int
    error: str | None = None
    problem: str | None = None


def look(spool: Path, assume_dead: bool = False) -> list[Left]:
    """Every writer that left files in `spool` (a spool directory, or one writer's in it); raises SpoolError."""
    if layout.is_shipper(spool.name):
        folders = [spool]
    else:
        try:
            folders = sorted(path for path in spool.iterdir() if layout.is_shipper(path.name))
        except OSError as error:
            raise SpoolError(f"cannot read the spool directory {spool}: {error.strerror}.") from error
    found = (examine(folder, assume_dead) for folder in folders)
    return [left for left in found if left.size or left.damaged or left.problem]


def examine(folder: Path, assume_dead: bool = False, after: int | None = None) -> Left:
    """One writer's directory; `waiting` counts events after `after` (default: what its status calls committed)."""
    writer = WriterSpool(folder)
    writer.assume_dead = assume_dead
    status = read_status(folder)
    mark = status.committed if after is None else after
    waiting = 0
    try:
        while True:
            writer.look()
            records, used = writer.poll(_ROOM)
            waiting += sum(record.seq > mark for record in records)
            if not used:
                break
        headless = writer.headless_bytes()
    finally:
        writer.close()
    header = writer.header
    return Left(
        writer_id=writer.writer_id,
        run_id=header.run_id if header else "",
        ledger=header.ledger_url if header else "",
        state=state_of(writer),
        pid=header.pid if header else 0,
        events=writer.events_read,
        waiting=waiting,
        committed=status.committed,
        lost_bytes=writer.lost_bytes if header else headless,
        size=size_on_disk(folder),
        damaged=len(list(folder.glob(f"*{SUFFIX}{DAMAGED}"))),
        error=status.error,
        problem=writer.problem,
    )


def state_of(writer: WriterSpool) -> str:
    """closed, dead, alive, unknown or unreadable."""
    if writer.header is None:
        return "unreadable"
    return "closed" if writer.closed else {True: "alive", None: "unknown", False: "dead"}[writer.alive]


def size_on_disk(folder: Path) -> int:
    """Bytes on disk of a writer's spool files."""
    total = 0
    for path in folder.glob(f"*{SUFFIX}"):
        try:
            total += path.stat().st_blocks * 512
        except OSError:
            continue  # shipped meanwhile
    return total
