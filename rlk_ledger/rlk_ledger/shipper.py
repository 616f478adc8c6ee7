"""The shipper: one process per spool directory that carries events from every writer's spool into the bucket.

    python -m rlk_ledger.shipper --spool DIR [--until-idle]

A cycle reads what the writers left, syncs it (one group of fdatasync), ships what is due, and only after a receipt was
read back deletes what it covers. There is no state on disk that a restart needs: receipts say what is committed, and
until they say so the spool keeps it. Killed between any two steps, nothing is lost and nothing is doubled.

Life of an event after the spool: `spools.poll` -> `outbox.add` -> `chain.draft` -> segment -> receipt -> `release`.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import msgspec

from rlk_ledger import layout
from rlk_ledger.chain import Ending
from rlk_ledger.outbox import Outbox
from rlk_ledger.segments import SEGMENT_BYTES
from rlk_ledger.spools import WriterSpool
from rlk_ledger.store import Store, open_store
from rlk_ledger_schemas.errors import SpoolError
from rlk_ledger_sdk.loss_page import NAME as LOSSES
from rlk_ledger_sdk.status import CHECKPOINT_REQUEST, FLUSH_REQUEST, STATUS, Status, read_request, read_status

SYNC_EVERY_S = 1.0
FORGET_AFTER_S = 3600.0
"""Age of the last status after which the directory of a writer without spool files is removed."""
_UNKNOWN_S = 60.0


class Shipper:
    """Serves one spool directory. Owned by one thread; with `workers`, buckets are talked to on that many others."""

    def __init__(
        self,
        spool: Path,
        open_: Callable[[str], Store] = open_store,
        workers: int = 0,
        only: Callable[[WriterSpool], bool] | None = None,
        url: str | None = None,
    ) -> None:
        self.spool = spool
        self.writers: dict[str, WriterSpool] = {}
        self.outboxes: dict[tuple[str, str], Outbox] = {}
        self.holder = b""  # what this shipper last wrote into the lock file, see `service`
        self._open = open_
        self._only = only
        self._url = url
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="ship") if workers else None
        self._futures: dict[tuple[str, str], Future[bool]] = {}
        # Checkpoints have a thread of their own: however long one takes, shipping does not wait for it.
        self._covering_pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint") if workers else None
        self._covering: dict[tuple[str, str], Future[bool]] = {}
        self._last_covered: set[tuple[str, str]] = set()  # outboxes whose rest was covered on the way out
        self._status: dict[str, Status] = {}
        self._stated: set[str] = set()
        self._poisoned: dict[str, int] = {}
        self._synced_at = 0.0
        self._read_at: dict[str, float] = {}
        self._asked: dict[str, tuple[int, ...]] = {}  # the last requests seen of each writer: times in ns, files

    # -- one cycle ---------------------------------------------------------------------------------------------------

    def cycle(self, flush: bool = False, patient: bool = False) -> bool:
        """Reads, syncs, ships what is due (everything when `flush`), releases; whether there was anything to do.

        A bucket that refused is not asked again before its pause is over, except by a `flush` that is not `patient`.
        """
        read = self._scan()
        wanted = self._flushes()
        self._sync(flush or bool(wanted))
        shipped = self._ship(flush, wanted, patient or not flush)
        self._cover()
        self._settle()
        if read or shipped:
            self._last_covered.clear()
        return read or shipped

    def _scan(self) -> bool:
        """Moves what the spools hold into the outboxes; notes writers that ended."""
        self.find_writers()
        busy = False
        total = self._share_out()
        for writer_id, writer in self.writers.items():
            writer.look()
            outbox = self._outbox(writer)
            if outbox is None or (self._only is not None and not self._only(writer)):
                continue
            room = outbox.room(total - outbox.held())
            if room == 0:
                outbox.crowded = outbox.inflight is None
                continue
            records, size = writer.poll(room)
            if records:
                busy = True
                self._read_at[writer_id] = time.monotonic()
                outbox.add(records, size)
                total += size
            self._note_ending(writer, outbox)
        return busy

    def _share_out(self) -> int:
        """Tells each outbox how many share the memory; returns the bytes that all hold."""
        busy = sum(bool(outbox.pending or outbox.inflight) for outbox in self.outboxes.values())
        for outbox in self.outboxes.values():
            outbox.sharers = busy if outbox.pending or outbox.inflight else busy + 1
            outbox.crowded = False
        return sum(outbox.held() for outbox in self.outboxes.values())

    def find_writers(self) -> None:
        """Notes the writers' directories that are new since the last look."""
        for path in _writer_folders(self.spool):
            if path.name not in self.writers:
                self.writers[path.name] = WriterSpool(path)

    def _note_ending(self, writer: WriterSpool, outbox: Outbox) -> None:
        """Queues the statement about a writer that died, or about bytes of it that are no event."""
        if writer.died and writer.writer_id not in self._stated:
            self._stated.add(writer.writer_id)
            new = writer.lost_bytes - self._poisoned.get(writer.writer_id, 0)
            outbox.endings[writer.writer_id] = Ending(new, writer.read_seq)
        elif writer.lost_bytes > self._poisoned.get(writer.writer_id, 0) and writer.writer_id not in self._stated:
            new = writer.lost_bytes - self._poisoned.get(writer.writer_id, 0)
            self._poisoned[writer.writer_id] = writer.lost_bytes
            reason = writer.problem or "bytes between its events are no event"
            outbox.endings[writer.writer_id] = Ending(new, writer.read_seq, reason, dead=False)

    def _flushes(self) -> set[tuple[str, str]]:
        """Outboxes some writer waits for: it asked for a number that is not committed yet, or it closed."""
        wanted = set()
        for writer in self.writers.values():
            outbox = self._outbox(writer)
            if outbox is None:
                continue
            committed = outbox.committed_up_to(writer.writer_id)
            if writer.closed and writer.read_seq > committed:
                wanted.add((outbox.url, outbox.run_id))
            if read_request(writer.directory, FLUSH_REQUEST) > committed:
                wanted.add((outbox.url, outbox.run_id))
        return wanted

    def _cover(self, rest: bool = False) -> None:
        """Starts the checkpoints that are due, and those of all that is uncovered when `rest`.

        Without workers only what a writer waits for is made, and at once.
        """
        self._covering = {key: future for key, future in self._covering.items() if not future.done()}
        waited_for = self._waited_for()
        for key, outbox in self.outboxes.items():
            asked = key in waited_for or (rest and outbox.checkpoints.period_s > 0)
            if outbox.chain is None or key in self._covering or not outbox.checkpoints.due(asked):
                continue
            if self._covering_pool is not None:
                self._covering[key] = self._covering_pool.submit(outbox.checkpoint, asked)
            elif asked:
                outbox.checkpoint(now=True)

    def _waited_for(self) -> set[tuple[str, str]]:
        """Outboxes in which a writer waits for a checkpoint over what is committed."""
        out = set()
        for writer in self.writers.values():
            outbox = self._outbox(writer)
            if outbox is None:
                continue
            covered, committed = (
                outbox.checkpoints.covered_up_to(writer.writer_id),
                outbox.committed_up_to(writer.writer_id),
            )
            if covered < read_request(writer.directory, CHECKPOINT_REQUEST) <= committed:
                out.add((outbox.url, outbox.run_id))
        return out

    def cover_rest(self) -> bool:
        """Before leaving: covers what nothing covers yet, tried once a run; whether that is still under way."""
        fresh = self.outboxes.keys() - self._last_covered
        self._last_covered |= fresh
        self._cover(rest=bool(fresh))
        return bool(self._covering)

    def _sync(self, now: bool) -> None:
        if not now and time.monotonic() - self._synced_at < SYNC_EVERY_S:
            return
        for writer in self.writers.values():
            if writer.read_seq > writer.synced_seq:
                with contextlib.suppress(OSError):  # a disk that cannot sync leaves `synced` where it is
                    writer.sync()
        self._synced_at = time.monotonic()

    def _ship(self, flush: bool, wanted: set[tuple[str, str]], patient: bool) -> bool:
        busy = False
        for key, outbox in self.outboxes.items():
            future = self._futures.get(key)
            if future is not None and future.done():
                del self._futures[key]
                busy |= future.result()
            elif future is not None:
                continue
            asked = flush or key in wanted
            if not outbox.due(asked) or (patient and time.monotonic() < outbox.retry_at):
                continue
            outbox.take()
            if self._pool is not None:
                self._futures[key] = self._pool.submit(outbox.ship)
                continue
            while outbox.ship() and outbox.due(asked):
                outbox.take()
            busy = True
        return busy

    def _settle(self) -> None:
        """After shipping: deletes what is committed, tells each writer how far it is, forgets writers that are gone."""
        for writer_id, writer in list(self.writers.items()):
            outbox = self._outbox(writer)
            if outbox is None:
                self._forget_empty(writer)
                continue
            if (outbox.url, outbox.run_id) in self._futures:
                continue
            committed = outbox.committed_up_to(writer_id)
            if writer_id not in outbox.endings and not self._owes(outbox, writer_id):
                freed = writer.release(committed)
            else:
                freed = 0
            self._tell(writer, outbox, committed, freed)
            if writer.ended and writer.alive is False and not writer.files:
                self._forget(writer)

    @staticmethod
    def _owes(outbox: Outbox, writer_id: str) -> bool:
        """Whether a statement about the writer is still on its way: until it is committed its spool is the evidence."""
        return outbox.inflight is not None and writer_id in outbox.inflight.endings

    def _tell(self, writer: WriterSpool, outbox: Outbox, committed: int, freed: int) -> None:
        before = self._status.get(writer.writer_id) or read_status(writer.directory)
        now = Status(
            synced=max(before.synced, writer.synced_seq, committed),
            committed=max(before.committed, committed),
            checkpointed=max(before.checkpointed, outbox.checkpoints.covered_up_to(writer.writer_id)),
            checkpoint_error=outbox.checkpoints.error or outbox.key_error,
            shipped_bytes=before.shipped_bytes + freed,
            error=outbox.error or writer.problem,
            warning=outbox.warning or before.warning,
            shipper=outbox.chain.shipper if outbox.chain else before.shipper,
            wall_us=before.wall_us,
        )
        if now != before or writer.writer_id not in self._status:
            now = msgspec.structs.replace(now, wall_us=time.time_ns() // 1000)
            with contextlib.suppress(OSError):
                _write_status(writer.directory, now)
            self._status[writer.writer_id] = now

    def _forget_empty(self, writer: WriterSpool) -> None:
        status = writer.directory / STATUS
        with contextlib.suppress(OSError):
            if not writer.files and time.time() - status.stat().st_mtime > FORGET_AFTER_S:
                self._forget(writer)

    def _forget(self, writer: WriterSpool) -> None:
        """Lets go of a writer that is gone, on disk and here: a shipper of a busy node sees thousands of them."""
        _remove_folder(writer.directory)
        self._stated.discard(writer.writer_id)
        held: dict[str, Any]
        for held in (self.writers, self._status, self._poisoned, self._read_at, self._asked):
            held.pop(writer.writer_id, None)

    def _outbox(self, writer: WriterSpool) -> Outbox | None:
        header = writer.header
        if header is None:
            return None
        key = (header.ledger_url, header.run_id)
        if key not in self.outboxes:
            self.outboxes[key] = Outbox(header, self._open, self._url)
        return self.outboxes[key]

    # -- the whole ---------------------------------------------------------------------------------------------------

    def drain(self, timeout: float) -> None:
        """Waits at most `timeout` seconds for shipments under way and notes what they committed."""
        done, _ = wait(self._futures.values(), timeout)
        self._futures = {key: future for key, future in self._futures.items() if future not in done}
        self._settle()

    def idle(self) -> bool:
        """Whether nothing waits to be shipped and no writer is known to live."""
        return not self.waits() and not any(self.may_write(writer) for writer in self.writers.values())

    def waits(self) -> bool:
        """Whether something that was read is not committed yet."""
        return bool(self._futures) or any(o.pending or o.endings or o.inflight for o in self.outboxes.values())

    def may_write(self, writer: WriterSpool) -> bool:
        """Whether more may come of the writer; of one that cannot be looked at, a minute after its last event not."""
        if writer.header is None or writer.ended or writer.closed:
            return False
        if writer.alive is None:
            return time.monotonic() - self._read_at.get(writer.writer_id, 0.0) < _UNKNOWN_S
        return True

    def pressed(self) -> bool:
        """Whether shipments are under way or much waits for one: the next cycle should not."""
        if self._futures or self._covering:
            return True
        much = [o for o in self.outboxes.values() if o.crowded or 2 * o.pending_bytes >= SEGMENT_BYTES]
        return any(not outbox.failures for outbox in much)

    def asked(self) -> bool:
        """Whether a writer asked for something since this was asked last; one look at a file a writer."""
        news = False
        for writer_id, writer in self.writers.items():
            with contextlib.suppress(OSError):
                request = (writer.directory / FLUSH_REQUEST).stat()
                seen: tuple[int, ...] = (request.st_mtime_ns, request.st_ino)
                with contextlib.suppress(OSError):
                    request = (writer.directory / CHECKPOINT_REQUEST).stat()
                    seen = (*seen, request.st_mtime_ns, request.st_ino)
                news |= seen != self._asked.get(writer_id)
                self._asked[writer_id] = seen
        return news

    def errors(self) -> list[str]:
        """What stands in the way of shipping now, one sentence an outbox."""
        return [outbox.error for outbox in self.outboxes.values() if outbox.error]

    def checkpoint_errors(self) -> list[str]:
        """What stands in the way of signing and of checkpoints now; shipping goes on."""
        found = [error for outbox in self.outboxes.values() for error in (outbox.key_error, outbox.checkpoints.error)]
        return [error for error in found if error]

    def failing_for(self) -> int:
        """How many attempts in a row failed in the outbox that fails longest."""
        return max((outbox.failures for outbox in self.outboxes.values()), default=0)

    def forget_receipts(self) -> None:
        """Another shipper served this spool since: what is committed has to be read again."""
        for outbox in self.outboxes.values():
            outbox.forget()

    def close(self) -> None:
        """Closes descriptors and waits for shipments under way."""
        for pool in (self._pool, self._covering_pool):
            if pool is not None:
                pool.shutdown()
        for writer in self.writers.values():
            writer.close()


def _writer_folders(spool: Path) -> Iterator[Path]:
    try:
        names = sorted(os.listdir(spool))  # noqa: PTH208
    except FileNotFoundError:
        return
    except OSError as error:
        raise SpoolError(f"cannot read the spool directory {spool}: {error.strerror}.") from error
    for name in names:
        if layout.is_shipper(name):
            yield spool / name


def _write_status(directory: Path, status: Status) -> None:
    fresh = directory / ".status.tmp"
    fresh.write_bytes(msgspec.json.encode(status))
    fresh.replace(directory / STATUS)


def _remove_folder(directory: Path) -> None:
    """Removes what a finished writer and its shipper left; a folder that holds anything else stays."""
    with contextlib.suppress(OSError):
        for name in (STATUS, FLUSH_REQUEST, CHECKPOINT_REQUEST, LOSSES, ".status.tmp", ".flush.tmp"):
            (directory / name).unlink(missing_ok=True)
        for path in directory.glob(".*.tmp"):
            path.unlink(missing_ok=True)
        directory.rmdir()


if __name__ == "__main__":
    from rlk_ledger.service import main

    raise SystemExit(main())
