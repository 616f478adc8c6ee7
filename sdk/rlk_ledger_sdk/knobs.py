"""Settings of an engine as requested, materialised and actually in force: three facts, recorded as one event."""

from typing import Any, Final

from rlk_ledger_sdk.api import record
from rlk_ledger_sdk.reference import Reference


class _Unobservable:
    def __repr__(self) -> str:
        return "UNOBSERVABLE"


UNOBSERVABLE: Final = _Unobservable()
"""The actual value of a setting that the engine shows nowhere."""

LEFT_OPEN: Final = (None, "auto", "default")
"""Requests that leave the choice to the engine: any value in force grants them."""


def read_back(
    path: str,
    *,
    requested: Any,
    actual: Any,
    evidence: str,
    lifecycle: str,
    materialized: Any = None,
) -> Reference:
    """Records one `knob.applied`; `status` follows from the values.

    requested: what the user asked for; None, "auto" and "default" ask for nothing. materialized: what the engine's
    configuration made of it. actual: what the running engine shows, or UNOBSERVABLE. evidence: where `actual` was read.
    lifecycle: request, engine, process_group, process or build.
    """
    status = "applied" if requested in LEFT_OPEN or actual == requested else "fallback"
    if actual is UNOBSERVABLE:
        status, actual = "unobservable", None
    return record(
        "knob.applied",
        path=path,
        requested="default" if requested is None else requested,
        materialized=materialized,
        actual=actual,
        status=status,
        evidence=evidence,
        lifecycle=lifecycle,
    )
