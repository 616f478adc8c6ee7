"""Recovering a spool after a crash: everything that is whole goes into the ledger, and what is not is said exactly."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec

from rlk_ledger import layout
from rlk_ledger.leftovers import Left, examine, look, size_on_disk, state_of
from rlk_ledger.service import claim, elected
from rlk_ledger.shipper import Shipper
from rlk_ledger.spools import WriterSpool
from rlk_ledger.store import Store, open_store
from rlk_ledger_schemas.errors import SpoolError, StoreError, UsageError

Outcome = Literal["saved", "saved_with_loss", "waiting", "nothing"]
_PAUSE_S = 1.0


class Recovered(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one writer's spool.

    `events` were whole in the spool; `shipped` of them are new in the ledger and `known` were there already, so that
    `events - shipped - known` wait for the bucket. `lost_bytes` were no event. `state` is closed, dead, alive (its
    newest file was left alone), unknown (it ran on a machine that this one cannot look at: the same) or unreadable (no
    file says which run and ledger it belongs to: `run_id` and `ledger` are empty and its files stay where they are).
    `files_left` are the names of the files that stay in its directory.
    """

    writer_id: str
    run_id: str
    ledger: str
    state: str
    events: int
    shipped: int
    known: int
    last_seq: int
    lost_bytes: int
    problem: str | None = None
    files_left: tuple[str, ...] = ()

    @property
    def waiting(self) -> int:
        """Whole events that are not in the ledger yet."""
        return self.events - self.shipped - self.known


class RunTotal(msgspec.Struct, frozen=True, kw_only=True):
    """What was saved of one run: sums over its writers. `sealed`: the run has a seal; None where nobody looked."""

    run_id: str
    ledger: str
    writers: int
    events: int
    shipped: int
    known: int
    waiting: int
    lost_bytes: int
    sealed: bool | None = None


def totals(found: list[Recovered], open_: Callable[[str], Store] = open_store) -> list[RunTotal]:
    """One RunTotal a run and ledger; asks a ledger that took something whether the run is sealed."""
    out = []
    for ledger, run_id in sorted({(r.ledger, r.run_id) for r in found}):
        mine = [r for r in found if (r.ledger, r.run_id) == (ledger, run_id)]
        out.append(
            RunTotal(
                run_id=run_id,
                ledger=ledger,
                writers=len(mine),
                events=sum(r.events for r in mine),
                shipped=sum(r.shipped for r in mine),
                known=sum(r.known for r in mine),
                waiting=sum(r.waiting for r in mine),
                lost_bytes=sum(r.lost_bytes for r in mine),
                sealed=_sealed(ledger, run_id, open_) if any(r.shipped for r in mine) else None,
            )
        )
    return out


def _sealed(ledger: str, run_id: str, open_: Callable[[str], Store]) -> bool | None:
    try:
        return open_(ledger).stat(layout.seal_path(run_id)) is not None
    except StoreError:
        return None


def outcome(found: list[Recovered]) -> Outcome:
    """The whole in a word; `waiting` when a bucket did not take everything, whatever else there is to say."""
    if not found:
        return "nothing"
    if any(r.waiting for r in found):
        return "waiting"
    return "saved_with_loss" if any(r.lost_bytes or r.state == "unreadable" for r in found) else "saved"


def recover(
    spool: Path,
    url: str | None = None,
    assume_dead: bool = False,
    open_: Callable[[str], Store] = open_store,
    wait_s: float = 0.0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Recovered]:
    """Ships every whole event of a spool directory (or of one writer's directory in it), in this process and now.

    `url` sends the events to another ledger than the spool names; `assume_dead` says that the machines the writers ran
    on are gone; a bucket that does not answer is asked again for `wait_s` seconds. `progress` hears of bytes on disk.
    Raises UsageError when `spool` is no spool directory, SpoolError when a shipper serves it.
    """
    one, folder = _place(spool)
    with elected(folder) as lock:
        if lock is None:
            raise SpoolError(f"a shipper serves {folder} and recovers it by itself; look again in a minute.")
        shipper = Shipper(folder, open_, only=lambda writer: one in (None, writer.writer_id), url=url)
        claim(lock, shipper)
        try:
            shipper.find_writers()
            writers = [w for w in shipper.writers.values() if one in (None, w.writer_id)]
            for writer in writers:
                writer.assume_dead = assume_dead
            _ship(shipper, writers, wait_s, progress)
            return [
                _report(shipper, w) if w.header is not None else _unreadable(w)
                for w in writers
                if w.files or w.header or w.problem
            ]
        finally:
            shipper.close()


def preview(spool: Path, assume_dead: bool = False) -> list[Left]:
    """What `recover` would read in `spool`, by reading only; raises as it does, but a shipper may serve the spool."""
    one, folder = _place(spool)
    return look(folder / one if one else folder, assume_dead)


def _place(spool: Path) -> tuple[str | None, Path]:
    """(the writer when `spool` is one writer's directory, the spool directory); raises UsageError."""
    if not spool.is_dir():
        raise UsageError(f"{spool} is not a directory; give the spool directory (RLK_SPOOL) or one writer's in it.")
    one = spool.name if layout.is_shipper(spool.name) else None
    return one, (spool.parent if one else spool).absolute()


def _ship(shipper: Shipper, writers: list[WriterSpool], wait_s: float, progress: Callable[[int, int], None]) -> None:
    """Cycles until nothing moves any more; a ledger that refuses holds up no other."""
    total = sum(size_on_disk(writer.directory) for writer in writers)
    deadline = time.monotonic() + wait_s
    before = None
    while True:
        busy = shipper.cycle(flush=True)
        progress(total - min(total, sum(size_on_disk(writer.directory) for writer in writers)), total)
        now = (sum(w.events_read for w in writers), sum(len(w.files) for w in writers), shipper.waits())
        if busy and now != before:
            before = now
        elif shipper.errors() and time.monotonic() < deadline:
            time.sleep(_PAUSE_S)
        else:
            return


def _unreadable(writer: WriterSpool) -> Recovered:
    names = ", ".join(file.path.name for file in writer.files)
    return Recovered(
        writer_id=writer.writer_id,
        run_id="",
        ledger="",
        state="unreadable",
        events=0,
        shipped=0,
        known=0,
        last_seq=-1,
        lost_bytes=writer.headless_bytes(),
        files_left=_files(writer),
        problem=writer.problem
        or f"no readable header in {writer.directory} ({names}): whose events they are cannot be told, they stay",
    )


def _report(shipper: Shipper, writer: WriterSpool) -> Recovered:
    header = writer.header
    assert header is not None
    outbox = shipper.outboxes[header.ledger_url, header.run_id]
    known = outbox.known.get(writer.writer_id, 0)
    held = outbox.waiting(writer.writer_id)
    unread = examine(writer.directory, after=writer.read_seq).waiting if outbox.error else 0
    return Recovered(
        writer_id=writer.writer_id,
        run_id=header.run_id,
        ledger=outbox.url,
        state=state_of(writer),
        events=writer.events_read + unread,
        shipped=writer.events_read - known - held,
        known=known,
        last_seq=writer.read_seq,
        lost_bytes=writer.lost_bytes,
        problem=outbox.error or writer.problem,
        files_left=_files(writer),
    )


def _files(writer: WriterSpool) -> tuple[str, ...]:
    """Names of the spool files in a writer's directory, those set aside as damaged included."""
    return tuple(sorted(path.name for path in writer.directory.glob("*.spool*")))
