"""The recorder: from the arguments of record() to a frame in the spool.

One critical section (`_lock`) owns the spool state, the losses and every field below marked (S). Three flags make it
safe where a Python process is not:

* `_owned()`: this thread is inside the section. A signal handler or `__del__` that records meanwhile is queued and
  recorded when the interrupted call leaves the section. The lock itself is the flag, so nothing can leave it wrong.
* `_unsettled` (S): the last section did not end normally, or there is something to write first (the writer's own
  events, a gap). Set on entry, cleared on success, so an asynchronous exception anywhere is noticed by the next call.
* `_mark[0]`: false after a fork and after close().
"""

import contextlib
import logging
import os
import re
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlk_ledger_schemas.arrays import Array
from rlk_ledger_schemas.codec import NO_ARRAYS, encode_payload, pack_u32
from rlk_ledger_schemas.errors import EventError, FlushTimeout, SpoolError, UsageError
from rlk_ledger_schemas.events import REGISTRY, SCHEMA_VERSION, Event, check_fields, encode, make_plain
from rlk_ledger_sdk.budget import Budget
from rlk_ledger_sdk.config import Config
from rlk_ledger_sdk.durability import Durability
from rlk_ledger_sdk.filesystem import method_for, name_of
from rlk_ledger_sdk.forks import NO_PROCESS, new_mark, on_worker_exit
from rlk_ledger_sdk.gaps import Losses
from rlk_ledger_sdk.missing import without_none
from rlk_ledger_sdk.modes import Mode
from rlk_ledger_sdk.place import prepare_spool, spool_header
from rlk_ledger_sdk.process import identity, new_writer_id
from rlk_ledger_sdk.reference import NOT_RECORDED, Reference
from rlk_ledger_sdk.scope import current_fields, merged
from rlk_ledger_sdk.spool import Full, SpoolWriter

_log = logging.getLogger("rlk_ledger")
_wall = time.time_ns
_mono = time.monotonic_ns
_revivals: dict[int, threading.RLock] = {}
_recorders: "weakref.WeakSet[Recorder]" = weakref.WeakSet()


class Recorder:
    """Records the events of one process under one Config. Thread-safe; a forked child becomes a new writer."""

    enabled = True

    def __init__(self, config: Config) -> None:
        self.config: Config = config
        self._prepare()
        self.auditable = True
        self._closed = False
        self._warned: set[tuple[str, str]] = set()
        self._start(parent_writer=None)
        self._identity.insert(0, ("run.opened", config.run_opened))
        _recorders.add(self)
        self._settle_quietly()
        self._afterwards()

    @property
    def mode(self) -> Mode:
        """The mode in force; a forked child's is its parent's."""
        return self.config.mode

    def writer(self) -> str | None:
        """The id of the writer that record() reaches, which a forked child becomes here; None once closed."""
        return self.writer_id if self._mark[0] or self._alive_here() else None

    # -- lifecycle --------------------------------------------------------------------------------------------------

    def _start(self, parent_writer: str | None) -> None:
        """Becomes a fresh writer of the calling process: new id, lock, spool; nothing is written yet."""
        config, me, writer_id = self.config, identity(), new_writer_id()
        directory = config.spool / writer_id
        self._new_lock()
        self._unsettled = True
        self._losses = Losses()
        self._deferred: deque[tuple[str, Any, dict[str, Array], Reference]] = deque()
        self._contracts: dict[str, Reference] = {}
        self._run_id = config.run_id
        opened = {**config.writer_opened, "host": me.host, "pid": me.pid}
        if parent_writer is not None:
            opened["parent_writer"] = parent_writer
        self._identity: list[tuple[str, dict[str, Any]]] = [("writer.opened", opened)]
        self._spool = self._new_spool(writer_id, directory)
        self._file_number = -1
        self._durability: Durability = Durability(config, directory)
        self._redacts = config.redaction.mode != "none"
        self.directory = directory
        self.writer_id: str = writer_id  # after all that can fail: until then a forked child knows its parent's
        self._mark = new_mark()
        if config.shipper != "inline":  # shipping inline needs libraries that do not survive a fork
            on_worker_exit(lambda: self.close("exit", timeout=0))

    def _new_lock(self) -> None:
        self._lock = threading.RLock()
        self._owned: Callable[[], bool] = getattr(self._lock, "_is_owned")  # noqa: B009  what Condition uses, untyped

    def _prepare(self) -> None:
        prepare_spool(self.config)

    def _new_spool(self, writer_id: str, directory: Path) -> SpoolWriter:
        config, header = self.config, spool_header(self.config, writer_id)
        budget = Budget(directory, config.budget_bytes, config.block_ms)
        return SpoolWriter(directory, header, method_for(name_of(str(config.spool))), budget)

    def _abandon(self) -> None:
        """In a forked child: lets go of the parent's file and lock, so that nothing here can reach them."""
        if not self._closed:
            self._spool.close()
            self._mark = NO_PROCESS
            self._new_lock()

    def _alive_here(self) -> bool:
        """After `_mark[0]` was false: becomes a new writer in a forked child; False once closed."""
        pid = os.getpid()
        with _revivals.setdefault(pid, threading.RLock()):
            if self._closed:
                self._warn("closed", "", "record() after close(): nothing is recorded until init() is called again")
                return False
            if not self._mark[0]:
                self._abandon()
                self._start(parent_writer=self.writer_id)
        return True

    # -- the hot path -----------------------------------------------------------------------------------------------

    def record(self, event: str | Event, /, **fields: Any) -> Reference:
        """Records one event; see rlk_ledger.record."""
        return self.emit(event, fields)

    def emit(self, event: str | Event, fields: dict[str, Any]) -> Reference:
        """record() with the keyword arguments as a dict, which is consumed."""
        try:
            if not self._mark[0] and not self._alive_here():
                return NOT_RECORDED
            scoped = current_fields()
            if type(event) is not str:
                event, fields = _typed(event, fields)
            if scoped is not None:
                fields = merged(scoped, fields)
            try:
                wire, arrays = check_fields(event, fields)
            except EventError:
                if not without_none(event, fields):
                    raise
                wire, arrays = check_fields(event, fields)
            if self._redacts:
                arrays = self.config.redaction.apply(event, wire, arrays)
            try:
                reference = self._append(event, wire, arrays)
            except (TypeError, ValueError, OverflowError, RecursionError):
                if not make_plain(event, wire):
                    raise
                reference = self._append(event, wire, arrays)
        except UsageError as error:  # an EventError, or what a contract's body cannot hold
            return self.rejected(event, error)
        except SpoolError:
            raise
        except Exception as error:
            return self.failed(event, error)
        if self._deferred or self._file_number != self._spool.number:
            self._afterwards()
        return reference

    def _append(self, name: str, wire: Any, arrays: dict[str, Array]) -> Reference:
        """Stores one checked event: the critical section."""
        contract_id = None
        if name == "contract.declared":
            contract_id = wire.contract_id
            if (known := self._contracts.get(contract_id)) is not None:
                return known
        if self._owned():
            return self._defer(name, wire, arrays, contract_id)
        payload = b""
        with self._lock:
            spool = self._spool
            try:
                settling = self._unsettled
                if settling:
                    self._settle()
                self._unsettled = True
                seq = spool.at[1]
                wire.schema_version = SCHEMA_VERSION
                wire.seq = seq
                wire.wall_ns = _wall()
                wire.mono_ns = _mono()
                wire.run_id = self._run_id
                wire.writer_id = self.writer_id
                payload = encode(wire)
                if arrays:
                    payload = encode_payload(payload, arrays)
                else:
                    payload = pack_u32(len(payload)) + payload + NO_ARRAYS  # the same, without a call
                if settling:
                    payload = self._after_losses(wire, arrays, payload)
                    seq = wire.seq
                spool.put(payload)
                if settling:
                    self._losses.total = 0
                self._unsettled = False
            except Exception as error:
                if spool.closed:  # by a fork inside this call: the parent stores its event, this child its own
                    return self._append(name, wire, arrays) if self._alive_here() else NOT_RECORDED
                if not isinstance(error, Full):
                    raise
                if payload and name == "writer.closed" and not self._losses and spool.put_reserved(payload):
                    return Reference(self.writer_id, seq)
                self._drop(name, error, len(payload) or sum(len(array.data) for array in arrays.values()))
                return Reference(self.writer_id, None, contract_id)
        reference = Reference(self.writer_id, seq, contract_id)
        if contract_id is not None:
            self._contracts[contract_id] = reference
        return reference

    # -- inside the critical section --------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Repairs what an exception left, then writes the writer's own events if they are still to come."""
        self._spool.resync()
        self._losses.settle(self._spool.at[1])
        while self._identity:
            payload = self._encoded(*self._identity[0])
            if self._state_before(payload):
                payload = self._encoded(*self._identity[0])
            self._spool.put(payload)
            self._identity.pop(0)

    def _after_losses(self, wire: Any, arrays: dict[str, Array], payload: bytes) -> bytes:
        """The payload of an event that has room, as it is to be put: after the losses, numbered anew. Raises Full."""
        if self._state_before(payload):
            wire.seq = self._spool.at[1]
            payload = encode_payload(encode(wire), arrays)
        return payload

    def _state_before(self, payload: bytes) -> bool:
        """States what was lost before an event that now has room; False when nothing was. Raises Full.

        In this order, so that the number of a gap event that is kept is never another event's.
        """
        if not self._losses:
            return False
        gap = self._losses.event(self._spool, self._encoded)
        self._spool.make_room(len(gap), len(payload) + 16)  # 16: its number may take more bytes
        if not self._state_losses(roll=False):  # pragma: no cover - there is room
            raise Full(f"no room for what was lost in {self.directory}")
        return True

    def _settle_quietly(self, roll: bool = False) -> None:
        """Settles now, as far as there is room; `roll` opens a new file for a gap event that needs one."""
        if self._owned():
            return
        with self._lock:
            try:
                self._settle()
                self._unsettled = bool(self._losses) and not self._state_losses(roll)
                if not self._unsettled:
                    self._losses.total = 0
            except Full as full:
                self._warn_full(full)

    def _encoded(self, name: str, fields: dict[str, Any]) -> bytes:
        assigned = {
            "schema_version": SCHEMA_VERSION,
            "seq": self._spool.at[1],
            "wall_ns": _wall(),
            "mono_ns": _mono(),
            "run_id": self._run_id,
            "writer_id": self.writer_id,
        }
        wire, arrays = check_fields(name, dict(fields), assigned)
        return encode_payload(encode(wire), arrays)

    def _lose(self, kind: str, nbytes: int, reason: str, event_type: str, roll: bool) -> None:
        """Consumes a sequence number that holds nothing and states it, now or when there is room.

        Kept at once: from here on a kill leaves the loss stated.
        """
        self._losses.add(self._spool.at[1], kind, nbytes, reason[:500], event_type[:500])
        self._spool.skip()
        self._losses.event(self._spool, self._encoded)
        if roll or self._losses.due:
            self._state_losses(roll)

    def _state_losses(self, roll: bool) -> bool:
        """Writes the gap event of the pending losses; False when it has to wait."""
        try:
            return self._losses.state(self._spool, self._encoded, roll)
        except Full as full:
            self._warn_full(full)
            return False

    def _drop(self, name: str, full: Full, nbytes: int) -> None:
        """No room: counts the event as lost; an audit event makes the run non-auditable, or raises when strict."""
        kind = "bulk" if REGISTRY[name].arrays else "audit"
        self._lose(kind, nbytes, str(full), name, roll=False)
        self._warn_full(full)
        if kind == "audit":
            self.auditable = False
            if self.config.strict:
                raise SpoolError(f"{full}; {name} was not recorded and consistency is strict")

    # -- around the critical section --------------------------------------------------------------------------------

    def _defer(self, name: str, wire: Any, arrays: dict[str, Array], contract_id: str | None) -> Reference:
        reference = Reference(self.writer_id, None, contract_id)
        self._deferred.append((name, wire, arrays, reference))
        return reference

    def _afterwards(self) -> None:
        """What a record() owes after it left the critical section: queued events, a look at the shipper on a roll."""
        if self._owned():
            return
        while self._deferred:
            try:
                name, wire, arrays, reference = self._deferred.popleft()
            except IndexError:  # another thread took it
                return
            try:
                reference.seq = self._append(name, wire, arrays).seq
            except Exception as error:  # the call that was interrupted is not the one that failed
                kind = type(error).__name__
                self._warn("internal", name, f"record({name!r}) from a signal handler failed: {kind}: {error}")
                self._gap("internal", kind if self._redacts else f"{kind}: {error}", name)
        if self._file_number != self._spool.number:
            self._file_number = self._spool.number
            self._durability.ensure_shipper()

    def rejected(self, event: Any, error: UsageError) -> Reference:
        """A malformed event: raises under tests; else one warning per kind of mistake and a gap event."""
        if self.config.on_error == "raise":
            raise error
        name = event if isinstance(event, str) else type(event).__name__
        reason = str(error)
        if self._redacts:
            reason, name = self.config.redaction.refusal(name, error)
        kind = re.sub(r"\d+|'[^']*'", "_", reason)[:200]  # one mistake may show with many values
        self._warn(f"rejected {name}", kind, f"record({name!r}) was refused and a gap event says so: {reason}")
        return self._gap("rejected", reason, name)

    def failed(self, event: Any, error: Exception) -> Reference:
        """An error of the recorder or an integration: never into the job, into the ledger, and raised under tests."""
        name = event if isinstance(event, str) else type(event).__name__
        kind = type(error).__name__
        reason = f"{kind}: {error}"
        if self._redacts:
            reason, name = self.config.redaction.refusal(name, error)
        self._warn("internal", f"{name} {kind}", f"record({name!r}) failed inside the recorder: {reason}")
        reference = self._gap("internal", reason, name)
        if self.config.on_error == "raise":
            raise error
        return reference

    def _gap(self, kind: str, reason: str, event_type: str) -> Reference:
        try:
            if self._mark[0] and not self._owned():
                with self._lock:
                    self._lose_one(kind, reason, event_type)
        except Exception as error:
            self._warn("gap", "", f"a gap event could not be written ({error}); it follows when it can")
        return Reference(self.writer_id, None)

    def _lose_one(self, kind: str, reason: str, event_type: str) -> None:
        if self._unsettled:
            with contextlib.suppress(Full):
                self._settle()
        self._unsettled = True
        self._lose(kind, 0, reason, event_type, roll=True)
        self._unsettled = bool(self._losses or self._identity)

    def _warn_full(self, full: Full) -> None:
        self._warn("full", "", f"{full}; events are dropped and counted until there is room")

    def _warn(self, kind: str, detail: str, message: str) -> None:
        if (kind, detail) not in self._warned and len(self._warned) < 100:
            self._warned.add((kind, detail))
            _log.warning("%s", message)

    # -- flush and close --------------------------------------------------------------------------------------------

    def flush(self, level: str = "committed", timeout: float = 30.0) -> dict[str, int]:
        """Waits until everything recorded so far has reached `level`; see rlk_ledger.flush."""
        last = -1
        if self._mark[0]:
            self._afterwards()
            if self._removed():
                raise FlushTimeout(
                    f"flush: {self._REMOVED.format(self.directory)}; what is recorded now goes elsewhere"
                )
            self._settle_quietly()
        if self._mark[0] or self._closed:  # else a forked child that has recorded nothing
            last = self._spool.at[1] - 1
        return self._durability.wait(level, last, timeout)

    _REMOVED = "somebody removed spool files in {}: what was not committed yet is lost, and verify will say so"

    def _removed(self) -> bool:
        """Whether the open spool file was removed; the next event then goes into a new one."""
        if self._owned():
            return False
        with self._lock:
            return self._spool.removed()

    def close(self, reason: str = "close", timeout: float | None = None) -> None:
        """Writes `writer.closed`, asks the shipper for the rest and waits at most `timeout` s (RLK_EXIT_S)."""
        if self._closed:
            return
        if self._mark[0]:
            self._afterwards()
            if self._removed():
                self._warn("removed", "", self._REMOVED.format(self.directory))
            self._settle_quietly(roll=True)
            closed, arrays = check_fields("writer.closed", {"reason": reason})
            with contextlib.suppress(SpoolError):  # warned about; the reader will say that this writer never closed
                self._append("writer.closed", closed, arrays)
        here = bool(self._mark[0])
        self._closed = True
        self._mark = NO_PROCESS
        if here:
            waits = self.config.exit_s if timeout is None else timeout
            if left := self._durability.leave(self._spool.at[1] - 1, waits):
                self._warn("close", "", left)
            if not self._owned():
                with self._lock:
                    self._spool.close()


def _typed(event: Any, fields: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    if not isinstance(event, Event):
        raise EventError(
            f"record() takes an event type or an event, got {type(event).__module__}.{type(event).__name__}."
        )
    if fields:
        raise EventError(f"record({type(event).__name__}(...)) takes no further fields, got {min(fields)!r}.")
    return event.TYPE, event.fields()


def _after_fork_in_child() -> None:
    for recorder in list(_recorders):
        recorder._abandon()


os.register_at_fork(after_in_child=_after_fork_in_child)
