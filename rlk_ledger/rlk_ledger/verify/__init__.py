"""Is the ledger intact? Every object against every other that speaks of it.

`self`, chain and file digests catch a change of any bit; gaps in a chain or in a writer's numbers catch a removal;
`deep` recomputes every event's leaf and every column. Checkpoints catch what is changed or cut from the end of a chain;
copies of them kept elsewhere catch what is done to the checkpoints. What no checkpoint covers and no registered key
signed can still be removed from the end of a chain together with its segment: that is said, by count.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from rlk_ledger import layout, signing
from rlk_ledger.ledger import Ledger
from rlk_ledger.store import Missing, Store, open_store
from rlk_ledger.tombstones import Graves
from rlk_ledger.verify.canary import check_canaries, check_promise
from rlk_ledger.verify.chains import check_chains
from rlk_ledger.verify.checkpoints import check_checkpoints
from rlk_ledger.verify.copies import copies_of, read_copies
from rlk_ledger.verify.finding import KINDS, Covered, Finding, VerifyResult, finding, result
from rlk_ledger.verify.indexes import check_index
from rlk_ledger.verify.pruned import Vouched, check_pruned, graves_of
from rlk_ledger.verify.seal import check_seal
from rlk_ledger.verify.segment import check_segment
from rlk_ledger.verify.writers import check_writers
from rlk_ledger_schemas.checkpoints import Checkpoint
from rlk_ledger_schemas.errors import FormatError, LedgerError
from rlk_ledger_schemas.objects import LedgerInfo, Receipt, check_run_id, decode_ledger

__all__ = ["KINDS", "Covered", "Finding", "Progress", "VerifyResult", "check_segment", "verify"]

Progress = Callable[[int, int], None]
"""Called with (bytes checked so far, bytes in all)."""


def verify(
    target: Ledger | Store | str,
    run_id: str | None = None,
    deep: bool = False,
    progress: Progress | None = None,
    checkpoints: Sequence[str | os.PathLike[str] | Checkpoint] = (),
    keys: Sequence[str | bytes] = (),
    anchor: str | None = None,
) -> VerifyResult:
    """Checks one run, or every run, of the ledger at `target` (a Ledger, a Store or a URL).

    `checkpoints` are copies kept elsewhere (files, or decoded) that the ledger has to agree with; `anchor` is a URL
    with more of them. With `keys` (vkeys, files that hold one, or 32 bytes) only checkpoints signed by one of them
    cover anything. Damage is a finding, never an exception. Raises UsageError for a malformed run id, copy or key,
    LedgerError when there is no ledger or no such run at all, StoreError when a store cannot be read.
    """
    store = open_store(target) if isinstance(target, str) else target.store if isinstance(target, Ledger) else target
    findings: list[Finding] = []
    info, ledger_bytes = _ledger_info(store, findings)
    findings += [*check_canaries(store), *check_promise(info, layout.LEDGER)]
    publics = signing.public_keys(keys)
    copies = read_copies(checkpoints, anchor, info, run_id, findings)
    names = store.children(layout.RUNS)
    if run_id is not None and check_run_id(run_id) not in names and not copies_of(copies, run_id):
        raise LedgerError(f"no run {run_id!r} in {store.url}; `rlk-ledger runs` lists what is there.")
    everywhere = {*filter(_is_name, names), *(copy.checkpoint.info.run_id for copy in copies)}
    runs = [run_id] if run_id is not None else sorted(everywhere)
    receipts: list[Receipt] = []
    covered: list[Covered] = []
    pruned = 0
    chains = [(run, check_chains(store, run, info, ledger_bytes)) for run in runs]
    size = sum(receipt.segment.bytes for _, chain in chains for receipt in chain.receipts)
    done = _Counter(size, progress)
    for run, chain in chains:
        coverage = check_checkpoints(store, run, info, chain, copies_of(copies, run), publics)
        findings += chain.findings + coverage.findings
        covered.append(coverage.summary)
        graves = graves_of(store, run, chain.receipts)
        damaged, absent = _check_segments(store, run, chain.receipts, graves, deep, done, findings)
        pruned += len(absent)
        findings += check_promise(chain.info, layout.run_json(run))
        findings += check_index(store, run, chain.receipts, [name for name, _ in chain.listing])
        findings += check_seal(store, run, info, chain, coverage, publics)
        vouched = Vouched(coverage, copies_of(copies, run), bool(publics))
        findings += check_pruned(store, run, chain.receipts, graves, absent, vouched)
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
        pruned=pruned,
        checkpoints=tuple(covered),
        copies=len(copies),
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
