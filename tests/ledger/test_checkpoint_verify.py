"""The rows of the attack table that checkpoints, signatures and copies kept elsewhere find: what is done, by name."""

import base64
import json
import random
import shutil
from pathlib import Path

import msgspec
import pytest

from rlk_ledger import checkpoints, cli, layout, signing
from rlk_ledger.anchors import Conflict, anchor
from rlk_ledger.build import event
from rlk_ledger.chain import Chain, new_shipper
from rlk_ledger.contact import meet
from rlk_ledger.store import FileStore, open_store
from rlk_ledger.verify import verify
from rlk_ledger_schemas.checkpoints import checkpoint_text, decode_checkpoint, encode_checkpoint, origin
from rlk_ledger_schemas.errors import ConfigError, UsageError
from rlk_ledger_schemas.findings import Exit
from rlk_ledger_schemas.fingerprints import canonical_json, sha256
from rlk_ledger_schemas.notes import NoteSignature, VerifierKey, decode_note, decode_vkey
from rlk_ledger_schemas.objects import FORMAT, RunInfo, decode_receipt, encode_receipt

RUN = "r1"
pytestmark = pytest.mark.skipif(not signing.available(), reason="needs cryptography")


class Maker:
    """A ledger whose chains grow receipt by receipt and whose checkpoints are made on demand."""

    def __init__(self, root: Path, signer=None) -> None:
        self.root = root
        self.store = open_store(str(root))
        self.signer = signer
        declared = RunInfo(
            format=FORMAT, ledger_id="", run_id=RUN, roles={}, mode={}, redaction="none", created_us=0
        )  # fmt: skip
        self.contact = meet(self.store, declared)

    def chain(self, signer=None) -> Chain:
        return Chain(self.store, self.contact, new_shipper(), signer=signer)

    def grow(self, chain: Chain, count: int = 1) -> None:
        for _ in range(count):
            fields = {"weight_version": f"v{chain.n}", "digest": "sha256:00", "tensor_count": 1}
            chain.publish(chain.draft([event(RUN, chain.shipper, chain.n, "weights.published", **fields)]))

    def cover(self):
        return checkpoints.make(self.store, RUN, self.signer)

    def path(self, chain: Chain, n: int) -> Path:
        return self.root / layout.receipt_path(RUN, chain.shipper, n)

    def checkpoint(self, k: int) -> Path:
        return self.root / layout.checkpoint_path(RUN, k)


def key() -> signing.Signer:
    made = signing.fresh_signer()
    return signing.Signer(made._private, kept=True)


@pytest.fixture
def maker(tmp_path: Path) -> Maker:
    """Two chains, three checkpoints over 3, 5 and 8 receipts, and two receipts after the last."""
    made = Maker(tmp_path / "ledger")
    made.a, made.b = made.chain(), made.chain()
    for a, b in ((2, 1), (1, 1), (1, 2)):
        made.grow(made.a, a)
        made.grow(made.b, b)
        made.cover()
    made.grow(made.a)
    made.grow(made.b)
    return made


def found(maker: Maker, severity: str = "error", **options) -> dict[str, set[str]]:
    """Objects by kind of finding; the index, which says what receipts say, has findings and tests of its own."""
    result = verify(maker.store, RUN, **options)
    out: dict[str, set[str]] = {}
    for f in result.findings:
        if f.severity == severity and not f.kind.startswith("index."):
            out.setdefault(f.kind, set()).add(f.object)
    if severity == "error" and out:
        assert result.exit_code == Exit.ERROR
    return out


def test_an_intact_log_is_intact_and_what_came_after_it_is_said_by_count(maker: Maker) -> None:
    result = verify(maker.store, RUN)
    assert result.exit_code == Exit.OK
    (note,) = (f for f in result.findings if f.kind == "receipt.uncovered")
    assert note.object == f"runs/{RUN}"
    assert f"2 of 10 receipts, in 2 chains ({min(maker.a.shipper, maker.b.shipper)} from" in note.text
    assert "came after checkpoint 2" in note.text
    (summary,) = result.checkpoints
    assert (summary.k, summary.receipts, summary.signed, summary.uncovered) == (2, 8, 0, 2)
    maker.cover()
    assert found(maker, "info").keys() == set()


def test_receipts_cut_from_the_end_of_a_chain_are_named(maker: Maker) -> None:
    for n in (4, 3, 2):
        maker.path(maker.a, n).unlink()
    assert found(maker) == {"receipt.missing": {layout.receipt_path(RUN, maker.a.shipper, 2)}}
    shutil.rmtree(maker.path(maker.b, 0).parent)
    assert found(maker)["receipt.missing"] == {
        layout.receipt_path(RUN, maker.a.shipper, 2),
        layout.receipt_path(RUN, maker.b.shipper, 0),
    }


def rewritten(maker: Maker, chain: Chain, first: int) -> None:
    """Rewrites a chain from receipt `first` on with every digest recomputed: what who knows the format does."""
    previous = None
    for n in range(chain.n):
        path = maker.path(chain, n)
        receipt = decode_receipt(path.read_bytes(), "x")
        if n >= first:
            receipt = msgspec.structs.replace(receipt, wall_us=receipt.wall_us + 1, previous=previous)
            path.write_bytes(encode_receipt(receipt))
        previous = sha256(path.read_bytes())


def test_a_chain_rewritten_with_every_digest_recomputed_is_named_receipt_by_receipt(maker: Maker) -> None:
    rewritten(maker, maker.a, 2)
    covered = {layout.receipt_path(RUN, maker.a.shipper, n) for n in (2, 3)}
    assert found(maker) == {"receipt.replaced": covered}


def test_what_came_after_the_last_checkpoint_can_be_rewritten_and_is_said_to_be_uncovered(maker: Maker) -> None:
    rewritten(maker, maker.a, 4)
    assert found(maker) == {}
    assert "receipt.uncovered" in found(maker, "info")


@pytest.mark.parametrize("k", [0, 1, 2])
def test_any_flipped_bit_of_a_checkpoint_is_named_in_it(maker: Maker, k: int) -> None:
    maker.signer = key()
    maker.grow(maker.a)
    maker.cover()
    path = maker.checkpoint(k + 1)
    whole = path.read_bytes()
    draw = random.Random(k)
    for bit in draw.sample(range(8 * len(whole)), 12):
        changed = bytearray(whole)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(bytes(changed))
        errors = found(maker)
        assert layout.checkpoint_path(RUN, k + 1) in set().union(*errors.values()), (bit, errors)


def test_any_flipped_bit_of_a_signature_line_is_an_invalid_signature_or_no_note(maker: Maker) -> None:
    maker.signer = key()
    maker.cover()
    path = maker.checkpoint(3)
    whole = path.read_bytes()
    start = whole.rindex("— ".encode())
    for at in range(start, len(whole), 3):
        changed = bytearray(whole)
        changed[at] ^= 1 << at % 7
        path.write_bytes(bytes(changed))
        errors = found(maker)
        assert errors.keys() <= {"signature.invalid", "checkpoint.unreadable"}
        assert errors, at


def test_a_checkpoint_deleted_from_the_middle_swapped_or_moved(maker: Maker) -> None:
    whole = [maker.checkpoint(k).read_bytes() for k in range(3)]
    maker.checkpoint(1).unlink()
    assert found(maker) == {"checkpoint.missing": {layout.checkpoint_path(RUN, 1)}}
    maker.checkpoint(1).write_bytes(whole[2])
    maker.checkpoint(2).write_bytes(whole[1])
    assert found(maker) == {"checkpoint.misplaced": {layout.checkpoint_path(RUN, k) for k in (1, 2)}}


def test_a_name_among_the_checkpoints_that_is_none(maker: Maker) -> None:
    names = ("0", "00000009.bak", "000000000")
    for name in names:
        maker.checkpoint(0).with_name(name).write_bytes(maker.checkpoint(0).read_bytes())
    assert found(maker) == {"object.unknown": {f"runs/{RUN}/checkpoint/{n}" for n in names}}


def forged(maker: Maker, k: int, **changes) -> None:
    """Checkpoint k remade with other fields and its own digests recomputed."""
    there = decode_checkpoint(maker.checkpoint(k).read_bytes(), "x")
    info = msgspec.structs.replace(there.info, **changes)
    maker.checkpoint(k).write_bytes(checkpoint_text(info, there.size, there.root) + b"\n")


def test_a_remade_checkpoint_breaks_the_link_of_the_next(maker: Maker) -> None:
    forged(maker, 1, wall_us=1)
    assert found(maker) == {"checkpoint.unlinked": {layout.checkpoint_path(RUN, 2)}}


def test_a_checkpoint_over_another_tree_contradicts_its_leaves_or_the_receipts(maker: Maker) -> None:
    leaves = decode_checkpoint(maker.checkpoint(2).read_bytes(), "x").leaves
    other = base64.b64encode(b"".join([leaves[1], leaves[0], *leaves[2:]])).decode()
    forged(maker, 2, leaves=other)
    errors = found(maker)
    assert errors["checkpoint.contradicts"] == {layout.checkpoint_path(RUN, 2)}
    assert len(errors["receipt.replaced"]) == 2, "the receipts are not in the place this checkpoint gives them"


def test_a_checkpoint_of_another_ledger_or_run_is_misplaced(maker: Maker, tmp_path: Path) -> None:
    other = Maker(tmp_path / "other")
    chain = other.chain()
    other.grow(chain, 3)
    other.cover()
    maker.checkpoint(0).write_bytes(other.checkpoint(0).read_bytes())
    assert found(maker)["checkpoint.misplaced"] == {layout.checkpoint_path(RUN, 0)}


# -- copies kept elsewhere -------------------------------------------------------------------------------------------


@pytest.fixture
def copy(maker: Maker, tmp_path: Path) -> str:
    """The last checkpoint, kept elsewhere."""
    path = tmp_path / "kept"
    path.write_bytes(maker.checkpoint(2).read_bytes())
    return str(path)


def test_a_copy_the_ledger_agrees_with_adds_nothing_and_an_old_one_too(maker: Maker, copy: str, tmp_path: Path) -> None:
    assert found(maker, checkpoints=[copy]) == {}
    old = decode_checkpoint(maker.checkpoint(0).read_bytes(), "x")
    for _ in range(2):
        maker.grow(maker.a)
        maker.cover()
    assert found(maker, checkpoints=[copy, old]) == {}


def test_a_copy_cosigned_by_a_witness_is_the_same_checkpoint(maker: Maker, copy: str) -> None:
    note = decode_note(Path(copy).read_bytes(), "x")
    witness = NoteSignature("witness.example/w1", b"1234", b"s" * 72)
    Path(copy).write_bytes(Path(copy).read_bytes() + f"— {witness.name} ".encode()
                           + base64.b64encode(witness.key_id + witness.signature) + b"\n")  # fmt: skip
    assert decode_note(Path(copy).read_bytes(), "x").text == note.text
    assert found(maker, checkpoints=[copy]) == {}


def test_everything_rolled_back_is_named_by_a_newer_copy(maker: Maker, copy: str) -> None:
    maker.checkpoint(2).unlink()
    for chain, numbers in ((maker.a, (4, 3)), (maker.b, (4, 3, 2))):
        for n in numbers:
            maker.path(chain, n).unlink()
    assert found(maker) == {}, "without the copy nobody could tell"
    assert found(maker, checkpoints=[copy]) == {
        "checkpoint.missing": {layout.checkpoint_path(RUN, 2)},
        "receipt.missing": {
            layout.receipt_path(RUN, maker.a.shipper, 3),
            layout.receipt_path(RUN, maker.b.shipper, 2),
        },
    }


def test_a_history_rewritten_with_its_checkpoints_is_named_by_a_copy(maker: Maker, copy: str) -> None:
    shutil.rmtree(maker.checkpoint(0).parent)
    shutil.rmtree(maker.checkpoint(0).parents[1] / "index")
    rewritten(maker, maker.a, 3)
    for _ in range(3):
        maker.cover()
        maker.grow(maker.b)
    assert found(maker) == {}, "without the copy nobody could tell"
    assert found(maker, checkpoints=[copy]) == {
        "checkpoint.changed": {layout.checkpoint_path(RUN, 2), layout.checkpoint_path(RUN, 1)},
        "receipt.replaced": {layout.receipt_path(RUN, maker.a.shipper, 3)},
    }


def test_all_checkpoints_deleted_or_the_whole_run_is_named_by_a_copy(maker: Maker, copy: str) -> None:
    shutil.rmtree(maker.checkpoint(0).parent)
    assert found(maker, checkpoints=[copy]) == {"checkpoint.missing": {layout.checkpoint_path(RUN, 2)}}
    shutil.rmtree(maker.root / "runs" / RUN)
    for run in (RUN, None):
        result = verify(maker.store, run, checkpoints=[copy])
        kinds = {f.kind for f in result.findings}
        assert result.exit_code == Exit.ERROR
        assert {"checkpoint.missing", "receipt.missing", "run.unreadable"} <= kinds


def test_the_ledger_id_is_pinned_by_a_copy(maker: Maker, copy: str, tmp_path: Path) -> None:
    other = Maker(tmp_path / "other")
    other.grow(other.chain(), 3)
    other.cover()
    result = verify(other.store, RUN, checkpoints=[copy])
    (error,) = (f for f in result.findings if f.severity == "error")
    assert (error.kind, error.object) == ("ledger.changed", "ledger.json")


def test_a_copy_that_is_none_or_of_another_run_is_usage(maker: Maker, copy: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        verify(maker.store, RUN, checkpoints=[str(tmp_path / "nothing")])
    Path(copy).write_bytes(Path(copy).read_bytes()[:-2])
    with pytest.raises(UsageError, match="--checkpoint"):
        verify(maker.store, RUN, checkpoints=[copy])
    one = decode_checkpoint(maker.checkpoint(0).read_bytes(), "x")
    info = msgspec.structs.replace(one.info, run_id="r2")
    with pytest.raises(UsageError, match="run 'r2', not of 'r1'"):
        verify(maker.store, RUN, checkpoints=[decode_checkpoint(encode_checkpoint(info, one.size, one.root), "x")])


def test_a_checkpoint_that_comes_during_the_listing_is_no_attack(maker: Maker) -> None:
    """Listings are no snapshot: a checkpoint may be listed while the receipts it covers were not there yet."""

    class Late(FileStore):
        def list(self, prefix: str):
            before = list(super().list(prefix))
            maker.grow(maker.a, 2)
            maker.grow(maker.chain())
            maker.cover()
            new = [e for e in super().list(prefix) if e not in before and "/checkpoint/" in e.path]
            return iter(sorted([*before, *new]))

    result = verify(Late(maker.root), RUN)
    assert [f for f in result.findings if f.severity == "error"] == []
    assert result.exit_code == Exit.OK


# -- anchors ---------------------------------------------------------------------------------------------------------


def test_anchored_checkpoints_show_what_was_rolled_back(maker: Maker, tmp_path: Path) -> None:
    to = str(tmp_path / "anchor")
    first = anchor(maker.store, RUN, to)
    assert first.written
    assert not anchor(maker.store, RUN, to).written
    path = f"{maker.contact.ledger.ledger_id}/{RUN}/00000002"
    assert (tmp_path / "anchor" / path).read_bytes() == maker.checkpoint(2).read_bytes()
    maker.cover()
    assert anchor(maker.store, RUN, to).written
    assert found(maker, anchor=to) == {}
    maker.checkpoint(3).unlink()
    assert found(maker, anchor=to) == {"checkpoint.missing": {layout.checkpoint_path(RUN, 3)}}
    shutil.rmtree(maker.root / "runs" / RUN)
    kinds = {f.kind for f in verify(maker.store, anchor=to).findings}
    assert {"checkpoint.missing", "receipt.missing"} <= kinds, "a run that is gone whole is named by its anchor"


def test_anchoring_reads_the_newest_note_only(maker: Maker, tmp_path: Path, monkeypatch) -> None:
    to = tmp_path / "anchor"
    for _ in range(4):
        anchor(maker.store, RUN, str(to))
        maker.grow(maker.a)
        maker.cover()
    read: list[str] = []
    before = FileStore.read

    def noted(store: FileStore, path: str) -> bytes:
        read.extend([path] if store.root == to else [])
        return before(store, path)

    monkeypatch.setattr(FileStore, "read", noted)
    done = anchor(maker.store, RUN, str(to))
    folder = f"{maker.contact.ledger.ledger_id}/{RUN}"
    last = done.checkpoint.k
    assert read == [f"{folder}/{last - 1:08d}", f"{folder}/{last:08d}"], "the one before, and what was written"
    (to / folder / f"{last:08d}").write_bytes(b"junk")
    with pytest.raises(Conflict):
        anchor(maker.store, RUN, str(to))


def test_an_anchor_without_the_run_or_with_something_else_is_a_gap(maker: Maker, tmp_path: Path) -> None:
    to = tmp_path / "anchor"
    result = verify(maker.store, RUN, anchor=str(to))
    assert (result.exit_code, result.findings[0].kind) == (Exit.GAP, "anchor.unusable")
    anchor(maker.store, RUN, str(to))
    folder = to / maker.contact.ledger.ledger_id / RUN
    (folder / "00000001").write_bytes(b"junk")
    (folder / "notes.txt").write_bytes(b"junk")
    assert found(maker, "gap", anchor=str(to)) == {"anchor.unusable": {f"runs/{RUN}"}}


def test_an_anchor_inside_the_ledger_is_refused(maker: Maker, tmp_path: Path) -> None:
    for url in (maker.root, maker.root / "anchor", f"file://{maker.root}/x", tmp_path / "x" / ".." / "ledger" / "y"):
        with pytest.raises(UsageError, match="inside the ledger"):
            anchor(maker.store, RUN, str(url))
    assert anchor(maker.store, RUN, str(tmp_path / "ledger2")).written


def run(capsys, *arguments: str) -> tuple[int, str]:
    code = cli.main(list(arguments))
    out = capsys.readouterr()
    return code, out.out + out.err


def test_commands_conflicting_anchors_and_copies_are_exit_code_1(maker: Maker, tmp_path: Path, capsys) -> None:
    url, to, file = str(maker.root), str(tmp_path / "anchor"), str(tmp_path / "kept")
    code, text = run(capsys, "checkpoint", RUN, "--ledger", url, "-o", file)
    assert (code, "checkpoint 3 covers 10 receipts, 2 of them new; not signed" in text) == (0, True)
    assert f"verify {RUN} --ledger {url} --checkpoint {file}" in text
    assert Path(file).read_bytes() == maker.checkpoint(3).read_bytes()
    assert run(capsys, "anchor", RUN, "--ledger", url, "--to", to)[0] == 0
    code, text = run(capsys, "verify", RUN, "--ledger", url, "--anchor", to, "--checkpoint", file)
    assert (code, "compared with 2 copies kept elsewhere, and nothing departs from them" in text) == (0, True)
    assert "next:" not in text, "where nothing is wrong there is nothing to do"
    maker.checkpoint(3).unlink()
    code, text = run(capsys, "anchor", RUN, "--ledger", url, "--to", to)
    assert (code, "the newest in the ledger is 2" in text) == (1, True)
    maker.grow(maker.a)
    kept = Path(file).read_bytes()
    code, text = run(capsys, "checkpoint", RUN, "--ledger", url, "-o", file)
    assert (code, "is another checkpoint 3 than the ledger's" in text) == (1, True)
    assert Path(file).read_bytes() == kept, "evidence is not replaced by what contradicts it"
    code, text = run(capsys, "anchor", RUN, "--ledger", url, "--to", to)
    assert (code, "another checkpoint 3" in text) == (1, True)
    assert run(capsys, "verify", RUN, "--ledger", url, "--anchor", to)[0] == 1
    assert run(capsys, "anchor", RUN, "--ledger", url, "--to", url)[0] == 2
    (tmp_path / "text").write_text("mine")
    assert run(capsys, "checkpoint", RUN, "--ledger", url, "-o", str(tmp_path / "text"))[0] == 2
    assert (tmp_path / "text").read_text() == "mine"


# -- keys and signatures ---------------------------------------------------------------------------------------------


@pytest.fixture
def signed(tmp_path: Path) -> Maker:
    """A signed chain of four receipts and an unsigned one of two, the first three and the first covered and signed."""
    made = Maker(tmp_path / "ledger", key())
    made.a, made.b = made.chain(made.signer), made.chain()
    made.grow(made.a, 3)
    made.grow(made.b)
    made.cover()
    made.grow(made.a)
    made.grow(made.b)
    return made


def test_receipts_signed_by_a_registered_key_are_believed_and_others_are_named(signed: Maker) -> None:
    result = verify(signed.store, RUN)
    assert result.exit_code == Exit.OK
    (note,) = (f for f in result.findings if f.kind == "receipt.uncovered")
    assert f"1 of 6 receipts, in 1 chain ({signed.b.shipper} from 1)" in note.text
    assert (result.checkpoints[0].signed, result.checkpoints[0].uncovered) == (1, 1)
    strange = signed.chain(key())
    signed.grow(strange, 2)
    (note,) = (f for f in verify(signed.store, RUN).findings if f.kind == "receipt.uncovered")
    assert f"{strange.shipper} from 0" in note.text, "a key no checkpoint covers is anybody's"
    signed.cover()
    signed.grow(strange)
    assert "receipt.uncovered" not in found(signed, "info")


def test_a_registered_key_is_believed_in_every_chain_it_signs(signed: Maker) -> None:
    """A job that starts again with its key is a new shipper, and nobody else can have signed what it ships."""
    again = signed.chain(signed.signer)
    signed.grow(again, 2)
    (note,) = (f for f in verify(signed.store, RUN).findings if f.kind == "receipt.uncovered")
    assert again.shipper not in note.text
    assert verify(signed.store, RUN).checkpoints[0].signed == 3


def test_signing_is_deterministic_and_covers_every_other_byte(signed: Maker) -> None:
    draft = [signed.a.draft([event(RUN, signed.a.shipper, 4, "weights.published", weight_version="v",
                                   digest="a:0", tensor_count=1, wall_ns=5)]) for _ in range(2)]  # fmt: skip
    at = {d.receipt.wall_us for d in draft}
    assert len({d.receipt_bytes for d in draft}) == len(at)
    data = signed.path(signed.a, 0).read_bytes()
    receipt = decode_receipt(data, "x")
    assert base64.b64decode(receipt.public_key) == signed.signer.public_key
    assert signing.receipt_signed_by(data, receipt, signed.signer.public_key)
    fields = json.loads(data)
    for name in fields.keys() - {"self", "signature"}:
        changed = json.dumps({k: v for k, v in fields.items() if k != name}).encode()
        assert not signing.receipt_signed_by(changed, receipt, signed.signer.public_key), name


def test_what_is_signed_is_the_receipt_without_self_and_signature_whatever_repeats_them(signed: Maker) -> None:
    data = signed.path(signed.a, 1).read_bytes()
    fields = json.loads(data)
    for extra in (
        {},
        {"note": {"self": fields["self"]}},
        {"a": {"signature": fields["signature"], "z": 1}},
        {"z": "é"},
    ):
        whole = canonical_json({**fields, **extra})
        rest = canonical_json({k: v for k, v in {**fields, **extra}.items() if k not in ("self", "signature")})
        assert signing.receipt_message(whole) == b"rlk-ledger receipt\n" + rest


@pytest.mark.parametrize("how", ["stripped", "another key", "garbage"])
def test_a_forged_last_receipt_of_a_signed_chain_is_an_error_though_no_checkpoint_covers_it(
    signed: Maker, how: str
) -> None:
    path = signed.path(signed.a, 3)
    receipt = msgspec.structs.replace(decode_receipt(path.read_bytes(), "x"), wall_us=1, signature=None)
    if how == "another key":
        receipt = signing.signed(receipt, key())
    elif how == "garbage":
        receipt = msgspec.structs.replace(receipt, signature="AAAA")
    path.write_bytes(encode_receipt(receipt))
    kind = "signature.missing" if how == "stripped" else "signature.invalid"
    assert found(signed) == {kind: {layout.receipt_path(RUN, signed.a.shipper, 3)}}


def test_with_a_key_only_its_checkpoints_cover_anything(signed: Maker, tmp_path: Path) -> None:
    mine = signed.signer.vkey()
    assert found(signed, "gap", keys=[mine]) == {}
    assert verify(signed.store, RUN, keys=[mine]).checkpoints[0].k == 0
    signed.signer = None
    signed.cover()
    result = verify(signed.store, RUN, keys=[mine])
    assert (result.exit_code, result.checkpoints[0].k, result.checkpoints[0].uncovered) == (Exit.OK, 0, 1)
    other = key()
    result = verify(signed.store, RUN, keys=[other.vkey()])
    assert result.exit_code == Exit.GAP
    assert {f.kind for f in result.findings} >= {"checkpoint.unsigned", "key.unknown", "receipt.uncovered"}
    assert verify(signed.store, RUN, keys=[other.vkey(), signed.a.signer.public_key]).exit_code == Exit.OK
    file = tmp_path / "key"
    file.write_text(mine + "\n")
    assert verify(signed.store, RUN, keys=[str(file)]).exit_code == Exit.OK


def test_a_history_remade_without_the_key_is_seen_with_the_key(signed: Maker) -> None:
    shutil.rmtree(signed.checkpoint(0).parent)
    real, signed.signer = signed.signer, key()
    signed.cover()
    assert found(signed) == {}
    result = verify(signed.store, RUN, keys=[real.vkey()])
    assert result.exit_code == Exit.GAP
    assert "checkpoint.unsigned" in {f.kind for f in result.findings}


def test_the_signature_bears_the_origin_as_its_name_and_the_published_form(signed: Maker) -> None:
    note = decode_note(signed.checkpoint(0).read_bytes(), "x")
    name = origin(signed.contact.ledger.ledger_id, RUN)
    (line,) = note.signatures
    vkey = VerifierKey(name, signed.signer.public_key)
    assert (line.name, line.key_id) == (name, decode_vkey(vkey.encode()).key_id)
    assert signing.check(vkey.public_key, line.signature, note.text)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("nothing", "no verifier key and no file"),
        ("rlk-ledger+00000000+AboSr6gDqqzUrejHRUdSG+brOlAuIRK6zOTtAuA9bkyo", "mistyped"),
        ("a+b", "no verifier key"),
    ],
)
def test_a_key_that_is_none_is_usage(signed: Maker, text: str, match: str) -> None:
    with pytest.raises(UsageError, match=match):
        verify(signed.store, RUN, keys=[text])


def test_keygen_makes_a_key_once_and_prints_what_verify_takes(
    signed: Maker, tmp_path: Path, capsys, monkeypatch
) -> None:
    path = tmp_path / "key.pem"
    code, text = run(capsys, "keygen", str(path))
    vkey = text.splitlines()[0]
    assert (code, path.stat().st_mode & 0o777) == (0, 0o600)
    assert f"RLK_SIGNING_KEY={path.absolute()}" in text, "which works from any directory"
    assert run(capsys, "keygen", str(path))[0] == 2
    assert cli.main(["keygen", "--public", str(path)]) == 0
    assert capsys.readouterr() == (f"{vkey}\n", ""), "stdout is the key and nothing else: it can be sent to a file"
    (tmp_path / "key.pub").write_text(f"{vkey}\n")
    assert run(capsys, "verify", "--ledger", str(signed.root), "--key", str(tmp_path / "key.pub"))[0] == 3
    monkeypatch.setenv("RLK_SIGNING_KEY", str(path))
    url = str(signed.root)
    code, text = run(capsys, "checkpoint", RUN, "--ledger", url, "--json")
    (made,) = json.loads(text)["checkpoints"]
    assert decode_vkey(made["key"]).public_key == decode_vkey(vkey).public_key
    assert run(capsys, "verify", "--ledger", url, "--key", vkey)[0] == 0
    assert run(capsys, "verify", "--ledger", url, "--key", str(path))[0] == 2, "a private key is no verifier key"
    path.write_text("-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n")
    code, text = run(capsys, "checkpoint", RUN, "--ledger", url)
    assert (code, "keygen" in text) == (2, True)
    signer, wrong = signing.shipper_signer()
    assert not signer.kept
    assert "keygen" in wrong
    monkeypatch.setenv("RLK_SIGNING_KEY", str(tmp_path / "gone"))
    with pytest.raises(ConfigError, match="cannot be read"):
        signing.load_signer()


def test_without_cryptography_everything_is_unsigned_and_what_is_signed_is_said_to_be_unchecked(
    signed: Maker, monkeypatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(signing, "available", lambda: False)
    assert signing.fresh_signer() is None
    assert signing.shipper_signer() == (None, None)
    result = verify(signed.store, RUN)
    unchecked = {f.object for f in result.findings if f.kind == "signature.unchecked"}
    assert unchecked == {f"runs/{RUN}", layout.checkpoint_path(RUN, 0)}
    assert (result.exit_code, result.checkpoints[0].uncovered) == (Exit.OK, 2), "what is not checked is not believed"
    with pytest.raises(UsageError, match=r"rlk-ledger\[signing\]"):
        verify(signed.store, RUN, keys=["x"])
    with pytest.raises(UsageError, match=r"rlk-ledger\[signing\]"):
        signing.new_key(tmp_path / "k")
    monkeypatch.setenv("RLK_SIGNING_KEY", "x")
    with pytest.raises(ConfigError, match=r"rlk-ledger\[signing\]"):
        signing.load_signer()
    signed.signer = None
    assert signed.cover().k == 1
