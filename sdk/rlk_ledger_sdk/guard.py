"""Keeps a mistake of an integration out of the job it watches."""

from collections.abc import Iterator
from contextlib import contextmanager

from rlk_ledger_sdk.api import current


@contextmanager
def guarded(what: str) -> Iterator[None]:
    """Turns an exception of the enclosed code into one warning and an `internal` gap that names `what`.

    Under `on_error=raise` (the default under pytest) it is raised as well.
    """
    try:
        yield
    except Exception as error:
        current().failed(what, error)
