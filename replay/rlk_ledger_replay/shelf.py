"""The checkpoints and adapters a replay needs, read and checked once each, and how each side applied its adapters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rlk_ledger.history import History
from rlk_ledger.ledger import Ledger
from rlk_ledger.pairs import Pairing
from rlk_ledger_replay.adapters import Adapted, Adapter, How, load_adapter
from rlk_ledger_replay.checkpoint import CheckpointError
from rlk_ledger_replay.fetch import fetch, is_url
from rlk_ledger_replay.gates import Gate
from rlk_ledger_replay.progress import Progress
from rlk_ledger_replay.semantics import SIDES, Side
from rlk_ledger_replay.weights import Held, Recorded, filled, find_folder, hold, recorded_versions
from rlk_ledger_replay.work import Model
from rlk_ledger_schemas.errors import LedgerError

if TYPE_CHECKING:
    from rlk_ledger_replay.preparation import Request

OTHER_WAY = "other_way"
"""The pass that scores a side's reference with its adapter applied as the side did not apply it."""


class Shelf:
    """What was read so far, by version index, and a gate for each version that is not to be had."""

    def __init__(
        self, ledger: Ledger, history: History, pairing: Pairing, request: Request, progress: Progress | None = None
    ) -> None:
        """Reads nothing yet."""
        kinds = ("weights.published", "weights.loaded")
        self._recorded = recorded_versions(
            {"type": f.type, "step": f.fields.get("step"), **f.fields} for kind in kinds for f in history.of(kind)
        )
        self._versions, self._url, self._request, self._progress = pairing.versions, ledger.url, request, progress
        self.held: dict[int, Held] = {}
        self.missing: dict[int, Gate] = {}
        self.adapted: dict[int, Adapted] = {}
        self.adapter_gates: list[Gate] = []

    def take(self, wanted: Iterable[int]) -> None:
        """Reads the checkpoints of these version indices, each once."""
        for index in wanted:
            if index in self.held or index in self.missing:
                continue
            version = self._versions[index]
            recorded = self._recorded.get(version, Recorded(version))
            try:
                held = hold(recorded, find_folder(recorded, self._url, self._request.weights, self._progress))
                if self._request.adapter is not None or recorded.adapters:
                    self._take_adapter(index, recorded, held)
                self.held[index] = held
            except (LedgerError, CheckpointError) as error:
                reason = str(error)
                self.missing[index] = Gate(f"weights.digest.{version}", "unknown", reason, {"version": version})

    def models(self) -> dict[int, Model]:
        """What to score each version with."""
        return {index: Model(one.folder, one.live, self.adapted.get(index)) for index, one in self.held.items()}

    def _take_adapter(self, index: int, recorded: Recorded, held: Held) -> None:
        """Reads a version's adapter and compares it with the recorded one. Raises LedgerError, CheckpointError."""
        version, template = recorded.version, self._request.adapter
        names = ", ".join(recorded.adapters)
        if template is None:
            raise LedgerError(
                f"version {version!r} was published with adapter {names}, and the record does not say where it is; "
                "pass --adapter 'FOLDER/{version}'."
            )
        if len(recorded.adapters) > 1:
            raise LedgerError(f"version {version!r} was published with several adapters ({names}); one can be applied.")
        place = filled(template, recorded, "--adapter")
        folder = fetch(place, self._progress) if is_url(place) else Path(place).expanduser()
        adapter = load_adapter(folder, held.config, next(iter(recorded.adapters), "default"))
        gate = adapter_gate(recorded, folder, adapter)
        if gate.status == "failed":
            raise CheckpointError(gate.reason)
        self.adapter_gates.append(gate)
        self.adapted[index] = Adapted(folder, "unmerged", self._request.merge_dtype, adapter.live)


def adapter_gate(recorded: Recorded, folder: Path, adapter: Adapter) -> Gate:
    """Whether the adapter in `folder` is the one that was published."""
    name = f"weights.adapter.{recorded.version}"
    told = {"folder": str(folder), "digest": adapter.live, "projections": len(adapter.pairs), "scale": adapter.scale}
    wanted = next(iter(recorded.adapters.values()), None)
    if wanted is None:
        return Gate(name, "unknown", f"no adapter was recorded for version {recorded.version}", told)
    if wanted.partition(":")[0] != "sum64x2":
        return Gate(name, "unknown", f"the adapter's recorded digest {wanted} cannot be recomputed", told)
    if wanted in adapter.digests:
        return Gate(name, "passed", "the adapter's digest matches the published one", {**told, "digest": wanted})
    reason = f"the adapter in {folder} is not the recorded one: its digest is {adapter.live}, {wanted} was published"
    return Gate(name, "failed", reason, told)


def applied_as(history: History, adapted: Mapping[int, Adapted], request: Request) -> dict[Side, How]:
    """How each side applied its adapters: as asked for, else as recorded.

    A side that names the adapter in its own weights event holds it apart and applies it unmerged. A rollout engine
    that took weights and names none took merged ones. Where nothing says, unmerged.
    """
    if not adapted:
        return {}
    loaded = [fact.fields for fact in history.of("weights.loaded")]
    rollout: How = "merged" if loaded and not any(one.get("adapters") for one in loaded) else "unmerged"
    recorded: dict[Side, How] = {"rollout": rollout, "training": "unmerged"}
    return {side: request.adapter_as.get(side, recorded[side]) for side in SIDES}


def other_way(how: How) -> How:
    """The other of the two."""
    return "unmerged" if how == "merged" else "merged"
