"""Is the ledger intact? Every object against every other that speaks of it.

`self`, chain and file digests catch a change of any bit; gaps in a chain or in a writer's numbers catch a removal;
`deep` recomputes every event's leaf and every column. What no checkpoint covers can still be removed from the tail of
a chain together with its segment: then its writers show as open, and only a checkpoint would tell.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from rlk_ledger import layout
from rlk_ledger.ledger import Ledger
from rlk_ledger.store import Missing, Store, open_store
from rlk_ledger.tombstones import Graves
from rlk_ledger.verify.chains import check_chains
from rlk_ledger.verify.finding import KINDS, Finding, VerifyResult, finding, result
from rlk_ledger.verify.pruned import check_pruned, graves_of
from rlk_ledger.verify.segment import check_segment
from rlk_ledger.verify.writers import check_writers
from rlk_ledger_schemas.errors import FormatError, LedgerError
from rlk_ledger_schemas.objects import LedgerInfo, Receipt, check_run_id, decode_ledger

__all__ = ["KINDS", "Finding", "Progress", "VerifyResult", "check_segment", "verify"]

Progress = Callable[[int, int], None]
"""Called with (bytes checked so far, bytes in all)."""


def verify(
    target: Ledger | Store | str, run_id: str | None = None, deep: bool = False, progress: Progress | None = None
) -> VerifyResult:
    """Checks one run, or every run, of the ledger at `target` (a Ledger, a Store or a URL).

    Damage is a finding, never an exception. Raises UsageError for a malformed run id, LedgerError when there is no
    ledger or no such run at all, StoreError when the store cannot be read.
    """
    store = open_store(target) if isinstance(target, str) else target.store if isinstance(target, Ledger) else target
    findings: list[Finding] = []
    info, ledger_bytes = _ledger_info(store, findings)
    names = store.children(layout.RUNS)
    if run_id is not None and check_run_id(run_id) not in names:
        raise LedgerError(f"no run {run_id!r} in {store.url}; `rlk-ledger runs` lists what is there.")
    runs = [run_id] if run_id is not None else [name for name in names if _is_name(name)]
    receipts: list[Receipt] = []
    chains = [(run, check_chains(store, run, info, ledger_bytes)) for run in runs]
    size = sum(receipt.segment.bytes for _, chain in chains for receipt in chain.receipts)
    done = _Counter(size, progress)
    for run, chain in chains:
        findings += chain.findings
        graves = graves_of(store, run, chain.receipts)
        damaged, absent = _check_segments(store, run, chain.receipts, graves, deep, done, findings)
        findings += check_pruned(store, run, chain.receipts, graves, absent)
        findings += check_writers(store, run, chain.receipts, chain.info, damaged, graves)
        receipts += chain.receipts
    return result(
        list(dict.fromkeys(findings)),
        deep=deep,
        runs=len(runs),
        receipts=len(receipts),
        segments=len({r.segment.name for r in receipts}),
        events=sum(r.segment.rows for r in receipts),
        size=size,
    )


def _ledger_info(store: Store, findings: list[Finding]) -> tuple[LedgerInfo | None, bytes]:
    try:
        data = store.read(layout.LEDGER)
    except Missing:
        if not store.children(layout.RUNS):
            raise LedgerError(f"no ledger at {store.url}: {layout.LEDGER} is not there; check the URL.") from None
        findings.append(finding("ledger.unreadable", layout.LEDGER, "ledger.json is gone"))
        return None, b""
    try:
        return decode_ledger(data), data
    except FormatError as error:
        findings.append(finding("ledger.unreadable", layout.LEDGER, str(error)))
        return None, data


def _is_name(name: str) -> bool:
    try:
        check_run_id(name)
    except ValueError:
        return False
    return True


class _Counter:
    """Adds up bytes for the progress callback; owned by the thread that collects results."""

    def __init__(self, size: int, progress: Progress | None) -> None:
        self.size = size
        self.done = 0
        self.progress = progress

    def add(self, count: int) -> None:
        self.done += count
        if self.progress is not None:
            self.progress(self.done, self.size)


def _check_segments(
    store: Store,
    run_id: str,
    receipts: Sequence[Receipt],
    graves: Graves,
    deep: bool,
    done: _Counter,
    findings: list[Finding],
) -> tuple[set[str], set[str]]:
    """Checks the segments on as many threads as there are cores (hashing frees the interpreter).

    Returns the paths of the damaged ones and the names of those that are gone as a tombstone says.
    """
    damaged, absent = set(), set()
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for receipt, found in zip(
            receipts, pool.map(lambda r: check_segment(store, run_id, r, deep), receipts), strict=True
        ):
            done.add(receipt.segment.bytes)
            if receipt.segment.name in graves.by_name and [f.kind for f in found] == ["segment.missing"]:
                absent.add(receipt.segment.name)
                continue
            findings += found
            if any(f.severity == "error" for f in found):
                damaged.add(layout.segment_path(run_id, receipt.segment.name))
    return damaged, absent
