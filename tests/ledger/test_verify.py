"""Every row of the attack table that needs no checkpoint: what is done to the ledger, and how verify names it."""

import random
import shutil
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlk_ledger import layout
from rlk_ledger.build import build, event
from rlk_ledger.chain import Ending, new_shipper
from rlk_ledger.ledger import Ledger, open_ledger
from rlk_ledger.records import rows
from rlk_ledger.segments import read_segment
from rlk_ledger.verify import verify
from rlk_ledger_schemas.errors import LedgerError, UsageError
from rlk_ledger_schemas.findings import Exit
from rlk_ledger_schemas.fingerprints import sha256
from rlk_ledger_schemas.objects import Receipt, SegmentRef, decode_receipt, encode_receipt

RUN = "r1"
A, B, C = "0a" * 16, "0b" * 16, "0c" * 16


def logprobs(writer: str, seq: int, run: str = RUN, **more):
    fields = {
        "sample_id": f"s{seq}",
        "source": "rollout",
        "contract_id": "c",
        "values": [float("nan"), -0.0, -1.5 - seq],
    }
    return event(run, writer, seq, "logprobs", step=seq, **{**fields, **more})


def whole(writer: str, role: str, rank: int, world: int, run: str = RUN) -> list:
    """A writer's life: opened, six scores, closed."""
    out = [event(run, writer, 0, "writer.opened", role=role, rank=rank, world_size=world)]
    out += [logprobs(writer, seq, run) for seq in range(1, 7)]
    return [*out, event(run, writer, 7, "writer.closed", reason="done")]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two writers of a roster of two, in one chain of four segments."""
    build(
        str(tmp_path / "l"),
        RUN,
        whole(A, "rollout", 0, 1) + whole(B, "training", 0, 1),
        roles={"rollout": 1, "training": 1},
        per_segment=4,
    )
    return tmp_path / "l"


def receipts(root: Path) -> list[Path]:
    return sorted((root / "runs" / RUN / "receipt").rglob("*.json"))


def segments(root: Path) -> list[Path]:
    """Segments in receipt order."""
    return [root / "runs" / RUN / decode_receipt(p.read_bytes(), "x").segment.name for p in receipts(root)]


def relative(root: Path, path: Path) -> str:
    return path.relative_to(root).as_posix()


def errors(root: Path, deep: bool = False) -> list:
    result = verify(str(root), RUN, deep=deep)
    found = [f for f in result.findings if f.severity == "error"]
    assert (result.exit_code == Exit.ERROR) == bool(found)
    return found


def rewrite_chain(root: Path, change) -> None:
    """Re-makes the chain with every hash recomputed: what an attacker who knows the format does.

    `change(n, receipt)` returns the receipt to write in place n.
    """
    previous = None
    for n, path in enumerate(receipts(root)):
        receipt = change(n, decode_receipt(path.read_bytes(), "x"))
        receipt = msgspec.structs.replace(receipt, previous=previous)
        path.write_bytes(encode_receipt(receipt))
        previous = sha256(path.read_bytes())


def test_an_untouched_ledger_is_intact_and_counted(root: Path) -> None:
    for deep in (False, True):
        result = verify(str(root), deep=deep)
        assert (result.exit_code, result.verdict, result.findings) == (Exit.OK, "intact", ())
        assert (result.runs, result.receipts, result.segments, result.events) == (1, 4, 4, 16)


@pytest.mark.parametrize("name", ["ledger.json", "run.json", "receipt", "segment"])
def test_any_flipped_bit_is_found_in_its_object(root: Path, name: str) -> None:
    rng = random.Random(name)
    paths = {"ledger.json": [root / "ledger.json"], "run.json": [root / "runs" / RUN / "run.json"]}
    targets = paths.get(name) or {"receipt": receipts, "segment": segments}[name](root)
    for _ in range(120):
        path = rng.choice(targets)
        original = path.read_bytes()
        data = bytearray(original)
        bit = rng.randrange(len(data) * 8)
        data[bit // 8] ^= 1 << (bit % 8)
        path.write_bytes(data)
        found = errors(root)
        path.write_bytes(original)
        assert relative(root, path) in {f.object for f in found}, (path, bit)
        if name == "segment":
            (hit,) = [f for f in found if f.object == relative(root, path)]
            assert hit.kind == "segment.changed"
            assert hit.byte is not None
            assert hit.byte <= bit // 8 < hit.end_byte, f"byte {bit // 8} is outside {hit}"
    assert errors(root) == []


def test_a_flipped_bit_names_writer_range_and_the_very_byte_when_the_events_still_decode(root: Path) -> None:
    path = segments(root)[0]
    data = bytearray(path.read_bytes())
    at = data.index(b"parquet-cpp-arrow")
    data[at] ^= 1
    path.write_bytes(data)
    (hit,) = errors(root)
    assert (hit.byte, hit.end_byte, hit.writer, hit.first, hit.last) == (at, at + 1, A, 0, 3)


@pytest.mark.parametrize("keep", [0, 1, 100, -1])
def test_a_truncated_segment(root: Path, keep: int) -> None:
    path = segments(root)[1]
    data = path.read_bytes()
    path.write_bytes(data[:keep])
    (hit,) = errors(root)
    assert (hit.kind, hit.object, hit.byte) == ("segment.changed", relative(root, path), len(data[:keep]))


def test_a_longer_segment(root: Path) -> None:
    path = segments(root)[1]
    size = path.stat().st_size
    path.write_bytes(path.read_bytes() + b"x")
    assert [(f.kind, f.byte) for f in errors(root)] == [("segment.changed", size)]


def test_a_deleted_segment(root: Path) -> None:
    path = segments(root)[2]
    path.unlink()
    assert [(f.kind, f.object, f.writer, f.first, f.last) for f in errors(root)] == [
        ("segment.missing", relative(root, path), B, 0, 3)
    ]


def test_a_replaced_segment_and_two_swapped_ones(root: Path) -> None:
    one, two = segments(root)[:2]
    a, b = one.read_bytes(), two.read_bytes()
    one.write_bytes(b)
    assert [f.object for f in errors(root)] == [relative(root, one)]
    two.write_bytes(a)
    assert {f.object for f in errors(root)} == {relative(root, one), relative(root, two)}


def test_a_segment_of_another_run(root: Path) -> None:
    build(str(root), "r2", whole(A, "rollout", 0, 1, run="r2"), per_segment=4)
    donor = next((root / "runs" / "r2" / "segment").rglob("*.parquet"))
    segments(root)[0].write_bytes(donor.read_bytes())
    assert [f.object for f in errors(root)] == [relative(root, segments(root)[0])]


def test_receipts_of_another_run_do_not_pass_as_this_ones(root: Path) -> None:
    build(str(root), "r2", whole(C, "rollout", 0, 1, run="r2"))
    shutil.rmtree(root / "runs" / RUN / "receipt")
    shutil.copytree(root / "runs" / "r2" / "receipt", root / "runs" / RUN / "receipt")
    assert {f.kind for f in errors(root)} >= {"receipt.misplaced"}


def test_a_receipt_deleted_from_the_middle(root: Path) -> None:
    path = receipts(root)[1]
    path.unlink()
    result = verify(str(root), RUN)
    assert [(f.kind, f.object) for f in result.findings if f.severity == "error"] == [
        ("receipt.missing", relative(root, path))
    ]
    assert ("seqs.missing", A, 4, 7) not in {(f.kind, f.writer, f.first, f.last) for f in result.findings}
    assert "segment.garbage" in {f.kind for f in result.findings}


def test_a_receipt_deleted_from_the_tail_shows_as_a_writer_that_never_closed(root: Path) -> None:
    """Without a checkpoint a cut tail looks like a run still open: it is named, and its segment is garbage."""
    receipts(root)[-1].unlink()
    result = verify(str(root), RUN)
    assert result.exit_code == Exit.OK
    assert {(f.kind, f.writer) for f in result.findings} == {("writer.open", B), ("segment.garbage", None)}


def test_a_tail_cut_inside_a_closed_writers_numbers_is_a_gap(tmp_path: Path) -> None:
    """When another chain holds the writer's end, the cut middle is missing."""
    url = str(tmp_path / "l")
    life = whole(A, "rollout", 0, 1)
    build(url, RUN, life[:3])
    build(url, RUN, life[5:])
    result = verify(url)
    assert result.exit_code == Exit.GAP
    assert [(f.kind, f.writer, f.first, f.last) for f in result.findings] == [("seqs.missing", A, 3, 4)]


def test_all_receipts_of_a_chain_deleted_leaves_a_roster_that_never_reported(root: Path) -> None:
    shutil.rmtree(root / "runs" / RUN / "receipt")
    result = verify(str(root), RUN)
    assert result.exit_code == Exit.GAP
    assert {f.kind for f in result.findings} == {"rank.missing", "segment.garbage"}


def test_a_fork(root: Path) -> None:
    build(str(root), RUN, [logprobs(A, 3, values=[0.25])])
    found = errors(root)
    assert [(f.kind, f.writer, f.first, f.last) for f in found] == [("fork", A, 3, 3)]


def test_a_replayed_range_is_a_duplicate_named_and_shown_once(root: Path) -> None:
    build(str(root), RUN, whole(A, "rollout", 0, 1)[2:5])
    result = verify(str(root), deep=True)
    assert result.exit_code == Exit.OK
    assert [(f.kind, f.writer, f.first, f.last) for f in result.findings] == [("duplicates", A, 2, 4)]
    assert "3 events" in result.findings[0].text
    seen = [e[:2] for e in open_ledger(str(root)).read_events(RUN)]
    assert len(seen) == len(set(seen)) == 16


def test_reordered_receipts(root: Path) -> None:
    one, two = receipts(root)[1:3]
    a, b = one.read_bytes(), two.read_bytes()
    one.write_bytes(b)
    two.write_bytes(a)
    assert {f.object for f in errors(root)} >= {relative(root, one), relative(root, two)}


def test_a_receipt_replaced_by_a_valid_one_breaks_the_link_to_the_next(root: Path) -> None:
    path = receipts(root)[1]
    receipt = decode_receipt(path.read_bytes(), "x")
    path.write_bytes(encode_receipt(msgspec.structs.replace(receipt, wall_us=1)))
    assert [(f.kind, f.object) for f in errors(root)] == [("receipt.unlinked", relative(root, receipts(root)[2]))]


def _edit_segment(root: Path, n: int, edit) -> None:
    """Edits the table of segment n and recomputes its file hash and the whole chain."""
    path = segments(root)[n]
    table = edit(read_segment(path.read_bytes()))
    pq.write_table(table, path)
    data = path.read_bytes()

    def change(i: int, receipt: Receipt) -> Receipt:
        if i != n:
            return receipt
        ref = SegmentRef(name=receipt.segment.name, bytes=len(data), rows=receipt.segment.rows, sha256=sha256(data))
        return msgspec.structs.replace(receipt, segment=ref)

    rewrite_chain(root, change)


def _with_column(table: pa.Table, name: str, values: list) -> pa.Table:
    index = table.schema.get_field_index(name)
    return table.set_column(index, table.schema.field(index), pa.array(values, table.schema.field(index).type))


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("sample_id", ["x", "x", "x", "x"]),
        ("step", [9, 9, 9, 9]),
        ("wall_ns", [7, 0, 0, 0]),
        ("reward", [1.0, None, None, None]),
    ],
)
def test_an_edited_projection_with_every_hash_recomputed_is_found_deep_and_only_deep(
    root: Path, column, values
) -> None:
    _edit_segment(root, 1, lambda table: _with_column(table, column, values))
    assert errors(root) == []
    found = errors(root, deep=True)
    assert {f.kind for f in found} == {"projection.differs"}
    assert all(f.object == relative(root, segments(root)[1]) and f.writer == A and f.first is not None for f in found)


def test_an_edited_array_with_every_hash_recomputed_is_found_deep(root: Path) -> None:
    def edit(table: pa.Table) -> pa.Table:
        old = table["values__float32"].to_pylist()
        return _with_column(table, "values__float32", [old[0], *([[0.5]] * (len(old) - 1))])

    _edit_segment(root, 1, edit)
    found = errors(root, deep=True)
    assert {f.kind for f in found} == {"leaf.differs"}
    assert all(f.writer == A for f in found)


def test_an_edited_event_whose_leaf_was_recomputed_too_breaks_the_root(root: Path) -> None:
    forged = logprobs(A, 5, values=[0.0, 0.0, 0.0])

    def edit(table: pa.Table) -> pa.Table:
        from rlk_ledger.records import build_table

        forged_table = build_table([forged if r.seq == 5 else r for r in rows(table)])
        return forged_table.replace_schema_metadata(table.schema.metadata)

    _edit_segment(root, 1, edit)
    found = errors(root, deep=True)
    assert {f.kind for f in found} == {"segment.contradicts"}
    assert any("root" in f.text for f in found)


def test_a_receipt_that_lies_about_its_segment_is_found_deep(root: Path) -> None:
    def change(n: int, receipt: Receipt) -> Receipt:
        if n != 1:
            return receipt
        lie = msgspec.structs.replace(receipt.writers[0], last=receipt.writers[0].last + 5)
        return msgspec.structs.replace(receipt, writers=(lie,), types=receipt.types[:1])

    rewrite_chain(root, change)
    assert {f.kind for f in errors(root, deep=True)} == {"segment.contradicts"}


def test_a_receipt_that_names_a_segment_elsewhere_is_refused(root: Path) -> None:
    for name in (
        "../../../etc/passwd",
        "segment/x.parquet",
        segments(root)[0].relative_to(root / "runs" / RUN).as_posix(),
    ):
        backup = {p: p.read_bytes() for p in receipts(root)}

        def change(n: int, receipt: Receipt, name=name) -> Receipt:
            return (
                msgspec.structs.replace(receipt, segment=msgspec.structs.replace(receipt.segment, name=name))
                if n == 1
                else receipt
            )

        rewrite_chain(root, change)
        assert "receipt.misplaced" in {f.kind for f in errors(root)}
        for path, data in backup.items():
            path.write_bytes(data)


def test_a_chain_begun_under_another_ledger_or_run(root: Path) -> None:
    info = msgspec.json.decode((root / "runs" / RUN / "run.json").read_bytes())
    from rlk_ledger_schemas.fingerprints import canonical_json

    (root / "runs" / RUN / "run.json").write_bytes(canonical_json({**info, "roles": {"rollout": 1}}))
    assert [(f.kind, f.object) for f in errors(root)] == [("run.changed", "runs/r1/run.json")]
    (root / "runs" / RUN / "run.json").write_bytes(canonical_json(info))
    ledger = msgspec.json.decode((root / "ledger.json").read_bytes())
    (root / "ledger.json").write_bytes(canonical_json({**ledger, "ledger_id": "ff" * 16}))
    assert {f.kind for f in errors(root)} >= {"ledger.changed", "run.changed", "receipt.misplaced"}


def test_missing_or_newer_roots_are_findings_not_exceptions(root: Path) -> None:
    (root / "runs" / RUN / "run.json").unlink()
    assert {f.kind for f in errors(root)} == {"run.unreadable", "run.changed"}
    (root / "ledger.json").unlink()
    assert "ledger.unreadable" in {f.kind for f in errors(root)}
    (root / "ledger.json").write_bytes(b'{"format":1,"required_features":["teleport"]}')
    assert "ledger.unreadable" in {f.kind for f in errors(root)}


def test_an_object_among_the_receipts_that_is_none_is_named(root: Path) -> None:
    stray = receipts(root)[0].with_name("00000001.json.bak")
    stray.write_bytes(b"{}")
    assert [(f.kind, f.object) for f in errors(root)] == [("object.unknown", relative(root, stray))]


@pytest.mark.parametrize("name", ["000000000.json", "0.json", "0000000000000000.json", "00000000.JSON"])
def test_a_second_name_for_a_receipts_number_is_named_and_no_reader_takes_it(root: Path, name: str) -> None:
    """Else a forged receipt beside the real one would be read by queries and skipped by verify."""
    events = len(list(open_ledger(str(root)).read_events(RUN)))
    stray = receipts(root)[0].with_name(name)
    stray.write_bytes(receipts(root)[0].read_bytes())
    assert [(f.kind, f.object) for f in errors(root)] == [("object.unknown", relative(root, stray))]
    assert len(list(open_ledger(str(root)).read_events(RUN))) == events


def test_a_receipt_with_a_huge_number_is_one_finding_not_a_search_for_all_before_it(root: Path) -> None:
    last = receipts(root)[-1]
    stray = last.with_name("100000000000000.json")
    stray.write_bytes(last.read_bytes())
    found = {(f.kind, f.object) for f in errors(root)}
    assert ("receipt.misplaced", relative(root, stray)) in found
    assert [kind for kind, _ in found].count("receipt.missing") == 1


def test_a_segment_no_receipt_names_is_garbage_and_fine(root: Path) -> None:
    stray = root / "runs" / RUN / layout.segment_name(new_shipper(), 0, bytes(32))
    stray.parent.mkdir(parents=True)
    stray.write_bytes(b"half a segment")
    result = verify(str(root), deep=True)
    assert result.exit_code == Exit.OK
    assert [(f.kind, f.object) for f in result.findings] == [("segment.garbage", relative(root, stray))]


def test_missing_and_dropped_numbers_are_told_apart(tmp_path: Path) -> None:
    life = [logprobs(A, 0), event(RUN, A, 3, "gap", kind="bulk", first=1, last=2, reason="budget"), logprobs(A, 6)]
    url = str(tmp_path / "l")
    build(url, RUN, life, per_segment=2)
    result = verify(url)
    assert result.exit_code == Exit.GAP
    assert [(f.kind, f.first, f.last) for f in result.findings if f.severity == "gap"] == [
        ("seqs.dropped", 1, 2),
        ("seqs.missing", 4, 5),
    ]


def test_lost_bytes_and_killed_writers(tmp_path: Path) -> None:
    url = str(tmp_path / "l")
    build(url, RUN, [logprobs(A, 0), logprobs(B, 0)], endings={A: Ending(17, 0), B: Ending(0, 0)})
    result = verify(url)
    assert result.exit_code == Exit.GAP
    assert [(f.kind, f.writer) for f in result.findings] == [
        ("bytes.lost", A),
        ("writer.killed", A),
        ("writer.killed", B),
    ]
    assert "17 bytes" in result.findings[0].text


def test_the_roster_counts_ranks_once_the_writers_are_done_and_children_never(tmp_path: Path) -> None:
    url = str(tmp_path / "l")
    child = event(RUN, C, 0, "writer.opened", role="training", rank=1, world_size=3, parent_writer=A)
    life = whole(A, "training", 0, 3)
    build(url, RUN, [*life[:-1], child], roles={"training": 3})
    open_run = verify(url)
    assert open_run.exit_code == Exit.OK
    assert {f.kind for f in open_run.findings} == {"run.open", "writer.open"}
    build(url, RUN, [life[-1], event(RUN, C, 1, "writer.closed", reason="x")])
    done = verify(url)
    assert done.exit_code == Exit.GAP
    assert [(f.kind, f.object) for f in done.findings] == [("rank.missing", "runs/r1/run.json")]
    assert done.findings[0].text.endswith("1-2")


def test_an_unknown_run_ledger_or_name_is_usage(root: Path, tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="no run 'r9'"):
        verify(str(root), "r9")
    with pytest.raises(UsageError, match="not a name"):
        verify(str(root), "../r1")
    with pytest.raises(LedgerError, match="no ledger at"):
        verify(str(tmp_path / "nothing"))


def test_a_ledger_in_memory_and_an_opened_one_verify_too(tmp_path: Path) -> None:
    ledger = build(f"memory://{tmp_path}", RUN, whole(A, "rollout", 0, 1))
    assert isinstance(ledger, Ledger)
    assert verify(ledger, deep=True).verdict == "intact"
    assert verify(ledger.store, RUN).events == 8


def test_readers_refuse_what_does_not_decode_and_point_to_verify(root: Path) -> None:
    receipts(root)[0].write_bytes(b"{}")
    with pytest.raises(LedgerError, match="rlk-ledger verify r1"):
        list(open_ledger(str(root)).read_events(RUN))


def test_readers_refuse_a_changed_segment(root: Path) -> None:
    data = bytearray(segments(root)[0].read_bytes())
    data[len(data) // 2] ^= 4
    segments(root)[0].write_bytes(data)
    with pytest.raises(LedgerError, match=r"not those its receipt describes.*rlk-ledger verify r1"):
        list(open_ledger(str(root)).read_events(RUN))


def test_a_process_that_declares_other_roles_is_named_and_fine(tmp_path: Path) -> None:
    url = str(tmp_path / "l")
    build(
        url,
        RUN,
        [event(RUN, A, 0, "run.opened", roles={"rollout": 1}), *whole(B, "rollout", 0, 1)],
        roles={"rollout": 1},
    )
    other = [event(RUN, C, 0, "run.opened", roles={"training": 2}), event(RUN, C, 1, "writer.closed", reason="x")]
    build(url, RUN, other)
    result = verify(url)
    assert result.exit_code == Exit.OK
    assert [(f.kind, f.writer) for f in result.findings] == [("writer.open", A), ("run.redeclared", C)]


def test_a_roster_of_any_size_is_judged_by_its_ranges(tmp_path: Path) -> None:
    url = str(tmp_path / "l")
    build(url, RUN, [*whole(A, "training", 2, 4), *whole(B, "training", 5, 9)], roles={"training": 2**50})
    found = [f.text for f in verify(url).findings if f.kind == "rank.missing"]
    assert found == [f"of {2**50} training ranks these never reported: rank 0-1, 3-4, 6-{2**50 - 1}"]


def test_a_process_that_redacts_otherwise_than_the_run_says_is_named(tmp_path: Path) -> None:
    url = str(tmp_path / "l")
    opened = event(RUN, C, 0, "run.opened", roles={}, redaction="none")
    build(url, RUN, [opened, event(RUN, C, 1, "writer.closed", reason="x")], redaction="drop")
    (found,) = verify(url).findings
    assert (found.kind, found.writer, found.severity) == ("run.redeclared", C, "info")
    assert found.text == "it declared redaction 'none', run.json holds 'drop': its events are as it declared"
