"""Any fsspec file system as a store: S3, Google Cloud Storage, Azure Blob, memory, and whatever else has a client.

`create` is `pipe_file(mode="create")`, a conditional write, and what a read-back finds decides: stores word a refusal
differently, a conflict (409) is no refusal, and an error may follow a write that landed.
"""

import os
import re
import threading
from collections.abc import Iterator
from inspect import signature
from typing import Any

from rlk_ledger.clients import CALL_S, LONG_S, SLOWEST, advice, connect, permission
from rlk_ledger.store import Entry, Missing, checked, reason, settle
from rlk_ledger_schemas.errors import StoreError

_NO_BUCKET = re.compile(r"bucket does not exist|ContainerNotFound|container does not exist|NoSuchBucket", re.IGNORECASE)
_DENIED = re.compile(r"denied|forbidden|not authorized|AuthorizationP|AuthorizationF", re.IGNORECASE)

_memory = threading.Lock()  # memory:// checks, then writes


def _fresh_lock() -> None:
    global _memory
    _memory = threading.Lock()


os.register_at_fork(after_in_child=_fresh_lock)


class FsspecStore:
    """A bucket, or a prefix of one, behind an fsspec client. Threads may share it, and so may forked children."""

    def __init__(self, url: str, protocol: str) -> None:
        self.url = url.rstrip("/")
        self._protocol = protocol
        self._client = (os.getpid(), *connect(self.url, protocol))
        self._async = bool(getattr(self.fs, "async_impl", False))

    @property
    def fs(self) -> Any:
        """The client of this process; a child made by fork gets its own, because the thread of ours is not there."""
        if self._client[0] != os.getpid():
            self._client = (os.getpid(), *connect(self.url, self._protocol))
        return self._client[1]

    @property
    def root(self) -> str:
        """The path of the root as the client writes it: bucket and prefix."""
        return self._client[2]

    def create(self, path: str, data: bytes) -> None:
        target = self._target(path)
        try:
            if self._protocol == "memory":
                with _memory:
                    self.fs.makedirs(target.rpartition("/")[0], exist_ok=True)
                    self.fs.pipe_file(target, data, mode="create")
            else:
                limit_s = CALL_S + len(data) / SLOWEST
                self._call("pipe_file", target, data, mode="create", limit_s=limit_s, **self._whole(len(data)))
        except Exception as error:
            settle(self, path, data, error, self._why(error, "create"))

    def read(self, path: str) -> bytes:
        try:
            return bytes(self._call("cat_file", self._target(path), limit_s=LONG_S, **self._one_get()))
        except FileNotFoundError as error:
            self._check_bucket(error)
            raise Missing(f"{self.locate(path)} does not exist.") from None
        except Exception as error:
            raise StoreError(f"cannot read {self.locate(path)}: {self._why(error, 'read')}.") from error

    def list(self, prefix: str) -> Iterator[Entry]:
        top = self._target(prefix) if prefix else self.root
        try:
            found = self._call("find", top, detail=True, limit_s=LONG_S)
        except FileNotFoundError as error:
            self._check_bucket(error)
            return
        except Exception as error:
            raise StoreError(f"cannot list {self.url}/{prefix}: {self._why(error, 'list')}.") from error
        skip = len(self.root) + 1
        # adlfs answers with a list where an object has the folder's very name, which makes it no folder.
        infos = found.items() if isinstance(found, dict) else ()
        yield from sorted(
            Entry(path[skip:], int(info["size"] or 0))
            for path, info in infos
            if path.startswith(f"{top}/") and info["type"] == "file" and not path.endswith("/")
        )

    def children(self, prefix: str) -> tuple[str, ...]:
        top = self._target(prefix) if prefix else self.root
        try:
            found = self._call("ls", top, detail=False, limit_s=LONG_S)
        except (FileNotFoundError, NotADirectoryError) as error:
            self._check_bucket(error)
            return ()
        except Exception as error:
            raise StoreError(f"cannot list {self.url}/{prefix}: {self._why(error, 'list')}.") from error
        below = {path.rstrip("/")[len(top) + 1 :] for path in found if path.startswith(f"{top}/")}
        return tuple(sorted(name for name in below if name and "/" not in name))

    def stat(self, path: str) -> int | None:
        try:
            info = self._call("info", self._target(path), limit_s=CALL_S)
        except FileNotFoundError as error:
            self._check_bucket(error)
            return None
        except Exception as error:
            raise StoreError(f"cannot look at {self.locate(path)}: {self._why(error, 'read')}.") from error
        return int(info["size"]) if info["type"] == "file" else None

    def delete(self, path: str) -> None:
        try:
            try:
                self._call("rm_file", self._target(path), limit_s=CALL_S)
            except NotImplementedError:  # adlfs before 2026.2: it looks the object up first
                self._call("rm", self._target(path), limit_s=CALL_S)
        except FileNotFoundError:
            return
        except Exception as error:
            raise StoreError(f"cannot delete {self.locate(path)}: {self._why(error, 'delete')}.") from error

    def locate(self, path: str) -> str:
        return f"{self.url}/{checked(path)}"

    def _one_get(self) -> dict[str, int]:
        """Options that make a download one request: s3fs, since 2026.3, else asks for the size first, and lists."""
        cat_file = getattr(self.fs, "_cat_file", None) if self._protocol in ("s3", "s3a") else None
        return {"max_concurrency": 1} if cat_file and "max_concurrency" in signature(cat_file).parameters else {}

    def _whole(self, size: int) -> dict[str, int]:
        """Options that make an upload one request: a condition on parts is one that stores forget.

        It also leaves no parts behind when it is cut, and needs no right to abort an upload. Azure commits blocks.
        """
        if self._protocol in ("gs", "gcs"):
            return {"chunksize": size + 1}
        if self._protocol in ("s3", "s3a"):
            return {"chunksize": 5 << 29}  # s3fs cuts at twice this; S3 takes 5 GiB in one request
        return {}

    def _target(self, path: str) -> str:
        return f"{self.root}/{checked(path)}"

    def _call(self, name: str, *args: Any, limit_s: float, **options: Any) -> Any:
        """Calls the client, for `limit_s` seconds at most; a client without a loop of its own bounds itself."""
        fs = self.fs
        if not self._async:
            return getattr(fs, name)(*args, **options)
        from fsspec.asyn import sync

        return sync(fs.loop, getattr(fs, f"_{name}"), *args, timeout=limit_s, **options)

    def _why(self, error: Exception, verb: str) -> str:
        """Why the client failed, and which permission is missing where that is the reason."""
        text = reason(error)
        if not isinstance(error, PermissionError) and not _DENIED.search(f"{text} {getattr(error, 'error_code', '')}"):
            then = advice(self._protocol, text)
            return f"{text}; {then}" if then else text
        if not _DENIED.search(f"{text} {getattr(error, 'error_code', '')}"):
            return f"{text} (the credentials in use are refused)"
        needs = permission(self._protocol, verb)
        if self._protocol in ("s3", "s3a") and verb == "read":  # S3 answers so for an object that is not there, too
            needs += " there, and s3:ListBucket on the bucket"
        return f"{text}; the credentials in use need {needs}"

    def _check_bucket(self, error: Exception) -> None:
        """A bucket that is not there is no answer about an object in it."""
        told = f"{error} {getattr(error.__cause__, 'error_code', '')}"
        if _NO_BUCKET.search(told):
            raise StoreError(f"{self.url}: the bucket does not exist.") from error
