"""A bucket in memory that answers any of its calls with any outcome a bucket can have; an fsspec file system.

    bucket = FaultyBucket("b1")                      # open_store("oss://b1/ledger") is the ledger in it
    bucket.plan = lambda call: "lands" if call.number == 7 else None

It stands below `FsspecStore`, so what the store makes of an answer is part of what is tested. `CREATE`, `READ`, `LIST`,
`STAT` and `DELETE` name the outcomes of each verb. `Killed` stands for SIGKILL: nothing may catch it and go on.
"""

import errno
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import fsspec

CREATE = ("fails", "lands", "twice", "conflict", "refused", "unavailable", "ignored", "overtaken", "dies", "died")
"""fails: nothing there. lands: there, the reply lost. twice: there, and a retry underneath was refused. conflict: 409,
nothing there. refused: 412, and still nothing there. unavailable: 503. ignored: 200 with an error in it, nothing there.
overtaken: another client did its work just before. dies, died: the process, before and after."""
READ = ("fails", "unavailable", "cut", "missing", "dies")
"""cut: only the first half of the body. missing: not there yet for this reader."""
LIST = ("fails", "unavailable", "stale", "ghost", "dies")
"""stale: the newest object is not in it. ghost: an object that is gone is in it."""
STAT = ("fails", "missing", "dies")
DELETE = ("fails", "lands", "unavailable", "dies", "died")
OUTCOMES = {"create": CREATE, "read": READ, "list": LIST, "stat": STAT, "delete": DELETE}


class Killed(BaseException):
    """The process ends here."""


class Call(NamedTuple):
    """One call to the bucket: its number from 0, create | read | list | stat | delete, and the object or folder."""

    number: int
    verb: str
    path: str


Plan = Callable[[Call], str | None]


def _never(call: Call) -> str | None:
    return None


class FaultyBucket:
    """Objects by path, in the order they came; `plan` names the outcome of a call (None: as it should be).

    `rival` is run by an outcome `overtaken`, with the bucket's faults off; `slow` by an outcome `slow`, which goes on
    as it should when that returns.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.url = f"oss://{name}/ledger"
        self.objects: dict[str, bytes] = {}
        self.calls: list[Call] = []
        self.plan: Plan = _never
        self.rival: Callable[[], None] = lambda: None
        self.slow: Callable[[], None] = lambda: None
        self.ghost: str | None = None
        self._lock = threading.RLock()
        _buckets[name] = self

    @contextmanager
    def healthy(self) -> Iterator[None]:
        """Every call in the block has the outcome it should have, and is not counted."""
        plan, count = self.plan, len(self.calls)
        self.plan = _never
        try:
            yield
        finally:
            self.plan = plan
            del self.calls[count:]

    def outcome(self, verb: str, path: str) -> str | None:
        """Counts a call and says what becomes of it; raises what a client would for those that do nothing."""
        with self._lock:
            call = Call(len(self.calls), verb, path)
            self.calls.append(call)
            plan = self.plan
        outcome = plan(call)
        if outcome == "dies":
            raise Killed(f"{verb} {path}")
        if outcome == "fails":
            raise TimeoutError(errno.ETIMEDOUT, "the connection timed out")
        if outcome == "unavailable":
            raise OSError(errno.EIO, "503 Slow Down: please reduce your request rate")
        if outcome == "overtaken":
            with self.healthy():
                self.rival()
        if outcome == "slow":
            self.slow()
        return outcome

    def put(self, path: str, data: bytes) -> None:
        """Puts an object if nothing is there; raises as SeaweedFS words a failed condition."""
        with self._lock:
            if path in self.objects:
                raise OSError(errno.EINVAL, "At least one of the pre-conditions you specified did not hold")
            self.objects[path] = bytes(data)

    def __enter__(self) -> "FaultyBucket":
        return self

    def __exit__(self, *exc: object) -> None:
        _buckets.pop(self.name, None)


_buckets: dict[str, FaultyBucket] = {}


class FaultyFileSystem(fsspec.AbstractFileSystem):
    """The client of every FaultyBucket: what `FsspecStore` calls, and nothing else."""

    protocol = "oss"  # one the recorder takes, and whose own client is never installed here
    cachable = False

    def _bucket(self, path: str) -> FaultyBucket:
        return _buckets[path.partition("/")[0]]

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        """Put-if-absent; `mode` has to be create."""
        assert mode == "create", "a ledger never overwrites"
        path = self._strip_protocol(path)
        bucket = self._bucket(path)
        outcome = bucket.outcome("create", path)
        if outcome == "conflict":
            raise OSError(errno.EBUSY, "409 ConditionalRequestConflict")
        if outcome == "refused":
            raise FileExistsError(errno.EEXIST, "412 PreconditionFailed")
        if outcome == "ignored":
            return
        if outcome == "short":
            value = value[: len(value) // 2]
        bucket.put(path, value)
        if outcome == "lands":
            raise ConnectionResetError(errno.ECONNRESET, "connection reset by peer")
        if outcome == "twice":
            raise FileExistsError(errno.EEXIST, "412 PreconditionFailed")
        if outcome == "died":
            raise Killed(f"after create {path}")

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        """An object's bytes."""
        path = self._strip_protocol(path)
        bucket = self._bucket(path)
        outcome = bucket.outcome("read", path)
        if outcome == "missing" or path not in bucket.objects:
            raise FileNotFoundError(path)
        data = bucket.objects[path]
        return (data[: len(data) // 2] if outcome == "cut" else data)[start:end]

    def find(self, path: str, maxdepth: int | None = None, withdirs: bool = False, **kwargs: Any) -> Any:
        """Every object below a folder, with details."""
        path = self._strip_protocol(path)
        return {found: self._info(found, size) for found, size in self._listed(path).items()}

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> Any:
        """What is directly below a folder."""
        path = self._strip_protocol(path)
        found: dict[str, dict[str, Any]] = {}
        for name, size in self._listed(path).items():
            head, _, rest = name[len(path) + 1 :].partition("/")
            inside = f"{path}/{head}"
            found[inside] = {"name": inside, "size": 0, "type": "directory"} if rest else self._info(inside, size)
        if not found:
            raise FileNotFoundError(path)
        return list(found.values()) if detail else list(found)

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        """Name and size of an object."""
        path = self._strip_protocol(path)
        bucket = self._bucket(path)
        outcome = bucket.outcome("stat", path)
        if outcome == "missing" or path not in bucket.objects:
            raise FileNotFoundError(path)
        return self._info(path, len(bucket.objects[path]))

    def rm_file(self, path: str) -> None:
        """Deletes an object."""
        path = self._strip_protocol(path)
        bucket = self._bucket(path)
        outcome = bucket.outcome("delete", path)
        if path not in bucket.objects:
            raise FileNotFoundError(path)
        del bucket.objects[path]
        if outcome == "lands":
            raise ConnectionResetError(errno.ECONNRESET, "connection reset by peer")
        if outcome == "died":
            raise Killed(f"after delete {path}")

    def _listed(self, path: str) -> dict[str, int]:
        bucket = self._bucket(path)
        outcome = bucket.outcome("list", path)
        with bucket._lock:
            found = {name: len(data) for name, data in bucket.objects.items() if name.startswith(f"{path}/")}
        if outcome == "stale" and found:
            del found[list(found)[-1]]  # objects are held in the order they came
        if outcome == "ghost" and bucket.ghost is not None and bucket.ghost.startswith(f"{path}/"):
            found[bucket.ghost] = 1000
        return found

    @staticmethod
    def _info(path: str, size: int) -> dict[str, Any]:
        return {"name": path, "size": size, "type": "file"}


fsspec.register_implementation("oss", FaultyFileSystem, clobber=True)
