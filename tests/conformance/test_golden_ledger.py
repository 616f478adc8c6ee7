"""Format 1 is frozen: the golden ledger reads to exactly its twin, and the twin encodes to the same bytes."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from rlk_ledger import layout
from rlk_ledger.chain import Ending, writer_ranges
from rlk_ledger.ledger import open_ledger
from rlk_ledger.records import make_record
from rlk_ledger.segments import read_records, type_counts, write_segment
from rlk_ledger.verify import verify
from rlk_ledger_schemas import merkle
from rlk_ledger_schemas.arrays import Array
from rlk_ledger_schemas.codec import decode_payload, encode_payload, leaf_hash
from rlk_ledger_schemas.events import REGISTRY
from rlk_ledger_schemas.fingerprints import canonical_json, sha256
from rlk_ledger_schemas.frame import crc_seed, decode_header, encode_header, read_frame
from rlk_ledger_schemas.objects import Receipt, decode_receipt, encode_receipt

HERE = Path(__file__).parent
ROOT = HERE / "golden-1"
TWIN: dict[str, Any] = json.loads((HERE / "golden-1.json").read_text())
RUN = TWIN["run"]["run_id"]


ADDED_SINCE = {
    "batch.admitted",
    "boundary.captured",
    "drift.diagnosed",
    "kernels.certified",
    "segment.timed",
    "segments.pruned",
    "splitkv.planned",
}
"""Event types that came after golden-1 was frozen: a new type needs no format version."""


@pytest.fixture(scope="module")
def tool() -> Any:
    path = HERE.parent.parent / "tools" / "golden" / "make_golden.py"
    spec = importlib.util.spec_from_file_location("make_golden", path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _arrays(event: dict[str, Any]) -> dict[str, Array]:
    return {name: Array(a["dtype"], bytes.fromhex(a["bytes"])) for name, a in event["arrays"].items()}


def test_the_golden_ledger_reads_to_exactly_its_twin(tool) -> None:
    assert json.loads(json.dumps(tool.twin(ROOT))) == TWIN


def test_it_holds_every_event_type_and_the_hard_values() -> None:
    types = {event["fields"]["type"] for event in TWIN["events"]}
    assert set(REGISTRY) - ADDED_SINCE <= types
    assert "of.tomorrow" in types
    floats = [a["bytes"] for e in TWIN["events"] for a in e["arrays"].values() if a["dtype"] == "float32"]
    for bits in ("0100c07f", "4523c1ff", "00000080", "0000807f", "000080ff", "01000000"):
        assert any(bits in text for text in floats), f"{bits} is missing"


def test_deep_verify_says_what_was_put_there_and_nothing_else() -> None:
    result = verify(str(ROOT), deep=True)
    assert result.events == 28
    assert [(f.kind, f.writer and f.writer[:2], f.first, f.last) for f in result.findings] == [
        ("seqs.dropped", "b2", 11, 12),
        ("bytes.lost", "c3", None, None),
        ("writer.open", "a1", None, None),
        ("duplicates", "b2", 3, 3),
    ]


def test_the_twins_events_encode_to_the_same_leaves() -> None:
    for event in TWIN["events"]:
        envelope, arrays = bytes.fromhex(event["envelope"]), _arrays(event)
        assert leaf_hash(envelope, arrays).hex() == event["leaf"]
        assert decode_payload(encode_payload(envelope, arrays)) == (envelope, arrays)
        assert make_record(envelope, arrays).leaf.hex() == event["leaf"]


def test_the_twins_events_make_segments_with_the_receipts_roots_ranges_and_counts() -> None:
    leaves = {(e["fields"]["writer_id"], e["fields"]["seq"]): bytes.fromhex(e["leaf"]) for e in TWIN["events"]}
    for receipt in open_ledger(str(ROOT)).run(RUN).receipts:
        held = list(read_records((ROOT / layout.segment_path(RUN, receipt.segment.name)).read_bytes()))
        assert all(leaves[r.writer_id, r.seq] == r.leaf for r in held)
        assert f"sha256:{write_segment(held).root.hex()}" == receipt.root
        assert merkle.root([r.leaf for r in sorted(held, key=lambda r: (r.writer_id, r.seq))]).hex() == receipt.root[7:]
        endings = {w.writer_id: Ending(w.lost_bytes or 0) for w in receipt.writers if w.dead}
        assert writer_ranges(held, endings) == receipt.writers
        assert type_counts(held) == receipt.types


def test_receipts_ledger_json_and_run_json_are_rfc_8785_with_their_self_hash() -> None:
    for path, fields in TWIN["receipts"].items():
        data = (ROOT / path).read_bytes()
        assert canonical_json(fields) == data
        rest = {name: value for name, value in fields.items() if name != "self"}
        assert fields["self"] == sha256(canonical_json(rest))
        receipt: Receipt = decode_receipt(data, path)
        assert encode_receipt(receipt) == data
    assert canonical_json(TWIN["ledger"]) == (ROOT / "ledger.json").read_bytes()
    assert canonical_json(TWIN["run"]) == (ROOT / layout.run_json(RUN)).read_bytes()


def test_the_tool_still_makes_the_same_events_and_chains(tool, tmp_path: Path) -> None:
    """Parquet libraries may change a file's bytes; everything else must come out the same."""
    tool.make(tmp_path)
    again = json.loads((tmp_path / "golden-1.json").read_text())
    for twin in (again, want := json.loads(json.dumps(TWIN))):
        for fields in twin["receipts"].values():
            fields["segment"] = {k: v for k, v in fields["segment"].items() if k not in ("sha256", "bytes")}
            fields.pop("self")
            fields.pop("previous", None)
            fields.pop("samples", None)  # receipts say it since golden-1 was frozen
    assert again == want


def test_payload_frame_and_header_bytes_are_pinned(tool) -> None:
    vectors = TWIN["vectors"]
    payload = bytes.fromhex(vectors["small_payload"])
    assert payload.hex() == (
        "08000000"
        "81a474797065a178"  # u32 envelope length | envelope {"type": "x"}
        "0200"  # u16 array count
        "0161"
        "07"
        "666c6f61743332"
        "0400000000000000"
        "0100c07f"  # a: float32, 4 bytes, a NaN with a payload
        "0162"
        "05"
        "75696e7438"
        "0200000000000000"
        "0102"  # b: uint8, 2 bytes
    )
    frame = bytes.fromhex(vectors["small_frame"])
    assert len(frame) % 8 == 0
    assert frame[:4] == len(payload).to_bytes(4, "little")
    assert frame[4:8].hex() == "a0a612c5"
    assert frame[8 : 8 + len(payload)] == payload
    assert not frame[8 + len(payload) :].strip(b"\0")
    data = bytes(4096) + frame
    assert read_frame(data, 4096, crc_seed(tool.ROLLOUT, 2)) == payload
    assert read_frame(data, 4096, crc_seed(tool.ROLLOUT, 3)) is None, "a frame belongs to its file"
    head = bytes.fromhex(vectors["spool_header"])
    assert head[:12].hex() == "524c4b53504f4f4c01000000"
    assert decode_header(head) == (tool.header(), len(head))
    assert encode_header(tool.header()) == head


def test_floats_in_the_twin_are_exact() -> None:
    samples = [e["fields"] for e in TWIN["events"] if e["fields"]["type"] == "rollout.sample"]
    (sample,) = (fields for fields in samples if fields["sample_id"] == "s0")
    assert sample["sampling"]["temperature"] == 0.7
    assert sample["reward"] == -0.25
