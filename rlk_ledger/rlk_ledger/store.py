"""The only door to a bucket: create (put-if-absent), read, list, stat, and delete for `prune` alone.

After `create(path, data)` returns, `path` holds exactly `data`, whoever wrote it: a lost reply and a retry are both
success. AlreadyThere means other bytes are there; any other StoreError leaves the outcome open, and a retry is safe.
Paths are relative to the root, use `/`, and cannot leave it.
"""

import contextlib
import errno
import io
import os
import re
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Protocol
from urllib.parse import unquote

from rlk_ledger_schemas.errors import ConfigError, StoreError
from rlk_ledger_sdk.urls import holds_secret, misspelt

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")
_SECRET = re.compile(r"\b(sig|signature|X-Amz-\w+|X-Goog-\w+|AccountKey|SharedAccessSignature)=[^&;\s]+", re.IGNORECASE)
_TEMPORARY = re.compile(r"\..*\.tmp")


class AlreadyThere(StoreError, FileExistsError):
    """Other bytes stand at the path that was to be created."""


class Missing(StoreError, FileNotFoundError):
    """There is no object at the path."""


class Entry(NamedTuple):
    """One object of a listing: its path relative to the root and its size in bytes."""

    path: str
    size: int


class Store(Protocol):
    """A bucket, or a prefix of one."""

    url: str

    def create(self, path: str, data: bytes) -> None:
        """Puts `data` at `path` unless something is there; raises AlreadyThere for other bytes, else StoreError."""

    def read(self, path: str) -> bytes:
        """The object's bytes; raises Missing or StoreError."""

    def list(self, prefix: str) -> Iterator[Entry]:
        """Every object below the folder `prefix` ("" for all), sorted by path; nothing when there is none."""

    def children(self, prefix: str) -> tuple[str, ...]:
        """Names directly below the folder `prefix`, sorted, found without listing what lies deeper."""

    def stat(self, path: str) -> int | None:
        """The object's size in bytes, None when there is no object; raises StoreError when that cannot be told."""

    def delete(self, path: str) -> None:
        """Removes the object; one that is not there is success. Raises StoreError. Nothing but `prune` calls it."""

    def locate(self, path: str) -> str:
        """The absolute path or URL of `path`, as other readers (DuckDB, fsspec) want it."""


def open_store(url: str) -> Store:
    """The store at `url`: a local path, `file://`, `memory://`, or any fsspec URL. Nothing is contacted yet.

    Raises ConfigError when the URL is empty, names an unknown kind of store, or the store's client is not installed.
    """
    if not isinstance(url, str | os.PathLike) or not str(url).strip():
        raise ConfigError(f"a ledger URL is a path or something like s3://bucket/prefix, got {url!r}.")
    text = str(url)
    if "\0" in text or any("\ud800" <= c <= "\udfff" for c in text):
        raise ConfigError(f"the ledger URL {text!r} is no path and no URL.")
    if holds_secret(text):
        raise ConfigError("the ledger URL holds credentials; put them in the environment, not in the URL.")
    wrong = misspelt(text)
    if wrong is not None:
        raise ConfigError(f"the ledger URL {text!r} {wrong}.")
    match = _SCHEME.match(text)
    if match is None and "::" in text and "://" in text:
        raise ConfigError(f"{text}: chained file systems are no ledger; use a path, file://, s3://, gs:// or az://.")
    if match is None:
        return FileStore(Path(text).expanduser())
    if match[1] in ("file", "local"):
        return FileStore(Path(unquote(text[match.end() :]) if match[1] == "file" else text[match.end() :]))
    from rlk_ledger.buckets import FsspecStore

    return FsspecStore(text, match[1])


def checked(path: str) -> str:
    """`path` if it stays below the root; raises StoreError."""
    parts = path.split("/")
    if not path or path.startswith("/") or "\0" in path or "\\" in path or any(p in ("", ".", "..") for p in parts):
        raise StoreError(f"{path!r} is not a path below the ledger's root.")
    return path


class FileStore:
    """A directory. `create` writes a temporary file beside the target, syncs it, links it and syncs the directory."""

    def __init__(self, root: Path) -> None:
        self.root = Path(os.path.abspath(root))  # noqa: PTH100 - resolve() would follow links the user meant to keep
        self.url = str(self.root)

    def create(self, path: str, data: bytes) -> None:
        target = self.root / checked(path)
        refused: OSError | None = None
        try:
            _make_folders(target.parent)
            temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}.tmp")
            try:
                _write_synced(temporary, data)
                try:
                    os.link(temporary, target)
                except OSError as error:
                    refused = error
            finally:
                temporary.unlink(missing_ok=True)
                _sync_folder(target.parent)
        except OSError as error:
            raise StoreError(f"cannot create {target}: {reason(error)}.") from error
        if refused is not None:  # somebody was here first, or a remote disk lost its reply
            settle(self, path, data, refused, reason(refused))

    def read(self, path: str) -> bytes:
        with self.open(path) as file:
            try:
                return file.read()
            except OSError as error:
                raise StoreError(f"cannot read {self.root / path}: {reason(error)}.") from error

    def open(self, path: str) -> io.FileIO:
        """The object, unbuffered. Only a regular file is one: a pipe, device or folder in its place is `Missing`.

        Raises Missing and StoreError; nothing is waited for.
        """
        target = self.root / checked(path)
        try:
            fd = os.open(target, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            if stat.S_ISREG(os.fstat(fd).st_mode):
                return io.FileIO(fd)
            os.close(fd)
        except (FileNotFoundError, NotADirectoryError):
            raise Missing(f"{target} does not exist.") from None
        except OSError as error:
            if error.errno != errno.ENXIO:  # a socket
                raise StoreError(f"cannot read {target}: {reason(error)}.") from error
        raise Missing(f"{target} is no file.")

    def list(self, prefix: str) -> Iterator[Entry]:
        top = self.root / checked(prefix) if prefix else self.root
        found = []
        for folder, _, names in os.walk(top, onerror=_raise_walk):
            for name in names:
                if not _TEMPORARY.fullmatch(name):
                    file = Path(folder, name)
                    with contextlib.suppress(FileNotFoundError):
                        status = file.stat()
                        if stat.S_ISREG(status.st_mode):
                            found.append(Entry(file.relative_to(self.root).as_posix(), status.st_size))
        yield from sorted(found)

    def children(self, prefix: str) -> tuple[str, ...]:
        top = self.root / checked(prefix) if prefix else self.root
        try:
            return tuple(sorted(name for name in os.listdir(top) if not _TEMPORARY.fullmatch(name)))  # noqa: PTH208
        except (FileNotFoundError, NotADirectoryError):
            return ()
        except OSError as error:
            raise StoreError(f"cannot list {top}: {reason(error)}.") from error

    def stat(self, path: str) -> int | None:
        target = self.root / checked(path)
        try:
            found = target.stat()
            return found.st_size if stat.S_ISREG(found.st_mode) else None
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise StoreError(f"cannot look at {target}: {reason(error)}.") from error

    def delete(self, path: str) -> None:
        target = self.root / checked(path)
        try:
            target.unlink()
            _sync_folder(target.parent)
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            raise StoreError(f"cannot delete {target}: {reason(error)}.") from error

    def locate(self, path: str) -> str:
        return str(self.root / checked(path))


def settle(store: Store, path: str, data: bytes, error: Exception, why: str) -> None:
    """Decides a create whose reply was an error by reading back what is there.

    Returns when `data` is there, raises AlreadyThere for other bytes, StoreError while the outcome is open.
    """
    try:
        there = store.read(path)
    except Missing:
        raise StoreError(f"cannot create {store.locate(path)}: {why}.") from error
    except StoreError as unread:
        raise StoreError(f"cannot create {store.locate(path)}: {why}; and what is there now: {unread}") from error
    if there != data:
        raise AlreadyThere(f"{store.locate(path)} already holds other bytes.") from None


def _make_folders(folder: Path) -> None:
    """Creates `folder` and its parents, each made durable in its own parent."""
    if folder.is_dir():
        return
    _make_folders(folder.parent)
    with contextlib.suppress(FileExistsError):
        folder.mkdir()
    _sync_folder(folder.parent)


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _raise_walk(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise StoreError(f"cannot list {error.filename}: {reason(error)}.") from error


def reason(error: BaseException) -> str:
    """The first line of what an error says, without the secrets of a signed URL or a connection string."""
    text = getattr(error, "strerror", None) or str(error).strip().partition("\n")[0] or type(error).__name__
    return _SECRET.sub(r"\1=...", str(text)).rstrip(".")
