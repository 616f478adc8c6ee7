"""Is the ledger intact? Every object against every other that speaks of it.

`self`, chain and file digests catch a change of any bit; gaps in a chain or in a writer's numbers catch a removal;
`deep` recomputes every event's leaf and every column. Checkpoints catch what is changed or cut from the end of a chain;
copies of them kept elsewhere catch what is done to the checkpoints. What no checkpoint covers and no registered key
signed can still be removed from the end of a chain together with its segment: that is said, by count.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from rlk_ledger import layout, signing
from rlk_ledger.ledger import Ledger
from rlk_ledger.store import Missing, Store, open_store
from rlk_ledger.tombstones import Graves
from rlk_ledger.verify.canary import check_canaries, check_promise
from rlk_ledger.verify.chains import Chains, check_chains
from rlk_ledger.verify.checkpoints import Copy, check_checkpoints
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

_AGAIN = 3
_MAY_BE_PRUNE = frozenset({"segment.missing", "prune.unvouched", "seqs.missing", "rank.missing", "seal.differs"})
"""What a prune looks like that began after the receipts were listed: then the run is looked at again, a few times."""

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
    chains = [(run, check_chains(store, run, info, ledger_bytes)) for run in runs]
    done = _Counter(sum(receipt.segment.bytes for _, chain in chains for receipt in chain.receipts), progress)
    checked: list[_Checked] = []
    for run, chain in chains:
        check = _RunCheck(store, run, info, copies_of(copies, run), publics, deep, done)
        found = check.check(chain)
        for _ in range(_AGAIN):
            if _MAY_BE_PRUNE.isdisjoint(f.kind for f in found.findings) or not check.went_on(found.chains):
                break
            found = check.check(check_chains(store, run, info, ledger_bytes))
        checked.append(found)
        findings += found.findings
    receipts = [receipt for found in checked for receipt in found.chains.receipts]
    return result(
        list(dict.fromkeys(findings)),
        deep=deep,
        runs=len(runs),
        receipts=len(receipts),
        segments=len({r.segment.name for r in receipts}),
        events=sum(r.segment.rows for r in receipts),
        size=sum(r.segment.bytes for r in receipts),
        pruned=sum(found.pruned for found in checked),
        checkpoints=tuple(found.covered for found in checked),
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
        self.done = min(self.done + count, self.size)
        if self.progress is not None:
            self.progress(self.done, self.size)


class _Checked(NamedTuple):
    """What became of one run: its chains as they were read, what is covered, how many segments are pruned."""

    chains: Chains
    findings: list[Finding]
    covered: Covered
    pruned: int


class _RunCheck(NamedTuple):
    """The check of one run, as often as it has to be done; `copies` are those of the run."""

    store: Store
    run_id: str
    ledger: LedgerInfo | None
    copies: Sequence[Copy]
    keys: Sequence[bytes]
    deep: bool
    done: "_Counter"

    def check(self, chains: Chains) -> _Checked:
        """Everything there is to say about the run, given its chains. Raises StoreError."""
        store, run, receipts = self.store, self.run_id, chains.receipts
        coverage = check_checkpoints(store, run, self.ledger, chains, self.copies, self.keys)
        findings = chains.findings + coverage.findings
        graves = graves_of(store, run, receipts)
        damaged, absent = self._check_segments(receipts, graves, findings)
        findings += check_promise(chains.info, layout.run_json(run))
        findings += check_index(store, run, receipts, [name for name, _ in chains.listing])
        findings += check_seal(store, run, self.ledger, chains, coverage, self.keys)
        vouched = Vouched(coverage, self.copies, bool(self.keys))
        findings += check_pruned(store, run, receipts, graves, absent, vouched)
        findings += check_writers(store, run, receipts, chains.info, damaged, graves)
        return _Checked(chains, findings, coverage.summary, len(absent))

    def went_on(self, chains: Chains) -> bool:
        """Whether receipts or checkpoints came since `chains` were listed."""
        known = {name for name, _ in chains.listing}
        prefix = layout.run_root(self.run_id)
        return any(
            entry.path.removeprefix(f"{prefix}/") not in known
            for folder in ("receipt", "checkpoint")
            for entry in self.store.list(f"{prefix}/{folder}")
        )

    def _check_segments(
        self, receipts: Sequence[Receipt], graves: Graves, findings: list[Finding]
    ) -> tuple[set[str], set[str]]:
        """Checks the segments on as many threads as there are cores (hashing frees the interpreter).

        Returns the paths of the damaged ones and the names of those that are gone as a tombstone says.
        """
        damaged, absent = set(), set()
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            for receipt, found in zip(
                receipts,
                pool.map(lambda r: check_segment(self.store, self.run_id, r, self.deep), receipts),
                strict=True,
            ):
                self.done.add(receipt.segment.bytes)
                if receipt.segment.name in graves.by_name and [f.kind for f in found] == ["segment.missing"]:
                    absent.add(receipt.segment.name)
                    continue
                findings += found
                if any(f.severity == "error" for f in found):
                    damaged.add(layout.segment_path(self.run_id, receipt.segment.name))
        return damaged, absent
