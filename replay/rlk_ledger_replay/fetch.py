"""Checkpoints at URLs: fetched once into a local cache, whole or not at all.

A folder in the cache is named by its URL and by what the store says about its files (names, sizes, versions), so that a
checkpoint that was replaced is fetched again. It appears by one rename after every file was received in full; what an
interrupted fetch left has another name and is never read. Before a folder is used its files are digested again: one
that changed since is fetched anew.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlk_ledger.clients import advice, connect
from rlk_ledger_replay.checkpoint import CheckpointError
from rlk_ledger_replay.progress import Progress, Silent
from rlk_ledger_schemas.errors import ConfigError
from rlk_ledger_schemas.fingerprints import canonical_json, file_digest, sha256

ENV = "RLK_WEIGHTS_CACHE"
BLOCK = 8 << 20
_CONTENT = "content.json"
_WANTED = (".safetensors", ".safetensors.index.json")
_SETTINGS = ("config.json", "adapter_config.json")


@dataclass(frozen=True)
class _Remote:
    """One file of a checkpoint as its store tells it."""

    name: str
    path: str
    size: int
    version: str


def is_url(place: str) -> bool:
    """Whether a place is an fsspec URL that has to be fetched."""
    scheme, mark, _ = place.partition("://")
    return bool(mark) and scheme.isidentifier() and scheme != "file"


def cache_folder() -> Path:
    """Where fetched checkpoints are kept: RLK_WEIGHTS_CACHE, or the user's cache."""
    root = os.environ.get(ENV) or str(Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "rlk-ledger" / "weights")
    return Path(root).expanduser()


def fetch(url: str, progress: Progress | None = None) -> Path:
    """The local folder of the checkpoint at `url`: config and safetensors files, nothing below it.

    Raises CheckpointError naming the file when something is not there, or was not received in full.
    """
    progress = progress or Silent()
    protocol = url.partition("://")[0]
    try:
        system, root = connect(url, protocol)
        files = _listed(system, root, url)
        told = [[one.name, one.size, one.version] for one in files]
        folder = cache_folder() / sha256(canonical_json([url.rstrip("/"), told])).removeprefix("sha256:")[:32]
        if folder.is_dir() and not _whole(folder):
            shutil.rmtree(folder)
        if not folder.is_dir():
            _received(system, files, folder, url, progress)
        return folder
    except ConfigError as error:
        raise CheckpointError(str(error)) from None
    except CheckpointError:
        raise
    except Exception as error:  # clients raise errors of their own, of every kind
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        then = advice(protocol, text) or "check the URL and that it can be read from here"
        raise CheckpointError(f"{url}: cannot be read ({text.rstrip('.')}); {then}") from None


def _listed(system: Any, root: str, url: str) -> list[_Remote]:
    try:
        found = system.ls(root, detail=True, refresh=True)
    except FileNotFoundError:
        found = []
    files = [_remote(one) for one in found if one.get("type") == "file"]
    wanted = sorted((one for one in files if one.name in _SETTINGS or one.name.endswith(_WANTED)), key=lambda f: f.name)
    if not any(one.name in _SETTINGS for one in wanted):
        raise CheckpointError(f"{url}: holds no config.json; give the URL of a model folder")
    return wanted


def _remote(told: dict[str, Any]) -> _Remote:
    path = str(told["name"])
    version = next((str(told[key]) for key in ("ETag", "etag", "md5Hash", "mtime", "created") if told.get(key)), "")
    return _Remote(path.rstrip("/").rpartition("/")[2], path, int(told.get("size") or 0), version)


def _received(system: Any, files: Iterable[_Remote], folder: Path, url: str, progress: Progress) -> None:
    """Receives every file beside `folder` and then gives the whole its name."""
    files = list(files)
    part = folder.with_name(f"{folder.name}.part-{uuid.uuid4().hex[:8]}")
    part.mkdir(parents=True)
    total = sum(one.size for one in files)
    progress.stage(f"fetch {url} ({total / 1e6:,.1f} MB)", total)
    try:
        digests = {one.name: _copied(system, one, part / one.name, url, progress) for one in files}
        _written(part / _CONTENT, canonical_json(digests))
        with contextlib.suppress(OSError):  # another replay was first: what it has is as whole as this
            part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _copied(system: Any, one: _Remote, target: Path, url: str, progress: Progress) -> str:
    received = 0
    with system.open(one.path, "rb") as source, target.open("xb") as out:
        while block := source.read(BLOCK):
            out.write(block)
            received += len(block)
            progress.advance(len(block))
        out.flush()
        os.fsync(out.fileno())
    if received != one.size:
        raise CheckpointError(
            f"{url}: {one.name} came to {received} of its {one.size} bytes and is not used; try again"
        )
    return file_digest(target)


def _written(path: Path, data: bytes) -> None:
    with path.open("xb") as out:
        out.write(data)
        out.flush()
        os.fsync(out.fileno())


def _whole(folder: Path) -> bool:
    """Whether every file still has the digest it was received with."""
    try:
        told: dict[str, str] = json.loads((folder / _CONTENT).read_bytes())
        return all(file_digest(folder / name) == digest for name, digest in told.items())
    except (OSError, ValueError, AttributeError):
        return False
