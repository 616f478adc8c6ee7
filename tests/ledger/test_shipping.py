"""From spool to ledger: every event once, whatever goes wrong on the way."""

import errno
import os
import shutil
from collections import Counter
from pathlib import Path

import pytest

from rlk_ledger import cli, segments, service, spools
from rlk_ledger import ledger as ledgers
from rlk_ledger import outbox as outboxes
from rlk_ledger import shipper as shippers
from rlk_ledger.build import event
from rlk_ledger.chain import Chain, Forked
from rlk_ledger.contact import meet
from rlk_ledger.ledger import Run
from rlk_ledger.outbox import declared
from rlk_ledger.recover import recover
from rlk_ledger.service import elected, ship_once
from rlk_ledger.shipper import Shipper
from rlk_ledger.store import open_store
from rlk_ledger.verify import verify
from rlk_ledger_schemas.codec import encode_payload
from rlk_ledger_schemas.errors import SpoolError, StoreError, UsageError
from rlk_ledger_schemas.findings import Exit
from rlk_ledger_schemas.frame import encode_header
from rlk_ledger_sdk.status import read_status, request_flush

RUN = "r1"


def held(url: str) -> Counter:
    """How often each (writer, seq, leaf) stands in a segment some receipt names, shippers' own events left out."""
    run = ledgers.open_ledger(url).run(RUN)
    shippers = {r.shipper for r in run.receipts}
    out: Counter = Counter()
    for segment in run.segments():
        for record in segments.read_records(run.store.read(segment.path)):
            if record.writer_id not in shippers:
                out[record.writer_id, record.seq, record.leaf] += 1
    return out


def expected(*records) -> Counter:
    return Counter((r.writer_id, r.seq, r.leaf) for r in records)


def statements(url: str) -> list[tuple[str, int]]:
    events = ledgers.open_ledger(url).read_events(RUN, {"writer.lost"})
    return [(fields["writer"], fields["bytes_left"]) for _, _, fields, _ in events]


def test_a_live_writer_is_shipped_as_it_writes_and_its_files_stay_until_it_is_done(new_writer, spool, url) -> None:
    writer = new_writer()
    first = writer.many(3)
    shipper = Shipper(spool)
    shipper.cycle(flush=True)
    assert held(url) == expected(*first)
    assert len(list(writer.directory.glob("*.spool"))) == 1
    second = [*writer.many(2), writer.close()]
    shipper.cycle(flush=True)
    assert held(url) == expected(*first, *second)
    assert list(writer.directory.glob("*.spool")) == []
    status = read_status(writer.directory)
    assert (status.synced, status.committed, status.error) == (5, 5, None)
    receipts = ledgers.open_ledger(url).run(RUN).receipts
    assert [r.n for r in receipts] == [0, 1]
    assert receipts[1].writers[0].closed is True
    assert verify(url, deep=True).verdict == "intact"


def test_nothing_leaves_before_it_is_due_and_a_flush_request_makes_it_due(new_writer, spool, url) -> None:
    writer = new_writer()
    records = writer.many(2)
    shipper = Shipper(spool)
    shipper.cycle()
    shipper.cycle()
    assert not Path(url).exists()
    assert read_status(writer.directory).committed == -1
    request_flush(writer.directory, 1)
    shipper.cycle()
    assert held(url) == expected(*records)
    assert read_status(writer.directory).committed == 1


def test_a_close_makes_everything_due(new_writer, spool, url) -> None:
    writer = new_writer()
    records = [*writer.many(2), writer.close()]
    Shipper(spool).cycle()
    assert held(url) == expected(*records)


def test_full_segments_leave_by_themselves_and_a_large_record_gets_its_own(
    new_writer, spool, url, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outboxes, "SEGMENT_BYTES", 10_000)
    writer = new_writer()
    small = {"sample_id": "s", "source": "rollout", "contract_id": "c", "values": [0.0] * 500}
    big = {**small, "values": [0.0] * 5000}
    records = [writer.put("logprobs", **(big if i == 6 else small)) for i in range(12)]
    shipper = Shipper(spool)
    while shipper.cycle():
        pass
    assert sum(held(url).values()) >= 7
    shipper.cycle(flush=True)
    assert held(url) == expected(*records)
    rows = [r.segment.rows for r in ledgers.open_ledger(url).run(RUN).receipts]
    assert 1 in rows
    assert max(rows) <= 5


def test_an_invalid_frame_waits_while_the_writer_lives_and_is_a_counted_tear_once_it_is_dead(
    new_writer, spool, url, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = new_writer()
    records = writer.many(4)
    at = writer.spool.at[0]
    writer.spool._map[at + 8 : at + 30] = b"x" * 22
    shipper = Shipper(spool)
    shipper.cycle(flush=True)
    assert held(url) == expected(*records)
    assert statements(url) == []
    monkeypatch.setattr(spools, "is_alive", lambda header: False)
    shipper.cycle()
    assert statements(url) == [(writer.writer_id, 30)]
    assert not writer.directory.exists()
    result = verify(url, deep=True)
    assert result.exit_code == Exit.GAP
    assert {f.kind for f in result.findings} == {"bytes.lost", "writer.killed"}


def test_a_killed_writer_recovered_without_loss_is_named_and_fine(new_writer, spool, url) -> None:
    writer = new_writer(dead=True)
    records = writer.many(4)
    Shipper(spool).cycle()
    assert held(url) == expected(*records)
    assert statements(url) == [(writer.writer_id, 0)]
    result = verify(url, deep=True)
    assert result.exit_code == Exit.OK
    assert [f.kind for f in result.findings] == ["writer.killed"]


def test_a_writer_killed_before_its_first_event_is_named_once(new_writer, spool, url) -> None:
    writer = new_writer(dead=True)
    header = encode_header(writer.header)
    (writer.directory / "00000000.spool").write_bytes(header + bytes(4096))
    Shipper(spool).cycle()
    Shipper(spool).cycle()
    assert statements(url) == [(writer.writer_id, 0)]
    assert not writer.directory.exists()
    assert [f.kind for f in verify(url, deep=True).findings] == ["writer.killed"]


def test_a_restarted_shipper_commits_nothing_twice_and_misses_nothing(new_writer, spool, url) -> None:
    writer = new_writer()
    records = writer.many(3)
    Shipper(spool).cycle(flush=True)
    records += writer.many(3)
    Shipper(spool).cycle(flush=True)
    Shipper(spool).cycle(flush=True)
    assert held(url) == expected(*records)
    chains = {r.shipper for r in ledgers.open_ledger(url).run(RUN).receipts}
    assert len(chains) == 2


def test_several_runs_and_ledgers_leave_one_spool_apart(new_writer, spool, url, tmp_path) -> None:
    other = str(tmp_path / "other")
    a, b, c = new_writer(), new_writer(url=other), new_writer(run_id="r2")
    want_a, want_b = a.many(2), b.many(3)
    c.many(4)
    Shipper(spool).cycle(flush=True)
    assert held(url) == expected(*want_a)
    assert held(other) == expected(*want_b)
    assert ledgers.open_ledger(url).runs() == ["r1", "r2"]
    assert sum(1 for _ in ledgers.open_ledger(url).read_events("r2")) == 4


def test_a_spool_that_grows_over_many_files_keeps_order_and_is_deleted_behind(new_writer, spool, url) -> None:
    writer = new_writer()
    payload = {"sample_id": "s", "source": "rollout", "contract_id": "c", "values": [0.0] * 50_000}
    records = [writer.put("logprobs", **payload) for _ in range(12)]
    assert len(list(writer.directory.glob("*.spool"))) >= 2
    Shipper(spool).cycle(flush=True)
    assert held(url) == expected(*records)
    assert len(list(writer.directory.glob("*.spool"))) == 1, "all but the newest are gone"


@pytest.mark.parametrize("what", ["no msgpack", "text that is no UTF-8", "a time that is none"])
def test_a_frame_that_is_whole_but_no_event_is_said_and_its_file_kept(new_writer, spool, url, what) -> None:
    writer = new_writer()
    first = writer.put()
    garbled = event(
        RUN, writer.writer_id, 1, "weights.published", weight_version="XXXX", digest="sha256:00", tensor_count=1
    )
    odd = {"text that is no UTF-8": b"\xa4\xff\xfe\xff\xfe", "a time that is none": b"\xc7\x0c\xff" + b"\xff" * 12}
    envelope = garbled.envelope.replace(b"\xa4XXXX", odd[what]) if what in odd else b"nope!"
    writer.spool.put(encode_payload(envelope, {}))
    last = writer.close()
    Shipper(spool).cycle(flush=True)
    assert held(url) == expected(first, last)
    assert [p.name for p in writer.directory.glob("*.damaged")] == ["00000000.spool.damaged"]
    result = verify(url, deep=True)
    assert result.exit_code == Exit.GAP
    assert {f.kind for f in result.findings} == {"bytes.lost", "seqs.missing"}
    assert [(f.first, f.last) for f in result.findings if f.kind == "seqs.missing"] == [(1, 1)]


def test_the_run_is_declared_by_its_run_opened_event(new_writer, spool, url) -> None:
    writer = new_writer(roles={"training": 1})
    writer.put("run.opened", roles={"rollout": 2}, mode={"consistency": "audit"}, lineage={"run": "r0", "step": 3})
    Shipper(spool).cycle(flush=True)
    info = ledgers.open_ledger(url).run(RUN).info
    assert info.roles == {"rollout": 2}
    assert info.mode["consistency"] == "audit"
    assert info.lineage == {"run": "r0", "step": 3}


def test_what_run_json_cannot_hold_does_not_stop_the_run(new_writer, spool, url) -> None:
    writer = new_writer()
    record = writer.put("run.opened", roles={"rollout": 1}, lineage={"loss": float("nan")})
    Shipper(spool).cycle(flush=True)
    assert held(url) == expected(record)
    assert ledgers.open_ledger(url).run(RUN).info.lineage is None


def test_inline_ships_own_and_dead_writers_only_and_continues_its_chain(new_writer, spool, url) -> None:
    own, dead, foreign = (
        new_writer(),
        new_writer(dead=True, pid=1),
        new_writer(pid=os.getppid(), process_start=_start(os.getppid())),
    )
    want = own.many(2) + dead.many(2)
    foreign.many(2)
    assert ship_once(spool) == []
    assert held(url) == expected(*want)
    want += own.many(1)
    assert ship_once(spool) == []
    assert held(url) == expected(*want)
    assert len({r.shipper for r in ledgers.open_ledger(url).run(RUN).receipts}) == 1


def _start(pid: int) -> str:
    stat = Path(f"/proc/{pid}/stat").read_bytes()
    return f"{stat[stat.rindex(b')') + 2 :].split()[19].decode()}:{Path('/proc/self/ns/pid').stat().st_ino}"


def test_inline_after_another_shipper_reads_the_receipts_again(new_writer, spool, url) -> None:
    writer = new_writer()
    records = writer.many(2)
    assert ship_once(spool) == []
    records += writer.many(2)
    with elected(spool) as lock:
        other = Shipper(spool)
        other.cycle(flush=True)
        os.ftruncate(lock, 0)
        os.pwrite(lock, b"someone else", 0)
    records += writer.many(2)
    assert ship_once(spool) == []
    assert held(url) == expected(*records)
    assert verify(url).verdict == "intact"


def test_one_shipper_at_a_time(new_writer, spool, url) -> None:
    with elected(spool) as first:
        assert first is not None
        with elected(spool, wait_s=0.05) as second:
            assert second is None
        assert ship_once(spool, wait_s=0.05) == [f"another shipper serves {spool}"]
        with pytest.raises(SpoolError, match="a shipper serves"):
            recover(spool)


def test_a_bad_ledger_url_is_in_the_status_and_costs_nothing(new_writer, spool) -> None:
    writer = new_writer(url="s3x://bucket/x")
    writer.many(2)
    shipper = Shipper(spool)
    shipper.cycle(flush=True)
    assert "s3x" in read_status(writer.directory).error
    assert len(shipper.errors()) == 1
    assert list(writer.directory.glob("*.spool"))


def test_a_bucket_that_does_not_answer_fills_no_memory(new_writer, spool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outboxes, "SEGMENT_BYTES", 5_000)
    writer = new_writer(url="s3x://bucket/x")
    writer.many(400)
    shipper = Shipper(spool)
    for _ in range(5):
        shipper.cycle(flush=True)
    (box,) = shipper.outboxes.values()
    waiting = len(box.pending) + len(box.inflight.records)
    assert 0 < waiting < 150
    assert box.retry_at > 0


def test_another_shipper_under_the_same_identity_is_a_fork_and_costs_a_new_identity(new_writer, spool, url) -> None:
    writer = new_writer()
    records = writer.many(3)
    shipper = Shipper(spool)
    shipper.cycle(flush=True)
    (box,) = shipper.outboxes.values()
    chain = box.chain  # a process that was cloned has its identity and its key twice
    twin = Chain(open_store(url), chain.contact, shipper=chain.shipper, signer=chain.signer)
    twin.n, twin.previous = box.chain.n, box.chain.previous
    strange = new_writer(spool=spool.parent / "elsewhere")
    twin.publish(twin.draft([strange.put()]))
    old = box.chain.shipper
    records += writer.many(2)
    shipper.cycle(flush=True)
    assert shipper.errors() == []
    assert box.chain.shipper != old
    counted = held(url)
    assert all(counted[key] == 1 for key in expected(*records))
    opened = [f for _, _, f, _ in ledgers.open_ledger(url).read_events(RUN, {"writer.opened"})]
    assert [f["labels"] for f in opened] == [{"replaces": old, "reason": "fork_detected"}]
    assert verify(url, deep=True).exit_code == Exit.OK


def test_a_chain_repeats_a_publish_safely_and_refuses_a_taken_place(new_writer, url) -> None:
    writer = new_writer()
    store = open_store(url)
    contact = meet(store, declared(writer.header, []))
    chain = Chain(store, contact)
    draft = chain.draft(writer.many(2))
    chain.publish(draft)
    chain.publish(draft)
    taken = Chain(store, contact, shipper=chain.shipper)
    with pytest.raises(Forked):
        taken.publish(taken.draft(writer.many(1)))


def test_recover_says_exactly_what_was_saved(new_writer, spool, url) -> None:
    torn, whole, live = new_writer(dead=True), new_writer(dead=True), new_writer()
    records = torn.many(3)
    at = torn.spool.at[0]
    torn.spool._map[at + 8 : at + 15] = b"y" * 7
    records += whole.many(2) + live.many(2)
    found = {r.writer_id: r for r in recover(spool)}
    assert held(url) == expected(*records)
    assert (found[torn.writer_id].shipped, found[torn.writer_id].lost_bytes, found[torn.writer_id].state) == (
        3,
        15,
        "dead",
    )
    assert (found[whole.writer_id].shipped, found[whole.writer_id].lost_bytes) == (2, 0)
    assert (found[live.writer_id].shipped, found[live.writer_id].state) == (2, "alive")
    again = recover(spool)
    assert [(r.writer_id, r.shipped, r.known, r.waiting) for r in again] == [(live.writer_id, 0, 2, 0)]


def test_recover_of_a_spool_from_another_machine_leaves_the_tail_until_told(new_writer, spool, url) -> None:
    writer = new_writer(host="elsewhere", boot_id="other")
    records = writer.many(3)
    at = writer.spool.at[0]
    writer.spool._map[at + 8 : at + 15] = b"y" * 7
    (first,) = recover(spool)
    assert (first.state, first.shipped, first.lost_bytes) == ("unknown", 3, 0)
    assert list(writer.directory.glob("*.spool"))
    (second,) = recover(writer.directory, assume_dead=True)
    assert (second.state, second.shipped, second.known, second.lost_bytes) == ("dead", 0, 3, 15)
    assert held(url) == expected(*records)
    assert not writer.directory.exists()


def test_recover_refuses_what_is_no_spool(tmp_path) -> None:
    with pytest.raises(UsageError, match="is not a directory"):
        recover(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    assert recover(tmp_path / "empty") == []


def test_a_shipper_process_refuses_a_ledger_that_dies_with_it(new_writer, spool) -> None:
    writer = new_writer(url="memory://x", dead=True)
    writer.many(1)
    shipper = Shipper(spool, service._shared)
    shipper.cycle(flush=True)
    assert "lives in one process only" in shipper.errors()[0]
    assert list(writer.directory.glob("*.spool"))


def test_a_dead_writers_spool_is_kept_until_its_loss_is_stated(
    new_writer, spool, url, helpers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its events are committed already: only the statement about its torn tail still needs the file."""
    writer = new_writer()
    writer.many(2)
    Shipper(spool).cycle(flush=True)
    at = writer.spool.at[0]
    writer.spool._map[at + 8 : at + 30] = b"x" * 22
    monkeypatch.setattr(spools, "is_alive", lambda header: False)
    store = open_store(url)
    monkeypatch.setattr(store, "create", lambda *_: (_ for _ in ()).throw(helpers.lost_reply()))
    failing = Shipper(spool, lambda _: store)
    failing.cycle(flush=True)
    failing.cycle(flush=True)
    assert failing.errors()
    assert list(writer.directory.glob("*.spool")), "the evidence is still there"
    Shipper(spool).cycle(flush=True)
    assert statements(url) == [(writer.writer_id, 30)]
    assert not writer.directory.exists()


class _HalfWritten:
    """A store that says it created the object and kept half of it."""

    def __init__(self, inner, suffix: str) -> None:
        self.inner, self.suffix = inner, suffix
        self.url, self.locate, self.read = inner.url, inner.locate, inner.read

    def create(self, path: str, data: bytes) -> None:
        self.inner.create(path, data[: len(data) // 2] if path.endswith(self.suffix) else data)


def test_a_segment_that_reads_back_otherwise_gets_no_receipt(new_writer, url) -> None:
    writer = new_writer()
    store = open_store(url)
    chain = Chain(_HalfWritten(store, ".parquet"), meet(store, declared(writer.header, [])))
    draft = chain.draft(writer.many(2))
    with pytest.raises(StoreError, match="holds other bytes"):
        chain.publish(draft)
    assert store.stat(draft.receipt_path) is None
    assert chain.n == 0


def test_a_receipt_that_reads_back_otherwise_commits_nothing(new_writer, url) -> None:
    writer = new_writer()
    store = open_store(url)
    chain = Chain(_HalfWritten(store, "00000000.json"), meet(store, declared(writer.header, [])))
    with pytest.raises(Forked, match="holds other bytes"):
        chain.publish(chain.draft(writer.many(2)))
    assert chain.n == 0


def test_a_damaged_receipt_does_not_stop_later_shippers(new_writer, spool, url) -> None:
    """Verify names the damage; the events of the next job are shipped all the same."""
    first = new_writer()
    first.many(2)
    first.close()
    Shipper(spool).cycle(flush=True)
    (receipt,) = Path(url).glob("runs/r1/receipt/*/00000000.json")
    receipt.write_bytes(receipt.read_bytes()[:-9])
    second = new_writer()
    records = [*second.many(2), second.close()]
    shipper = Shipper(spool)
    shipper.cycle(flush=True)
    assert shipper.errors() == []
    assert sum(r.segment.rows for r in Run(open_store(url), "r1").intact_receipts()) == len(records)
    kinds = {f.kind for f in verify(url).findings if f.severity == "error"}
    assert kinds == {"receipt.unreadable"}


def test_recover_counts_the_bytes_of_a_spool_whose_header_is_gone(new_writer, spool, tmp_path) -> None:
    """Nobody can tell which ledger they belong to: they are counted, named and left where they are."""
    writer = new_writer(dead=True)
    writer.many(3)
    (file,) = writer.directory.glob("*.spool")
    data = bytearray(file.read_bytes())
    data[3] ^= 1
    file.write_bytes(data)
    (found,) = recover(spool)
    assert (found.state, found.events, found.lost_bytes) == ("unreadable", 0, len(data.rstrip(b"\0")))
    assert "00000000.spool" in str(found.problem)
    assert file.read_bytes() == data
    assert cli.main(["recover", str(spool)]) == 3


@pytest.mark.parametrize("what", ["ledger", "run"])
def test_a_ledger_removed_under_a_shipper_is_begun_anew_and_can_be_read(new_writer, spool, url, what) -> None:
    """Else every later receipt would lie below a root that nobody can open, and count as committed."""
    writer = new_writer()
    writer.many(2)
    shipper = Shipper(spool)
    shipper.cycle(flush=True)
    shutil.rmtree(url if what == "ledger" else Path(url) / "runs" / RUN)
    later = writer.many(3)
    shipper.cycle(flush=True)
    assert shipper.errors() == []
    assert held(url) == expected(*later)
    result = verify(url, deep=True)
    assert {f.kind for f in result.findings} == {"seqs.missing", "writer.open"}, "what was removed is missed"


def test_a_spool_on_a_full_disk_is_shipped_all_the_same(new_writer, spool, url, monkeypatch) -> None:
    """Nothing can be written there, not even the mark of who ships; what is shipped makes room."""
    writer = new_writer(dead=True)
    records = writer.many(3)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    monkeypatch.setattr(shippers, "_write_status", full)
    (found,) = recover(spool)
    assert (found.shipped, found.lost_bytes) == (3, 0)
    assert held(url) == expected(*records)
    assert list(spool.glob("*/*.spool")) == []


def test_nothing_is_deleted_before_it_is_committed(new_writer, spool, url) -> None:
    """A bucket that does not answer: every file stays, finished or not, and ships when it answers again."""
    closed, dead = new_writer(), new_writer(dead=True)
    records = [*closed.many(3), closed.close(), *dead.many(2)]
    there = sorted(spool.glob("*/*.spool"))

    def refuse(_: str) -> None:
        raise StoreError("the bucket does not answer.")

    shipper = Shipper(spool, refuse)
    for _ in range(3):
        shipper.cycle(flush=True)
    shipper.close()
    assert sorted(spool.glob("*/*.spool")) == there
    Shipper(spool).cycle(flush=True)
    assert held(url) == expected(*records)


def test_what_is_no_readable_file_holds_up_nobody_else(new_writer, spool, url) -> None:
    """A directory, a pipe, a link, a file of somebody else's: named, left alone, and the other writers are shipped."""
    odd, other = new_writer(dead=True), new_writer()
    odd.directory.joinpath("00000001.spool").mkdir()
    os.mkfifo(odd.directory / "00000002.spool")
    odd.directory.joinpath("00000003.spool").symlink_to("/etc/hostname")
    records = [*odd.many(2), *other.many(2), other.close()]
    found = {r.writer_id: r for r in recover(spool)}
    assert held(url) == expected(*records)
    assert "is no regular file" in str(found[odd.writer_id].problem)
    assert found[odd.writer_id].lost_bytes == 0
    assert (odd.directory / "00000003.spool").is_symlink()


def test_a_disk_that_fails_while_reading_loses_nothing_that_was_read(new_writer, spool, url, monkeypatch) -> None:
    writer = new_writer(dead=True)
    records = writer.many(4)
    original, calls = spools.SpoolFile.next_payload, []

    def failing(self: spools.SpoolFile) -> bytes | None:
        calls.append(1)
        if len(calls) == 3:
            raise OSError(errno.EIO, "Input/output error")
        return original(self)

    monkeypatch.setattr(spools.SpoolFile, "next_payload", failing)
    shipper = Shipper(spool)
    shipper.cycle(flush=True)
    assert len(list(writer.directory.glob("*.spool"))) == 1
    shipper.cycle(flush=True)
    assert held(url) == expected(*records)
    assert list(spool.glob("*/*.spool")) == []


def test_a_file_of_another_writer_or_number_is_counted_and_kept_for_a_person(new_writer, spool, url) -> None:
    writer = new_writer(dead=True)
    records = writer.many(2)
    (file,) = writer.directory.glob("*.spool")
    stray = writer.directory / "00000001.spool"
    stray.write_bytes(file.read_bytes())
    (found,) = recover(spool)
    assert held(url) == expected(*records)
    assert (found.lost_bytes > 0, "says it is file 0" in str(found.problem)) == (True, True)
    assert [p.name for p in writer.directory.glob("*.damaged")] == ["00000001.spool.damaged"]


def test_recover_of_what_it_may_not_read_is_not_fine(new_writer, spool, monkeypatch) -> None:
    writer = new_writer(dead=True)
    writer.many(2)

    def refused(*_: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied", "00000000.spool")

    monkeypatch.setattr(spools.SpoolFile, "_opened", refused)
    (found,) = recover(spool)
    expected = f"cannot read {writer.directory}/00000000.spool: Permission denied"
    assert (found.state, found.problem) == ("unreadable", expected)
    assert cli.main(["recover", str(spool)]) == 3


def test_a_shipper_remembers_nothing_of_writers_that_are_gone(new_writer, spool: Path, url: str) -> None:
    shipper = Shipper(spool)
    closed, killed = new_writer(dead=True), new_writer(dead=True)
    closed.many(2)
    closed.close()
    killed.many(2)
    for _ in range(3):
        shipper.asked()
        shipper.cycle(flush=True)
    assert not closed.directory.exists()
    assert not killed.directory.exists()
    left = [name for name, held in vars(shipper).items() if isinstance(held, dict | set) and held]
    assert left == ["outboxes"], "a run is kept as long as the shipper is; a writer is not"
    shipper.close()
