"""Writing a report: rendered, put in place in one step, and recorded."""

import contextlib
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rlk_ledger_replay.report.gather import gather
from rlk_ledger_replay.report.page import render
from rlk_ledger_replay.report.text import ReportError
from rlk_ledger_schemas.errors import RlkError
from rlk_ledger_schemas.fingerprints import sha256

if TYPE_CHECKING:
    from rlk_ledger.ledger import Ledger


@dataclass(frozen=True)
class ReportInfo:
    """A report written: where, its digest (`sha256:` of the file), its size, and the verdict it leads with.

    `recorded` says whether the ledger took the `report.written` event; `warning` why not, where it was asked to.
    """

    path: Path
    digest: str
    bytes: int
    verdict: str
    exit_code: int | None
    recorded: bool = False
    warning: str = ""


def write_report(ledger: "Ledger", run_id: str, path: str | os.PathLike[str], *, record: bool = True) -> ReportInfo:
    """Writes the report of a run to `path`: whole or not at all.

    record: whether a `report.written` event is added to the ledger. Raises LedgerError when the run does not exist or
    cannot be read, ReportError when the file cannot be written.
    """
    report = gather(ledger, run_id)
    data = render(report).encode("utf-8", errors="backslashreplace")
    target = Path(path)
    place(target, data)
    fields = report.lead.verdict or {}
    digest = sha256(data)
    warning = _record(ledger, run_id, digest, len(data), target.name) if record else ""
    return ReportInfo(
        path=target,
        digest=digest,
        bytes=len(data),
        verdict=str(fields.get("verdict") or "inconclusive"),
        exit_code=fields.get("exit_code"),
        recorded=record and not warning,
        warning=warning,
    )


def _record(ledger: "Ledger", run_id: str, digest: str, size: int, name: str) -> str:
    """Records the report; returns why it could not be, empty when it was. The file is good either way."""
    try:
        with ledger.writer(run_id, role="replay") as writer:
            writer.record("report.written", digest=digest, bytes=size, name=name)
    except RlkError as error:
        return f"the report is written, but the ledger did not take the event that says so: {error}"
    return ""


def place(target: Path, data: bytes) -> None:
    """Puts `data` at `target` in one step; raises ReportError that says why it cannot."""
    if target.is_dir():
        raise ReportError(f"{target} is a folder; name the HTML file to write.")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name[:64]}.", suffix=".tmp")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            Path(temporary).chmod(0o644)
            Path(temporary).replace(target)
        except OSError:
            with contextlib.suppress(OSError):
                Path(temporary).unlink()
            raise
    except OSError as error:
        raise ReportError(f"{target} cannot be written ({error.strerror or error}); name another place.") from None
