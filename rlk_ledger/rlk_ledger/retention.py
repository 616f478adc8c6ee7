"""Pruning: whole segments are deleted under a policy, after a tombstone says so; their receipts stay.

    choose ──> check each ──> tombstone committed ──> (checkpoint) ──> holds? ──> delete 64 ──> holds? ──> ...

A crash before the tombstone has changed nothing; one after it leaves segments that are still there, still read and
still checked, and the next prune under the same policy deletes them. Nothing is deleted that no tombstone names, that
is damaged, or that differs from another copy of the same events: those are evidence.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from rlk_ledger import layout
from rlk_ledger.chain import holders
from rlk_ledger.checkpoints import latest, make
from rlk_ledger.holds import refuse_held, this_person
from rlk_ledger.ledger import Ledger, Run, SegmentFile
from rlk_ledger.records import Record
from rlk_ledger.segments import read_records
from rlk_ledger.signing import load_signer
from rlk_ledger.spans import Spans, intersect, merged, repeated
from rlk_ledger.store import Missing
from rlk_ledger.summary import writer_states
from rlk_ledger.tombstones import TYPE, absent, statements
from rlk_ledger_schemas.errors import FormatError, LedgerError, StoreError, UsageError
from rlk_ledger_schemas.events.retention import PrunedSegment
from rlk_ledger_schemas.fingerprints import sha256
from rlk_ledger_schemas.objects import Receipt

_AT_ONCE = 64
"""Segments deleted between two looks for a hold."""
_PER_EVENT = 500
_EVENT_BYTES = 8 << 20
_WORKERS = 4

Progress = Callable[[int, int], None]
"""Called with (bytes so far, bytes in all)."""


class Policy(NamedTuple):
    """What may go: segments whose receipt is older than `older_than_s`, whose every step is below `before_step`; all.

    Both conditions hold where both are given. A segment without steps is never below a step.
    """

    older_than_s: float | None = None
    before_step: int | None = None
    everything: bool = False

    def check(self) -> None:
        """Raises UsageError unless it says what may go, and says it once."""
        limits = (self.older_than_s, self.before_step)
        if not self.everything and limits == (None, None):
            raise UsageError("prune what? Give --older-than, --before-step or --all.")
        if self.everything and limits != (None, None):
            raise UsageError("--all prunes every segment; give it alone.")

    def allows(self, receipt: Receipt, now_us: int) -> bool:
        """Whether the policy lets the segment of `receipt` go."""
        if self.older_than_s is not None and receipt.wall_us >= now_us - self.older_than_s * 1e6:
            return False
        if self.before_step is not None:
            steps = [t.max_step for t in receipt.types if t.max_step is not None]
            if not steps or max(steps) >= self.before_step:
                return False
        return True

    def fields(self) -> dict[str, Any]:
        """The policy as the tombstone states it."""
        given = {"older_than_s": self.older_than_s, "before_step": self.before_step, "all": self.everything or None}
        return {name: value for name, value in given.items() if value is not None}


class Pruning(NamedTuple):
    """What one prune did, or would do: segments chosen, of these those named by an earlier tombstone, and deleted.

    `stated` of the events stay as statements in the tombstone; `kept` says of how many segments outside the choice each
    thing holds.
    """

    run_id: str
    segments: int
    bytes: int
    events: int
    stated: int
    unfinished: int
    deleted: int
    kept: dict[str, int]
    dry_run: bool


def prune(
    ledger: Ledger,
    run_id: str,
    policy: Policy,
    *,
    reason: str | None = None,
    by: str | None = None,
    dry_run: bool = False,
    open_writers: bool = False,
    progress: Progress | None = None,
) -> Pruning:
    """Deletes the segments of a run that `policy` lets go.

    `open_writers` allows it while a writer has not ended: it may still record what belongs to what is pruned.
    Raises UsageError for a policy that lets nothing or too much go, LedgerError while a hold stands, for damage and
    for open writers, StoreError when the bucket refuses; each says what was deleted until then.
    """
    policy.check()
    ledger.forget(run_id)
    run = ledger.run(run_id)
    refuse_held(ledger.store, run_id)
    chosen, kept = _choose(run, policy)
    if chosen and not open_writers:
        _refuse_open(run)
    found = _examine(run, chosen, progress)
    repeated = _compare(run, found)
    fresh = [one for one in found if not _named_already(run, one)]
    size, events = (sum(getattr(one.receipt.segment, name) for one in found) for name in ("bytes", "rows"))
    stated = sum(len(one.entry.statements) for one in found)
    result = Pruning(run_id, len(found), size, events, stated, len(found) - len(fresh), 0, kept, dry_run)
    if dry_run or not found:
        return result
    if fresh:
        said = {"by": by or this_person(), "policy": policy.fields(), "reason": reason, "repeated": repeated or None}
        _commit(ledger, run_id, fresh, said)
    _refuse_unsaid(ledger.run(run_id), found)
    _checkpoint(ledger, run_id)
    _delete(ledger, run_id, found, progress)
    ledger.forget(run_id)
    return result._replace(deleted=len(found))


# -- choosing --------------------------------------------------------------------------------------------------------


def _choose(run: Run, policy: Policy) -> tuple[list[Receipt], dict[str, int]]:
    """The receipts whose segments go, and why how many others stay."""
    now_us = time.time_ns() // 1000
    allowed = [receipt for receipt in run.receipts if policy.allows(receipt, now_us)]
    gone = absent(run.store, run.run_id, [receipt.segment.name for receipt in allowed])
    graves = run.graves().by_name
    kept = {"outside the policy": len(run.receipts) - len(allowed), "holding a tombstone": 0, "pruned before": 0}
    chosen = []
    for receipt in allowed:
        name = receipt.segment.name
        if name in gone and name not in graves:
            raise LedgerError(
                f"{layout.segment_path(run.run_id, name)} is gone and no tombstone says that it was pruned: nothing "
                f"was deleted. `rlk-ledger verify {run.run_id}` says what else is damaged."
            )
        if any(t.type == TYPE for t in receipt.types):
            kept["holding a tombstone"] += 1
        elif name in gone:
            kept["pruned before"] += 1
        else:
            chosen.append(receipt)
    return chosen, {why: count for why, count in kept.items() if count}


def _refuse_open(run: Run) -> None:
    states = writer_states(run).values()
    open_ = [s["writer_id"] for s in states if s["state"] == "open" and not s["shipper"]]
    if open_:
        raise LedgerError(
            f"run {run.run_id!r} has {len(open_)} open writers ({open_[0]} ...): what they still record may need what "
            "would be pruned. Nothing was deleted; --open-writers prunes all the same."
        )


class _Found(NamedTuple):
    receipt: Receipt
    entry: PrunedSegment


def _examine(run: Run, chosen: Sequence[Receipt], progress: Progress | None) -> list[_Found]:
    """Every chosen segment read, found intact, and what of it outlives it; raises LedgerError for a damaged one."""
    size, done, out = sum(receipt.segment.bytes for receipt in chosen), 0, []
    with ThreadPoolExecutor(_WORKERS) as pool:
        for start in range(0, len(chosen), _WORKERS):  # so many in memory, and no more
            for one in pool.map(lambda receipt: _found(run, receipt), chosen[start : start + _WORKERS]):
                out.append(one)
                done += one.receipt.segment.bytes
                if progress is not None:
                    progress(done, size)
    return out


def _found(run: Run, receipt: Receipt) -> _Found:
    path = layout.segment_path(run.run_id, receipt.segment.name)
    try:
        data = run.store.read(path)
        if sha256(data) != receipt.segment.sha256:
            raise FormatError("its bytes are not those its receipt describes.")
        kept = statements(read_records(data))
    except (Missing, FormatError) as error:
        raise LedgerError(
            f"{path}: {error} Damage is evidence: nothing was deleted. `rlk-ledger verify {run.run_id}` says more."
        ) from None
    described = receipt.segment
    return _Found(receipt, PrunedSegment(described.name, described.sha256, described.rows, described.bytes, kept))


def _named_already(run: Run, found: _Found) -> bool:
    """Whether a tombstone says of the segment what a new one would say."""
    grave = run.graves().by_name.get(found.receipt.segment.name)
    return grave is not None and tuple(r.envelope for r in grave.statements) == found.entry.statements


# -- events held twice -----------------------------------------------------------------------------------------------


def _compare(run: Run, found: Sequence[_Found]) -> tuple[tuple[str, int, int], ...]:
    """Numbers of the chosen segments that another segment holds too, compared; raises LedgerError where they differ.

    Verify compares such copies whenever it looks; once one of them is gone only the tombstone can say that they agreed.
    """
    names = {one.receipt.segment.name for one in found}
    held = holders(run.receipts) if run.shared_writers else {}
    out = []
    for writer_id in sorted(run.shared_writers):
        mine = held[writer_id]
        twice = repeated(spans for _, spans in mine)
        here = merged(span for r, spans in mine if r.segment.name in names for span in intersect(spans, twice))
        if here:
            _refuse_forks(run, writer_id, [r for r, spans in mine if intersect(spans, here)], here)
            out += [(writer_id, first, last) for first, last in here]
    return tuple(out)


def _refuse_forks(run: Run, writer_id: str, holders: Sequence[Receipt], spans: Spans) -> None:
    leaves: dict[int, bytes] = {}
    for receipt in holders:
        segment = SegmentFile(layout.segment_path(run.run_id, receipt.segment.name), receipt)
        for record in run.records_of(segment):
            if record.writer_id != writer_id or not _inside(record, spans):
                continue
            if leaves.setdefault(record.seq, record.leaf) != record.leaf:
                raise LedgerError(
                    f"{segment.path}: another segment holds another event {record.seq} of writer {writer_id}: a fork "
                    f"is evidence, nothing was deleted. `rlk-ledger verify {run.run_id}` says more."
                )


def _inside(record: Record, spans: Spans) -> bool:
    return any(first <= record.seq <= last for first, last in spans)


# -- deleting --------------------------------------------------------------------------------------------------------


def _commit(ledger: Ledger, run_id: str, fresh: Sequence[_Found], said: dict[str, Any]) -> None:
    """Commits the tombstones; raises StoreError when the bucket does not take them."""
    with ledger.writer(run_id, role="retention") as recorder:
        for i, entries in enumerate(_grouped(fresh)):
            recorder.record(TYPE, segments=entries, **{**said, "repeated": said["repeated"] if i == 0 else None})


def _refuse_unsaid(run: Run, found: Sequence[_Found]) -> None:
    """Nothing is deleted that a reader of the bucket would not find named: raises LedgerError."""
    unsaid = {one.receipt.segment.name for one in found} - run.graves().by_name.keys()
    if unsaid:
        raise LedgerError(
            f"run {run.run_id!r}: no tombstone names {min(unsaid)} although one was written; run `verify`."
        )


def _grouped(fresh: Sequence[_Found]) -> Iterator[list[PrunedSegment]]:
    """The entries, so many in one event that it stays small."""
    group: list[PrunedSegment] = []
    size = 0
    for one in fresh:
        weight = sum(map(len, one.entry.statements))
        if group and (len(group) >= _PER_EVENT or size + weight > _EVENT_BYTES):
            yield group
            group, size = [], 0
        group.append(one.entry)
        size += weight
    if group:
        yield group


def _checkpoint(ledger: Ledger, run_id: str) -> None:
    """A run with checkpoints gets another, so that the tombstone is as hard to forge as what it speaks of.

    Also when an earlier prune committed the tombstone and was cut short before this.
    """
    if latest(ledger.store, run_id) is not None:
        make(ledger.store, run_id, load_signer())


def _delete(ledger: Ledger, run_id: str, found: Sequence[_Found], progress: Progress | None) -> None:
    """Deletes the segments, looking for a hold before every few; raises LedgerError or StoreError with the count."""
    names = [one.receipt.segment.name for one in found]
    sizes = [one.receipt.segment.bytes for one in found]
    with ThreadPoolExecutor(_WORKERS) as pool:
        for start in range(0, len(names), _AT_ONCE):
            refuse_held(ledger.store, run_id, f"{start} of {len(names)} segments were deleted before it was seen")
            paths = [layout.segment_path(run_id, name) for name in names[start : start + _AT_ONCE]]
            failed = [error for error in pool.map(lambda path: _deleted(ledger, path), paths) if error is not None]
            if failed:  # a delete whose reply was lost did its work
                done = len(absent(ledger.store, run_id, names))
                raise StoreError(
                    f"{done} of {len(names)} segments were deleted, then: {failed[0]} The tombstone stands, the "
                    "rest is still there and still read; prune again once the bucket allows it."
                )
            if progress is not None:
                progress(sum(sizes[: start + len(paths)]), sum(sizes))


def _deleted(ledger: Ledger, path: str) -> StoreError | None:
    try:
        ledger.store.delete(path)
    except StoreError as error:
        return error
    return None
