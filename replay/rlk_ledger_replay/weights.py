"""The checkpoint of a weight version: where it is, and proof that it is the one that was recorded.

The place is what `weights.published` recorded, or a template given by the user with `{version}` or `{step}` in it; both
may be URLs that fsspec knows. A recorded relative path starts at the ledger's root or at the folder that holds it. No
number is computed on weights whose digest was recorded and does not match. Tensors are mapped from their files and read
when they are needed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit
from urllib.request import url2pathname

import torch
from safetensors import safe_open

from rlk_ledger_replay.checkpoint import Checkpoint, CheckpointError, ModelConfig, load_checkpoint
from rlk_ledger_replay.fetch import fetch, is_url
from rlk_ledger_replay.progress import Progress
from rlk_ledger_schemas.errors import LedgerError, UsageError
from rlk_ledger_schemas.fingerprints import file_digest, tensors_digest
from rlk_ledger_sdk.weights import state_digest

Status = Literal["passed", "failed", "unknown"]


@dataclass(frozen=True)
class Recorded:
    """What the record says about one weight version. digest None: never published, nothing to check against.

    step: of the event. adapters: digests of the low-rank adapters the trainer published with it, by name.
    """

    version: str
    digest: str | None = None
    file_digest: str | None = None
    path: str | None = None
    step: int | None = None
    adapters: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Held:
    """A checkpoint that was read, its shapes, and whether it is the recorded one; its tensors are let go.

    status: `passed` when a recorded digest matches, `failed` when one does not, `unknown` when none was recorded or
    its scheme is not one this reader computes. live: `sum64x2` of the tensors, to tell later whether they changed.
    """

    version: str
    folder: Path
    config: ModelConfig
    status: Status
    reason: str
    digest: str
    live: str


def recorded_versions(events: Iterable[Mapping[str, Any]]) -> dict[str, Recorded]:
    """What `weights.published` events say, by version; `weights.loaded` supplies a path where none was published."""
    found: dict[str, Recorded] = {}
    for event in events:
        version, path = event["weight_version"], event.get("path")
        have = found.get(version)
        if event["type"] == "weights.published" and (have is None or have.digest is None):
            path = path or (have.path if have else None)
            adapters = {one["name"]: one["digest"] for one in event.get("adapters") or ()}
            told = (event["digest"], event.get("file_digest"), path, event.get("step"), adapters)
            found[version] = Recorded(version, *told)
        elif path and (have is None or have.path is None):
            found[version] = replace(have or Recorded(version, step=event.get("step")), path=path)
    return found


def find_folder(
    recorded: Recorded, ledger_url: str, template: str | None = None, progress: Progress | None = None
) -> Path:
    """The Hugging Face folder of a version (a path to a file inside it stands for the folder), fetched if it is a URL.

    Raises UsageError for a template without `{version}` or `{step}`, LedgerError when nothing is where it should be,
    CheckpointError for a URL that cannot be read.
    """
    tried = []
    for place in _candidates(recorded, ledger_url, template):
        tried.append(place)
        if is_url(place):
            return fetch(place.rpartition("/")[0] if place.endswith(".safetensors") else place, progress)
        path = Path(place)
        if path.suffix == ".safetensors" and path.is_file():
            return path.parent
        if path.is_dir():
            return path
    if not tried:
        raise LedgerError(
            f"weights of version {recorded.version!r}: the record names no path; pass --weights 'FOLDER/{{version}}'."
        )
    raise LedgerError(
        f"weights of version {recorded.version!r} are not at {' or '.join(tried)}; "
        f"copy them there or pass --weights 'FOLDER/{{version}}'."
    )


def hold(recorded: Recorded, folder: Path) -> Held:
    """Reads the checkpoint in `folder` and compares its digest with the recorded one; raises CheckpointError."""
    check_shards(folder)
    checkpoint = load_checkpoint(folder)
    live = live_digest(checkpoint.tensors)
    status, reason, digest = _compare(recorded, folder, checkpoint, live)
    return Held(recorded.version, folder, checkpoint.config, status, reason, digest, live)


def check_shards(folder: Path) -> None:
    """Whether a sharded checkpoint has the shards its index names, each with its tensors, and no other.

    Raises CheckpointError naming the shard.
    """
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return
    try:
        mapped: dict[str, str] = json.loads(index.read_bytes())["weight_map"]
        wanted = {file: {name for name, where in mapped.items() if where == file} for file in set(mapped.values())}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index}: is no index of shards ({error})") from None
    there = {file.name for file in folder.glob("model-*-of-*.safetensors")}
    for file in sorted(set(wanted) - {one.name for one in folder.iterdir()}):
        raise CheckpointError(f"{folder}: shard {file} is missing; {index.name} names it; copy it there")
    for file in sorted(there - set(wanted)):
        raise CheckpointError(f"{folder}: shard {file} is not in {index.name}: it belongs to another checkpoint")
    for file, names in sorted(wanted.items()):
        held = _tensor_names(folder / file)
        for name in sorted(names - held):
            raise CheckpointError(f"{folder}: shard {file} lacks tensor {name}, which {index.name} places there")
        for name in sorted(held - names):
            raise CheckpointError(f"{folder}: shard {file} holds tensor {name}, which {index.name} places elsewhere")


def _tensor_names(file: Path) -> set[str]:
    try:
        with safe_open(file, framework="pt") as opened:
            return set(opened.keys())
    except Exception as error:
        raise CheckpointError(f"{file}: cannot be read as safetensors ({error})") from None


def live_digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """`sum64x2` over the tensors, the tied head left out by the caller."""
    digest, _ = state_digest(dict(tensors))
    return digest


def filled(template: str, recorded: Recorded, option: str) -> str:
    """A template with a version's name and step in it.

    Raises UsageError when it names neither, or names a step that was not recorded.
    """
    if "{version}" not in template and "{step}" not in template:
        raise UsageError(
            f"{option} {template!r} names one folder for all versions; put {{version}} into it, or {{step}}."
        )
    if "{step}" in template and recorded.step is None:
        version = recorded.version
        raise UsageError(f"{option} {template!r}: no step was recorded for version {version!r}; use {{version}}.")
    return template.replace("{version}", recorded.version).replace("{step}", str(recorded.step))


def _candidates(recorded: Recorded, ledger_url: str, template: str | None) -> list[str]:
    if template is not None:
        place = filled(template, recorded, "--weights")
        return [place if is_url(place) else str(_local(place).expanduser())]
    if recorded.path is None:
        return []
    if is_url(recorded.path):
        return [recorded.path]
    path = _local(recorded.path)
    if path.is_absolute():
        return [str(path)]
    if is_url(ledger_url):
        root = ledger_url.rstrip("/")
        return [f"{root}/{recorded.path}", f"{root.rpartition('/')[0]}/{recorded.path}"]
    root_path = _local(ledger_url)
    return [str(root_path / path), str(root_path.parent / path)]


def _local(url: str) -> Path:
    parts = urlsplit(url)
    return Path(url2pathname(parts.path)) if parts.scheme == "file" else Path(url)


def _compare(recorded: Recorded, folder: Path, checkpoint: Checkpoint, found: str) -> tuple[Status, str, str]:
    wanted = recorded.digest
    if wanted is None:
        return "unknown", "no digest was recorded for this version", found
    scheme = wanted.partition(":")[0]
    if scheme == "blake3":
        found = tensors_digest((name, _bytes(tensor)) for name, tensor in sorted(checkpoint.tensors.items()))[0]
    elif scheme != "sum64x2":
        return _by_file(recorded, folder, found)
    if found == wanted:
        return "passed", f"{scheme} digest of {len(checkpoint.tensors)} tensors matches the published one", found
    return "failed", f"the checkpoint's digest is {found}, {wanted} was published", found


def _by_file(recorded: Recorded, folder: Path, found: str) -> tuple[Status, str, str]:
    single = folder / "model.safetensors"
    wanted = recorded.file_digest
    if wanted is None or not single.is_file() or not wanted.startswith("blake3:"):
        return "unknown", f"the recorded digest {recorded.digest} is of a scheme that cannot be recomputed", found
    actual = file_digest(single)
    if actual == wanted:
        return "passed", "the file's blake3 digest matches the published one", actual
    return "failed", f"the file's digest is {actual}, {wanted} was published", actual


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().cpu().view(torch.uint8).numpy().tobytes()
