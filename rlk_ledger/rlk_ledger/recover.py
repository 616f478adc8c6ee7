"""Recovering a spool after a crash: everything that is whole goes into the ledger, and what is not is said exactly."""

from collections.abc import Callable
from pathlib import Path

import msgspec

from rlk_ledger import layout
from rlk_ledger.service import claim, elected
from rlk_ledger.shipper import Shipper
from rlk_ledger.spools import WriterSpool
from rlk_ledger.store import Store, open_store
from rlk_ledger_schemas.errors import SpoolError, UsageError


class Recovered(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one writer's spool.

    `events` were whole in the spool; `shipped` of them are new in the ledger and `known` were there already, so that
    `events - shipped - known` wait for the bucket. `lost_bytes` were no event. `state` is closed, dead, alive (its
    newest file was left alone), unknown (it ran on a machine that this one cannot look at: the same) or unreadable (no
    file says which run and ledger it belongs to: `run_id` and `ledger` are empty and its files stay where they are).
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

    @property
    def waiting(self) -> int:
        """Whole events that are not in the ledger yet."""
        return self.events - self.shipped - self.known


def recover(
    spool: Path, url: str | None = None, assume_dead: bool = False, open_: Callable[[str], Store] = open_store
) -> list[Recovered]:
    """Ships every whole event of a spool directory (or of one writer's directory in it), in this process and now.

    `url` sends the events to another ledger than the spool names; `assume_dead` says that the machines the writers ran
    on are gone. Raises UsageError when `spool` is no spool directory, SpoolError when a shipper serves it.
    """
    if not spool.is_dir():
        raise UsageError(f"{spool} is not a directory; give the spool directory (RLK_SPOOL) or one writer's in it.")
    one = spool.name if layout.is_shipper(spool.name) else None
    folder = (spool.parent if one else spool).absolute()
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
            while shipper.cycle(flush=True) and not shipper.errors():
                pass
            return [
                _report(shipper, w) if w.header is not None else _unreadable(w)
                for w in writers
                if w.files or w.header or w.problem
            ]
        finally:
            shipper.close()


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
        lost_bytes=sum(file.bytes_left() for file in writer.files),
        problem=writer.problem
        or f"no readable header in {writer.directory} ({names}): whose events they are cannot be told, they stay",
    )


def _report(shipper: Shipper, writer: WriterSpool) -> Recovered:
    header = writer.header
    assert header is not None
    outbox = shipper.outboxes[header.ledger_url, header.run_id]
    known = outbox.known.get(writer.writer_id, 0)
    held = sum(r.writer_id == writer.writer_id for r in outbox.pending)
    if outbox.inflight is not None:
        held += sum(r.writer_id == writer.writer_id for r in outbox.inflight.records)
    alive = {True: "alive", None: "unknown", False: "dead"}[writer.alive]
    return Recovered(
        writer_id=writer.writer_id,
        run_id=header.run_id,
        ledger=outbox.url,
        state="closed" if writer.closed else alive,
        events=writer.events_read,
        shipped=writer.events_read - known - held,
        known=known,
        last_seq=writer.read_seq,
        lost_bytes=writer.lost_bytes,
        problem=outbox.error or writer.problem,
    )
