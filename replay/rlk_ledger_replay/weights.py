"""The checkpoint of a weight version: where it is, and proof that it is the one that was recorded.

The place is what `weights.published` recorded, or a template given by the user with `{version}` in it. A recorded
relative path starts at the ledger's root or at the folder that holds it. No number is computed on weights whose
digest was recorded and does not match.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit
from urllib.request import url2pathname

import torch

from rlk_ledger_replay.checkpoint import Checkpoint, ModelConfig, load_checkpoint
from rlk_ledger_schemas.errors import LedgerError, UsageError
from rlk_ledger_schemas.fingerprints import file_digest, tensors_digest
from rlk_ledger_sdk.weights import state_digest


@dataclass(frozen=True)
class Recorded:
    """What the record says about one weight version. digest None: never published, nothing to check against."""

    version: str
    digest: str | None = None
    file_digest: str | None = None
    path: str | None = None


@dataclass(frozen=True)
class Held:
    """A checkpoint that was read, its shapes, and whether it is the recorded one; its tensors are let go.

    status: `passed` when a recorded digest matches, `failed` when one does not, `unknown` when none was recorded or
    its scheme is not one this reader computes.
    """

    version: str
    folder: Path
    config: ModelConfig
    status: Literal["passed", "failed", "unknown"]
    reason: str
    digest: str


def recorded_versions(events: Iterable[Mapping[str, Any]]) -> dict[str, Recorded]:
    """What `weights.published` events say, by version; `weights.loaded` supplies a path where none was published."""
    found: dict[str, Recorded] = {}
    for event in events:
        version = event["weight_version"]
        have = found.get(version)
        if event["type"] == "weights.published" and (have is None or have.digest is None):
            path = event.get("path") or (have.path if have else None)
            found[version] = Recorded(version, event["digest"], event.get("file_digest"), path)
        elif event.get("path") and (have is None or have.path is None):
            base = have or Recorded(version)
            found[version] = Recorded(version, base.digest, base.file_digest, event["path"])
    return found


def find_folder(recorded: Recorded, ledger_url: str, template: str | None = None) -> Path:
    """The Hugging Face folder of a version (a path to a file inside it stands for the folder).

    Raises UsageError for a template without `{version}` and LedgerError when nothing is where it should be.
    """
    tried = []
    for path in _candidates(recorded, ledger_url, template):
        tried.append(str(path))
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
    checkpoint = load_checkpoint(folder)
    status, reason, digest = _compare(recorded, folder, checkpoint)
    return Held(recorded.version, folder, checkpoint.config, status, reason, digest)


def live_digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """`sum64x2` over the tensors, the tied head left out by the caller."""
    digest, _ = state_digest(dict(tensors))
    return digest


def _candidates(recorded: Recorded, ledger_url: str, template: str | None) -> list[Path]:
    if template is not None:
        if "{version}" not in template:
            raise UsageError(f"--weights {template!r} names one folder for all versions; put {{version}} into it.")
        return [Path(template.replace("{version}", recorded.version)).expanduser()]
    if recorded.path is None:
        return []
    path = _local(recorded.path)
    root = _local(ledger_url)
    return [path] if path.is_absolute() else [root / path, root.parent / path]


def _local(url: str) -> Path:
    parts = urlsplit(url)
    return Path(url2pathname(parts.path)) if parts.scheme == "file" else Path(url)


def _compare(
    recorded: Recorded, folder: Path, checkpoint: Checkpoint
) -> tuple[Literal["passed", "failed", "unknown"], str, str]:
    found = live_digest(checkpoint.tensors)
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


def _by_file(recorded: Recorded, folder: Path, found: str) -> tuple[Literal["passed", "failed", "unknown"], str, str]:
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
