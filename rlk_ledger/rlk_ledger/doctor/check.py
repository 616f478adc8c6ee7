"""One line of a doctor's report, and what the whole comes to."""

from collections.abc import Callable, Iterable, Iterator
from typing import Literal

import msgspec

from rlk_ledger_schemas.errors import RlkError

State = Literal["ok", "note", "warn", "fail", "unknown", "skipped"]


class Check(msgspec.Struct, frozen=True):
    """What was looked at, how it stands, what was seen and what to do.

    `ok`: looked at and fine. `note`: a fact nobody has to act on. `warn`: works, with a risk that is named. `fail`:
    recording or shipping does not work as it stands. `unknown`: it could not be told, which is not fine. `skipped`:
    not asked for.
    """

    name: str
    state: State
    text: str
    advice: str | None = None


Group = Callable[[], Iterable[Check]]


def guarded(name: str, group: Group) -> Iterator[Check]:
    """The checks of `group`; one that breaks off becomes `unknown` with its reason, never silence."""
    try:
        yield from group()
    except RlkError as error:
        yield Check(name, "fail", str(error))
    except Exception as error:
        yield Check(name, "unknown", f"it could not be told: {type(error).__name__}: {error}", "run with --debug")


def exit_code(checks: Iterable[Check]) -> int:
    """1 where something fails, 3 where something is unknown, else 0."""
    states = {check.state for check in checks}
    return 1 if "fail" in states else 3 if "unknown" in states else 0
