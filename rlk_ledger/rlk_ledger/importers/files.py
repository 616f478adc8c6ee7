"""The files an import reads: found below a path, named, hashed, and named again in every error."""

import contextlib
import hashlib
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from rlk_ledger.importers.model import Source
from rlk_ledger_schemas.errors import FormatError, UsageError

Progress = Callable[[int, int], None]
"""Called with (bytes read, bytes in all) now and then."""

_CHUNK = 1 << 20


def find(path: Path, pattern: str) -> list[tuple[Path, str]]:
    """(file, name below `path`) of a single file, or of every file below a folder that matches, in natural order.

    Raises UsageError when there is none.
    """
    if path.is_file():
        return [(path, path.name)]
    if not path.is_dir():
        raise UsageError(f"{path} is neither a file nor a folder.")
    found = [(file, file.relative_to(path).as_posix()) for file in path.rglob(pattern) if file.is_file()]
    if not found:
        raise UsageError(f"{path} holds no file called {pattern}, so there is nothing to import.")
    return sorted(found, key=lambda item: natural(item[1]))


def natural(text: str) -> list[tuple[int, int, str]]:
    """A sort key under which step_9 comes before step_10."""
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.split(r"(\d+)", text) if part]


def hashed(files: list[tuple[Path, str]], progress: Progress) -> list[Source]:
    """Every file as a Source; raises FormatError, naming the file, when one cannot be read."""
    stats = {}
    for path, name in files:
        with naming(path):
            stats[name] = path.stat()
    total, done, out = sum(stat.st_size for stat in stats.values()), 0, []
    for path, name in files:
        digest, count = hashlib.sha256(), 0
        with naming(path), path.open("rb") as stream:
            while chunk := stream.read(_CHUNK):
                digest.update(chunk)
                count += len(chunk)
                progress(min(done + count, total), total)
        done += stats[name].st_size
        shown = os.fsencode(name).decode("utf-8", "replace")
        out.append(Source(path, shown, digest.hexdigest(), count, stats[name].st_mtime_ns))
    return out


@contextlib.contextmanager
def reading(source: Source) -> Iterator[None]:
    """`naming` around the reading of a hashed file; raises FormatError when it changed since."""
    with naming(source.path):
        yield
        now = source.path.stat()
        if (now.st_size, now.st_mtime_ns) != (source.bytes, source.changed_ns):
            raise FormatError("it changed while it was read; import it once nothing writes to it.")


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Puts the file's path before the sentence of a FormatError, and turns a failing read into one."""
    try:
        yield
    except FormatError as error:
        raise FormatError(f"{path}: {error}") from None
    except OSError as error:
        raise FormatError(f"{path}: it cannot be read ({error.strerror or error}).") from None
    except RecursionError:
        raise FormatError(f"{path}: it is nested deeper than any dump.") from None
    except MemoryError:
        raise FormatError(f"{path}: it describes more than fits into memory.") from None
