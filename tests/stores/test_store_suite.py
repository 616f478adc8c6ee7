"""What a store promises, asked of every store: the same class of tests, inherited by each."""

import json
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest

from rlk_ledger.store import AlreadyThere, Entry, Missing, Store, open_store
from rlk_ledger_schemas.errors import StoreError

MIB = 1 << 20
SIZES = {"empty": 0, "one byte": 1, "five MiB and one": 5 * MIB + 1, "twenty MiB": 20 * MIB}
NAMES = ("runs/r.1/receipt/00ff/00000000.json", "runs/a-b_c/seal.json", "x/.hidden", "x/UPPER", "x/a=b", "x/ä ß+~@,;!")
_LARGE = pytest.mark.filterwarnings("ignore:Sending a large body directly with raw bytes:ResourceWarning")  # their way
ODD_ROOTS = ("day=1", "with space", "ünï", "a+b", "50%", "p{0}q", "a&b")


class StoreSuite:
    """Every promise of `Store`. A subclass says where its stores lie."""

    lives_beyond_the_process = True

    @pytest.fixture
    def url(self) -> str:
        raise NotImplementedError

    @pytest.fixture
    def store(self, url: str) -> Store:
        return open_store(url)

    # -- create, read, stat, delete -----------------------------------------------------------------------------------

    def test_what_was_created_is_read_back_and_a_repeat_of_the_same_bytes_is_success(self, store: Store) -> None:
        store.create("a/b.json", b"one")
        store.create("a/b.json", b"one")
        assert store.read("a/b.json") == b"one"
        assert store.stat("a/b.json") == 3

    def test_other_bytes_are_refused_and_change_nothing(self, store: Store) -> None:
        store.create("a/b.json", b"one")
        with pytest.raises(AlreadyThere, match="already holds other bytes"):
            store.create("a/b.json", b"two")
        with pytest.raises(AlreadyThere):
            store.create("a/b.json", b"")
        assert store.read("a/b.json") == b"one"

    @pytest.mark.parametrize("size", SIZES.values(), ids=SIZES.keys())
    def test_every_size_comes_back_and_stays(self, store: Store, size: int) -> None:
        data = os.urandom(size)
        store.create("sized/x", data)
        store.create("sized/x", data)
        with pytest.raises(AlreadyThere):
            store.create("sized/x", data + b"!")
        assert store.read("sized/x") == data
        assert store.stat("sized/x") == size
        assert list(store.list("sized")) == [Entry("sized/x", size)]

    def test_what_is_not_there_is_missing_and_no_error(self, store: Store) -> None:
        store.create("a/b/c", b"1")
        with pytest.raises(Missing, match="does not exist"):
            store.read("a/x")
        assert store.stat("a/x") is None
        assert store.children("nowhere") == ()
        assert list(store.list("nowhere")) == []
        store.delete("a/x")

    def test_a_folder_is_no_object(self, store: Store) -> None:
        store.create("a/b/c", b"1")
        assert store.stat("a") is None
        assert store.stat("a/b") is None
        with pytest.raises(StoreError):
            store.read("a/b")
        assert store.children("a/b/c") == ()
        assert list(store.list("a/b/c")) == []

    def test_a_deleted_object_is_gone_for_everyone_and_its_name_is_free(self, store: Store, url: str) -> None:
        store.create("a/b", b"1")
        store.create("a/c", b"2")
        store.delete("a/b")
        store.delete("a/b")
        other = open_store(url)
        assert other.stat("a/b") is None
        assert other.children("a") == ("c",)
        store.create("a/b", b"3")
        assert other.read("a/b") == b"3"

    # -- listing ------------------------------------------------------------------------------------------------------

    def test_a_listing_is_sorted_relative_and_complete(self, store: Store) -> None:
        for path in ("runs/b/2", "runs/b/1", "runs/a/x/y", "runs/bb/1", "runs.txt"):
            store.create(path, path.encode())
        assert list(store.list("runs")) == [
            Entry("runs/a/x/y", 10),
            Entry("runs/b/1", 8),
            Entry("runs/b/2", 8),
            Entry("runs/bb/1", 9),
        ]
        assert [entry.path for entry in store.list("runs/b")] == ["runs/b/1", "runs/b/2"]
        assert next(entry.path for entry in store.list("")) == "runs.txt"
        assert store.children("runs") == ("a", "b", "bb")
        assert store.children("runs/b") == ("1", "2"), "a sibling with the same beginning is no child"
        assert store.children("") == ("runs", "runs.txt")
        assert store.children("run") == ()

    def test_odd_names_stay_what_they_are(self, store: Store) -> None:
        for path in NAMES:
            store.create(path, path.encode())
        assert [entry.path for entry in store.list("")] == sorted(NAMES)
        assert set(store.children("x")) == {path[2:] for path in NAMES if path.startswith("x/")}
        for path in NAMES:
            assert store.read(path) == path.encode()
            assert store.stat(path) == len(path.encode())

    @pytest.mark.parametrize("root", ODD_ROOTS)
    def test_a_root_with_odd_characters_is_a_root_like_another(self, url: str, root: str) -> None:
        store = open_store(f"{url}/{root}")
        store.create("runs/r/seal.json", b"1")
        assert store.read("runs/r/seal.json") == b"1"
        assert list(store.list("")) == [Entry("runs/r/seal.json", 1)]
        assert store.children("runs") == ("r",)
        assert open_store(f"{url}/{root}x").children("") == ()

    def test_no_path_leaves_the_root(self, store: Store) -> None:
        calls: tuple[Callable[[str], Any], ...] = (
            lambda path: store.create(path, b""),
            store.read,
            store.stat,
            store.delete,
            store.locate,
        )
        for path in ("../x", "a/../../x", "/etc/passwd", "", "a//b", "a/./b", "a\0b", "a\\..\\b"):
            for call in calls:
                with pytest.raises(StoreError, match="not a path below"):
                    call(path)

    # -- others write too ---------------------------------------------------------------------------------------------

    def test_what_another_process_writes_is_seen_at_once(self, store: Store, url: str) -> None:
        if not self.lives_beyond_the_process:
            pytest.skip("lives in one process")
        assert store.children("runs/r") == ()
        assert list(store.list("runs")) == []
        assert store.stat("runs/r/late") is None
        for i in range(3):

            def write(i: int = i) -> None:
                open_store(url).create(f"runs/r/late{i}", b"12345")

            assert _in_child(write) is None
            assert store.children("runs/r") == tuple(f"late{j}" for j in range(i + 1))
            assert len(list(store.list("runs"))) == i + 1
            assert store.stat(f"runs/r/late{i}") == 5
            assert store.read(f"runs/r/late{i}") == b"12345"

    def test_a_store_opened_before_a_fork_works_on_both_sides(self, store: Store) -> None:
        if not self.lives_beyond_the_process:
            pytest.skip("lives in one process")
        store.create("before", b"1")

        def use() -> list[str]:
            store.create("child", b"2")
            return [store.read("before").decode(), store.read("child").decode(), *store.children("")]

        assert _in_child(use) == ["1", "2", "before", "child"]
        store.create("after", b"3")
        assert store.children("") == ("after", "before", "child")

    @pytest.mark.parametrize("size", [40, 200_000], ids=["small", "large"])
    def test_of_sixteen_racing_threads_one_wins_and_all_read_the_same(self, store: Store, size: int) -> None:
        for round_ in range(5):
            path = f"race/{size}/{round_}"
            seen = _race(16, lambda i, path=path: _try_to_create(store, path, bytes([65 + i]) * size))
            winners = [data for won, data in seen if won]
            assert len(winners) == 1, "exactly one creator wins"
            assert {data for _, data in seen} == set(winners), "everybody reads back what the winner wrote"

    @pytest.mark.parametrize("size", [40, 200_000], ids=["small", "large"])
    def test_of_four_racing_processes_one_wins_and_all_read_the_same(self, url: str, size: int) -> None:
        if not self.lives_beyond_the_process:
            pytest.skip("lives in one process")
        open_store(url).create("ready", b"")
        for round_ in range(4):

            def race(i: int, round_: int = round_) -> list[Any]:
                won, data = _try_to_create(open_store(url), f"race/{round_}", bytes([65 + i]) * size)
                return [won, data[:1].decode(), len(data)]

            seen = _children(4, race)
            winners = [letter for won, letter, _ in seen if won]
            assert len(winners) == 1
            assert {(letter, length) for _, letter, length in seen} == {(winners[0], size)}

    def test_threads_share_a_store(self, store: Store) -> None:
        def work(i: int) -> int:
            for j in range(5):
                store.create(f"shared/{i}/{j}", f"{i} {j}".encode())
            return sum(store.read(f"shared/{i}/{j}") == f"{i} {j}".encode() for j in range(5))

        assert _race(16, work) == [5] * 16
        assert len(list(store.list("shared"))) == 80

    # -- replies get lost ---------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("landed", [True, False], ids=["it landed", "it did not"])
    def test_an_error_after_which_the_bytes_are_there_is_success_and_else_it_is_open(
        self, store: Store, monkeypatch: pytest.MonkeyPatch, landed: bool
    ) -> None:
        _lose_replies(store, monkeypatch, landed)
        if landed:
            store.create("lost/x", b"mine")
            with pytest.raises(AlreadyThere):
                store.create("lost/x", b"theirs")
        else:
            with pytest.raises(StoreError, match=r"cannot create .*lost/x: the wire was cut") as caught:
                store.create("lost/x", b"mine")
            assert not isinstance(caught.value, AlreadyThere | Missing), "the caller may try again"
            assert store.stat("lost/x") is None


class ManyObjects:
    """Listings longer than a page, for stores whose servers have pages."""

    def test_a_listing_goes_on_beyond_the_servers_page(self, store: Store, server_page: int) -> None:
        count = server_page + 5
        _race(16, lambda i: [store.create(f"many/{j:05d}/x", b"1") for j in range(i, count, 16)])
        assert [entry.path for entry in store.list("many")] == [f"many/{j:05d}/x" for j in range(count)]
        assert store.children("many") == tuple(f"{j:05d}" for j in range(count))


class BigObjects:
    """Objects beyond the size from which clients upload in parts: the condition has to hold for them, too."""

    @pytest.mark.slow
    def test_the_condition_holds_for_an_object_larger_than_the_clients_parts(self, store: Store) -> None:
        first, second = bytes(120 * MIB), b"\1" * (120 * MIB)
        store.create("big/x", first)
        with pytest.raises(AlreadyThere):
            store.create("big/x", second)
        store.create("big/x", first)
        assert store.stat("big/x") == len(first)
        assert store.read("big/x") == first


class TestFile(StoreSuite):
    @pytest.fixture
    def url(self, tmp_path) -> str:
        return str(tmp_path / "ledger")


class TestMemory(StoreSuite):
    lives_beyond_the_process = False

    @pytest.fixture
    def url(self, name: str) -> str:
        return f"memory://{name}"


class _Served(StoreSuite):
    fixture = ""

    @pytest.fixture
    def url(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, name: str) -> str:
        server = request.getfixturevalue(self.fixture)
        for variable, value in server.environ.items():
            monkeypatch.setenv(variable, value)
        return server.url(name)


class TestSeaweedFS(_Served, ManyObjects, BigObjects):
    fixture, server_page = "seaweedfs", pytest.fixture(lambda self: 1000)


class TestMoto(_Served, ManyObjects, BigObjects):
    fixture, server_page = "moto", pytest.fixture(lambda self: 1000)


@_LARGE
class TestAzurite(_Served, BigObjects):
    fixture = "azurite"


@_LARGE
class TestFakeGcs(_Served, BigObjects):
    fixture = "fake_gcs"


# -- helpers ----------------------------------------------------------------------------------------------------


def _try_to_create(store: Store, path: str, data: bytes) -> tuple[bool, bytes]:
    """(whether we won, what is there), trying again while the outcome is open."""
    for _ in range(50):
        try:
            store.create(path, data)
        except AlreadyThere:
            return False, store.read(path)
        except Missing:
            raise
        except StoreError:
            continue
        return True, store.read(path)
    raise AssertionError("the outcome stayed open")


def _race(count: int, work: Callable[[int], Any]) -> list[Any]:
    """What `work(i)` returns on `count` threads that start together; raises what one of them raised."""
    barrier = threading.Barrier(count)
    out: list[Any] = [None] * count
    errors: list[BaseException] = []

    def run(i: int) -> None:
        barrier.wait()
        try:
            out[i] = work(i)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return out


def _in_child(work: Callable[[], Any]) -> Any:
    """What `work` returns in a forked child, as JSON has it."""
    return _children(1, lambda _: work())[0]


def _children(count: int, work: Callable[[int], Any]) -> list[Any]:
    """What `work(i)` returns in `count` forked children that start together."""
    go_read, go_write = os.pipe()
    pipes = []
    for i in range(count):
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.close(go_write)
                os.read(go_read, 1)  # ends when the parent lets go
                answer = json.dumps({"ok": work(i)})
            except BaseException as error:
                answer = json.dumps({"error": f"{type(error).__name__}: {error}"})
            os.write(write, answer.encode())
            os._exit(0)
        os.close(write)
        pipes.append((pid, read))
    os.close(go_read)
    os.close(go_write)
    out = []
    for pid, read in pipes:
        with os.fdopen(read, "rb") as file:
            answer = json.loads(file.read())
        os.waitpid(pid, 0)
        assert "error" not in answer, answer["error"]
        out.append(answer["ok"])
    return out


def _lose_replies(store: Any, monkeypatch: pytest.MonkeyPatch, landed: bool) -> None:
    """Every upload of `store` from now on raises: after it landed, or instead."""

    def lossy(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if landed:
                original(*args, **kwargs)
            raise OSError("the wire was cut")

        return call

    if not hasattr(store, "fs"):  # local files: the link is what makes an object
        monkeypatch.setattr(os, "link", lossy(os.link))
    elif store.url.startswith("memory://"):
        monkeypatch.setattr(store.fs, "pipe_file", lossy(store.fs.pipe_file))
    else:
        real = store._call

        def call(name: str, *args: Any, **kwargs: Any) -> Any:
            return (lossy(real) if name == "pipe_file" else real)(name, *args, **kwargs)

        monkeypatch.setattr(store, "_call", call)
