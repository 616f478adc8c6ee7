"""Waiting for what another process or thread does."""

import time
from collections.abc import Callable
from typing import TypeVar

_Found = TypeVar("_Found")


def wait_for(what: Callable[[], _Found], timeout: float = 180.0) -> _Found:
    """The first answer of `what` that is true; fails after `timeout` seconds, far beyond what a busy machine needs."""
    deadline = time.monotonic() + timeout
    while not (found := what()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)
    return found
