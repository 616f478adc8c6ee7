"""Segments give back every bit of every event, whatever its arrays and fields."""

import io
import struct

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlk_ledger.build import event
from rlk_ledger.records import PROJECTIONS, array_names, build_table, make_record, rows
from rlk_ledger.segments import content_root, encoding_of, read_records, read_segment, write_segment
from rlk_ledger_schemas import merkle
from rlk_ledger_schemas.arrays import ITEMSIZE, Array
from rlk_ledger_schemas.codec import decode_envelope
from rlk_ledger_schemas.columns import FIXED, PROMOTED, project
from rlk_ledger_schemas.errors import FormatError
from rlk_ledger_schemas.events import encode

WRITERS = ["0a" * 16, "ff" * 16]
_NAMES = st.sampled_from(
    ["values", "token_ids", "partials.max", "partials_max", "new.thing", "new_thing", "x" * 200, "é"]
)
_ODD_FLOATS = b"".join(
    struct.pack("<I", bits) for bits in (0x7FC00001, 0xFFC12345, 0x7F800001, 0x80000000, 0x00000001, 0x7F800000, 0)
)


@st.composite
def _arrays(draw: st.DrawFn) -> dict[str, Array]:
    out = {}
    for name in draw(st.lists(_NAMES, unique=True, max_size=4)):
        dtype = draw(st.sampled_from(sorted(ITEMSIZE)))
        data = draw(st.binary(max_size=12 * ITEMSIZE[dtype]) | st.just(_ODD_FLOATS * 2))
        out[name] = Array(dtype, data[: len(data) // ITEMSIZE[dtype] * ITEMSIZE[dtype]])
    return out


_VALUES = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.lists(st.integers(0, 5))
)
_FIELDS = st.dictionaries(
    st.sampled_from(
        [*PROMOTED, "step", "wall_ns", "schema_version", "sampling", "shard", "cache", "unknown", "run_id"]
    ),
    _VALUES | st.dictionaries(st.sampled_from(["temperature", "axis", "rank", "cached_tokens"]), _VALUES),
    max_size=6,
)


@st.composite
def _records(draw: st.DrawFn) -> list:
    keys = draw(st.lists(st.tuples(st.sampled_from(WRITERS), st.integers(0, 2**53 - 1)), unique=True, max_size=8))
    out = []
    for writer_id, seq in keys:
        fields = {**draw(_FIELDS), "type": draw(st.sampled_from(["logprobs", "gap", "of.tomorrow"]))}
        out.append(make_record(encode({**fields, "writer_id": writer_id, "seq": seq}), draw(_arrays())))
    return out


@settings(max_examples=150, deadline=None)
@given(_records())
def test_any_records_come_back_bit_for_bit(records: list) -> None:
    segment = write_segment(records)
    back = list(read_records(segment.data))
    assert sorted(back) == sorted(records)
    assert segment.rows == len(records)
    assert segment.root == content_root(back) == content_root(records)
    assert write_segment(list(reversed(records))).data == segment.data, "the order of arrival must not show"


@settings(max_examples=60, deadline=None)
@given(_records())
def test_every_projection_is_what_the_schema_says(records: list) -> None:
    table = build_table(records)
    for name, column in PROJECTIONS.items():
        for value, record in zip(table[name].to_pylist(), records, strict=True):
            want = project(decode_envelope(record.envelope), column)
            if FIXED.get(name) == "int32" and want is not None and abs(want) >= 2**31:
                want = None
            assert value == want or (value != value and want != want)


def test_nan_payloads_and_negative_zero_survive_in_the_column_itself() -> None:
    record = event(
        "r",
        WRITERS[0],
        0,
        "logprobs",
        sample_id="s",
        source="rollout",
        contract_id="c",
        values=Array("float32", _ODD_FLOATS),
    )
    column = read_segment(write_segment([record]).data)["values__float32"].chunk(0)
    assert column.values.to_numpy().tobytes() == _ODD_FLOATS


def test_an_absent_array_is_null_and_an_empty_one_is_an_empty_list() -> None:
    full = {"sample_id": "s", "source": "rollout", "contract_id": "c", "values": []}
    records = [event("r", WRITERS[0], 0, "logprobs", **full), event("r", WRITERS[0], 1, "logprobs", **full, entropy=[])]
    table = read_segment(write_segment(records).data)
    assert table["values__float32"].to_pylist() == [[], []]
    assert table["entropy__float32"].to_pylist() == [None, []]


def test_ordinary_segments_share_one_schema_and_rows_are_clustered(tmp_path) -> None:
    logprobs = {"sample_id": "s", "source": "rollout", "contract_id": "c", "values": np.zeros(40_000, np.float32)}
    mixed = [event("r", WRITERS[1], i, "logprobs", step=i % 3, **logprobs) for i in range(12)]
    mixed += [event("r", WRITERS[0], i, "writer.closed", reason="x") for i in range(2)]
    segment, small = write_segment(mixed), write_segment(mixed[-1:])
    assert read_segment(segment.data).schema == read_segment(small.data).schema
    table = read_segment(segment.data)
    order = list(zip(table["type"].to_pylist(), table["step"].to_pylist(), strict=True))
    assert order == sorted(order, key=lambda key: (key[0], -1 if key[1] is None else key[1]))
    path = tmp_path / "s.parquet"
    path.write_bytes(segment.data)
    file = pq.ParquetFile(path)
    assert file.num_row_groups == 2, "a large type has its own row group"
    at = file.schema_arrow.get_field_index("values__float32")
    leaf = next(
        i
        for i in range(file.metadata.num_columns)
        if file.metadata.row_group(0).column(i).path_in_schema.startswith("values__float32")
    )
    assert at >= 0
    assert "BYTE_STREAM_SPLIT" in file.metadata.row_group(0).column(leaf).encodings
    assert file.metadata.row_group(0).column(leaf).compression == "ZSTD"
    assert [r.seq for r in read_records(segment.data, {"writer.closed"})] == [0, 1]


def test_the_root_is_rfc_6962_over_writer_and_number() -> None:
    records = [event("r", w, i, "writer.closed", reason="x") for w in reversed(WRITERS) for i in (2, 0, 1)]
    leaves = [r.leaf for r in sorted(records, key=lambda r: (r.writer_id, r.seq))]
    assert write_segment(records).root == merkle.root(leaves)
    assert write_segment(records).root != merkle.root([r.leaf for r in records])


@pytest.mark.parametrize("cut", [0, 4, 100, -1, -9])
def test_what_is_no_segment_is_one_sentence(cut: int) -> None:
    data = write_segment([event("r", WRITERS[0], 0, "writer.closed", reason="x")]).data
    with pytest.raises(FormatError, match=r"Parquet segment"):
        read_segment(data[:cut])


def test_a_foreign_parquet_file_is_refused(tmp_path) -> None:
    import pyarrow as pa

    pq.write_table(pa.table({"a": [1]}), tmp_path / "x.parquet")
    with pytest.raises(FormatError, match="not a segment of format 1"):
        list(rows(pq.read_table(tmp_path / "x.parquet")))
    with pytest.raises(FormatError, match="not a segment of format 1"):
        read_segment((tmp_path / "x.parquet").read_bytes(), {"gap"})


@pytest.mark.parametrize("encoding", [1, 2])
def test_a_file_is_made_again_byte_for_byte_from_what_it_holds_whichever_encoding_it_has(encoding: int) -> None:
    rng = np.random.default_rng(1)
    ids = {"sample_id": "s", "step": 1}
    sample = {
        "response_token_ids": rng.integers(0, 150_000, 3000).astype(np.int32),
        "loss_mask": np.ones(3000, np.uint8),
    }
    scores = {"source": "rollout", "contract_id": "c", "values": rng.random(3000, np.float32)}
    records = [
        event("r", WRITERS[0], 0, "rollout.sample", **sample, **ids),
        event("r", WRITERS[0], 1, "logprobs", **scores, **ids),
    ]
    data = write_segment(records, encoding=encoding).data
    table = read_segment(data)
    assert encoding_of(table) == encoding
    assert sorted(rows(table)) == sorted(records)
    assert write_segment(rows(table), array_names(table), encoding_of(table)).data == data
    chunk = pq.ParquetFile(io.BytesIO(data)).metadata.row_group(0)
    columns = [chunk.column(i) for i in range(chunk.num_columns)]
    found = {c.path_in_schema.partition(".")[0]: "BYTE_STREAM_SPLIT" in c.encodings for c in columns}
    assert found["values__float32"]
    assert found["response_token_ids__int32"] == (encoding == 2)
