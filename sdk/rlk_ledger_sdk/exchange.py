"""Small facts of several ranks brought to one of them, through the key-value store that torch.distributed keeps anyway.

No collective is entered, so ranks that diverge (one does not record, one died) cannot hang a job: the rank that
collects waits for a bounded time, the others never wait.
"""

import contextlib
import sys
import time
from collections.abc import Sequence
from typing import Any

from rlk_ledger_schemas.errors import UsageError

TIMEOUT_S = 30.0
"""How long the rank that collects waits for the others: they arrive together, right after an export."""

_POLL_S = (0.001, 0.05)
"""First and longest pause between two looks at the store."""


def give(key: str, rank: int, payload: bytes) -> None:
    """Leaves this rank's payload under `key`."""
    _store().set(_name(key, rank), payload)


def collect(key: str, ranks: Sequence[int], timeout_s: float) -> list[bytes]:
    """The payloads of `ranks` under `key`, in their order; takes them away.

    Raises UsageError that names the ranks which gave nothing within `timeout_s` seconds.
    """
    store, deadline, pause = _store(), time.monotonic() + timeout_s, _POLL_S[0]
    missing = list(ranks)
    while missing:
        missing = [rank for rank in missing if not store.check([_name(key, rank)])]
        if missing and time.monotonic() > deadline:
            raise UsageError(
                f"ranks {missing} gave nothing for {key!r} within {timeout_s:g} s; every rank that holds a part of the "
                "weights must record and make the same call."
            )
        if missing:
            time.sleep(pause)
            pause = min(2 * pause, _POLL_S[1])
    return [_take(store, _name(key, rank)) for rank in ranks]


def _take(store: Any, name: str) -> bytes:
    payload = bytes(store.get(name))
    with contextlib.suppress(RuntimeError, NotImplementedError):  # a store that cannot delete keeps a few kilobytes
        store.delete_key(name)
    return payload


def _name(key: str, rank: int) -> str:
    return f"rlk-ledger/{key}/{rank}"


def _store() -> Any:
    """The store of the default process group: torch has no public name for it."""
    return sys.modules["torch"].distributed.distributed_c10d._get_default_store()
