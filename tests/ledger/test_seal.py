"""Seals: who was to take part and who did, what comes after, and a seal that lies."""

import contextlib
import json
import threading
from pathlib import Path

import msgspec
import pytest

from rlk_ledger import checkpoints, cli, layout, signing
from rlk_ledger.build import build, event
from rlk_ledger.chain import Chain, Ending
from rlk_ledger.contact import meet
from rlk_ledger.ledger import Ledger, open_ledger
from rlk_ledger.records import Record
from rlk_ledger.seals import Unfinished, read_seal, seal
from rlk_ledger.signing import Signer
from rlk_ledger.store import open_store
from rlk_ledger.summary import overview
from rlk_ledger.verify import verify
from rlk_ledger_schemas.errors import FormatError, LedgerError, StoreError
from rlk_ledger_schemas.findings import Exit
from rlk_ledger_schemas.seals import Seal, decode_seal, encode_seal

RUN = "r1"
A, B, C, D = "0a" * 16, "0b" * 16, "0c" * 16, "0d" * 16
ROLES = {"rollout": 2, "training": 1}


def life(writer: str, role: str, rank: int, world: int = 1, closed: bool = True, **more) -> list[Record]:
    out = [event(RUN, writer, 0, "writer.opened", role=role, rank=rank, world_size=world, **more)]
    out += [
        event(RUN, writer, i, "weights.published", weight_version="v", digest="sha256:00", tensor_count=i)
        for i in (1, 2)
    ]
    return [*out, event(RUN, writer, 3, "writer.closed", reason="done")] if closed else out


def whole() -> list[Record]:
    return life(A, "rollout", 0, 2) + life(B, "rollout", 1, 2) + life(C, "training", 0)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return str(tmp_path / "l")


@pytest.fixture
def signer(tmp_path: Path) -> Signer:
    return signing.new_key(tmp_path / "key.pem")


def made(url: str, records: list[Record] | None = None, **options) -> Ledger:
    return build(url, RUN, whole() if records is None else records, roles=ROLES, **options)


def signed_chain(ledger: Ledger, signer: Signer, records: list[Record]) -> None:
    """One more chain whose receipts bear signatures, as a shipper makes it."""
    run = ledger.run(RUN).info
    chain = Chain(ledger.store, meet(ledger.store, run), signer=signer)
    chain.publish(chain.draft(records))


def kinds(url: str, **options) -> dict[str, str]:
    """kind -> object of what verify finds; the run's exit code goes with the severities."""
    return {f.kind: f.object for f in verify(url, RUN, **options).findings}


# -- sealing ---------------------------------------------------------------------------------------------------------


def test_a_finished_run_is_sealed_on_a_checkpoint_of_all_of_it(url: str, signer: Signer) -> None:
    ledger = made(url, per_segment=3)
    sealed = seal(ledger.store, RUN, signer=signer)
    assert sealed.mine
    found = sealed.seal
    newest = checkpoints.latest(ledger.store, RUN)
    assert newest is not None
    assert (found.checkpoint.k, found.checkpoint.size, found.checkpoint.digest) == (0, 4, newest.digest)
    assert {role: msgspec.structs.astuple(count) for role, count in found.roster.items()} == {
        "rollout": (2, 2, 2, 0),
        "training": (1, 1, 1, 0),
    }
    assert (found.open, found.missing, found.complete) == ((), {}, True)
    assert read_seal(ledger.store, RUN) == found
    result = verify(url, RUN, deep=True, keys=[signer.vkey()])
    assert (result.exit_code, result.findings) == (Exit.OK, ())


def test_a_run_is_sealed_once_and_sealing_again_shows_the_seal(url: str) -> None:
    ledger = made(url)
    first = seal(ledger.store, RUN)
    build(url, RUN, life(D, "rollout", 0))
    again = seal(ledger.store, RUN)
    assert (again.mine, again.seal) == (False, first.seal)
    assert checkpoints.latest(ledger.store, RUN).k == 0, "and makes no checkpoint"


def test_missing_ranks_and_open_writers_are_refused_and_named(url: str) -> None:
    ledger = made(url, life(A, "rollout", 0, 2) + life(C, "training", 0, closed=False))
    with pytest.raises(
        Unfinished, match=r"2 rollout ranks these never reported: rank 1; 1 writer has not closed: 0c0c"
    ):
        seal(ledger.store, RUN)
    assert read_seal(ledger.store, RUN) is None
    sealed = seal(ledger.store, RUN, incomplete=True)
    found = sealed.seal
    assert (found.open, found.missing, found.complete) == ((C,), {"rollout": ((1, 1),)}, False)
    assert msgspec.structs.astuple(found.roster["training"]) == (1, 1, 0, 0)
    result = verify(url, RUN)
    assert result.exit_code == Exit.GAP
    hit = next(f for f in result.findings if f.kind == "seal.incomplete")
    assert (hit.object, hit.severity) == (layout.seal_path(RUN), "gap")
    assert "rollout ranks these never reported: rank 1" in hit.text
    assert "1 writer has not closed: 0c0c0c0c" in hit.text


def test_a_rank_that_never_reported_stays_missing_under_a_seal_while_others_are_open(url: str) -> None:
    """Without a seal the run might still be filling up (`run.open`); with one it is over."""
    ledger = made(url, life(A, "rollout", 0, 2) + life(C, "training", 0, closed=False))
    before = verify(url, RUN)
    assert before.exit_code == Exit.OK
    assert "run.open" in {f.kind for f in before.findings}
    seal(ledger.store, RUN, incomplete=True)
    assert verify(url, RUN).exit_code == Exit.GAP


def test_children_and_shippers_are_no_members_and_the_dead_are_counted(url: str) -> None:
    records = whole() + life(D, "training", 0, parent_writer=C)
    ledger = made(url, records[:-1], endings={D: Ending(0, 2)})
    found = seal(ledger.store, RUN).seal
    assert msgspec.structs.astuple(found.roster["training"]) == (1, 1, 1, 0)
    other = made(str(Path(url).with_name("m")), whole()[:-1], endings={C: Ending(0, 2)})
    found = seal(other.store, RUN).seal
    assert msgspec.structs.astuple(found.roster["training"]) == (1, 1, 0, 1)
    assert found.complete, "a writer that was found dead adds nothing more"


def test_a_run_without_roles_or_with_more_roles_than_declared(url: str) -> None:
    ledger = build(url, RUN, whole() + life(D, "reward", 0), roles={"rollout": 2})
    found = seal(ledger.store, RUN).seal
    assert {role: count.expected for role, count in found.roster.items()} == {"reward": 0, "rollout": 2, "training": 0}
    assert found.complete


def test_nothing_to_seal_and_nothing_damaged_is_sealed(url: str) -> None:
    ledger = made(url, per_segment=2)
    with pytest.raises(LedgerError, match="no run 'r9'"):
        seal(ledger.store, "r9")
    path = sorted((Path(url) / "runs" / RUN / "receipt").rglob("*.json"))[1]
    good = path.read_bytes()
    path.write_bytes(b"{}")
    with pytest.raises(LedgerError, match="rlk-ledger verify r1"):
        seal(ledger.store, RUN)
    path.write_bytes(good)
    assert seal(ledger.store, RUN).mine
    (Path(url) / "runs" / "r2").mkdir()
    info = json.loads((Path(url) / "runs" / RUN / "run.json").read_bytes())
    from rlk_ledger_schemas.fingerprints import canonical_json

    (Path(url) / "runs" / "r2" / "run.json").write_bytes(canonical_json({**info, "run_id": "r2"}))
    with pytest.raises(LedgerError, match="has no receipts yet"):
        seal(ledger.store, "r2")


# -- races and crashes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attempt", range(5))
def test_of_racing_sealers_one_wins_and_all_adopt_its_seal(url: str, attempt: int) -> None:
    made(url)
    found, start = [], threading.Barrier(6)

    def race(i: int) -> None:
        store = open_store(url)
        start.wait()
        found.append(seal(store, RUN, wall_us=lambda: i))

    threads = [threading.Thread(target=race, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 6
    assert len({encode_seal(one.seal) for one in found}) == 1
    assert [one.mine for one in found].count(True) == 1
    assert verify(url, RUN).exit_code == Exit.OK


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_crash_at_any_call_leaves_a_run_that_is_sealed_by_the_next_try(tmp_path: Path, helpers, after: bool) -> None:
    """The sealer is killed before, or right after, each of its calls: it looks like a crash, no attack."""
    calls = 0
    while True:
        url = str(tmp_path / f"l{calls}")
        ledger = made(url)
        store = helpers.FaultyStore(ledger.store, calls, "after" if after else "before", helpers.Killed)
        with contextlib.suppress(helpers.Killed):
            seal(store, RUN)
        if len(store.calls) <= calls:
            break
        assert verify(url, RUN, deep=True).exit_code == Exit.OK, f"killed at {store.calls[calls]}"
        assert seal(ledger.store, RUN).seal.complete
        result = verify(url, RUN, deep=True)
        assert (result.exit_code, result.findings) == (Exit.OK, ()), f"killed at {store.calls[calls]}"
        assert [one.k for one in checkpoints.read_checkpoints(ledger.store, RUN)] == [0]
        calls += 1
    assert calls > 15


def test_a_lost_reply_at_any_call_is_no_second_seal(tmp_path: Path, helpers) -> None:
    calls = 0
    while True:
        url = str(tmp_path / f"l{calls}")
        ledger = made(url)
        store = helpers.FaultyStore(ledger.store, calls, "after", helpers.lost_reply)
        with contextlib.suppress(StoreError, LedgerError):
            seal(store, RUN)
        if len(store.calls) <= calls:
            break
        seal(ledger.store, RUN)
        result = verify(url, RUN)
        assert (result.exit_code, result.findings) == (Exit.OK, ())
        calls += 1
    assert calls > 15


# -- after the seal --------------------------------------------------------------------------------------------------


def test_what_an_open_writer_adds_after_the_seal_is_fine_and_named(url: str) -> None:
    ledger = made(url, whole()[:-1])
    seal(ledger.store, RUN, incomplete=True)
    assert verify(url, RUN).exit_code == Exit.GAP
    build(url, RUN, whole()[-1:])
    checkpoints.make(ledger.store, RUN)
    result = verify(url, RUN)
    assert result.exit_code == Exit.OK, "the writer it left open has closed: nothing is missing any more"
    assert {f.kind for f in result.findings} == {"seal.added"}


def test_receipts_after_the_seal_of_nobody_it_knows_are_a_gap_and_lose_nothing(url: str) -> None:
    ledger = made(url)
    seal(ledger.store, RUN)
    build(url, RUN, life(D, "rollout", 0))
    result = verify(url, RUN)
    assert result.exit_code == Exit.GAP
    late = [f for f in result.findings if f.kind == "seal.late"]
    assert [(f.object.startswith(f"runs/{RUN}/receipt/"), f.writer) for f in late] == [(True, D)]
    assert len(list(open_ledger(url).read_events(RUN))) == 16
    checkpoints.make(ledger.store, RUN)
    assert verify(url, RUN).exit_code == Exit.GAP, "a checkpoint after the seal does not make them part of it"


def test_late_receipts_signed_by_a_registered_key_are_named_and_fine(url: str, signer: Signer) -> None:
    ledger = made(url)
    seal(ledger.store, RUN)
    signed_chain(ledger, signer, life(D, "rollout", 0))
    assert verify(url, RUN).exit_code == Exit.GAP, "a key nobody has vouched for"
    assert "seal.added" in kinds(url, keys=[signer.vkey()])
    checkpoints.make(ledger.store, RUN)
    result = verify(url, RUN)
    assert result.exit_code == Exit.OK, "a checkpoint covers the chain's first receipt, and with it the key"
    assert [f.kind for f in result.findings] == ["seal.added"]


def test_a_new_shipper_that_signs_with_a_registered_key_is_not_late(url: str, signer: Signer) -> None:
    ledger = made(url)
    signed_chain(ledger, signer, life(D, "rollout", 0))
    seal(ledger.store, RUN)
    signed_chain(ledger, signer, life("0e" * 16, "rollout", 0))
    result = verify(url, RUN)
    assert result.exit_code == Exit.OK
    assert "signed by a registered key" in next(f.text for f in result.findings if f.kind == "seal.added")


def test_a_real_shipper_that_meets_a_seal_still_ships(url: str, new_writer) -> None:
    from rlk_ledger.service import ship_once

    writer = new_writer()
    opened = {"role": "rollout", "rank": 0, "world_size": 1}
    writer.put("writer.opened", **opened)
    writer.many(3)
    spool = writer.directory.parent
    assert ship_once(spool) == []
    store = open_store(url)
    sealed = seal(store, RUN, incomplete=True).seal
    assert sealed.open == (writer.writer_id,)
    writer.many(4)
    writer.close()
    assert ship_once(spool) == []
    result = verify(url, RUN)
    assert result.exit_code == Exit.OK
    assert result.events == 9


def test_a_shipper_may_say_after_the_seal_what_it_found_and_nothing_else(url: str) -> None:
    """Its own writer id is no way around the seal."""
    ledger = made(url)
    seal(ledger.store, RUN)
    chain = Chain(ledger.store, meet(ledger.store, ledger.run(RUN).info))
    opened = event(RUN, chain.shipper, 0, "writer.opened", role="shipper", rank=0, world_size=1)
    lost = event(RUN, chain.shipper, 1, "writer.lost", writer=D, reason="dead", last_seq=-1, bytes_left=0)
    chain.publish(chain.draft([opened, lost]))
    assert kinds(url)["seal.added"].startswith(f"runs/{RUN}/receipt/{chain.shipper}")
    fields = {"weight_version": "v", "digest": "sha256:00", "tensor_count": 1}
    chain.publish(chain.draft([event(RUN, chain.shipper, 2, "weights.published", **fields)]))
    assert kinds(url)["seal.late"] == layout.receipt_path(RUN, chain.shipper, 1)


def test_a_sealed_run_is_pruned_without_a_late_finding(url: str) -> None:
    """Retention comes after the seal by its nature: its tombstones are named and fine."""
    ledger = made(url, per_segment=3)
    seal(ledger.store, RUN)
    before = {f.kind for f in verify(url, RUN).findings}
    assert before == set()
    code = cli.main(["prune", RUN, "--all", "--ledger", url])
    assert code == 0
    result = verify(url, RUN)
    found = {f.kind for f in result.findings}
    assert result.exit_code == Exit.OK, result.findings
    assert {"segment.pruned", "seal.added"} <= found
    assert "seal.late" not in found
    assert read_seal(ledger.store, RUN).complete


# -- a seal that lies ------------------------------------------------------------------------------------------------


def rewrite(ledger: Ledger, **changes) -> None:
    """Another seal in its place, `self` recomputed: what somebody does who knows the format."""
    path = Path(ledger.url) / layout.seal_path(RUN)
    found = decode_seal(path.read_bytes(), "x")
    path.write_bytes(encode_seal(msgspec.structs.replace(found, **changes)))


def test_a_seal_that_says_other_than_what_it_seals(url: str) -> None:
    ledger = made(url, life(A, "rollout", 0, 2) + life(C, "training", 0, closed=False))
    found = seal(ledger.store, RUN, incomplete=True).seal
    path = layout.seal_path(RUN)
    for changes in (
        {"missing": {}, "open": (), "complete": True},
        {"open": (A, C)},
        {"roster": {**found.roster, "rollout": msgspec.structs.replace(found.roster["rollout"], opened=2)}},
        {"checkpoint": msgspec.structs.replace(found.checkpoint, size=7)},
        {"checkpoint": msgspec.structs.replace(found.checkpoint, digest="sha256:" + "0" * 64)},
    ):
        rewrite(ledger, **changes)
        result = verify(url, RUN)
        assert result.exit_code == Exit.ERROR, changes
        assert [(f.kind, f.object) for f in result.findings if f.severity == "error"] == [("seal.differs", path)]
        rewrite(ledger, **msgspec.structs.asdict(found))
    assert verify(url, RUN).exit_code == Exit.GAP


def test_a_seal_on_a_checkpoint_that_is_gone(url: str) -> None:
    ledger = made(url)
    found = seal(ledger.store, RUN).seal
    rewrite(ledger, checkpoint=msgspec.structs.replace(found.checkpoint, k=3))
    assert kinds(url)["checkpoint.missing"] == layout.checkpoint_path(RUN, 3)
    rewrite(ledger, checkpoint=found.checkpoint)
    (Path(url) / layout.checkpoint_path(RUN, 0)).unlink()
    hits = [(f.kind, f.object) for f in verify(url, RUN).findings if f.kind != "receipt.uncovered"]
    assert hits == [("checkpoint.missing", layout.checkpoint_path(RUN, 0))], "said once"


def test_a_seal_of_another_run_or_ledger_is_misplaced(url: str, tmp_path: Path) -> None:
    ledger = made(url)
    seal(ledger.store, RUN)
    other = made(str(tmp_path / "other"))
    seal(other.store, RUN)
    (Path(url) / layout.seal_path(RUN)).write_bytes((Path(other.url) / layout.seal_path(RUN)).read_bytes())
    assert kinds(url)["seal.misplaced"] == layout.seal_path(RUN)
    rewrite(ledger, run_id="r2", ledger_id=ledger.info.ledger_id)
    assert kinds(url)["seal.misplaced"] == layout.seal_path(RUN)
    with pytest.raises(LedgerError, match="the seal of run 'r2'"):
        read_seal(ledger.store, RUN)


def test_a_signature_of_a_seal_holds_or_is_found(url: str, signer: Signer, tmp_path: Path) -> None:
    ledger = made(url)
    found = seal(ledger.store, RUN, signer=signer).seal
    assert verify(url, RUN, keys=[signer.vkey()]).exit_code == Exit.OK
    rewrite(ledger, wall_us=1)
    assert kinds(url)["signature.invalid"] == layout.seal_path(RUN)
    for changes in ({"signature": None}, {"signature": "x"}, {"public_key": "A" * 44}, {"public_key": None}):
        rewrite(ledger, **{**msgspec.structs.asdict(found), **changes})
        assert verify(url, RUN).exit_code == Exit.ERROR, changes
    rewrite(ledger, **{**msgspec.structs.asdict(found), "signature": None, "public_key": None})
    assert verify(url, RUN).exit_code == Exit.OK, "unsigned, it is as good as any seal without a key"
    assert kinds(url, keys=[signer.vkey()])["seal.unsigned"] == layout.seal_path(RUN)
    rewrite(ledger, **msgspec.structs.asdict(found))
    stranger = signing.new_key(tmp_path / "other.pem")
    assert "seal.unsigned" in kinds(url, keys=[stranger.vkey()])


def test_a_seal_that_does_not_parse_is_found_and_readers_refuse_it(url: str) -> None:
    ledger = made(url)
    seal(ledger.store, RUN)
    path = Path(url) / layout.seal_path(RUN)
    good = path.read_bytes()
    fields = json.loads(good)
    from rlk_ledger_schemas.fingerprints import canonical_json

    for bad in (b"", b"{}", good[:-1], good + b" ", b"[1]", good.replace(b'"format":1', b'"format":2'), b"\xff" + good):
        path.write_bytes(bad)
        assert kinds(url)["seal.unreadable"] == layout.seal_path(RUN)
        with pytest.raises(LedgerError, match="rlk-ledger verify r1"):
            read_seal(ledger.store, RUN)
    with pytest.raises(FormatError, match="format 2; this reader knows format 1"):
        decode_seal(good.replace(b'"format":1', b'"format":2'), "seal.json")
    with pytest.raises(FormatError, match="`complete` contradicts its own lists"):
        decode_seal(encode_seal(msgspec.convert({**fields, "complete": False}, Seal)), "seal.json")
    with pytest.raises(FormatError, match="that are no seal"):
        decode_seal(canonical_json({"format": 1, "self": "x"})[:-1], "seal.json")
    path.write_bytes(good)
    assert verify(url, RUN).exit_code == Exit.OK


# -- the command, runs and show --------------------------------------------------------------------------------------


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    code = cli.main(list(arguments))
    out = capsys.readouterr()
    return code, out.out, out.err


def test_seal_on_the_command_line(capsys, url: str, signer: Signer, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.delenv("RLK_LEDGER", raising=False)
    monkeypatch.setenv("RLK_SIGNING_KEY", str(tmp_path / "key.pem"))
    made(url, life(A, "rollout", 0, 2) + life(C, "training", 0))
    place = ("--ledger", url)
    code, out, err = run(capsys, "seal", RUN, *place)
    assert (code, out) == (3, "")
    assert "never reported: rank 1. --incomplete seals it all the same." in err
    assert overview(open_ledger(url).run(RUN))["sealed"] is None
    code, out, _ = run(capsys, "seal", RUN, "--incomplete", *place)
    assert code == 3
    assert "run r1 is sealed, INCOMPLETE, signed, on checkpoint 0, 1 receipt with root" in out
    code, out, _ = run(capsys, "seal", RUN, "--json", *place)
    assert code == 3
    assert json.loads(out)["mine"] is False
    assert "sealed incomplete" in run(capsys, "runs", *place)[1]
    assert "sealed incomplete" in run(capsys, "show", RUN, *place)[1]
    assert json.loads(run(capsys, "show", RUN, "--json", *place)[1])["sealed"] == "incomplete"
    assert run(capsys, "seal", "r9", *place)[0] == 2


def test_runs_and_show_say_sealed(capsys, url: str, monkeypatch) -> None:
    monkeypatch.delenv("RLK_SIGNING_KEY", raising=False)
    made(url)
    code, out, _ = run(capsys, "seal", RUN, "--ledger", url)
    assert code == 0
    assert "run r1 is sealed, complete, unsigned" in out
    assert run(capsys, "runs", "--ledger", url)[1].rstrip().endswith("closed, sealed")
    (Path(url) / layout.seal_path(RUN)).write_bytes(b"{}")
    code, out, _ = run(capsys, "runs", "--ledger", url)
    assert code == 1
    assert "damaged" in out
