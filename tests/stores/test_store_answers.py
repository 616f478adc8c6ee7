"""What a client makes of bad answers: conflicts, refusals, short bodies, silence, as a server is told to."""

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from rlk_ledger import buckets, clients
from rlk_ledger.store import AlreadyThere, Missing, Store, open_store
from rlk_ledger_schemas.errors import StoreError

DATA = b"0123456789" * 100
NOT_THERE = (404, b"<Error><Code>NoSuchKey</Code><Message>The specified key does not exist.</Message></Error>")
Answer = tuple[int, bytes]


class Told:
    """A server whose answer to each request is `answer(method, path)`; a `short` body breaks off half way."""

    def __init__(self) -> None:
        self.requests: list[str] = []
        self.answer: Callable[[str, str], Answer] = lambda method, path: NOT_THERE
        self.short = False
        self.silent = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.silent.set()
        self._server.shutdown()
        self._server.server_close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        told = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _do(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                self.rfile.read(length)
                told.requests.append(f"{self.command} {self.path}")
                status, body = told.answer(self.command, self.path)
                if status == 0:  # silence, until the test is over
                    told.silent.wait()
                    self.close_connection = True
                    return
                self.send_response(status)
                kind = "application/xml" if body.startswith(b"<") else "application/octet-stream"
                self.send_header("Content-Type", kind)
                self.send_header("ETag", '"0"')
                self.send_header("Last-Modified", "Tue, 01 Dec 2026 00:00:00 GMT")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body[: len(body) // 2] if told.short else body)
                self.close_connection = self.close_connection or told.short

            do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _do

            def log_message(self, *args: object) -> None:
                pass

        return Handler


@pytest.fixture
def told() -> Iterator[Told]:
    server = Told()
    yield server
    server.close()


def _environ(kind: str, port: int) -> dict[str, str]:
    endpoint = f"http://127.0.0.1:{port}"
    if kind == "s3":
        keys = {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s", "AWS_DEFAULT_REGION": "us-east-1"}
        return {"AWS_ENDPOINT_URL": endpoint, **keys}
    if kind == "gs":
        return {"STORAGE_EMULATOR_HOST": endpoint, "NO_GCE_CHECK": "true"}
    account = f"AccountName=a;AccountKey=a2V5;BlobEndpoint={endpoint}/a;"
    return {"AZURE_STORAGE_CONNECTION_STRING": f"DefaultEndpointsProtocol=http;{account}"}


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients that wait a second where they wait a quarter of a minute."""
    for module, name, value in (
        (clients, "CONNECT_S", 1),
        (clients, "ANSWER_S", 1),
        (buckets, "CALL_S", 3.0),
        (buckets, "LONG_S", 4.0),
    ):
        monkeypatch.setattr(module, name, value)


@pytest.fixture(params=["s3", "gs", "az"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def store(kind: str, told: Told, hasty: None, monkeypatch: pytest.MonkeyPatch) -> Store:
    return _store(kind, told.port, monkeypatch)


def _store(kind: str, port: int, monkeypatch: pytest.MonkeyPatch) -> Store:
    for name, value in _environ(kind, port).items():
        monkeypatch.setenv(name, value)
    return open_store(f"{kind}://bucket/ledger")


def _s3(told: Told, monkeypatch: pytest.MonkeyPatch, put: Answer, get: Answer) -> Store:
    told.answer = lambda method, path: put if method == "PUT" else get
    return _store("s3", told.port, monkeypatch)


def _error(status: int, code: str) -> Answer:
    return status, f"<Error><Code>{code}</Code><Message>{code} it says.</Message></Error>".encode()


CONFLICT = _error(409, "ConditionalRequestConflict")
REFUSED = _error(412, "PreconditionFailed")
BUSY = _error(503, "SlowDown")
BROKEN = _error(500, "InternalError")


@pytest.mark.parametrize("put", [CONFLICT, REFUSED, BUSY, BROKEN], ids=["409", "412", "503", "500"])
def test_whatever_the_refusal_what_is_there_decides(told, hasty, monkeypatch: pytest.MonkeyPatch, put: Answer) -> None:
    _s3(told, monkeypatch, put, (200, b"mine")).create("x", b"mine")
    with pytest.raises(AlreadyThere):
        _s3(told, monkeypatch, put, (200, b"theirs")).create("x", b"mine")
    with pytest.raises(StoreError) as caught:
        _s3(told, monkeypatch, put, NOT_THERE).create("x", b"mine")
    assert not isinstance(caught.value, AlreadyThere | Missing), (
        "nothing is there: the outcome is open, and a retry safe"
    )
    assert str(caught.value).startswith("cannot create s3://bucket/ledger/x: ")


def test_when_neither_the_write_nor_the_look_is_answered_the_outcome_is_open(told, hasty, monkeypatch) -> None:
    with pytest.raises(
        StoreError, match=r"cannot create .*InternalError.*; and what is there now: cannot read"
    ) as caught:
        _s3(told, monkeypatch, BROKEN, BROKEN).create("x", b"mine")
    assert not isinstance(caught.value, AlreadyThere | Missing)


def test_a_condition_is_sent_and_a_small_read_is_one_request(told, hasty, monkeypatch) -> None:
    store = _s3(told, monkeypatch, (200, b""), (200, DATA))
    store.create("x", DATA)
    assert store.read("x") == DATA
    assert [request.partition("?")[0] for request in told.requests] == [
        "PUT /bucket/ledger/x",
        "GET /bucket/ledger/x",
    ], "no bucket is listed, made or asked about"


def test_missing_is_one_request_and_a_denial_is_no_absence(told, hasty, monkeypatch) -> None:
    store = _s3(told, monkeypatch, NOT_THERE, NOT_THERE)
    with pytest.raises(Missing):
        store.read("x")
    assert len(told.requests) == 1
    told.answer = lambda method, path: _error(403, "AccessDenied")
    calls: dict[str, Callable[[], object]] = {
        "s3:GetObject": lambda: store.read("x"),
        "s3:PutObject": lambda: store.create("x", b""),
        "s3:ListBucket": lambda: store.children("runs"),
        "s3:DeleteObject": lambda: store.delete("x"),
    }
    for right, call in calls.items():
        with pytest.raises(StoreError, match=right) as caught:
            call()
        assert not isinstance(caught.value, Missing)
    for call in (lambda: store.stat("x"), lambda: list(store.list("runs"))):
        with pytest.raises(StoreError):
            call()


def test_a_bucket_that_is_not_there_is_no_absent_object(told, hasty, monkeypatch) -> None:
    gone = _error(404, "NoSuchBucket")
    gone = (404, gone[1].replace(b"NoSuchBucket it says", b"The specified bucket does not exist"))
    store = _s3(told, monkeypatch, gone, gone)
    for call in (lambda: store.read("x"), lambda: store.children("runs"), lambda: list(store.list("runs"))):
        with pytest.raises(StoreError, match="the bucket does not exist") as caught:
            call()
        assert not isinstance(caught.value, Missing)
    with pytest.raises(StoreError, match=r"cannot create .*bucket does not exist"):
        store.create("x", b"1")


def test_a_body_that_breaks_off_is_never_taken_for_the_object(store: Store, told: Told) -> None:
    told.answer, told.short = lambda method, path: (200, DATA), True
    with pytest.raises(StoreError, match="cannot read") as caught:
        store.read("x")
    assert not isinstance(caught.value, Missing)


def test_a_server_that_takes_connections_and_never_answers_ends_every_call(store: Store, told: Told) -> None:
    told.answer = lambda method, path: (0, b"")
    calls: tuple[Callable[[], object], ...] = (
        lambda: store.read("x"),
        lambda: store.create("x", bytes(100)),
        lambda: store.stat("x"),
        lambda: store.children("runs"),
        lambda: list(store.list("runs")),
        lambda: store.delete("x"),
    )
    errors: list[BaseException] = []

    def run(call: Callable[[], object]) -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == len(calls)
    for error in errors:
        assert isinstance(error, StoreError), error
        assert not isinstance(error, Missing | AlreadyThere)


def test_a_server_that_reads_nothing_of_an_upload_ends_it(kind: str, hasty, monkeypatch) -> None:
    """The receiver's window is full for ever: no read of ours times out, only the call as a whole."""
    monkeypatch.setattr(buckets, "SLOWEST", 1 << 30)
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(16)
        store = _store(kind, deaf.getsockname()[1], monkeypatch)
        with pytest.raises(StoreError, match="cannot create"):
            store.create("x", bytes(32 << 20))


def test_a_server_that_is_not_there_is_an_error_of_the_store(kind: str, hasty, monkeypatch) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        store = _store(kind, nobody.getsockname()[1], monkeypatch)
        for call in (lambda: store.read("x"), lambda: store.create("x", b"1"), lambda: store.children("runs")):
            with pytest.raises(StoreError) as caught:
                call()
            assert not isinstance(caught.value, Missing | AlreadyThere)


def test_a_command_on_a_server_that_is_not_there_is_one_sentence(kind: str) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        environ = {**os.environ, **_environ(kind, nobody.getsockname()[1])}
        command = [str(Path(sys.executable).with_name("rlk-ledger")), "runs", "--ledger", f"{kind}://bucket/ledger"]
        done = subprocess.run(command, env=environ, text=True, capture_output=True)
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert f"cannot read {kind}://bucket/ledger/ledger.json: " in line


def test_what_the_user_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec.config

    given = {"s3": {"config_kwargs": {"read_timeout": 99}, "key": "k", "secret": "s"}, "gs": {"requests_timeout": 7}}
    monkeypatch.setattr(fsspec.config, "conf", given)
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    s3 = open_store("s3://bucket/x").fs
    assert s3.config_kwargs["read_timeout"] == 99
    assert s3.config_kwargs["connect_timeout"] == clients.CONNECT_S
    assert s3.key == "k"
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://127.0.0.1:9")
    assert open_store("gs://bucket/x").fs.requests_timeout == 7


@pytest.mark.parametrize(
    "url",
    [
        "s3://AKIAKEY:SeCrEt@bucket/x",
        "s3://AKIAKEY@bucket/x",
        "gs://user:SeCrEt@bucket/x",
        "az://box/x?sv=1&sig=SeCrEt",
        "abfss://box:SeCrEt@account.dfs.core.windows.net/x",
        "https://bucket.s3.amazonaws.com/x?X-Amz-Signature=SeCrEt",
    ],
)
def test_a_url_with_credentials_is_refused_without_repeating_them(url: str) -> None:
    from rlk_ledger_schemas.errors import ConfigError
    from rlk_ledger_sdk.config import load_config

    for call in (lambda: open_store(url), lambda: load_config(url, run_id="r")):
        with pytest.raises(ConfigError, match="holds credentials; put them in the environment") as caught:
            call()
        assert "SeCrEt" not in str(caught.value)
        assert "AKIAKEY" not in str(caught.value)


def test_an_azure_container_at_an_account_and_a_chained_url() -> None:
    from rlk_ledger_schemas.errors import ConfigError
    from rlk_ledger_sdk.urls import holds_secret

    assert not holds_secret("abfss://box@account.dfs.core.windows.net/x")
    assert not holds_secret("/data/team@site/x")
    with pytest.raises(ConfigError, match="chained file systems are no ledger"):
        open_store("simplecache::s3://bucket/x")


def test_an_s3_client_of_before_parts_were_read_at_once_reads_with_one_request(told: Told, monkeypatch) -> None:
    """s3fs before 2026.3 takes no option for it: its only way is one GET."""
    import s3fs

    newest = s3fs.S3FileSystem._cat_file

    async def cat_file(self, path, version_id=None, start=None, end=None):
        return await newest(self, path, version_id=version_id, start=start, end=end, max_concurrency=1)

    monkeypatch.setattr(s3fs.S3FileSystem, "_cat_file", cat_file)
    store = _s3(told, monkeypatch, CONFLICT, (200, DATA))
    assert store.read("a") == DATA
    assert [request.partition("?")[0] for request in told.requests] == ["GET /bucket/ledger/a"]


def test_a_client_that_deletes_only_many_at_once_deletes_one(monkeypatch) -> None:
    """adlfs before 2026.2 has no way to delete one blob by name."""
    store = open_store("memory://before-rm-file")
    assert isinstance(store, buckets.FsspecStore)
    store.create("a/b", DATA)
    store.create("a/c", DATA)

    def not_yet(path: str) -> None:
        raise NotImplementedError

    monkeypatch.setattr(store.fs, "rm", store.fs.rm_file)
    monkeypatch.setattr(store.fs, "rm_file", not_yet)
    store.delete("a/b")
    store.delete("a/b")
    assert [entry.path for entry in store.list("")] == ["a/c"]
