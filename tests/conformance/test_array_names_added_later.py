"""A new array name needs no format version: segments keep the columns of the version that wrote them."""

import shutil
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlk_ledger import layout, records
from rlk_ledger.ledger import open_ledger
from rlk_ledger.records import ARRAYS_KEY
from rlk_ledger.segments import read_records
from rlk_ledger.verify import verify
from rlk_ledger.verify.segment import check_segment
from rlk_ledger_schemas.fingerprints import sha256
from rlk_ledger_schemas.objects import Receipt

ROOT = Path(__file__).parent / "golden-1"


@pytest.fixture
def newer(monkeypatch) -> None:
    """This version, had an event type of it one array more; in the middle of the list, where the sorting puts it."""
    more = {**records.REGISTERED, "logits_top__float32": ("logits.top", "float32")}
    monkeypatch.setattr(records, "REGISTERED", dict(sorted(more.items())))


def _receipts(root: Path) -> list[Receipt]:
    ledger = open_ledger(str(root))
    return [receipt for run_id in ledger.runs() for receipt in ledger.run(run_id).receipts]


def _edited(root: Path, receipt: Receipt, edit) -> Receipt:
    """The segment rewritten by `edit`, and a receipt that says of it what is true of the new bytes."""
    path = root / layout.segment_path(receipt.run_id, receipt.segment.name)
    table = edit(pq.read_table(path))
    pq.write_table(table, path)
    data = path.read_bytes()
    segment = msgspec.structs.replace(receipt.segment, bytes=len(data), sha256=sha256(data))
    return msgspec.structs.replace(receipt, segment=segment)


def _without(table: pa.Table, column: str) -> pa.Table:
    """As a version that did not know the array would have written it."""
    names = msgspec.json.decode(table.schema.metadata[ARRAYS_KEY])
    del names[column]
    cut = table.drop_columns([column])
    return cut.replace_schema_metadata({**table.schema.metadata, ARRAYS_KEY: msgspec.json.encode(names)})


def _with(table: pa.Table, column: str, cells: pa.Array, key: list[str]) -> pa.Table:
    names = msgspec.json.decode(table.schema.metadata[ARRAYS_KEY])
    wider = table.append_column(column, cells)
    metadata = {**table.schema.metadata, ARRAYS_KEY: msgspec.json.encode({**names, column: key})}
    return wider.replace_schema_metadata(metadata)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return Path(shutil.copytree(ROOT, tmp_path / "golden-1"))


def _found(root: Path, receipt: Receipt) -> set[str]:
    return {f.kind for f in check_segment(open_ledger(str(root)).store, receipt.run_id, receipt, deep=True)}


def test_an_older_ledger_is_as_intact_as_before(newer) -> None:
    assert {f.kind for f in verify(str(ROOT), deep=True).findings} == {
        "seqs.dropped",
        "bytes.lost",
        "writer.open",
        "duplicates",
    }


def test_a_column_that_holds_nothing_may_be_absent_or_from_a_later_version(root: Path) -> None:
    dropped = 0
    for receipt in _receipts(root):
        table = pq.read_table(root / layout.segment_path(receipt.run_id, receipt.segment.name))
        empty = [n for n in table.schema.names if "__" in n and table[n].null_count == len(table)]
        for name in empty[:1]:
            dropped += 1
            assert _found(root, _edited(root, receipt, lambda t, n=name: _without(t, n))) == set()
        cells = pa.nulls(len(table), records.list_type("int8"))
        later = _edited(root, receipt, lambda t, c=cells: _with(t, "of_tomorrow__int8", c, ["of.tomorrow", "int8"]))
        assert _found(root, later) == set()
    assert dropped


def test_a_column_that_holds_something_must_be_there(root: Path) -> None:
    for receipt in _receipts(root):
        table = pq.read_table(root / layout.segment_path(receipt.run_id, receipt.segment.name))
        full = [n for n in table.schema.names if "__" in n and table[n].null_count < len(table)]
        if full:
            found = _found(root, _edited(root, receipt, lambda t, n=full[0]: _without(t, n)))
            assert "leaf.differs" in found
            return
    pytest.fail("no segment of the golden ledger holds an array")


@pytest.mark.parametrize(
    ("column", "key"),
    [("ghost__float32", None), ("values", ["values", "float32"]), ("other__float32", ["values", "float32"])],
)
def test_a_column_that_no_version_writes_is_a_contradiction(root: Path, column: str, key: list[str] | None) -> None:
    receipt = _receipts(root)[0]

    def edit(table: pa.Table) -> pa.Table:
        cells = pa.nulls(len(table), records.list_type("float32"))
        return table.append_column(column, cells) if key is None else _with(table, column, cells, key)

    assert _found(root, _edited(root, receipt, edit)) == {"projection.differs"}


def test_a_damaged_older_segment_is_told_by_its_own_columns(root: Path, newer) -> None:
    receipt = _receipts(root)[0]
    path = root / layout.segment_path(receipt.run_id, receipt.segment.name)
    data = bytearray(path.read_bytes())
    assert list(read_records(bytes(data)))
    data[-20] ^= 1  # in the footer
    path.write_bytes(data)
    found = list(check_segment(open_ledger(str(root)).store, receipt.run_id, receipt, deep=True))
    assert [f.kind for f in found] == ["segment.changed"]
