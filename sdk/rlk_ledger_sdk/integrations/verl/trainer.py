"""A verl trainer that records: a subclass whose old-log-prob step shows both sides of the batch to the recorder."""

import sys
from collections.abc import Sequence
from typing import Any, TypeVar

from rlk_ledger_schemas.errors import EventError
from rlk_ledger_sdk.api import record
from rlk_ledger_sdk.guard import guarded
from rlk_ledger_sdk.integrations.opening import opened
from rlk_ledger_sdk.integrations.verl.columns import Batch, option
from rlk_ledger_sdk.integrations.verl.record import (
    Names,
    record_samples,
    record_scores,
    refuse,
    training_contract,
)
from rlk_ledger_sdk.scope import scope

Trainer = TypeVar("Trainer", bound=type)
_FIELDS = ("prompts", "responses", "response_mask", "rollout_log_probs", "old_log_probs", "entropy", "uid", "rm_scores")


def recording(config: Any = None) -> bool:
    """Whether this process records. verl's driver sees both sides of a job, so it is its one writer."""
    return opened("verl", "training", "verl", lambda: {"roles": {"training": 1}, "engine": {"name": _engine(config)}})


def _engine(config: Any) -> str:
    """The training backend; "verl" where the configuration does not say, or answers with an error of its own."""
    try:
        return str(option(config, "actor_rollout_ref.actor.strategy", "verl"))
    except Exception:  # an interpolation that does not resolve, a mandatory value that is missing
        return "verl"


def ledgered(trainer: Trainer) -> Trainer:
    """A subclass of a v1 `PPOTrainer` or a legacy `RayPPOTrainer` that records; the trainer itself is untouched.

    Recording happens after `_compute_old_log_prob`, on what the driver already holds (v1: on what it asks the
    TransferQueue for). Where this process does not record, the subclass does nothing but call its base.
    """
    base: Any = trainer

    class Ledgered(base):  # type: ignore[misc]
        def _compute_old_log_prob(self, batch: Any, *args: Any, **more: Any) -> Any:
            result = super()._compute_old_log_prob(batch, *args, **more)
            if recording(getattr(self, "config", None)):
                with guarded("verl old log-probabilities"):
                    observe(self, batch, result)
            return result

    Ledgered.__name__, Ledgered.__qualname__ = base.__name__, base.__qualname__
    Ledgered.__module__, Ledgered.__doc__ = base.__module__, base.__doc__
    return Ledgered  # type: ignore[return-value]


def install() -> list[str]:
    """Makes every trainer that verl's v1 registry knows record; returns their names.

    The registry's entries are replaced under their own names, because verl reads a mode's settings by that name. Call
    it before verl's task runner looks its trainer up.
    """
    import importlib

    registry: dict[str, Any] = importlib.import_module("verl.trainer.ppo.v1.trainer_base").TRAINER_REGISTRY
    importlib.import_module("verl.trainer.ppo.v1")
    for name, trainer in registry.items():
        if not getattr(trainer, "_rlk_ledgered", False):
            registry[name] = ledgered(trainer)
            registry[name]._rlk_ledgered = True
    return sorted(registry)


def observe(trainer: Any, batch: Any, result: Any) -> None:
    """Records the batch of one old-log-prob step; a batch it cannot read is one sentence and a gap."""
    step = getattr(trainer, "global_steps", None)
    config = getattr(trainer, "config", None)
    if option(config, "algorithm.rollout_correction.bypass_mode", False):
        return  # old_log_probs are the engine's own values then: training has scored nothing
    try:
        with scope(step=step):
            _observe(trainer, config, batch, result)
    except EventError as error:
        refuse("logprobs", error)


def _observe(trainer: Any, config: Any, batch: Any, result: Any) -> None:
    keys, tags = getattr(batch, "keys", None), getattr(batch, "tags", None)
    queued = isinstance(keys, list) and isinstance(tags, list)
    data = Batch(_fetched(batch) if queued else batch)
    scored = data if queued else Batch(_merged(batch, result))
    skip = [bool(tag.get("is_padding", False)) for tag in tags] if queued and tags else [False] * len(data.rows)
    ids = Names().give(data, keys if queued else None)
    record_samples(data, ids, config, skip, tags if queued and tags else ())
    version = version_in_force(trainer)
    record_scores(scored, ids, "old_log_probs", "training", training_contract(config, data), version, skip)
    _layout(ids, data, skip, getattr(trainer, "global_steps", None), getattr(trainer, "local_trigger_step", 0))


def version_in_force(trainer: Any) -> str | None:
    """The weights the old log-probabilities were computed with, in the names the rollout engines report.

    verl stamps its engines with the global step after which weights were sent. At step g the trainer holds those of
    g - 1; after t local updates without a sync its weights are "g-1+t", except in the modes that restore the weights
    of the sync before they score (separate_async, the fully asynchronous trainer).
    """
    parameters = getattr(trainer, "current_param_version", None)
    if isinstance(parameters, int):
        return str(parameters)
    step = getattr(trainer, "global_steps", None)
    if not isinstance(step, int) or step < 1:
        return None
    local = getattr(trainer, "local_trigger_step", 0) or 0
    restored = getattr(trainer, "trainer_mode", None) == "separate_async"
    return str(step - 1) if restored or not local else f"{step - 1}+{local}"


def _fetched(batch: Any) -> Any:
    """A v1 batch's columns out of the TransferQueue."""
    queue: Any = sys.modules["transfer_queue"]
    known = getattr(batch, "fields", None)
    wanted = [field for field in _FIELDS if known is None or field in known]
    return queue.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=wanted)


def _merged(batch: Any, result: Any) -> Any:
    """A legacy batch's tokens with the scores that the step returned, which it has not joined yet."""
    scores = result[0] if isinstance(result, tuple) else result
    columns: dict[str, Any] = {}
    for part in (batch, scores):
        tensors: Any = getattr(part, "batch", part)
        columns |= {name: tensors[name] for name in tensors.keys()}  # noqa: SIM118 - a TensorDict iterates its rows
    return columns


def _layout(ids: Sequence[str], data: Batch, skip: Sequence[bool], step: Any, local: Any) -> None:
    kept = [at for at, dropped in enumerate(skip) if not dropped]
    record(
        "batch.layout",
        layout_id=f"step-{step}-{local or 0}",
        sample_order=[ids[at] for at in kept],
        sequence_lengths=[data.rows[at].total for at in kept],
        global_batch=len(kept),
    )
