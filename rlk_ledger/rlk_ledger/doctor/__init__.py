"""What a job will meet here: one line a check, and unknown is never fine.

    check.py    a line, and what the whole comes to      spool.py    place, space, leftovers, shipper
    bucket.py   rights, put-if-absent, latency, clock    machine.py  versions, limits, container
    estimate.py bytes and requests before a run          plug-ins: entry points of the group `rlk_ledger.checks`

A plug-in is a function without arguments that yields `Check`s.
"""

import importlib.metadata
import os
from collections.abc import Callable, Iterator
from functools import partial

from rlk_ledger.doctor.bucket import check_bucket
from rlk_ledger.doctor.check import Check, Group, guarded
from rlk_ledger.doctor.machine import (
    check_clock,
    check_configuration,
    check_container,
    check_limits,
    check_versions,
)
from rlk_ledger.doctor.spool import check_leftovers, check_spool
from rlk_ledger_schemas.errors import ConfigError
from rlk_ledger_sdk.config import spool_place

GROUP = "rlk_ledger.checks"


def doctor(
    url: str | None, spool: str | None = None, tell: Callable[[str], None] = lambda name: None
) -> Iterator[tuple[str, Check]]:
    """(section, check) of everything there is to look at, as it is found; `tell` hears which section comes next.

    `url` None skips the store; `spool` None looks at RLK_SPOOL or the default.
    """
    for section, group in (*_own(url, spool), *plugins()):
        tell(section)
        for check in guarded(section, group):
            yield section, check


def _own(url: str | None, spool: str | None) -> list[tuple[str, Group]]:
    groups: list[tuple[str, Group]] = [
        ("versions", partial(check_versions, url)),
        ("configuration", partial(check_configuration, url)),
    ]
    try:
        folder, named = spool_place(spool)
        groups += [
            ("spool", partial(check_spool, folder, named, os.environ)),
            ("leftovers", partial(check_leftovers, folder)),
        ]
    except ConfigError as error:
        wrong = Check("spool place", "fail", str(error).removeprefix("init: "))
        groups.append(("spool", lambda: [wrong]))
    if url is None:
        text = "the store was not looked at: no ledger is named"
        groups.append(("store", lambda: [Check("store", "skipped", text, "give --ledger URL or set RLK_LEDGER")]))
    else:
        groups.append(("store", partial(check_bucket, url)))
    return [*groups, ("limits", check_limits), ("clock", check_clock), ("container", check_container)]


def plugins() -> list[tuple[str, Group]]:
    """The checks of other packages, by entry point; one that cannot be loaded is `unknown`."""
    found = sorted(importlib.metadata.entry_points(group=GROUP), key=lambda entry: entry.name)
    return [(entry.name, partial(_loaded, entry)) for entry in found]


def _loaded(entry: importlib.metadata.EntryPoint) -> Iterator[Check]:
    yield from entry.load()()
