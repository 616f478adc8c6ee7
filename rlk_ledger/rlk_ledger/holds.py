"""Holds of a run: while one stands, nothing of the run is pruned. Placing and releasing only ever adds an object."""

import getpass
import os
import secrets
import socket
import time
from collections.abc import Iterator
from typing import NamedTuple

from rlk_ledger import layout
from rlk_ledger.store import Missing, Store
from rlk_ledger_schemas.errors import FormatError, LedgerError, UsageError
from rlk_ledger_schemas.holds import Hold, decode_hold, encode_hold
from rlk_ledger_schemas.objects import FORMAT, RunInfo


class State(NamedTuple):
    """One hold: the object that placed it and the one that released it, None where it is absent or unreadable.

    `problem` says what is unreadable. A hold that cannot be read stands; an unreadable release releases nothing.
    """

    hold_id: str
    hold: Hold | None
    release: Hold | None
    problem: str | None = None

    @property
    def stands(self) -> bool:
        """Whether it forbids pruning."""
        return self.release is None and (self.hold is not None or self.problem is not None)


def this_person() -> str:
    """`user@host`, the name under which holds and prunes are made unless another is given."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


def place(store: Store, run: RunInfo, reason: str, by: str) -> Hold:
    """Places a hold on the run; raises UsageError without a reason, StoreError when the bucket does not take it."""
    if not reason.strip() or len(reason) > 4096 or not by.strip() or len(by) > 4096:
        raise UsageError("a hold needs a reason and a name, each of 1 to 4096 characters.")
    hold = _made(run, secrets.token_hex(8), by, reason)
    store.create(layout.hold_path(run.run_id, hold.hold_id), encode_hold(hold))
    return hold


def release(store: Store, run: RunInfo, hold_id: str, by: str, reason: str | None = None) -> Hold:
    """Releases one hold; raises UsageError when there is none of that id or it is released already."""
    state = next((s for s in read_holds(store, run.run_id) if s.hold_id == hold_id), None)
    if state is None:
        raise UsageError(f"run {run.run_id!r} has no hold {hold_id!r}; `rlk-ledger hold {run.run_id}` lists them.")
    if state.release is not None:
        raise UsageError(f"hold {hold_id} was released by {state.release.by} already.")
    made = _made(run, hold_id, by, reason, released=True)
    store.create(layout.hold_path(run.run_id, hold_id, released=True), encode_hold(made))
    return made


def _made(run: RunInfo, hold_id: str, by: str, reason: str | None, released: bool | None = None) -> Hold:
    return Hold(
        format=FORMAT,
        ledger_id=run.ledger_id,
        run_id=run.run_id,
        hold_id=hold_id,
        by=by,
        reason=reason,
        released=released,
        wall_us=time.time_ns() // 1000,
    )


def read_holds(store: Store, run_id: str) -> list[State]:
    """Every hold of the run, placed first first; raises StoreError."""
    found: dict[str, dict[bool, Hold | str]] = {}
    for path, key in _objects(store, run_id):
        if key is None:
            continue
        try:
            read: Hold | str = _checked(decode_hold(store.read(path), path), run_id, key, path)
        except FormatError as error:
            read = str(error)
        except Missing:
            continue
        found.setdefault(key[0], {})[key[1]] = read
    out = []
    for hold_id, held in found.items():
        hold, freed = held.get(False), held.get(True)
        problem = " ".join(text for text in (hold, freed) if isinstance(text, str)) or None
        out.append(State(hold_id, _readable(hold), _readable(freed), problem))
    return sorted(out, key=lambda s: (s.hold.wall_us if s.hold else 0, s.hold_id))


def _readable(read: Hold | str | None) -> Hold | None:
    return read if isinstance(read, Hold) else None


def _objects(store: Store, run_id: str) -> Iterator[tuple[str, tuple[str, bool] | None]]:
    """Every object in the run's hold folder: its path, and (id, released) where it has the name of a hold."""
    root = layout.run_root(run_id)
    for entry in store.list(f"{root}/hold"):
        yield entry.path, layout.parse_hold(entry.path.removeprefix(root + "/"))


def _checked(hold: Hold, run_id: str, key: tuple[str, bool], path: str) -> Hold:
    if (hold.run_id, hold.hold_id, bool(hold.released)) != (run_id, *key):
        raise FormatError(f"{path}: it is hold {hold.hold_id} of run {hold.run_id!r}; it was moved here.")
    return hold


def damaged(store: Store, run_id: str) -> list[tuple[str, str]]:
    """(path, what is wrong) of every object in the hold folder that is no hold of this run. Raises StoreError."""
    out = []
    for path, key in _objects(store, run_id):
        if key is None:
            out.append((path, "it is no hold and no release of one"))
            continue
        try:
            _checked(decode_hold(store.read(path), path), run_id, key, path)
        except FormatError as error:
            out.append((path, str(error).removeprefix(f"{path}: ")))
        except Missing:
            continue
    return out


def refuse_held(store: Store, run_id: str, so_far: str = "nothing was deleted") -> None:
    """Raises LedgerError while a hold stands, saying what was done until then."""
    standing = [state for state in read_holds(store, run_id) if state.stands]
    if standing:
        first = standing[0]
        why = f"by {first.hold.by}: {first.hold.reason}" if first.hold else f"but cannot be read: {first.problem}"
        more = f" and {len(standing) - 1} more" if len(standing) > 1 else ""
        raise LedgerError(
            f"run {run_id!r} is held ({first.hold_id} {why}{more}); {so_far}. "
            f"`rlk-ledger hold {run_id} --release {first.hold_id}` releases it."
        )
