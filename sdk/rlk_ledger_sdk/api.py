"""The surface of the recorder: init, record, scope, flush, close, current.

`_current` is this process's recorder: None until the first use decides, and NOTHING when recording is off.
"""

import atexit
import functools
import logging
import os
import threading
from typing import Any, Unpack

from rlk_ledger_schemas.errors import ConfigError, RlkError, UsageError
from rlk_ledger_schemas.events import Event
from rlk_ledger_schemas.fingerprints import token_digest
from rlk_ledger_sdk.config import Options, check_options, load_config
from rlk_ledger_sdk.durability import LEVELS
from rlk_ledger_sdk.modes import OFF, Mode, disabled, exports, from_environment, in_force, load_mode, missing_exports
from rlk_ledger_sdk.recorder import Recorder
from rlk_ledger_sdk.redaction import Redaction
from rlk_ledger_sdk.reference import NOT_RECORDED, Reference

_log = logging.getLogger("rlk_ledger")
_lock = threading.RLock()
_EXPORTED = ("RLK_LEDGER", "RLK_RUN_ID", "RLK_ROLE", "RLK_SPOOL", "RLK_PARENT_WRITER")


class Nothing:
    """Stands in for a recorder where recording is off: every call is a branch."""

    enabled = False
    writer_id = None

    def __init__(self, mode: Mode = OFF) -> None:
        self.mode = mode

    def writer(self) -> None:
        """Nobody records."""

    def emit(self, event: str | Event, fields: dict[str, Any]) -> Reference:
        """Records nothing."""
        return NOT_RECORDED

    def record(self, event: str | Event, /, **fields: Any) -> Reference:
        """Records nothing."""
        return NOT_RECORDED

    def failed(self, event: Any, error: Exception) -> Reference:
        """Nothing is recorded, so nothing is said."""
        return NOT_RECORDED

    def rejected(self, event: Any, error: UsageError) -> Reference:
        """Nothing is recorded, so nothing is said."""
        return NOT_RECORDED

    def flush(self, level: str = "committed", timeout: float = 30.0) -> dict[str, int]:
        """There is nothing to wait for."""
        if level not in LEVELS:
            raise UsageError(f"flush: level {level!r} is unknown; use one of {', '.join(LEVELS)}.")
        return dict.fromkeys(LEVELS, -1)

    def close(self, reason: str = "close", timeout: float | None = None) -> None:
        """There is nothing to close."""


NOTHING = Nothing()
_current: Recorder | Nothing | None = None
_before: dict[str, str | None] = {}


def init(url: str | os.PathLike[str] | None = None, **options: Unpack[Options]) -> Recorder | Nothing:
    """Opens this process's writer; without a URL here or in RLK_LEDGER, and with RLK_DISABLE=1, recording stays off.

    Options, all with defaults: run_id, role, rank, world_size, roles, engine, parallel, mode, on_missing, redaction,
    job, lineage, sampling_policy, spool, shipper (process, inline, off), budget_bytes, block_ms,
    on_error (raise, warn), environment, revision. A second init() closes the writer of the first. Raises ConfigError;
    a bucket that cannot be reached raises nothing.
    """
    check_options(options)
    return _open(url, options, parent_writer=None)


def record(event: str | Event, /, **fields: Any) -> Reference:
    """Records one event, given as a type with fields or as an event object; returns its reference.

    When this returns with a `seq`, the event survives the process being killed. Raises EventError for a malformed
    event under `on_error=raise`, and SpoolError for an audit event without room under `consistency=strict`.
    """
    recorder = _current
    if recorder is None:
        recorder = _first_use()
    return recorder.emit(event, fields)


def acting() -> Recorder | Nothing:
    """What record() records with: this process's recorder; a child of a recording process opens its own first."""
    return _first_use() if _current is None else _current


def flush(level: str = "committed", timeout: float = 30.0) -> dict[str, int]:
    """Waits until everything this process recorded is `level`: spooled, synced, committed or checkpointed.

    Returns the watermark per level: the last sequence number that reached it, -1 for none. Raises FlushTimeout after
    `timeout` seconds, saying what is outstanding and why; UsageError for an unknown level.
    """
    return (_current or NOTHING).flush(level, timeout)


def close(reason: str = "close", timeout: float | None = None) -> None:
    """Closes this process's writer, waiting at most `timeout` seconds (RLK_EXIT_S, 10) for the shipper."""
    global _current
    with _lock:
        recorder, _current = _current, None
        if recorder is not None:
            recorder.close(reason, timeout)
        _restore_environment()


def current() -> Recorder | Nothing:
    """This process's recorder, or the one that records nothing."""
    return _current or NOTHING


def mode() -> Mode:
    """The mode in force in this process: `fast`, `consistency`, `on_missing`.

    Before init() it is what the environment says; raises ConfigError where that is malformed. Consistency is `off`
    wherever nothing is recorded, unless it is strict, which holds without a ledger as well.
    """
    return from_environment() if _current is None else _current.mode


def token_name(tokens: Any) -> str | None:
    """A name of 16 hex digits for token ids, the same wherever they are the same; None under `redaction = drop`.

    Without the key of `redaction = hash` nobody can tell whose tokens it stands for.
    """
    recorder = acting()
    redaction = recorder.config.redaction if isinstance(recorder, Recorder) else Redaction("none")
    return redaction.name_of(token_digest(tokens))


def recording() -> bool:
    """Whether record() keeps anything in this process; decides it now where nothing has decided it yet."""
    return (_first_use() if _current is None else _current).enabled


def swap(recorder: Recorder | Nothing | None) -> Recorder | Nothing | None:
    """Puts `recorder` in force and returns the one before; closes nothing (for `testing.capture`)."""
    global _current
    with _lock:
        before, _current = _current, recorder
        return before


def _open(url: str | os.PathLike[str] | None, options: Options, parent_writer: str | None) -> Recorder | Nothing:
    global _current
    with _lock:
        asked = load_mode(options.get("mode"), options.get("on_missing"), _environment_before())
        options = {**options, "mode": asked.pair, "on_missing": asked.on_missing}
        config = None if disabled() else load_config(url, parent_writer=parent_writer, **options)
        if config is None or not config.recording:
            close("reinit", timeout=0)
            nothing = Nothing(in_force(asked, config is not None))
            _current = nothing
            _export(missing_exports(nothing.mode))
            return nothing
        close("reinit", timeout=0)
        recorder = Recorder(config)
        _current = recorder
        named = f"{config.spool_named}:{config.spool}" if config.spool_named else str(config.spool)
        role = config.writer_opened["role"]
        _export(dict(zip(_EXPORTED, (config.url, config.run_id, role, named, recorder.writer_id))))
        _export(exports(config.mode))
        redaction = config.redaction
        if redaction.mode != (os.environ.get("RLK_REDACTION") or "none"):  # a child must not let out what we do not
            _export({"RLK_REDACTION": redaction.mode})
        if redaction.mode != "none":
            _say_redaction(redaction.text)
        return recorder


@functools.cache
def _say_redaction(text: str) -> None:
    """Once a process, however often it opens a writer."""
    _log.warning("redaction: %s", text)


def _first_use() -> Recorder | Nothing:
    """record() before init(): a child of a recording process initialises itself; anything else stays off."""
    global _current
    with _lock:
        if _current is not None:
            return _current
        if disabled() or not os.environ.get("RLK_LEDGER"):
            _current = _unrecorded()
        elif not os.environ.get("RLK_RUN_ID"):
            _current = _unrecorded()
            _log.warning("RLK_LEDGER is set, RLK_RUN_ID is not and init() was not called: nothing is recorded")
        else:
            _current = _self_initialised()
        return _current


def _unrecorded() -> Nothing:
    """What stands in where no recorder can be opened, in the mode the environment asks for."""
    try:
        return Nothing(in_force(load_mode(), has_ledger=False))
    except ConfigError as error:
        if _raises():
            raise
        _log.warning("the mode is off: %s", error)
        return NOTHING


def _raises() -> bool:
    return "PYTEST_CURRENT_TEST" in os.environ or os.environ.get("RLK_ON_ERROR") == "raise"


def _self_initialised() -> Recorder | Nothing:
    try:
        return _open(None, {}, parent_writer=os.environ.get("RLK_PARENT_WRITER") or None)
    except RlkError as error:
        if _raises():
            raise
        _log.warning("nothing is recorded by this process: %s", error)
        return NOTHING


def _export(variables: dict[str, str]) -> None:
    """Lets spawned children find the ledger; close() puts back what was there."""
    for name, value in variables.items():
        _before.setdefault(name, os.environ.get(name))
        os.environ[name] = value


def _environment_before() -> dict[str, str]:
    """The environment without what an earlier init() exported for children: its mode is not that of the next one."""
    return {name: value for name, value in {**os.environ, **_before}.items() if value is not None}


def _restore_environment() -> None:
    for name, value in _before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    _before.clear()


def _at_exit() -> None:
    if isinstance(_current, Recorder):
        _current.close("exit")


def _after_fork_in_child() -> None:
    global _lock
    _lock = threading.RLock()  # another thread of the parent may have held it


atexit.register(_at_exit)
os.register_at_fork(after_in_child=_after_fork_in_child)
