"""Writing into a ledger from the inside: replay, audit and importers are writers like any other."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlk_ledger.service import ship_once
from rlk_ledger_schemas.errors import ConfigError, LedgerError, StoreError
from rlk_ledger_sdk.config import load_config
from rlk_ledger_sdk.recorder import Recorder

if TYPE_CHECKING:
    from rlk_ledger.ledger import Ledger

ABOUT = frozenset({"replay", "retention"})
"""Roles that write about what others recorded."""


@contextlib.contextmanager
def writer(
    ledger: "Ledger",
    run_id: str,
    role: str = "replay",
    *,
    roles: dict[str, int] | None = None,
    all_or_nothing: bool = False,
    **options: Any,
) -> Iterator[Recorder]:
    """A recorder with a private spool, committed when the block ends (also when it raises, unless `all_or_nothing`).

    The run is joined as it is declared; a run that does not exist yet is declared with `roles`. `options` are those of
    `init()`. Raises ConfigError for bad options, StoreError when the bucket does not take the events: they then stay
    in the spool directory the message names.
    """
    spool = Path(tempfile.mkdtemp(prefix="rlk-writer-"))
    done = False
    try:
        config = load_config(
            ledger.url,
            run_id=run_id,
            role=role,
            rank=0,
            world_size=1,
            spool=spool,
            shipper="off",
            on_error="raise",
            **{**_as_declared(ledger, run_id, role, roles or {role: 1}), **options},
        )
        if config is None:  # pragma: no cover - a Ledger always has a URL
            raise ConfigError("the ledger has no URL.")
        recorder = Recorder(config)
        complete = not all_or_nothing
        try:
            yield recorder
            complete = True
        finally:
            recorder.close("close", timeout=0.0)
            errors = ship_once(spool, keep=False) if complete else []
            done = not errors
            ledger.forget(run_id)
        if errors:
            raise StoreError(f"{errors[0]} The events are kept: `rlk-ledger recover {spool}` ships them later.")
    finally:
        if done:
            shutil.rmtree(spool, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                spool.rmdir()


def _as_declared(ledger: "Ledger", run_id: str, role: str, roles: dict[str, int]) -> dict[str, Any]:
    """The options that make this writer agree with run.json.

    Who only writes about a run needs no key to hide its tokens: he has none, and `drop` promises as much as `hash`.
    """
    try:
        info = ledger.run(run_id).info
    except LedgerError:
        return {"roles": roles, "mode": {"fast": "off", "consistency": "audit"}}
    mode = {"fast": "off", **info.mode}
    if mode.get("consistency", "off") == "off":
        mode["consistency"] = "audit"
    keyless = role in ABOUT and info.redaction == "hash" and not os.environ.get("RLK_REDACTION_KEY")
    redaction = "drop" if keyless else info.redaction
    return {"roles": info.roles or roles, "mode": mode, "redaction": redaction, "lineage": info.lineage}
