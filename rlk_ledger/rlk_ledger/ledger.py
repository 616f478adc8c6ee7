"""Reading a ledger: its runs, their receipts, and the events of the segments a question needs.

Receipts are the index: nothing lists segments, and a segment is opened only when its receipt says it holds a wanted
type, step or sample. Readers trust what `verify` checks; they still refuse bytes that do not decode.
"""

import contextlib
from collections.abc import Collection, Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from rlk_ledger import index, layout
from rlk_ledger.chain import holders
from rlk_ledger.receipts import Receipts
from rlk_ledger.records import Record
from rlk_ledger.segments import read_records
from rlk_ledger.store import Missing, Store, open_store
from rlk_ledger.tombstones import TYPE as TOMBSTONE
from rlk_ledger.tombstones import Graves, Pruned, absent, read_graves, summary
from rlk_ledger_schemas.arrays import Array
from rlk_ledger_schemas.codec import decode_envelope
from rlk_ledger_schemas.errors import FormatError, LedgerError
from rlk_ledger_schemas.fingerprints import sha256
from rlk_ledger_schemas.objects import FORMAT, LedgerInfo, Receipt, RunInfo, decode_ledger, decode_run

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from rlk_ledger.result import Result
    from rlk_ledger_sdk.recorder import Recorder


class SegmentFile(NamedTuple):
    """A segment some receipt names: its path below the root and that receipt."""

    path: str
    receipt: Receipt


class Run:
    """One run of a ledger; everything is read when first asked for and then kept."""

    def __init__(self, store: Store, run_id: str) -> None:
        self.store = store
        self.run_id = run_id
        self._path = layout.run_json(run_id)
        self._graves: Graves | None = None

    @cached_property
    def info(self) -> RunInfo:
        """run.json; raises LedgerError when the run does not exist or its record is damaged."""
        try:
            return decode_run(self.store.read(self._path), self._path)
        except Missing:
            raise LedgerError(self._missing()) from None
        except FormatError as error:
            raise LedgerError(f"{error} `rlk-ledger verify {self.run_id}` says what else is damaged.") from None

    def _missing(self) -> str:
        if self.store.children(f"{layout.run_root(self.run_id)}/receipt"):
            return f"{self._path} is gone; `rlk-ledger verify {self.run_id}` says what else is damaged."
        return f"no run {self.run_id!r} in {self.store.url}; `rlk-ledger runs` lists what is there."

    @cached_property
    def held(self) -> Receipts:
        """What the receipts say, as columns: from the run's indexes and the tail, or read one by one without them.

        Raises LedgerError when a receipt that has to be read does not decode, or is gone.
        """
        return index.read(self.store, self.info.ledger_id, self.run_id, self._refuse)

    @property
    def receipts(self) -> tuple[Receipt, ...]:
        """Every receipt, by shipper and then in chain order; raises LedgerError as `held` does.

        Out of an index they come without `previous` and `signature`. Of many receipts, ask `held`.
        """
        return self.held.all

    def intact_receipts(self) -> Receipts:
        """The receipts that decode. For shippers: beside a damaged receipt the worst they can do is a duplicate."""
        return index.read(self.store, self.info.ledger_id, self.run_id, lambda path, error: None)

    def _refuse(self, path: str, error: Exception) -> None:
        text = str(error) if isinstance(error, FormatError) else f"{path} is gone."
        raise LedgerError(f"{text} `rlk-ledger verify {self.run_id}` says what else is damaged.") from None

    def segments(
        self,
        types: Collection[str] | None = None,
        steps: Collection[int] | None = None,
        samples: Collection[str] | None = None,
    ) -> list[SegmentFile]:
        """The segments that may hold events of `types`, at `steps`, of `samples`; None is no limit.

        In the order of `receipts`. `samples` limits the types that are about one sample only (SAMPLE_TYPES): what
        others say may concern it.
        """
        return [
            SegmentFile(layout.segment_path(self.run_id, receipt.segment.name), receipt)
            for receipt in self.held.holding(types, steps, samples)
        ]

    @cached_property
    def shared_writers(self) -> frozenset[str]:
        """Writers of whom two receipts hold overlapping sequence numbers: a hand-over repeated some events."""
        return frozenset(writer_id for writer_id, held in self.held.writers.items() if held.shared)

    def intact(self, segment: SegmentFile) -> bytes:
        """The bytes of a segment; raises Missing, and FormatError when they are not those its receipt describes."""
        data = self.store.read(segment.path)
        if sha256(data) != segment.receipt.segment.sha256:
            raise FormatError("its bytes are not those its receipt describes.")
        return data

    def records(self, types: Collection[str] | None = None, samples: Collection[str] | None = None) -> Iterator[Record]:
        """The records of the run (of `types`, when given), segment by segment, each (writer, seq) once.

        Of a pruned segment these are the few that its tombstone states; see `pruned`. With `samples`, segments that
        hold nothing of them are not opened; those that are opened are given whole.
        """
        seen: set[tuple[str, int]] = set()
        for segment in self.segments(types, samples=samples):
            for record in self.records_of(segment, types):
                if record.writer_id in self.shared_writers:
                    if (record.writer_id, record.seq) in seen:
                        continue
                    seen.add((record.writer_id, record.seq))
                yield record

    def records_of(self, segment: SegmentFile, types: Collection[str] | None = None) -> Iterator[Record]:
        """The records of one segment, or what outlives it once it is pruned; raises LedgerError for a damaged one."""
        try:
            try:
                yield from read_records(self.intact(segment), types)
            except Missing:
                yield from self.outliving(segment, types)
        except (Missing, FormatError) as error:
            raise LedgerError(f"{segment.path}: {error} Run `rlk-ledger verify {self.run_id}`.") from None

    def outliving(self, segment: SegmentFile, types: Collection[str] | None = None) -> list[Record]:
        """The events (of `types`, when given) that outlive a pruned segment; raises Missing when none says it was."""
        grave = self.graves().by_name.get(segment.receipt.segment.name)
        if grave is None:  # it may have been pruned after the receipts were read
            self._graves = read_graves(Run(self.store, self.run_id)._mourned(), self._of_types)
            grave = self._graves.by_name.get(segment.receipt.segment.name)
        if grave is None:
            raise Missing("the segment is gone, and no tombstone says that it was pruned.")
        return [r for r in grave.statements if types is None or decode_envelope(r.envelope)["type"] in types]

    def graves(self) -> Graves:
        """What the run's tombstones say; raises LedgerError when one cannot be read."""
        if self._graves is None:
            self._graves = read_graves(self._mourned(), self._of_types)
        return self._graves

    def _mourned(self) -> tuple[Receipt, ...]:
        """Every receipt where there is a tombstone; without one, none has to be made an object."""
        return self.receipts if TOMBSTONE in self.held.types else ()

    def _of_types(self, receipt: Receipt, types: Collection[str]) -> Iterator[Record]:
        path = layout.segment_path(self.run_id, receipt.segment.name)
        try:
            yield from read_records(self.intact(SegmentFile(path, receipt)), types)
        except (Missing, FormatError) as error:
            raise LedgerError(f"{path}: {error} Run `rlk-ledger verify {self.run_id}`.") from None

    def pruned(self) -> Pruned | None:
        """How much of the run was deleted on purpose, None for nothing; what is named but still there is not."""
        graves = self.graves().by_name
        if not graves:
            return None
        gone = absent(self.store, self.run_id, graves)
        return summary([graves[name] for name in sorted(gone)], holders(self.receipts))


class Ledger:
    """An opened ledger."""

    def __init__(self, store: Store, info: LedgerInfo) -> None:
        self.store = store
        self.info = info
        self._runs: dict[str, Run] = {}

    @property
    def url(self) -> str:
        """Where the ledger is: an absolute path or a URL."""
        return self.store.url

    def runs(self, among: Collection[str] | None = None) -> list[str]:
        """Ids of the runs (those `among` some names), sorted; one that lost its run.json and has receipts is a run."""
        names = self.store.children(layout.RUNS) if among is None else sorted(among)
        return [name for name in names if self._is_run(name)]

    def _is_run(self, name: str) -> bool:
        with contextlib.suppress(ValueError):
            there = self.store.stat(layout.run_json(name)) is not None
            return there or bool(self.store.children(f"{layout.run_root(name)}/receipt"))
        return False

    def run(self, run_id: str) -> Run:
        """The run `run_id`, read once per Ledger; raises UsageError for a malformed id, LedgerError without a run."""
        if run_id not in self._runs:
            run = Run(self.store, run_id)
            _ = run.info
            self._runs[run_id] = run
        return self._runs[run_id]

    def read_events(
        self, run_id: str, types: Collection[str] | None = None, samples: Collection[str] | None = None
    ) -> Iterator[tuple[str, int, dict[str, Any], dict[str, Array]]]:
        """(writer id, seq, envelope, arrays) of the run's events, each once; of `types` only when given.

        `samples` leaves out segments without them, see `Run.records`.
        """
        for record in self.run(run_id).records(types, samples):
            yield record.writer_id, record.seq, decode_envelope(record.envelope), record.arrays

    def pruned(self) -> list[tuple[str, Pruned]]:
        """What is pruned of each run that was read through this Ledger so far."""
        read = [(run_id, run.pruned()) for run_id, run in self._runs.items()]
        return [(run_id, pruned) for run_id, pruned in read if pruned is not None]

    def forget(self, run_id: str) -> None:
        """Drops what was read of a run: the next `run(run_id)` reads it again."""
        self._runs.pop(run_id, None)

    def writer(self, run_id: str, role: str = "replay", **options: Any) -> "AbstractContextManager[Recorder]":
        """A recorder for `run_id` whose events are committed when the block ends; see `rlk_ledger.writer`."""
        from rlk_ledger.writer import writer

        return writer(self, run_id, role, **options)

    def sql(self, query: str, params: dict[str, Any] | list[Any] | None = None) -> "Result":
        """The result of a read-only query over the views, as .df(), .pl() or .arrow(); see `rlk_ledger.views`."""
        from rlk_ledger import views
        from rlk_ledger.result import Result

        return Result(views.sql(self, query, params))


def open_ledger(url: str) -> Ledger:
    """The ledger at `url` (a path or an fsspec URL); raises LedgerError when there is none or it is newer than this."""
    store = open_store(url)
    try:
        return Ledger(store, decode_ledger(store.read(layout.LEDGER)))
    except Missing:
        raise LedgerError(
            f"no ledger at {store.url}: {layout.LEDGER} is not there; check the URL "
            "(the first job that records there begins one)."
        ) from None
    except FormatError as error:
        raise LedgerError(f"{store.url}: {error}") from None


open = open_ledger  # noqa: A001 - `ledger.open` is the public name


def open_or_begin(url: str) -> Ledger:
    """The ledger at `url`; where there is none yet, one that its first writer will make."""
    try:
        return open_ledger(url)
    except LedgerError:
        store = open_store(url)
        if store.stat(layout.LEDGER) is not None:
            raise
    return Ledger(store, LedgerInfo(format=FORMAT, hash="sha256", ledger_id="", required_features=(), created_us=0))
