"""A ledger from events at hand, without a recorder: what tests, importers and the golden ledger use."""

from collections.abc import Iterable, Mapping
from typing import Any

from rlk_ledger.chain import Chain, Ending
from rlk_ledger.contact import meet
from rlk_ledger.ledger import Ledger, open_ledger
from rlk_ledger.records import Record, make_record
from rlk_ledger.store import open_store
from rlk_ledger_schemas.arrays import Array
from rlk_ledger_schemas.errors import EventError
from rlk_ledger_schemas.events import SCHEMA_VERSION, check_fields, encode
from rlk_ledger_schemas.objects import FORMAT, RunInfo, check_run_id

Item = tuple[str, int, bytes | dict[str, Any], dict[str, Array]]


def event(
    run_id: str, writer_id: str, seq: int, type_name: str, *, wall_ns: int = 0, mono_ns: int = 0, **fields: Any
) -> Record:
    """The record `record(type_name, **fields)` would write as number `seq` of `writer_id`; raises EventError."""
    assigned = {
        "schema_version": SCHEMA_VERSION,
        "seq": seq,
        "wall_ns": wall_ns,
        "mono_ns": mono_ns,
        "run_id": run_id,
        "writer_id": writer_id,
    }
    wire, arrays = check_fields(type_name, fields, assigned)
    return make_record(encode(wire), arrays)


def build(
    url: str,
    run_id: str,
    records: Iterable[Record | Item],
    *,
    roles: Mapping[str, int] | None = None,
    per_segment: int | None = None,
    endings: Mapping[str, Ending] | None = None,
    redaction: str = "none",
) -> Ledger:
    """Appends `records` to run `run_id` of the ledger at `url` (made when absent) as one new chain; returns the ledger.

    A record is a `Record` (see `event`) or (writer_id, seq, envelope as bytes or dict, arrays). `per_segment` cuts
    after so many records; `roles` and `redaction` are declared in run.json when the run is new.
    """
    held = [record if isinstance(record, Record) else _item(record) for record in records]
    declared = RunInfo(
        format=FORMAT,
        ledger_id="",
        run_id=check_run_id(run_id),
        roles=dict(roles or {}),
        mode={},
        redaction=redaction,  # type: ignore[arg-type]
        created_us=0,
    )
    store = open_store(url)
    chain = Chain(store, meet(store, declared))
    step = per_segment or max(1, len(held))
    for start in range(0, len(held), step):
        last = start + step >= len(held)
        chain.publish(chain.draft(held[start : start + step], endings if last else None))
    return open_ledger(url)


def _item(item: Item) -> Record:
    writer_id, seq, envelope, arrays = item
    record = make_record(envelope if isinstance(envelope, bytes) else encode(envelope), arrays)
    if (record.writer_id, record.seq) != (writer_id, seq):
        raise EventError(f"the envelope is event {record.seq} of {record.writer_id}, not {seq} of {writer_id}.")
    return record
