"""Opening a framework worker's writer from its environment, once, at the first hook that runs in it."""

import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

from rlk_ledger_sdk import api
from rlk_ledger_sdk.config import disabled

_log = logging.getLogger("rlk_ledger")
_decided: set[int] = set()
"""Process ids in which `opened` has opened a writer or found that there is none to open."""


def opened(name: str, role: str, engine: str, more: Callable[[], Mapping[str, Any]]) -> bool:
    """Whether this process records, after opening its writer where RLK_LEDGER and RLK_RUN_ID say where.

    name: the framework, for warnings. more: further options of init(), asked for only when a writer is opened. A writer
    that the job opened itself is used as it is. Raises nothing: a writer that cannot be opened is one warning.
    """
    if api.current().enabled:
        return True
    pid = os.getpid()
    if pid in _decided:
        return False
    _decided.add(pid)
    if disabled() or not os.environ.get("RLK_LEDGER"):
        return False
    if not os.environ.get("RLK_RUN_ID"):
        _log.warning(
            "%s: RLK_LEDGER is set and RLK_RUN_ID is not, so the processes of one job would record as many runs: "
            "nothing is recorded; set both in the job's runtime_env",
            name,
        )
        return False
    try:
        api.init(**{"role": role, "engine": {"name": engine}, **more()})
    except Exception as error:  # a framework that is half set up answers questions about itself with anything
        _log.warning("%s: nothing is recorded by this process: %s", name, error)
    return api.current().enabled
