"""Checkpoints kept elsewhere, as files or at an anchor: evidence the bucket's owner could not touch."""

import os
from collections.abc import Sequence
from pathlib import Path

from rlk_ledger import layout
from rlk_ledger.anchors import read_anchor
from rlk_ledger.verify.checkpoints import Copy
from rlk_ledger.verify.finding import Finding, finding
from rlk_ledger_schemas.checkpoints import Checkpoint, decode_checkpoint
from rlk_ledger_schemas.errors import FormatError, UsageError
from rlk_ledger_schemas.objects import LedgerInfo, check_run_id


def read_copies(
    given: Sequence[str | os.PathLike[str] | Checkpoint],
    anchor: str | None,
    ledger: LedgerInfo | None,
    run_id: str | None,
    findings: list[Finding],
) -> list[Copy]:
    """The copies in `given` (files, or decoded) and at the URL `anchor`; for one run only when `run_id` is given.

    What an anchor lacks or holds in vain is a finding. Raises UsageError for a file that is no checkpoint, or one of
    another run than `run_id`; StoreError when the anchor cannot be read.
    """
    copies = [_copy(item) for item in given]
    other = next((c for c in copies if run_id is not None and c.checkpoint.info.run_id != run_id), None)
    if other is not None:
        raise UsageError(f"{other.where} is a checkpoint of run {other.checkpoint.info.run_id!r}, not of {run_id!r}.")
    if anchor is not None:
        copies += _anchored(anchor, ledger, run_id, findings)
    return copies


def copies_of(copies: Sequence[Copy], run_id: str) -> list[Copy]:
    """The copies of one run, the newest first: it says the most."""
    mine = [copy for copy in copies if copy.checkpoint.info.run_id == run_id]
    return sorted(mine, key=lambda copy: -copy.checkpoint.k)


def _copy(item: str | os.PathLike[str] | Checkpoint) -> Copy:
    if isinstance(item, Checkpoint):
        return Copy(f"the copy of checkpoint {item.k}", item)
    where = os.fspath(item)
    try:
        found = decode_checkpoint(Path(where).read_bytes(), where)
        check_run_id(found.info.run_id)
    except OSError as error:
        raise UsageError(f"--checkpoint {where}: {error.strerror}.") from None
    except FormatError as error:
        raise UsageError(f"--checkpoint: {error} Give the file `rlk-ledger checkpoint -o` wrote.") from None
    return Copy(where, found)


def _anchored(url: str, ledger: LedgerInfo | None, run_id: str | None, findings: list[Finding]) -> list[Copy]:
    where = layout.run_root(run_id) if run_id is not None else layout.LEDGER
    if ledger is None:
        findings.append(
            finding("anchor.unusable", where, f"ledger.json does not say which ledger to look for at {url}")
        )
        return []
    notes = read_anchor(url, ledger.ledger_id, run_id)
    out = []
    for note in notes:
        if note.checkpoint is not None:
            out.append(Copy(note.where, note.checkpoint))
        else:
            findings.append(finding("anchor.unusable", where, f"{note.where}: {note.problem}"))
    if not notes:
        what = f"run {run_id!r}" if run_id is not None else "any run"
        text = f"{url} holds nothing of {what} of ledger {ledger.ledger_id}; `rlk-ledger anchor` puts it there"
        findings.append(finding("anchor.unusable", where, text))
    return out
