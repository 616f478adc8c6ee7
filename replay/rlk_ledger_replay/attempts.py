"""Scorings kept on disk while a replay runs, so that one that was killed goes on where it was.

An attempt is a file that one replay creates and appends to, one line a unit of work, handed to the disk before the next
begins; no file is ever written to by another replay or overwritten. A line holds what was scored (the case: weights,
adapter, numerics, path, scorer build, layout, tolerance version; the sample; the digest of its inputs), the values, and
a digest of all that. What a torn, altered or foreign line says is not used: it is scored again.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import os
import time
from collections.abc import Iterator, Mapping
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlk_ledger_replay.work import Entry, Refused, Scored, Unit
from rlk_ledger_schemas import tolerances
from rlk_ledger_schemas.errors import UsageError
from rlk_ledger_schemas.fingerprints import canonical_json, sha256

Float32 = NDArray[np.float32]
SUFFIX = ".attempt"
ENV = "RLK_ATTEMPTS"


def attempts_folder(ledger_url: str, run_id: str) -> Path:
    """Where attempts at a run are kept: below RLK_ATTEMPTS, or the user's cache."""
    root = os.environ.get(ENV) or str(Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "rlk-ledger" / "attempts")
    return Path(root).expanduser() / sha256(f"{ledger_url}\0{run_id}".encode()).removeprefix("sha256:")[:24]


def case_of(unit: Unit) -> str:
    """The identity of what is computed, samples apart: `sha256:<hex>`."""
    adapter = unit.model.adapter
    body = {
        "weights": unit.model.digest,
        "adapter": None if adapter is None else [adapter.digest, adapter.how, adapter.dtype],
        "numerics": dataclasses.asdict(unit.numerics),
        "layout": [1, 1, False],
        "path": unit.path,
        "scorer": unit.scorer,
        "tolerance": tolerances.FINGERPRINT,
    }
    return sha256(canonical_json(json.loads(json.dumps(body))))


def inputs_of(entry: Entry) -> str:
    """The digest of a sample's inputs: ids, where the response begins, recorded routes."""
    routes = b"" if entry.routes_NLK is None else np.ascontiguousarray(entry.routes_NLK, dtype="<i4").tobytes()
    head = canonical_json([len(entry.ids_T), entry.start, len(routes)])
    return sha256(head + np.ascontiguousarray(entry.ids_T, dtype="<i4").tobytes() + routes)


@dataclasses.dataclass(frozen=True)
class _Place:
    file: Path
    first: int
    length: int


class Attempts:
    """What earlier attempts left, where it is to be used, and this replay's own file. Used by one thread."""

    def __init__(self, folder: Path, replay_id: str, *, resume: bool = False) -> None:
        """Creates this replay's file in `folder`; resume: whether earlier ones are used.

        Raises UsageError where the folder cannot be written to.
        """
        self.reused = self.scored = self.refused = 0
        self._held = _index(folder) if resume else {}
        self.file = folder / f"{replay_id}{SUFFIX}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._out = self.file.open("xb")
        except OSError as error:
            raise UsageError(
                f"attempts cannot be kept in {folder} ({error.strerror}); name another place by {ENV}."
            ) from None

    def find(self, unit: Unit, entry: Entry) -> Scored | None:
        """The values of one sample of a unit, if an earlier attempt has them whole.

        Weights nobody checked have no identity, so nothing is found for them.
        """
        if unit.model.digest is None:
            return None
        place = self._held.get((case_of(unit), entry.sample))
        record = None if place is None else _read(place)
        if record is None or record["inputs"] != inputs_of(entry):
            return None
        values: Float32 = np.frombuffer(base64.b64decode(record["values"]), dtype="<f4").astype(np.float32)
        if len(values) != len(entry.ids_T) - entry.start:
            return None
        self.reused += 1
        routes = record.get("routes")
        return Scored((values,), () if routes is None else ((routes[0], routes[1]),))

    def keep(self, unit: Unit, outcome: Scored | Refused) -> None:
        """Appends what came of a unit, on the disk when this returns."""
        case, lines = case_of(unit), []
        base = {"case": case, "path": unit.path, "at": round(time.time(), 3)}
        if isinstance(outcome, Refused):
            self.refused += len(unit.entries)
            told = {"status": "error", "samples": [one.sample for one in unit.entries], "reason": outcome.reason}
            lines.append(_line({**base, **told}))
        else:
            self.scored += len(unit.entries)
            for entry, values, routes in zip(unit.entries, outcome.values, outcome.routes or repeat(None)):
                data = base64.b64encode(values.astype("<f4").tobytes()).decode()
                told = {"status": "completed", "sample": entry.sample, "inputs": inputs_of(entry), "values": data}
                lines.append(_line({**base, **told, **({} if routes is None else {"routes": list(routes)})}))
        self._out.write(b"".join(lines))
        self._out.flush()
        os.fsync(self._out.fileno())

    def close(self) -> None:
        """Closes this replay's file; a file that nothing was written to is taken away."""
        if self._out.closed:
            return
        empty = self._out.tell() == 0
        self._out.close()
        if empty:
            self.file.unlink(missing_ok=True)

    def as_dict(self) -> dict[str, Any]:
        """How many sample scorings were taken from earlier attempts, made, and refused."""
        return {"reused": self.reused, "scored": self.scored, "refused": self.refused, "file": str(self.file)}


def _line(record: dict[str, Any]) -> bytes:
    return canonical_json({**record, "digest": sha256(canonical_json(record))}) + b"\n"


def _index(folder: Path) -> dict[tuple[str, str], _Place]:
    """Where whole, unaltered lines of completed scorings are; of several for one sample any will do."""
    found = {}
    for file in sorted(folder.glob(f"*{SUFFIX}")):
        for place, record in _records(file):
            if record.get("status") == "completed":
                found[record["case"], record["sample"]] = place
    return found


def _records(file: Path) -> Iterator[tuple[_Place, Mapping[str, Any]]]:
    at = 0
    with file.open("rb") as lines:
        for line in lines:
            record = _checked(line)
            if record is not None:
                yield _Place(file, at, len(line)), record
            at += len(line)


def _read(place: _Place) -> Mapping[str, Any] | None:
    """The line as it is now, its digest recomputed."""
    try:
        with place.file.open("rb") as file:
            file.seek(place.first)
            return _checked(file.read(place.length))
    except OSError:
        return None


def _checked(line: bytes) -> Mapping[str, Any] | None:
    if not line.endswith(b"\n"):
        return None
    try:
        record = json.loads(line)
        digest = record.pop("digest")
        return record if sha256(canonical_json(record)) == digest else None
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        return None
