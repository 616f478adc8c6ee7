"""Shippers that sign and checkpoint: real processes, writers that wait for it, and shipping that never does."""

import base64
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from waiting import wait_for

import rlk_ledger
from rlk_ledger import checkpoints, signing
from rlk_ledger.service import serve, ship_once
from rlk_ledger.shipper import Shipper
from rlk_ledger.spawn import start
from rlk_ledger.store import FileStore, open_store
from rlk_ledger.verify import verify
from rlk_ledger_schemas.errors import ConfigError
from rlk_ledger_schemas.findings import Exit
from rlk_ledger_schemas.objects import decode_receipt
from rlk_ledger_sdk.status import lock_is_free, read_status, request_checkpoint, request_flush

RUN = "r1"


def newest(url: str):
    return checkpoints.latest(open_store(url), RUN)


def receipts(url: str) -> list[Path]:
    return sorted((Path(url) / "runs" / RUN / "receipt").rglob("*.json"))


def test_a_shipper_process_covers_what_a_writer_waits_for_and_the_rest_before_it_leaves(new_writer, spool, url) -> None:
    writer = new_writer()
    writer.many(3)
    start(spool)
    request_flush(writer.directory, 2)
    wait_for(lambda: read_status(writer.directory).committed == 2)
    assert newest(url) is None, "nobody asked, and five minutes are not over"
    request_checkpoint(writer.directory, 2)
    wait_for(lambda: read_status(writer.directory).checkpointed == 2)
    assert newest(url).size == 1
    writer.many(2)
    writer.close()
    wait_for(lambda: lock_is_free(spool))
    assert newest(url).size == len(receipts(url)) == 2
    result = verify(url, deep=True)
    assert (result.verdict, result.findings) == ("intact", ())


def test_checkpoints_can_be_turned_off_and_a_writer_may_still_ask(new_writer, spool, url, monkeypatch) -> None:
    monkeypatch.setenv("RLK_CHECKPOINT_S", "0")
    writer = new_writer()
    writer.many(3)
    writer.close()
    assert serve(spool, until_idle=True, linger_s=0.0) == 0
    assert newest(url) is None
    asking = new_writer()
    asking.many(2)
    request_flush(asking.directory, 1)
    request_checkpoint(asking.directory, 1)
    assert ship_once(spool, keep=False) == []
    assert read_status(asking.directory).checkpointed == 1
    assert newest(url).size == 2


def test_checkpoints_are_made_every_so_often_while_writers_live(new_writer, spool, url, monkeypatch) -> None:
    monkeypatch.setenv("RLK_CHECKPOINT_S", "0.2")
    writer = new_writer()
    stop = threading.Event()
    thread = threading.Thread(target=serve, args=(spool, True, stop))
    thread.start()
    try:
        for size in (1, 2, 3):
            writer.many(1)
            request_flush(writer.directory, size - 1)
            wait_for(lambda size=size: read_status(writer.directory).checkpointed == size - 1)
        assert newest(url).size == 3
        made = len(list((Path(url) / "runs" / RUN / "checkpoint").iterdir()))
        time.sleep(1.0)
        assert len(list((Path(url) / "runs" / RUN / "checkpoint").iterdir())) == made, "without news there is none"
    finally:
        stop.set()
        thread.join()


def test_shipping_does_not_wait_for_a_checkpoint(new_writer, spool, url) -> None:
    going, go = threading.Event(), threading.Event()

    class Stuck(FileStore):
        def create(self, path: str, data: bytes) -> None:
            if "/checkpoint/" in path:
                going.set()
                assert go.wait(60)
            super().create(path, data)

    writer = new_writer()
    writer.many(2)
    shipper = Shipper(spool, lambda _: Stuck(Path(url)), workers=1)

    def until(what: Callable[[], bool]) -> None:
        wait_for(lambda: (shipper.cycle(), what())[1])

    try:
        request_checkpoint(writer.directory, 1)
        request_flush(writer.directory, 1)
        until(going.is_set)
        for last in (3, 5, 7):
            writer.many(2)
            request_flush(writer.directory, last)
            until(lambda last=last: read_status(writer.directory).committed == last)
        assert read_status(writer.directory).checkpointed == -1
        go.set()
        until(lambda: read_status(writer.directory).checkpointed >= 1)
    finally:
        go.set()
        shipper.close()


def test_a_damaged_receipt_stops_no_shipping_and_is_told(new_writer, spool, url) -> None:
    writer = new_writer()
    writer.many(2)
    assert ship_once(spool) == []
    path = receipts(url)[0]
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    writer.many(2)
    request_checkpoint(writer.directory, 3)
    assert ship_once(spool) == []
    status = read_status(writer.directory)
    assert (status.committed, status.checkpointed, status.error) == (3, -1, None)
    assert "rlk-ledger verify" in status.checkpoint_error
    path.write_bytes(whole)
    wait_for(lambda: ship_once(spool) == [] and read_status(writer.directory).checkpointed == 3)
    assert read_status(writer.directory).checkpoint_error is None


def test_flush_waits_for_a_checkpoint_inline_and_a_removed_ledger_begins_another_log(tmp_path: Path) -> None:
    import shutil

    url = str(tmp_path / "ledger")
    rlk_ledger.init(url, run_id=RUN, spool=tmp_path / "spool", shipper="inline")
    for path in ("a", "b"):
        last = rlk_ledger.record("knob.applied", path=path, requested=1, status="applied")
        assert rlk_ledger.flush("checkpointed", timeout=0)["checkpointed"] == last.seq
    assert newest(url).k == 1
    shutil.rmtree(url)
    last = rlk_ledger.record("knob.applied", path="c", requested=1, status="applied")
    assert rlk_ledger.flush("checkpointed", timeout=0)["checkpointed"] == last.seq
    rlk_ledger.close()
    assert (newest(url).k, newest(url).size) == (0, 1)


needs_keys = pytest.mark.skipif(not signing.available(), reason="needs cryptography")


@needs_keys
def test_a_shipper_signs_with_the_key_it_is_given_and_its_checkpoints_too(
    new_writer, spool, url, tmp_path, monkeypatch
):
    key = signing.new_key(tmp_path / "key.pem")
    monkeypatch.setenv("RLK_SIGNING_KEY", str(tmp_path / "key.pem"))
    monkeypatch.setenv("RLK_ANCHOR", str(tmp_path / "anchor"))
    writer = new_writer()
    writer.many(2)
    writer.close()
    assert serve(spool, until_idle=True, linger_s=0.0) == 0
    (path,) = receipts(url)
    receipt = decode_receipt(path.read_bytes(), "x")
    assert base64.b64decode(receipt.public_key) == key.public_key
    result = verify(url, keys=[key.vkey()], anchor=str(tmp_path / "anchor"))
    assert (result.exit_code, result.checkpoints[0].receipts) == (Exit.OK, 1)
    assert len(list((tmp_path / "anchor").rglob("00000000"))) == 1


@needs_keys
def test_without_a_key_each_process_signs_with_one_of_its_own(new_writer, spool, url) -> None:
    keys = set()
    for _ in range(2):
        new_writer().many(1)
        assert ship_once(spool, keep=False) == []
    for path in receipts(url):
        receipt = decode_receipt(path.read_bytes(), "x")
        keys.add(receipt.public_key)
        assert signing.receipt_signed_by(path.read_bytes(), receipt, base64.b64decode(receipt.public_key))
    assert len(keys) == len(receipts(url)) == 2


@needs_keys
def test_a_key_that_cannot_be_used_stops_no_shipping_and_is_told(new_writer, spool, url, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("RLK_SIGNING_KEY", str(tmp_path / "gone.pem"))
    writer = new_writer()
    writer.many(2)
    assert ship_once(spool, keep=False) == []
    status = read_status(writer.directory)
    assert status.committed == 1
    assert "gone.pem cannot be read" in status.checkpoint_error


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("RLK_CHECKPOINT_S", "often"),
        ("RLK_CHECKPOINT_S", "-1"),
        ("RLK_SIGNING_KEY", os.devnull),
        ("RLK_SIGNING_KEY", "/gone"),
    ],
)
def test_malformed_settings_are_refused_at_init(tmp_path: Path, monkeypatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=name):
        rlk_ledger.init(str(tmp_path / "l"), run_id=RUN, spool=tmp_path / "spool", shipper="off")
