"""Writers, spools and stores that fail on purpose."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlk_ledger.build import event
from rlk_ledger.records import Record
from rlk_ledger.store import Entry, Store
from rlk_ledger_schemas.codec import encode_payload
from rlk_ledger_schemas.errors import StoreError
from rlk_ledger_schemas.frame import SpoolHeader
from rlk_ledger_sdk.budget import Budget
from rlk_ledger_sdk.process import identity, new_writer_id
from rlk_ledger_sdk.spool import SpoolWriter

RUN = "r1"


class Writer:
    """A writer that spools events; `die()` makes readers believe its process is dead."""

    def __init__(self, spool: Path, url: str, dead: bool = False, **header: Any) -> None:
        self.writer_id = new_writer_id()
        self.directory = spool / self.writer_id
        self.directory.mkdir(parents=True)
        me = identity()
        self.header = SpoolHeader(
            **{
                "writer_id": self.writer_id,
                "run_id": RUN,
                "ledger_url": url,
                "file_number": 0,
                "first_seq": 0,
                "pid": me.pid,
                "process_start": "1:" + me.process_start.partition(":")[2] if dead else me.process_start,
                "host": me.host,
                "boot_id": me.boot_id,
                **header,
            }
        )
        self.spool = SpoolWriter(self.directory, self.header, "mmap", Budget(self.directory, 1 << 40, 0))

    def put(self, type_name: str = "weights.published", **fields: Any) -> Record:
        seq = self.spool.at[1]
        if type_name == "weights.published":
            fields = {"weight_version": f"v{seq}", "digest": "sha256:00", "tensor_count": seq, **fields}
        record = event(self.header.run_id, self.writer_id, seq, type_name, **fields)
        self.spool.put(encode_payload(record.envelope, record.arrays))
        return record

    def many(self, count: int) -> list[Record]:
        return [self.put() for _ in range(count)]

    def close(self) -> Record:
        record = self.put("writer.closed", reason="test")
        self.spool.close()
        return record


class Killed(BaseException):
    """Stands for SIGKILL: nothing in the shipper may catch it and go on."""


class FaultyStore:
    """A store whose k-th call goes wrong: `before` did nothing, `after` did its work and lost the reply."""

    def __init__(self, inner: Store, at: int, when: str, error: Callable[[], BaseException]) -> None:
        self.inner = inner
        self.url = inner.url
        self.at = at
        self.when = when
        self.error = error
        self.calls: list[str] = []
        self.lock = threading.Lock()

    def _call(self, name: str, *args: Any) -> Any:
        with self.lock:
            number = len(self.calls)
            self.calls.append(f"{name} {args[0]}")
        if number == self.at and self.when == "before":
            raise self.error()
        try:
            return getattr(self.inner, name)(*args)
        finally:
            if number == self.at and self.when == "after":
                raise self.error()

    def create(self, path: str, data: bytes) -> None:
        self._call("create", path, data)

    def read(self, path: str) -> bytes:
        return self._call("read", path)

    def list(self, prefix: str) -> Iterator[Entry]:
        return iter(self._call("list", prefix))

    def children(self, prefix: str) -> tuple[str, ...]:
        return self._call("children", prefix)

    def stat(self, path: str) -> int | None:
        return self._call("stat", path)

    def locate(self, path: str) -> str:
        return self.inner.locate(path)


def lost_reply() -> StoreError:
    return StoreError("the reply was lost.")


@pytest.fixture
def spool(tmp_path: Path) -> Path:
    folder = tmp_path / "spool"
    folder.mkdir()
    return folder


@pytest.fixture
def url(tmp_path: Path) -> str:
    return str(tmp_path / "ledger")


@pytest.fixture
def new_writer(spool: Path, url: str) -> Callable[..., Writer]:
    def make(**options: Any) -> Writer:
        return Writer(options.pop("spool", spool), options.pop("url", url), **options)

    return make


@pytest.fixture
def helpers() -> Any:
    """The helper classes of this file, for tests that build their own."""

    return SimpleNamespace(Writer=Writer, Killed=Killed, FaultyStore=FaultyStore, lost_reply=lost_reply)
