"""A store holds exactly what was created, once, below its root."""

import os
import threading
from pathlib import Path

import pytest

from rlk_ledger import canary, contact
from rlk_ledger.canary import encode_canary
from rlk_ledger.store import AlreadyThere, FileStore, Missing, open_store
from rlk_ledger_schemas.errors import ConfigError, StoreError


@pytest.fixture(params=["file", "memory"])
def store(request, tmp_path):
    return open_store(str(tmp_path / "root") if request.param == "file" else f"memory://{tmp_path}")


def test_create_is_put_if_absent_and_a_repeat_of_the_same_bytes_is_success(store) -> None:
    store.create("a/b.json", b"one")
    store.create("a/b.json", b"one")
    with pytest.raises(AlreadyThere):
        store.create("a/b.json", b"two")
    assert store.read("a/b.json") == b"one"
    assert store.stat("a/b.json") == 3
    assert store.stat("a/c.json") is None
    with pytest.raises(Missing):
        store.read("a/c.json")


def test_listing_is_sorted_relative_and_shows_whole_objects_only(store) -> None:
    for path in ("runs/b/2", "runs/b/1", "runs/a/x/y"):
        store.create(path, path.encode())
    assert [(e.path, e.size) for e in store.list("runs")] == [("runs/a/x/y", 10), ("runs/b/1", 8), ("runs/b/2", 8)]
    assert store.children("runs") == ("a", "b")
    assert store.children("nowhere") == ()
    assert list(store.list("nowhere")) == []


@pytest.mark.parametrize("path", ["../x", "a/../../x", "/etc/passwd", "", "a//b", "a/./b", "a\0b", "a\\..\\b"])
def test_no_path_leaves_the_root(store, path: str) -> None:
    for call in (lambda: store.create(path, b""), lambda: store.read(path), lambda: store.stat(path)):
        with pytest.raises(StoreError, match="not a path below"):
            call()


def test_of_many_racing_creators_one_wins_and_nothing_half_written_is_seen(tmp_path: Path) -> None:
    stores = [FileStore(tmp_path) for _ in range(8)]
    for round_ in range(20):
        barrier = threading.Barrier(8)
        won = []

        def race(i: int, store: FileStore, barrier=barrier, won=won, round_=round_) -> None:
            barrier.wait()
            try:
                store.create(f"r/{round_}", bytes([i]) * 5000)
                won.append(i)
            except AlreadyThere:
                pass

        threads = [threading.Thread(target=race, args=(i, s)) for i, s in enumerate(stores)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(won) == 1
        assert stores[0].read(f"r/{round_}") == bytes([won[0]]) * 5000
    assert len(list((tmp_path / "r").iterdir())) == 20, "no temporary file is left"


def test_a_temporary_file_of_a_killed_writer_is_no_object(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    store.create("a/x", b"1")
    (tmp_path / "a" / ".y.0123456789abcdef.tmp").write_bytes(b"half")
    assert [e.path for e in store.list("")] == ["a/x"]
    assert store.children("a") == ("x",)


def test_a_read_only_directory_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(StoreError, match=r"cannot create .*x: Permission denied\.$"):
        FileStore(tmp_path).create("x", b"")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("url", "says"),
    [("", "a path or something like"), ("  ", "a path"), ("nosuch://b/x", "use a path"), (None, "got None")],
)
def test_a_bad_url_is_one_sentence(url, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        open_store(url)


def test_a_missing_client_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(ConfigError, match=r'pip install "rlk-ledger\[s3\]"'):
        open_store("s3://bucket/x")


def test_relative_and_file_urls_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert open_store("led").url == open_store(f"file://{tmp_path}/led").url == str(tmp_path / "led")


class _Overwriting:
    """A store that ignores the condition: last writer wins."""

    def __init__(self) -> None:
        self.url, self.objects = "fake://", {}

    def create(self, path: str, data: bytes) -> None:
        self.objects[path] = data

    def read(self, path: str) -> bytes:
        if path not in self.objects:
            raise Missing(path)
        return self.objects[path]

    def locate(self, path: str) -> str:
        return path


class _ChecksThenWrites(_Overwriting):
    """A store that looks first and writes then: right alone, wrong in a race."""

    def __init__(self) -> None:
        super().__init__()
        self.together = threading.Barrier(2)

    def create(self, path: str, data: bytes) -> None:
        there = path in self.objects
        if not path.endswith("twice"):
            self.together.wait()
        if there:
            raise AlreadyThere(path)
        self.objects[path] = data


class _Loses(_Overwriting):
    """A store that puts something else where it was told to create."""

    def create(self, path: str, data: bytes) -> None:
        if path in self.objects:
            raise AlreadyThere(path)
        self.objects[path] = encode_canary(path.rpartition("/")[2], "somebody else's")


def _run(**more):
    from rlk_ledger_schemas.objects import RunInfo

    return RunInfo(
        **{
            "format": 1,
            "ledger_id": "",
            "run_id": "r",
            "roles": {},
            "mode": {},
            "redaction": "none",
            "created_us": 1,
            **more,
        }
    )


def test_the_probe_sees_a_store_that_ignores_the_condition(store) -> None:
    assert canary.probe(store) == "honoured"
    assert canary.probe(store) == "honoured", "it may be repeated"
    for careless in (_Overwriting(), _ChecksThenWrites(), _Loses()):
        assert canary.probe(careless) == "ignored", type(careless).__name__


def test_a_probe_that_cannot_be_read_back_says_so_and_nothing_else() -> None:
    class Cuts(_Overwriting):
        def read(self, path: str) -> bytes:
            return super().read(path)[:50]

    with pytest.raises(StoreError, match="reads back as 50 bytes that are no canary"):
        canary.probe(Cuts())

    class Forgets(_Overwriting):
        def create(self, path: str, data: bytes) -> None:
            pass

    with pytest.raises(StoreError, match="canary/twice was written and is not there"):
        canary.probe(Forgets())


def test_canaries_say_what_they_are_and_verify_sees_a_change_of_any_byte(tmp_path: Path) -> None:
    from rlk_ledger.verify import verify

    store = FileStore(tmp_path)
    contact.meet(store, _run())
    assert verify(store).findings == ()
    for name in ("twice", "race"):
        file = tmp_path / "canary" / name
        whole = file.read_bytes()
        for i in range(len(whole)):
            file.write_bytes(whole[:i] + bytes([whole[i] ^ 1]) + whole[i + 1 :])
            assert [(f.kind, f.object) for f in verify(store).findings] == [("canary.changed", f"canary/{name}")]
        file.write_bytes(whole[:-1])
        assert verify(store).exit_code == 1
        file.write_bytes(whole)
    (tmp_path / "canary" / "third").write_bytes(whole)
    assert [f.object for f in verify(store).findings] == ["canary/third"]


def test_what_the_first_release_left_as_a_canary_is_no_damage(tmp_path: Path) -> None:
    from rlk_ledger.verify import verify

    store = FileStore(tmp_path)
    for name in ("twice", "race"):
        store.create(f"canary/{name}", b"0123456789abcdef0123456789abcdef")
    assert contact.meet(store, _run()).ledger.put_if_absent == "honoured"
    assert verify(store).findings == ()


def test_a_ledger_copied_to_a_store_that_overwrites_is_met_with_a_probe_at_every_new_run(tmp_path: Path) -> None:
    good = FileStore(tmp_path)
    contact.meet(good, _run())
    copied = _Overwriting()
    copied.objects = {entry.path: good.read(entry.path) for entry in good.list("")}
    met = contact.meet(copied, _run(run_id="r2"))
    assert met.ledger.put_if_absent == "honoured", "ledger.json stays what it was"
    assert met.run.put_if_absent == "ignored"
    assert met.overwrites
    with pytest.raises(contact.Ignored):
        contact.meet(copied, _run(), strict=True)


def test_a_store_that_overwrites_is_told_to_whoever_verifies() -> None:
    from rlk_ledger.verify.canary import check_promise

    met = contact.meet(_Overwriting(), _run())
    assert [f.kind for f in check_promise(met.ledger, "ledger.json")] == ["store.overwrites"]
    assert [f.object for f in check_promise(met.run, "runs/r/run.json")] == ["runs/r/run.json"]
    assert check_promise(None, "ledger.json") == []


def test_a_store_that_ignores_the_condition_is_refused_when_strict_and_recorded_otherwise() -> None:
    with pytest.raises(contact.Ignored, match="overwrites objects"):
        contact.meet(_Overwriting(), _run(), strict=True)
    lax = _Overwriting()
    assert contact.meet(lax, _run()).ledger.put_if_absent == "ignored"
    with pytest.raises(contact.Ignored):
        contact.meet(lax, _run(run_id="r2"), strict=True)


def test_the_first_declaration_wins(store) -> None:
    first = contact.meet(store, _run(roles={"training": 2}))
    second = contact.meet(store, _run(roles={"training": 4}))
    assert first.ledger.put_if_absent == "honoured"
    assert second.run == first.run
    assert second.ledger == first.ledger


def test_a_pinned_ledger_id_must_agree(store) -> None:
    from rlk_ledger_schemas.errors import LedgerError

    assert contact.meet(store, _run(), ledger_id="ab" * 16).ledger.ledger_id == "ab" * 16
    with pytest.raises(LedgerError, match="this writer was given ledger"):
        contact.meet(store, _run(), ledger_id="cd" * 16)


@pytest.mark.parametrize("url", ["a\0b", "a\ud800b"])
def test_a_url_no_system_can_hold_is_a_configuration_error(url: str) -> None:
    with pytest.raises(ConfigError, match="no path and no URL"):
        open_store(url)
