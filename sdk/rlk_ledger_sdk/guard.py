"""Keeps a mistake of an integration out of the job it watches."""

from collections.abc import Iterator
from contextlib import contextmanager

from rlk_ledger_schemas.errors import SpoolError
from rlk_ledger_sdk.api import current


@contextmanager
def guarded(what: str) -> Iterator[None]:
    """Turns an exception of the enclosed code into one warning and an `internal` gap that names `what`.

    Under `on_error=raise` (the default under pytest) it is raised as well. An audit event without room passes through
    under `consistency=strict`, which asks for that: whoever wants an auditable run must not get another one.
    """
    try:
        yield
    except SpoolError:  # only strict raises it
        raise
    except Exception as error:
        current().failed(what, error)
