"""The attack table, row by row: what somebody who can write to the bucket does, and what tells on him.

The attacker here knows the format, has every tool and recomputes every hash; what he lacks is the signing key, and the
copies of checkpoints that are kept elsewhere. Rows that need no checkpoint are in test_verify.py, flipped bits of every
kind of object in tests/faults/test_bit_flips.py; ROWS says where each row is tested.
"""

import ast
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlk_ledger import anchors, checkpoints, cli, layout, seals, signing
from rlk_ledger.build import build, event
from rlk_ledger.chain import Chain
from rlk_ledger.contact import meet
from rlk_ledger.ledger import open_ledger
from rlk_ledger.records import Record
from rlk_ledger.segments import read_records
from rlk_ledger.signing import Signer
from rlk_ledger.store import open_store
from rlk_ledger.verify import VerifyResult, verify
from rlk_ledger_schemas.checkpoints import Checkpoint, decode_checkpoint
from rlk_ledger_schemas.codec import decode_envelope
from rlk_ledger_schemas.errors import LedgerError
from rlk_ledger_schemas.findings import Exit
from rlk_ledger_schemas.objects import RunInfo, decode_receipt
from rlk_ledger_schemas.seals import encode_seal

TESTS = Path(__file__).resolve().parents[1]
RUN = "r1"
WRITERS = ["0a" * 16, "0b" * 16, "0c" * 16]
ONE, TWO = "1" * 32, "2" * 32

# Every row of the attack table, and the tests that do it.
ROWS = {
    "any bit of any object flipped": {
        "faults/test_bit_flips.py": ["test_flipped_bits_of_every_kind_of_object_are_found_and_located"],
        "ledger/test_verify.py": ["test_any_flipped_bit_is_found_in_its_object"],
    },
    "object deleted, truncated, replaced, swapped with another run's": {
        "ledger/test_verify.py": [
            "test_a_deleted_segment",
            "test_a_truncated_segment",
            "test_a_replaced_segment_and_two_swapped_ones",
            "test_a_segment_of_another_run",
            "test_receipts_of_another_run_do_not_pass_as_this_ones",
        ],
        "ledger/test_attacks.py": ["test_objects_of_another_run", "test_a_deleted_object_of_any_kind"],
    },
    "receipt deleted from the middle or the tail": {
        "ledger/test_verify.py": ["test_a_receipt_deleted_from_the_middle"],
        "ledger/test_attacks.py": ["test_a_tail_cut_off_with_its_segments", "test_a_whole_chain_removed"],
    },
    "fork, replay of a range": {
        "ledger/test_verify.py": ["test_a_fork", "test_a_replayed_range_is_a_duplicate_named_and_shown_once"],
    },
    "reorder": {
        "ledger/test_verify.py": ["test_reordered_receipts"],
        "ledger/test_attacks.py": ["test_receipts_of_a_chain_told_in_another_order"],
    },
    "rows edited and hashes recomputed": {
        "ledger/test_verify.py": [
            "test_an_edited_array_with_every_hash_recomputed_is_found_deep",
            "test_an_edited_event_whose_leaf_was_recomputed_too_breaks_the_root",
        ],
        "ledger/test_attacks.py": [
            "test_a_rewritten_chain_against_the_checkpoints",
            "test_a_rewritten_history_against_a_copy",
            "test_a_rewritten_history_against_the_key",
            "test_a_rewritten_history_against_an_anchor",
            "test_one_event_replaced_is_one_receipt_named",
        ],
    },
    "a projection column edited with its file hash": {
        "ledger/test_verify.py": ["test_an_edited_projection_with_every_hash_recomputed_is_found_deep_and_only_deep"],
    },
    "a rank that never reported": {
        "ledger/test_verify.py": ["test_the_roster_counts_ranks_once_the_writers_are_done_and_children_never"],
        "ledger/test_seal.py": [
            "test_a_rank_that_never_reported_stays_missing_under_a_seal_while_others_are_open",
            "test_a_seal_that_says_other_than_what_it_seals",
        ],
        "ledger/test_attacks.py": ["test_a_rank_erased_from_a_sealed_run"],
    },
    "checkpoint deleted, replaced, re-signed, rolled back, split": {
        "ledger/test_attacks.py": [
            "test_a_checkpoint_deleted_from_the_middle",
            "test_checkpoints_deleted_from_the_tail",
            "test_a_checkpoint_signed_anew_with_another_key",
            "test_the_whole_ledger_rolled_back",
            "test_a_split_view",
        ],
    },
}


class Bucket(NamedTuple):
    """The ledger under attack, and what its owner keeps elsewhere: the key, and the checkpoints as they were made."""

    root: Path
    signer: Signer
    made: list[Checkpoint]

    @property
    def run(self) -> Path:
        return self.root / "runs" / RUN

    def receipt(self, shipper: str, n: int) -> Path:
        return self.root / layout.receipt_path(RUN, shipper, n)

    def checkpoint(self, k: int) -> Path:
        return self.root / layout.checkpoint_path(RUN, k)

    def check(self, **options) -> VerifyResult:
        return verify(str(self.root), RUN, **options)


def life(writer: str, rank: int) -> list[Record]:
    out = [event(RUN, writer, 0, "writer.opened", role="rollout", rank=rank, world_size=3)]
    for seq in range(1, 6):
        fields = {"sample_id": f"s{seq}", "source": "rollout", "contract_id": "c", "values": [-0.5, -1.5 - seq]}
        out.append(event(RUN, writer, seq, "logprobs", step=seq, **fields))
    return [*out, event(RUN, writer, 6, "writer.closed", reason="done")]


def publish(root: Path, shipper: str, batches: list[list[Record]], signer: Signer | None) -> None:
    store = open_store(str(root))
    declared = RunInfo(
        format=1, ledger_id="", run_id=RUN, roles={"rollout": 3}, mode={}, redaction="none", created_us=0
    )  # fmt: skip
    chain = Chain(store, meet(store, declared), shipper=shipper, signer=signer, wall_us=lambda: 1)
    for batch in batches:
        chain.publish(chain.draft(batch))


def batches(records: list[Record], size: int = 3) -> list[list[Record]]:
    return [records[i : i + size] for i in range(0, len(records), size)]


@pytest.fixture(params=[True, False], ids=["signed", "unsigned"])
def signs(request) -> bool:
    return request.param


@pytest.fixture
def bucket(tmp_path: Path, signs: bool) -> Bucket:
    """Two chains, of five and three receipts, a checkpoint after each, then one more receipt of the first and one more.

    Signed ones have signed receipts and checkpoints; in the others there is no key anywhere.
    """
    signer = signing.new_key(tmp_path / "key.pem")
    mine = signer if signs else None
    root = tmp_path / "l"
    records = life(WRITERS[0], 0) + life(WRITERS[1], 1)
    publish(root, ONE, batches(records), mine)
    store = open_store(str(root))
    made = [checkpoints.make(store, RUN, mine)]
    publish(root, TWO, batches(life(WRITERS[2], 2)), mine)
    made.append(checkpoints.make(store, RUN, mine))
    return Bucket(root, signer, made)


def errors(result: VerifyResult) -> set[tuple[str, str]]:
    return {(f.kind, f.object) for f in result.findings if f.severity == "error"}


def remove(bucket: Bucket, shipper: str, since: int) -> None:
    """Removes the receipts of a chain from number `since` on, with their segments."""
    for path in sorted(bucket.receipt(shipper, 0).parent.glob("*.json")):
        receipt = decode_receipt(path.read_bytes(), "x")
        if receipt.n >= since:
            (bucket.run / receipt.segment.name).unlink()
            path.unlink()


def without_index(bucket: Bucket) -> None:
    shutil.rmtree(bucket.run / "index", ignore_errors=True)


def rewrite(bucket: Bucket, edit: Callable[[Record], Record | None], signer: Signer | None = None) -> None:
    """Writes every chain of the run anew, under its old names, with every hash recomputed: segments, leaves, receipts.

    `edit` gives the event to write in place of one, or None to leave it out. Checkpoints stay as they are.
    """
    for folder in sorted((bucket.run / "receipt").iterdir()):
        told = []
        for path in sorted(folder.iterdir()):
            receipt = decode_receipt(path.read_bytes(), "x")
            segment = bucket.run / receipt.segment.name
            kept = [edit(record) for record in read_records(segment.read_bytes())]
            told.append([record for record in kept if record is not None])
            segment.unlink()
            path.unlink()
        publish(bucket.root, folder.name, [batch for batch in told if batch], signer)


def forge(bucket: Bucket, signer: Signer | None = None) -> None:
    """Removes every checkpoint and index and makes new ones over what is there now."""
    shutil.rmtree(bucket.run / "checkpoint")
    without_index(bucket)
    checkpoints.make(open_store(str(bucket.root)), RUN, signer)


def better(record: Record) -> Record:
    """Sample s3 of the second writer gets a better score."""
    fields = decode_envelope(record.envelope)
    if (record.writer_id, record.seq) != (WRITERS[1], 3):
        return record
    names = {"sample_id", "source", "contract_id", "step"}
    given = {name: value for name, value in fields.items() if name in names}
    return event(RUN, record.writer_id, record.seq, "logprobs", values=[0.0, 0.0], **given)


# -- the ledger before anything is done to it ------------------------------------------------------------------------


def test_untouched_it_is_intact_whatever_it_is_held_against(bucket: Bucket, signs: bool, tmp_path: Path) -> None:
    anchor = str(tmp_path / "anchor")
    anchors.anchor(open_store(str(bucket.root)), RUN, anchor)
    result = bucket.check(deep=True, checkpoints=bucket.made, anchor=anchor)
    assert (result.exit_code, result.findings) == (Exit.OK, ())
    if signs:
        assert bucket.check(keys=[bucket.signer.vkey()]).findings == ()


def test_every_row_of_the_table_has_its_tests() -> None:
    for row, files in ROWS.items():
        for name, wanted in files.items():
            tree = ast.parse((TESTS / name).read_text())
            there = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
            assert set(wanted) <= there, f"{row}: {name}"


# -- objects deleted and swapped -------------------------------------------------------------------------------------


def test_a_deleted_object_of_any_kind(bucket: Bucket, signs: bool) -> None:
    """Each object in turn: its own path is named, or that of the run where nothing can tell which it was."""
    store = open_store(str(bucket.root))
    seals.seal(store, RUN, signer=bucket.signer if signs else None)
    fine = {"seal.json", "index"}  # a seal nobody kept, and an index anybody may delete
    for path in sorted(p for p in bucket.root.rglob("*") if p.is_file() and "canary" not in p.parts):
        data = path.read_bytes()
        path.unlink()
        result = bucket.check()
        path.write_bytes(data)
        name = path.relative_to(bucket.root).as_posix()
        if fine & {path.name, path.parent.name}:
            assert result.exit_code == Exit.OK, name
        else:
            assert name in {object_ for _, object_ in errors(result)}, name
    assert bucket.check().findings == ()


def test_objects_of_another_run(bucket: Bucket, signs: bool, tmp_path: Path) -> None:
    """A run of the same shape, of the same ledger: none of its objects passes for one of this run."""
    other = tmp_path / "other"
    shutil.copytree(bucket.root, other)
    (other / "runs" / RUN).rename(other / "runs" / "r2")
    shutil.rmtree(other / "runs" / "r2")
    url = str(bucket.root)
    records = [
        event("r2", r.writer_id, r.seq, "weights.published", weight_version="v", digest="sha256:00", tensor_count=1)
        for r in life(WRITERS[0], 0)
    ]
    build(url, "r2", records, per_segment=2)
    store = open_store(url)
    checkpoints.make(store, "r2", bucket.signer if signs else None)
    seals.seal(store, RUN)
    seals.seal(store, "r2", incomplete=True)
    donors = bucket.root / "runs" / "r2"
    swaps = [
        (bucket.receipt(ONE, 1), next((donors / "receipt").rglob("00000001.json"))),
        (next((bucket.run / "segment").rglob("00000000-*")), next((donors / "segment").rglob("00000000-*"))),
        (bucket.checkpoint(0), donors / "checkpoint" / "00000000"),
        (bucket.run / "seal.json", donors / "seal.json"),
        (bucket.run / "run.json", donors / "run.json"),
    ]
    for mine, theirs in swaps:
        good = mine.read_bytes()
        mine.write_bytes(theirs.read_bytes())
        assert mine.relative_to(bucket.root).as_posix() in {object_ for _, object_ in errors(bucket.check())}, mine
        mine.write_bytes(good)
    assert bucket.check().findings == ()
    moved = bucket.run / "index" / next((donors / "index").iterdir()).name
    shutil.copy(next((donors / "index").iterdir()), moved)
    assert moved.relative_to(bucket.root).as_posix() in {object_ for _, object_ in errors(bucket.check())}


# -- the tail --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("since", [4, 2])
def test_a_tail_cut_off_with_its_segments(bucket: Bucket, since: int) -> None:
    """Without checkpoints it would be a run still open; the marks of the newest say how far each chain went."""
    remove(bucket, ONE, since)
    without_index(bucket)
    result = bucket.check()
    assert result.exit_code == Exit.ERROR
    assert errors(result) == {("receipt.missing", layout.receipt_path(RUN, ONE, since))}
    found = next(f for f in result.findings if f.kind == "receipt.missing")
    assert f"{since}" in found.text
    assert "gone from the end of the chain" in found.text


def test_a_tail_that_no_checkpoint_covers_is_the_limit_and_is_named_as_such(bucket: Bucket, signs: bool) -> None:
    """What came after the last checkpoint can be cut unseen: before that, `verify` says that it is uncovered."""
    publish(bucket.root, "3" * 32, batches(life("0d" * 16, 0)), None)
    assert "receipt.uncovered" in {f.kind for f in bucket.check().findings}
    remove(bucket, "3" * 32, 0)
    assert bucket.check().exit_code == Exit.OK


def test_a_whole_chain_removed(bucket: Bucket) -> None:
    remove(bucket, TWO, 0)
    without_index(bucket)
    assert errors(bucket.check()) == {("receipt.missing", layout.receipt_path(RUN, TWO, 0))}


def test_receipts_of_a_chain_told_in_another_order(bucket: Bucket, signs: bool) -> None:
    """Segments 1 and 2 change places, every hash and link recomputed: the checkpoint knows who stood where."""
    told = []
    for n in range(5):
        receipt = decode_receipt(bucket.receipt(ONE, n).read_bytes(), "x")
        told.append(list(read_records((bucket.run / receipt.segment.name).read_bytes())))
    remove(bucket, ONE, 0)
    told[1], told[2] = told[2], told[1]
    publish(bucket.root, ONE, told, bucket.signer if signs else None)
    without_index(bucket)
    found = errors(bucket.check())
    assert {("receipt.replaced", layout.receipt_path(RUN, ONE, n)) for n in (1, 2)} <= found


# -- history rewritten, every hash recomputed ------------------------------------------------------------------------


def test_a_rewritten_chain_against_the_checkpoints(bucket: Bucket, signs: bool) -> None:
    """Every object agrees with every other again, but the checkpoints in the bucket were left alone."""
    rewrite(bucket, better)
    without_index(bucket)
    result = bucket.check(deep=True)
    assert result.exit_code == Exit.ERROR
    changed = {object_ for kind, object_ in errors(result) if kind == "receipt.replaced"}
    edited = [n for n in range(5) if WRITERS[1] in bucket.receipt(ONE, n).read_text()]
    assert layout.receipt_path(RUN, ONE, edited[1]) in changed
    if not signs:  # what comes before the edit is byte for byte what it was
        assert changed == {layout.receipt_path(RUN, ONE, n) for n in range(edited[1], 5)}


def test_one_event_replaced_is_one_receipt_named(bucket: Bucket, signs: bool) -> None:
    """In the last receipt of a chain nothing follows the edit: exactly that receipt is named."""

    def edit(record: Record) -> Record:
        if record.writer_id == WRITERS[2] and record.seq == 6:
            return event(RUN, record.writer_id, 6, "writer.closed", reason="another")
        return record

    rewrite(bucket, edit, bucket.signer if signs else None)
    without_index(bucket)
    assert errors(bucket.check(deep=True)) == {("receipt.replaced", layout.receipt_path(RUN, TWO, 2))}


@pytest.mark.parametrize("k", [0, 1])
def test_a_rewritten_history_against_a_copy(bucket: Bucket, k: int, tmp_path: Path) -> None:
    """Checkpoints and indexes made anew over it: the bucket is one whole again, and a copy kept elsewhere tells."""
    rewrite(bucket, better)
    forge(bucket)
    assert bucket.check(deep=True).exit_code == Exit.OK, "nothing in the bucket can tell"
    kept = tmp_path / "kept"
    kept.write_bytes(bucket.made[k].data)
    result = bucket.check(checkpoints=[kept])
    assert result.exit_code == Exit.ERROR
    found = errors(result)
    assert layout.checkpoint_path(RUN, 0) in {object_ for _, object_ in found}
    edited = [n for n in range(5) if WRITERS[1] in bucket.receipt(ONE, n).read_text()]
    named = {object_ for kind, object_ in found if kind == "receipt.replaced"}
    if k == 0:
        assert layout.receipt_path(RUN, ONE, edited[1]) in named, "the very receipt that was edited"
    else:
        assert layout.checkpoint_path(RUN, 1) in {object_ for _, object_ in found}


@pytest.mark.parametrize("signs", [True], indirect=True)
def test_a_rewritten_history_against_the_key(bucket: Bucket, tmp_path: Path) -> None:
    """Without the key he signs nothing, or with his own: no checkpoint of the key that is given covers either."""
    key = bucket.signer.vkey()
    stranger = signing.new_key(tmp_path / "stranger.pem")
    for other in (None, stranger):
        rewrite(bucket, better, other)
        forge(bucket, other)
        assert bucket.check(deep=True).exit_code == Exit.OK, "nothing in the bucket can tell"
        result = bucket.check(keys=[key])
        assert result.exit_code == Exit.GAP
        kinds = {f.kind for f in result.findings}
        assert {"checkpoint.unsigned", "receipt.uncovered"} <= kinds
        assert ("key.unknown" in kinds) == (other is not None)
        assert result.checkpoints[0].k is None


@pytest.mark.parametrize("signs", [True], indirect=True)
def test_a_rewritten_history_that_keeps_the_old_signatures(bucket: Bucket) -> None:
    """The old signature lines under new texts hold nothing."""
    rewrite(bucket, better)
    forge(bucket)
    path = bucket.checkpoint(0)
    lines = bucket.made[0].data.decode().partition("\n\n")[2]
    fields = msgspec.json.decode(path.read_bytes().split(b"\n")[3])
    assert "public_key" not in fields
    path.write_bytes(path.read_bytes() + lines.encode())
    result = bucket.check(keys=[bucket.signer.vkey()])
    assert result.exit_code != Exit.OK
    assert result.checkpoints[0].k is None


def test_a_rewritten_history_against_an_anchor(bucket: Bucket, tmp_path: Path) -> None:
    anchor = str(tmp_path / "anchor")
    anchors.anchor(open_store(str(bucket.root)), RUN, anchor)
    rewrite(bucket, better)
    forge(bucket)
    assert bucket.check().exit_code == Exit.OK
    result = bucket.check(anchor=anchor)
    assert result.exit_code == Exit.ERROR
    assert layout.checkpoint_path(RUN, 1) in {object_ for _, object_ in errors(result)}


def test_an_event_left_out_of_history(bucket: Bucket) -> None:
    """Not edited but gone: the numbers show it, and the copy shows it where the numbers were closed up as well."""

    def without(record: Record) -> Record | None:
        return None if (record.writer_id, record.seq) == (WRITERS[1], 3) else record

    rewrite(bucket, without)
    forge(bucket)
    assert {f.kind for f in bucket.check().findings} == {"seqs.missing"}
    shutil.rmtree(bucket.run / "receipt")
    shutil.rmtree(bucket.run / "segment")
    closed = [r if r.seq < 3 else _renumbered(r, r.seq - 1) for r in life(WRITERS[1], 1) if r.seq != 3]
    publish(bucket.root, ONE, batches(life(WRITERS[0], 0) + closed), None)
    publish(bucket.root, TWO, batches(life(WRITERS[2], 2)), None)
    forge(bucket)
    assert bucket.check(deep=True).exit_code == Exit.OK, "nothing in the bucket can tell"
    assert bucket.check(checkpoints=[bucket.made[0]]).exit_code == Exit.ERROR


def _renumbered(record: Record, seq: int) -> Record:
    fields = decode_envelope(record.envelope)
    given = {k: v for k, v in fields.items() if k in {"sample_id", "source", "contract_id", "step", "reason"}}
    arrays = {name: array.tolist() for name, array in record.arrays.items()}
    return event(RUN, record.writer_id, seq, fields["type"], **given, **arrays)


def test_a_rank_erased_from_a_sealed_run(bucket: Bucket, signs: bool) -> None:
    """All a rank ever wrote is removed and every checkpoint made anew: the seal has it, or the roster of run.json."""
    store = open_store(str(bucket.root))
    sealed = seals.seal(store, RUN, signer=bucket.signer if signs else None).seal
    assert sealed.complete
    path = bucket.root / layout.seal_path(RUN)
    remove(bucket, TWO, 0)
    forge(bucket)
    assert errors(bucket.check()) == {("checkpoint.missing", layout.checkpoint_path(RUN, 1))}
    new = seals.sealed_checkpoint(checkpoints.latest(store, RUN))
    path.write_bytes(encode_seal(msgspec.structs.replace(sealed, checkpoint=new, public_key=None, signature=None)))
    assert errors(bucket.check()) == {("seal.differs", layout.seal_path(RUN))}, "it counts a rank that is not there"
    path.unlink()
    assert seals.seal(store, RUN, incomplete=True).seal.missing == {"rollout": ((2, 2),)}
    result = bucket.check()
    assert result.exit_code == Exit.GAP
    assert {f.kind for f in result.findings} == {"rank.missing", "seal.incomplete"}


# -- checkpoints -----------------------------------------------------------------------------------------------------


def grown(bucket: Bucket, signs: bool, more: int = 2) -> list[Checkpoint]:
    """More receipts and more checkpoints, all kept elsewhere as well."""
    made = list(bucket.made)
    for i in range(more):
        publish(bucket.root, f"{i + 3}" * 32, batches(life(f"{i + 13:x}" * 32, 0)), bucket.signer if signs else None)
        made.append(checkpoints.make(open_store(str(bucket.root)), RUN, bucket.signer if signs else None))
    return made


def test_a_checkpoint_deleted_from_the_middle(bucket: Bucket, signs: bool) -> None:
    made = grown(bucket, signs)
    for k in range(len(made) - 1):
        bucket.checkpoint(k).unlink()
        without_index(bucket)
        assert errors(bucket.check()) == {("checkpoint.missing", layout.checkpoint_path(RUN, k))}
        bucket.checkpoint(k).write_bytes(made[k].data)
    assert bucket.check().exit_code == Exit.OK


def test_checkpoints_deleted_from_the_tail(bucket: Bucket, signs: bool, tmp_path: Path) -> None:
    """Where nothing in the bucket stands on one, as a seal does, nothing there says so; a copy always does."""
    made = grown(bucket, signs)
    anchor = str(tmp_path / "anchor")
    store = open_store(str(bucket.root))
    anchors.anchor(store, RUN, anchor)
    seals.seal(store, RUN)
    for k in (3, 2):
        bucket.checkpoint(k).unlink()
    without_index(bucket)
    assert errors(bucket.check()) == {("checkpoint.missing", layout.checkpoint_path(RUN, 3))}
    (bucket.root / layout.seal_path(RUN)).unlink()
    assert bucket.check().exit_code == Exit.OK
    for options in ({"checkpoints": [made[3]]}, {"checkpoints": [made[2]]}, {"anchor": anchor}):
        result = bucket.check(**options)
        assert result.exit_code == Exit.ERROR, options
        assert "checkpoint.missing" in {kind for kind, _ in errors(result)}


def test_a_checkpoint_signed_anew_with_another_key(bucket: Bucket, signs: bool, tmp_path: Path) -> None:
    """Same content, another key: the one after it does not follow it, and nobody who knows the key believes it."""
    stranger = signing.new_key(tmp_path / "stranger.pem")
    made = grown(bucket, signs, 1)
    for k in (1, 2):
        path = bucket.checkpoint(k)
        path.write_bytes(_signed_anew(made[k], stranger))
        result = bucket.check()
        if k == 1:
            assert ("checkpoint.unlinked", layout.checkpoint_path(RUN, 2)) in errors(result)
        else:
            assert result.exit_code == Exit.OK, "the newest one, for somebody without the key"
        assert bucket.check(checkpoints=[made[k]]).exit_code == Exit.ERROR
        if signs:
            strict = bucket.check(keys=[bucket.signer.vkey()])
            assert "key.unknown" in {f.kind for f in strict.findings}
            assert strict.checkpoints[0].k == k - 1, "believed up to the last one of the key"
        path.write_bytes(made[k].data)


def _signed_anew(checkpoint: Checkpoint, signer: Signer) -> bytes:
    import base64

    from rlk_ledger_schemas.checkpoints import checkpoint_text, encode_checkpoint

    info = msgspec.structs.replace(checkpoint.info, public_key=base64.b64encode(signer.public_key).decode())
    text = checkpoint_text(info, checkpoint.size, checkpoint.root)
    line = signer.note_signature(checkpoint.origin, text)
    return encode_checkpoint(info, checkpoint.size, checkpoint.root, [line])


def test_the_whole_ledger_rolled_back(bucket: Bucket, signs: bool, tmp_path: Path) -> None:
    """A backup of yesterday put in place of today: every object of it is genuine, every signature holds."""
    yesterday = tmp_path / "yesterday"
    shutil.copytree(bucket.root, yesterday)
    made = grown(bucket, signs)
    anchor = str(tmp_path / "anchor")
    anchors.anchor(open_store(str(bucket.root)), RUN, anchor)
    shutil.rmtree(bucket.root)
    yesterday.rename(bucket.root)
    keys = [bucket.signer.vkey()] if signs else []
    assert bucket.check(keys=keys).exit_code == Exit.OK, "nothing in the bucket can tell"
    for options in ({"checkpoints": [made[3]]}, {"anchor": anchor}):
        result = bucket.check(keys=keys, **options)
        assert result.exit_code == Exit.ERROR
        found = errors(result)
        assert ("receipt.missing", layout.receipt_path(RUN, "4" * 32, 0)) in found
        assert "checkpoint.missing" in {kind for kind, _ in found}


def test_a_split_view(bucket: Bucket, signs: bool, tmp_path: Path) -> None:
    """Two people are shown two ledgers that part after checkpoint 1; whoever compares notes sees it."""
    mine, other = bucket.signer if signs else None, tmp_path / "other"
    shutil.copytree(bucket.root, other)
    views = []
    for root, shipper in ((bucket.root, "3" * 32), (other, "4" * 32)):
        publish(root, shipper, batches(life("0d" * 16, 0)), mine)
        views.append(checkpoints.make(open_store(str(root)), RUN, mine))
    assert [view.k for view in views] == [2, 2]
    for root, copy in ((bucket.root, views[1]), (other, views[0])):
        assert verify(str(root), RUN).exit_code == Exit.OK, "each alone is without fault"
        result = verify(str(root), RUN, checkpoints=[copy])
        assert ("checkpoint.changed", layout.checkpoint_path(RUN, 2)) in errors(result)
        assert verify(str(root), RUN, checkpoints=bucket.made).exit_code == Exit.OK, "up to where they part they agree"


def test_the_command_tells_with_a_copy_with_the_key_and_with_the_anchor(
    bucket: Bucket, signs: bool, tmp_path: Path, capsys
) -> None:
    place = ["--ledger", str(bucket.root)]
    kept, anchor = tmp_path / "kept", str(tmp_path / "anchor")
    kept.write_bytes(bucket.made[1].data)
    assert decode_checkpoint(kept.read_bytes(), "kept").k == 1
    anchors.anchor(open_store(str(bucket.root)), RUN, anchor)
    options = [["--checkpoint", str(kept)], ["--anchor", anchor]] + ([["--key", bucket.signer.vkey()]] if signs else [])
    for extra in options:
        assert cli.main(["verify", RUN, *place, *extra]) == 0, extra
    rewrite(bucket, better)
    forge(bucket)
    assert cli.main(["verify", RUN, *place]) == 0
    codes = [cli.main(["verify", RUN, *place, *extra]) for extra in options]
    assert codes == [1, 1, 3][: len(options)]
    assert "checkpoint.changed" in capsys.readouterr().out


@pytest.mark.parametrize("whose", ["nobody", "another", "registered"])
def test_what_came_after_a_copy_is_shown_whatever_covers_it_in_the_bucket(
    bucket: Bucket, signs: bool, whose: str
) -> None:
    """Checkpoints that the attacker appends vouch for nothing: a copy covers what it covers, the rest is counted."""
    added = {"nobody": None, "another": signing.fresh_signer(), "registered": bucket.signer if signs else None}[whose]
    publish(bucket.root, "3" * 32, batches(life("0d" * 16, 0)), added)
    assert checkpoints.make(open_store(str(bucket.root)), RUN, added) is not None
    for options in [{"checkpoints": bucket.made}, *([{"keys": [bucket.signer.vkey()]}] if signs else [])]:
        result = bucket.check(**options)
        told = [f.text for f in result.findings if f.kind == "receipt.uncovered"]
        (summary,) = result.checkpoints
        if whose == "registered" and signs:
            counts = (0, 0) if "keys" in options else (3, 0)
        else:
            counts = (0, 3)
        assert (result.exit_code, summary.signed, summary.uncovered) == (Exit.OK, *counts)
        other = signs and whose != "registered" and "keys" not in options
        assert [f.object for f in result.findings if f.kind == "key.changed"] == (
            [layout.checkpoint_path(RUN, 2)] if other else []
        )
        assert [text.startswith("3 of ") and "newest" in text for text in told] == [True] * (counts[1] > 0)


def test_no_reader_answers_from_a_segment_that_is_not_the_one_its_receipt_describes(bucket: Bucket) -> None:
    """A column that says otherwise than the event, and bytes that no longer follow from the receipt: refused, not read.

    Whoever recomputes the receipt too meets the checkpoint.
    """
    path = next(p for p in sorted(bucket.run.glob("segment/*/*")) if b"logprobs" in p.read_bytes())
    table = pq.read_table(path)
    step = pa.array([777] * len(table), table.schema.field("step").type)
    pq.write_table(table.set_column(table.schema.get_field_index("step"), "step", step), path)
    ledger = open_ledger(str(bucket.root))
    for question in ("select max(step) from logprobs", "select count(*) from events", "select * from drift"):
        with pytest.raises(LedgerError, match="not those its receipt describes"):
            ledger.sql(question).arrow()
    with pytest.raises(LedgerError, match="not those its receipt describes"):
        list(ledger.read_events(RUN))


@pytest.mark.parametrize("what", ["pipe", "folder", "device", "nothing"])
@pytest.mark.parametrize("kind", ["segment", "receipt", "checkpoint", "run.json"])
def test_what_is_no_file_is_no_object(bucket: Bucket, kind: str, what: str) -> None:
    """In place of an object a pipe is not waited for, a device not read to its end, a folder no reason to give up."""
    path = {
        "segment": next(iter(sorted(bucket.run.glob("segment/*/*")))),
        "receipt": bucket.receipt(ONE, 1),
        "checkpoint": bucket.checkpoint(0),
        "run.json": bucket.run / "run.json",
    }[kind]
    path.unlink()
    if what == "pipe":
        os.mkfifo(path)
    elif what == "folder":
        path.mkdir()
    elif what == "device":
        path.symlink_to("/dev/zero")
    told = {(f.kind, f.object) for f in bucket.check(checkpoints=bucket.made).findings if f.severity == "error"}
    kinds = {"segment": "segment.missing", "receipt": "receipt.missing", "checkpoint": "checkpoint.missing"}
    assert (kinds.get(kind, "run.unreadable"), path.relative_to(bucket.root).as_posix()) in told


def test_a_note_of_a_gigabyte_is_not_read(bucket: Bucket) -> None:
    with bucket.checkpoint(2).open("wb") as file:
        file.truncate(1 << 40)
    assert errors(bucket.check(checkpoints=bucket.made)) == {
        ("checkpoint.unreadable", bucket.checkpoint(2).relative_to(bucket.root).as_posix())
    }
