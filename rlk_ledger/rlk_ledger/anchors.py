"""Checkpoints kept at a second URL, which whoever can write the ledger should not be able to write.

    <url>/<ledger id>/<run id>/<k>        the bytes of checkpoint k, put only if nothing is there

An anchor is evidence as far as its owner is another than the ledger's, and what is there is never replaced.
"""

import os
import re
from pathlib import Path
from typing import NamedTuple

from rlk_ledger import layout
from rlk_ledger.checkpoints import check_follows, latest, read_checkpoint, read_checkpoints
from rlk_ledger.store import AlreadyThere, FileStore, Missing, Store, open_store
from rlk_ledger_schemas.checkpoints import Checkpoint, decode_checkpoint
from rlk_ledger_schemas.errors import FormatError, LedgerError, UsageError
from rlk_ledger_schemas.objects import check_run_id

_NOTE = re.compile(r"([0-9]{8}|[1-9][0-9]{8,14})")


class Conflict(LedgerError):
    """The anchor knows another history than the ledger: one of the two was changed."""


class Anchored(NamedTuple):
    """Where the newest checkpoint lies at the anchor, and whether this call put it there."""

    where: str
    checkpoint: Checkpoint
    written: bool


class Note(NamedTuple):
    """What lies at an anchor: where, its run, and the checkpoint, or why it is none."""

    where: str
    run_id: str
    k: int
    checkpoint: Checkpoint | None
    problem: str | None


def anchor(store: Store, run_id: str, url: str) -> Anchored:
    """Puts the newest checkpoint of a run at `url`, after checking that it follows what is anchored there.

    Raises UsageError when `url` lies inside the ledger, Conflict when the anchor knows another history or a later one
    than the ledger still has, LedgerError without a checkpoint or when the ledger's are damaged, StoreError.
    """
    to = open_store(url)
    _check_apart(store, to)
    newest = latest(store, check_run_id(run_id))
    if newest is None:
        raise LedgerError(f"run {run_id!r} has no checkpoint; `rlk-ledger checkpoint {run_id}` makes one.")
    known = _newest_note(to, newest.info.ledger_id, run_id)
    if known is not None:
        _check_follows(store, run_id, known, newest)
    else:
        read_checkpoints(store, run_id)  # what is anchored first has to be whole
    path = f"{newest.info.ledger_id}/{run_id}/{newest.k:08d}"
    if known is not None and known.k == newest.k:
        return Anchored(to.locate(path), newest, False)
    try:
        to.create(path, newest.data)
    except AlreadyThere:
        raise Conflict(f"{to.locate(path)} holds another checkpoint {newest.k} of run {run_id!r}.") from None
    if to.read(path) != newest.data:
        raise Conflict(f"{to.locate(path)} was replaced right after it was written.")
    return Anchored(to.locate(path), newest, True)


def keep(store: Store, run_id: str, newest: Checkpoint, path: Path) -> None:
    """Writes the newest checkpoint to the file `path`, in place of an older one that the ledger still has.

    Raises Conflict when the file knows another history, UsageError when it holds something else or cannot be written.
    """
    try:
        older = decode_checkpoint(path.read_bytes(), str(path)) if path.exists() else None
        if older is not None and older.info.run_id != run_id:
            raise UsageError(f"{path} is a checkpoint of run {older.info.run_id!r}; it is not replaced by another's.")
        if older is not None:
            _check_follows(store, run_id, Note(str(path), run_id, older.k, older, None), newest)
        fresh = path.with_name(f".{path.name}.tmp")
        fresh.write_bytes(newest.data)
        fresh.replace(path)
    except FormatError as error:
        raise UsageError(f"{error} It is no checkpoint and is not replaced.") from None
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}.") from None


def _check_follows(store: Store, run_id: str, note: Note, newest: Checkpoint) -> None:
    """Raises Conflict unless the ledger still has what is anchored, and all since follows it."""
    anchored = note.checkpoint
    if anchored is None:
        return
    if anchored.k > newest.k:
        raise Conflict(f"{note.where} is checkpoint {anchored.k}; the newest in the ledger is {newest.k}.")
    before = newest if newest.k == anchored.k else _at(store, run_id, anchored.k, note.where)
    if before.text != anchored.text:
        raise Conflict(f"{note.where} is another checkpoint {anchored.k} than the ledger's.")
    for k in range(anchored.k + 1, newest.k + 1):
        here = newest if k == newest.k else _at(store, run_id, k, note.where)
        check_follows(here, before, layout.checkpoint_path(run_id, k), run_id)
        before = here


def _at(store: Store, run_id: str, k: int, where: str) -> Checkpoint:
    try:
        return read_checkpoint(store, run_id, k)
    except Missing:
        raise Conflict(f"{layout.checkpoint_path(run_id, k)} is gone, and {where} knows it or one before it.") from None


def read_anchor(url: str, ledger_id: str, run_id: str | None = None) -> list[Note]:
    """Every note anchored at `url` for a ledger (for one of its runs, when given), by run and number."""
    store = open_store(url)
    found = store.list(ledger_id if run_id is None else f"{ledger_id}/{run_id}")
    return sorted((_note(store, ledger_id, entry.path) for entry in found), key=lambda note: (note.run_id, note.k))


def _newest_note(store: Store, ledger_id: str, run_id: str) -> Note | None:
    """The newest intact note of a run, found by name: a run anchored every few minutes has thousands of older ones."""
    paths = sorted((entry.path for entry in store.list(f"{ledger_id}/{run_id}")), key=lambda path: (len(path), path))
    notes = (_note(store, ledger_id, path) for path in reversed(paths))
    return next((note for note in notes if note.checkpoint is not None), None)


def _note(store: Store, ledger_id: str, path: str) -> Note:
    run, _, name = path.removeprefix(f"{ledger_id}/").partition("/")
    where = store.locate(path)
    if not _NOTE.fullmatch(name):
        return Note(where, run, -1, None, "it is no checkpoint's name")
    try:
        found = decode_checkpoint(store.read(path), where)
    except FormatError as error:
        return Note(where, run, int(name), None, str(error))
    if (found.info.ledger_id, found.info.run_id, found.k) != (ledger_id, run, int(name)):
        return Note(where, run, int(name), None, f"it is checkpoint {found.k} of {found.origin}")
    return Note(where, run, found.k, found, None)


def _check_apart(store: Store, to: Store) -> None:
    """Raises UsageError when `to` is the ledger or lies inside it: who can write the one can write the other."""
    here, there = _place(store), _place(to)
    if there == here or there.startswith(here.rstrip("/") + "/"):
        raise UsageError(f"{to.url} lies inside the ledger {store.url}; an anchor belongs where others can write.")


def _place(store: Store) -> str:
    if isinstance(store, FileStore):
        return os.path.realpath(store.root)
    return re.sub(r"^(s3a|gcs|abfss)://", _canonical_scheme, store.locate("x").removesuffix("/x"))


def _canonical_scheme(match: re.Match[str]) -> str:
    return {"s3a": "s3", "gcs": "gs", "abfss": "abfs"}[match[1]] + "://"
