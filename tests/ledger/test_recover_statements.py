"""`recover` says what it saved and what not: every outcome its own words, exit code and totals."""

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from rlk_ledger import cli, layout, outbox
from rlk_ledger.leftovers import look
from rlk_ledger.recover import outcome, preview, recover, totals
from rlk_ledger.store import Store, open_store
from rlk_ledger.verify import verify
from rlk_ledger_schemas.errors import StoreError


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.main(list(arguments))
    out = capsys.readouterr()
    return code, out.out, out.err


def refusing(bad: str) -> Any:
    """Opens stores; the one at `bad` does not answer."""

    def open_(url: str) -> Store:
        if url == bad:
            raise StoreError(f"{url} does not answer.")
        return open_store(url)

    return open_


def test_a_closed_job_is_saved_whole_and_a_second_time_there_is_nothing(capsys, new_writer, spool, url) -> None:
    writer = new_writer()
    writer.many(3)
    writer.close()
    code, out, _ = run(capsys, "recover", str(spool), "--json")
    document = json.loads(out)
    assert (code, document["outcome"]) == (0, "saved")
    (total,) = document["runs"]
    assert (total["run_id"], total["ledger"], total["shipped"], total["waiting"], total["sealed"]) == (
        *("r1", url, 4, 0, False),
    )
    assert document["writers"][0]["files_left"] == []
    code, out, _ = run(capsys, "recover", str(spool), "--json")
    assert (code, json.loads(out)["outcome"]) == (0, "nothing")


def test_a_spool_kept_aside_and_recovered_again_says_that_all_is_in_the_ledger(capsys, new_writer, spool, url) -> None:
    writer = new_writer(dead=True)
    writer.many(3)
    shutil.copytree(spool, spool.parent / "copy")
    assert run(capsys, "recover", str(spool))[0] == 0
    code, out, _ = run(capsys, "recover", str(spool.parent / "copy"))
    assert code == 0
    assert "3 whole events in the spool: 0 shipped now, 3 were in the ledger; nothing was lost." in out
    assert "nothing new: 0 events shipped, 3 were in the ledger before." in out
    assert verify(url, deep=True).events == 5


def test_several_runs_and_ledgers_in_one_spool_are_totalled_apart(new_writer, spool, url, tmp_path) -> None:
    other = str(tmp_path / "other")
    for options in ({}, {"run_id": "r2"}, {"run_id": "r2", "url": other}, {"run_id": "r2"}):
        new_writer(dead=True, **options).many(2)
    found = totals(recover(spool))
    assert [(t.ledger, t.run_id, t.writers, t.shipped) for t in found] == [
        (url, "r1", 1, 2),
        (url, "r2", 2, 4),
        (other, "r2", 1, 2),
    ]


def test_a_ledger_that_refuses_holds_up_no_other_and_its_events_are_all_counted(
    new_writer, spool, url, tmp_path, monkeypatch
) -> None:
    """More than one segment's worth waits for each: what was not even read for want of room is waiting too."""
    monkeypatch.setattr(outbox, "SEGMENT_BYTES", 2_000)
    bad = str(tmp_path / "bad")
    good, stuck = new_writer(dead=True), new_writer(dead=True, url=bad, run_id="r2")
    good.many(60)
    stuck.many(60)
    found = {r.writer_id: r for r in recover(spool, open_=refusing(bad))}
    saved, waits = found[good.writer_id], found[stuck.writer_id]
    assert (saved.shipped, saved.waiting, saved.files_left) == (60, 0, ())
    assert (waits.events, waits.shipped, waits.waiting, waits.lost_bytes) == (60, 0, 60, 0)
    assert waits.files_left == ("00000000.spool",)
    assert outcome(list(found.values())) == "waiting"
    (again,) = recover(spool)
    assert (again.shipped, outcome([again])) == (60, "saved")
    assert verify(bad, deep=True).exit_code == verify(url, deep=True).exit_code == 0


def test_a_bucket_that_comes_back_within_the_wait_is_asked_again(new_writer, spool, url) -> None:
    new_writer(dead=True).many(2)
    asked: list[float] = []

    def open_(target: str) -> Store:
        asked.append(time.monotonic())
        if len(asked) == 1:
            raise StoreError("not yet.")
        return open_store(target)

    (found,) = recover(spool, open_=open_, wait_s=60)
    assert (found.shipped, found.waiting) == (2, 0)
    assert len(asked) == 2


def test_a_torn_tail_is_saved_with_a_stated_loss(capsys, new_writer, spool, url) -> None:
    writer = new_writer(dead=True)
    writer.many(3)
    at = writer.spool.at[0]
    writer.spool._map[at + 8 : at + 19] = b"half a word"
    code, out, _ = run(capsys, "recover", str(spool), "--json")
    document = json.loads(out)
    assert (code, document["outcome"], document["runs"][0]["lost_bytes"]) == (3, "saved_with_loss", 19)
    assert [f.kind for f in verify(url).findings if f.severity != "info"] == ["bytes.lost"]


def test_a_damaged_header_is_no_whole_save_and_its_file_is_named(capsys, new_writer, spool, url) -> None:
    new_writer(dead=True).many(2)
    broken = new_writer(dead=True)
    broken.many(2)
    broken.spool._map[0:8] = b"RLKBROKE"
    code, out, _ = run(capsys, "recover", str(spool))
    assert code == 3
    assert "saved with loss: 2 events shipped" in out
    assert f"no readable header in {broken.directory} (00000000.spool)" in out
    assert (broken.directory / "00000000.spool").exists()


def test_a_run_that_was_sealed_meanwhile_takes_the_events_and_it_is_said(capsys, new_writer, spool, url) -> None:
    new_writer(dead=True).many(2)
    recover(spool)
    open_store(url).create(layout.seal_path("r1"), b"a seal; whose is not looked at here")
    new_writer(dead=True).many(3)
    code, out, _ = run(capsys, "recover", str(spool))
    assert code == 0
    assert "3 shipped now" in out
    assert "run r1 was sealed before: `rlk-ledger verify r1` names what came late." in out


def test_a_dry_run_says_what_would_be_done_and_changes_nothing(capsys, new_writer, spool, url) -> None:
    writer, torn, lives, far = (
        new_writer(dead=True),
        new_writer(dead=True),
        new_writer(),
        new_writer(host="elsewhere", boot_id="other"),
    )
    for one in (writer, torn, lives, far):
        one.many(2)
    at = torn.spool.at[0]
    torn.spool._map[at + 8 : at + 12] = b"torn"
    before = {path: path.read_bytes() for path in sorted(spool.rglob("*")) if path.is_file()}
    code, out, _ = run(capsys, "recover", str(spool), "--dry-run")
    assert code == 3
    assert out.count("2 would be shipped, 0 were called committed (the ledger was not asked)") == 4
    assert "12 bytes are no whole event and would be lost" in out
    assert "the writer still runs, its newest file would be left alone" in out
    assert "without --assume-dead" in out
    assert {path: path.read_bytes() for path in sorted(spool.rglob("*")) if path.is_file()} == before
    assert not Path(url).exists()
    code, out, _ = run(capsys, "recover", str(writer.directory), "--dry-run", "--json")
    document = json.loads(out)
    assert (code, document["dry_run"], [w["waiting"] for w in document["writers"]]) == (0, True, [2])
    (sure,) = [one for one in preview(spool, assume_dead=True) if one.writer_id == far.writer_id]
    assert (sure.state, sure.waiting) == ("dead", 2)


def test_what_a_dry_run_announces_is_what_recover_then_does(new_writer, spool, url) -> None:
    for count in (1, 2, 3):
        new_writer(dead=True).many(count)
    announced = {one.writer_id: (one.waiting, one.lost_bytes) for one in preview(spool)}
    assert {r.writer_id: (r.shipped, r.lost_bytes) for r in recover(spool)} == announced
    assert look(spool) == []


def test_a_spool_of_this_machine_before_a_restart_is_dead_without_being_told(new_writer, spool, url) -> None:
    writer = new_writer(boot_id="before-the-restart")
    writer.many(4)
    (found,) = recover(spool)
    assert (found.state, found.shipped, found.files_left) == ("dead", 4, ())


def test_progress_ends_with_everything_done(new_writer, spool, url) -> None:
    new_writer(dead=True).many(2)
    seen: list[tuple[int, int]] = []
    recover(spool, progress=lambda done, total: seen.append((done, total)))
    assert seen
    assert seen[-1][0] == seen[-1][1] > 0
