"""One piece of scoring that any worker can do, here or elsewhere: which weights, which numerics, which samples.

A unit carries everything it needs but the weights, which a worker reads itself and checks against the digest that was
checked before: a checkpoint that changed in between is refused. A worker keeps one model and one numerics at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from rlk_ledger_kernels.decision import Provenance
from rlk_ledger_kernels.errors import KernelError
from rlk_ledger_kernels.probe import using_threads
from rlk_ledger_replay.adapted import AdaptedDecoder
from rlk_ledger_replay.adapters import Adapted, apply_adapter
from rlk_ledger_replay.build import scorer_fingerprint
from rlk_ledger_replay.checkpoint import CheckpointError, load_checkpoint
from rlk_ledger_replay.decoder import Decoder
from rlk_ledger_replay.numerics import Numerics
from rlk_ledger_replay.routes import counted
from rlk_ledger_replay.weights import live_digest

ExecutionPath = Literal["prefill", "decode", "routed"]
Float32 = NDArray[np.float32]
Int32 = NDArray[np.int32]


@dataclass(frozen=True)
class Model:
    """Weights by folder. digest: `sum64x2` of the base tensors as checked before, None where nobody checked.

    adapter: a low-rank adapter and how it is applied.
    """

    folder: Path
    digest: str | None = None
    adapter: Adapted | None = None


@dataclass(frozen=True, eq=False)
class Entry:
    """One sample. ids_T: prompt and response, int32 [T]; start: length of the prompt.

    routes_NLK: recorded experts, int32 [T - 1, layers with experts, experts of a token], for the path `routed`.
    """

    sample: str
    ids_T: Int32
    start: int
    routes_NLK: Int32 | None = None

    @property
    def cost(self) -> int:
        """What scoring it costs, to within a factor: tokens fed."""
        return len(self.ids_T)


@dataclass(frozen=True, eq=False)
class Unit:
    """Samples to score together under one model, numerics and path. scorer: the build that has to score them."""

    model: Model
    numerics: Numerics
    path: ExecutionPath
    entries: tuple[Entry, ...]
    scorer: str
    threads: int = 1


@dataclass(frozen=True, eq=False)
class Scored:
    """values: float32 nats of each entry's response.

    routes: of a routed unit, for each entry the (token, layer) pairs that recorded routes cover and agree at.
    """

    values: tuple[Float32, ...]
    routes: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Refused:
    """A unit without values, and why. memory: it did not fit, and a smaller one may."""

    reason: str
    memory: bool = False


Outcome = Scored | Refused


@dataclass
class Worker:
    """Scores units. unchanged: by model that was let go of, whether its weights were then as they were read."""

    unchanged: dict[Model, bool] = field(default_factory=dict)
    _model: Model | None = None
    _base: Decoder | None = None
    _digest: str = ""
    _current: Decoder | None = None

    def score(self, unit: Unit) -> Outcome:
        """The values of a unit; whatever the decoder or the checkpoint raises is an answer."""
        try:
            return self.attempt(unit)
        except MemoryError as error:
            return Refused(f"MemoryError: {error}", memory=True)
        except (KernelError, CheckpointError, RuntimeError, OSError) as error:
            return Refused(f"{type(error).__name__}: {error}", memory="out of memory" in str(error))

    def attempt(self, unit: Unit) -> Scored:
        """The values of a unit; raises what the decoder and the checkpoint raise."""
        with using_threads(unit.threads):
            return self._scored(unit)

    def close(self) -> Mapping[Model, bool]:
        """Lets go of the model; whether the weights of every model held were left as they were."""
        if self._model is not None and self._base is not None:
            same = live_digest(self._base.checkpoint.tensors) == self._digest
            self.unchanged[self._model] = same and self.unchanged.get(self._model, True)
        self._model = self._base = self._current = None
        return self.unchanged

    def _scored(self, unit: Unit) -> Scored:
        decoder = self._decoder(unit)
        samples = [(torch.from_numpy(one.ids_T.astype(np.int64)), one.start) for one in unit.entries]
        routes: tuple[tuple[int, int], ...] = ()
        if unit.path == "routed":
            given = [one.routes_NLK for one in unit.entries if one.routes_NLK is not None]
            routed = decoder.prefill_routed(samples, [torch.from_numpy(one) for one in given])
            scores, routes = routed.scores, tuple(counted(given, routed.chosen))
        elif unit.path == "decode":
            scores = decoder.decode_logprobs_batch(samples)
        else:
            scores = decoder.prefill_logprobs_batch(samples)
        return Scored(tuple(one.numpy().astype(np.float32, copy=False) for one in scores), routes)

    def _decoder(self, unit: Unit) -> Decoder:
        if unit.model != self._model or self._base is None:
            self.close()
            self._base = self._loaded(unit.model)
            self._model = unit.model
        if self._current is None or self._current.numerics != unit.numerics:
            self._current = None
            decoder = self._base.with_numerics(unit.numerics)
            self._same_build(decoder.operators.provenance, unit.scorer)
            self._current = decoder
        return self._current

    def _loaded(self, model: Model) -> Decoder:
        checkpoint = load_checkpoint(model.folder)
        self._digest = live_digest(checkpoint.tensors)
        if model.digest is not None and model.digest != self._digest:
            raise CheckpointError(
                f"{model.folder}: the weights changed after they were checked: their digest is {self._digest}, it was "
                f"{model.digest}; nothing is computed on them"
            )
        if model.adapter is None:
            return Decoder(checkpoint)
        adapter = model.adapter.load(checkpoint.config)
        if model.adapter.how == "unmerged":
            return AdaptedDecoder(checkpoint, adapter)
        merged = Decoder(apply_adapter(checkpoint, adapter, model.adapter.dtype))
        self._digest = live_digest(merged.checkpoint.tensors)
        return merged

    def _same_build(self, ran: tuple[Provenance, ...], scorer: str) -> None:
        found = scorer_fingerprint(ran)
        if found != scorer:
            raise CheckpointError(
                f"this worker's scorer is another build ({found[:19]}) than the one that asked ({scorer[:19]}); "
                "install the same rlk-ledger and torch on every worker"
            )
