"""verl: a trainer that records both sides, or two calls in a loop of one's own. Nothing of verl is imported here.

    rlk_ledger.integrations.verl.install()      # before the task runner looks its trainer up

or, without touching the job's code, VERL_USE_EXTERNAL_MODULES=rlk_ledger.integrations.verl_installed in the task
runner's environment (verl imports those modules itself). RLK_LEDGER and RLK_RUN_ID say where to. For a trainer class of
one's own: `Trainer = ledgered(Trainer)`. For a loop of one's own:

    record_rollout(batch, config=config, step=step)                              # after generate_sequences
    record_old_log_probs(batch, config=config, step=step, weight_version="12")   # after compute_log_prob

Stands on verl 0.9.1: `TRAINER_REGISTRY` and `PPOTrainer._compute_old_log_prob` of verl/trainer/ppo/v1/trainer_base.py
(a batch there is a KVBatchMeta, its columns are in the TransferQueue), `RayPPOTrainer._compute_old_log_prob` of
verl/trainer/ppo/ray_trainer.py (a DataProto), and the columns written by verl/experimental/agent_loop. rollout.
calculate_log_probs must be on, else there is nothing of the engine's to compare. In bypass mode the trainer scores
nothing and only says so by its absence.
"""

from collections.abc import Sequence
from typing import Any

from rlk_ledger_schemas.errors import EventError
from rlk_ledger_sdk.guard import guarded
from rlk_ledger_sdk.integrations.verl.columns import Batch
from rlk_ledger_sdk.integrations.verl.record import (
    Names,
    record_samples,
    record_scores,
    refuse,
    training_contract,
)
from rlk_ledger_sdk.integrations.verl.trainer import install, ledgered, recording
from rlk_ledger_sdk.scope import scope

_names = Names()


def record_rollout(
    data: Any, *, config: Any = None, step: int | None = None, keys: Sequence[str] | None = None
) -> None:
    """Records every sample of a DataProto (or TensorDict, or mapping of columns) and its rollout_log_probs.

    config: the job's configuration, for the sampling parameters and what the log-probabilities include. keys: a unique
    id a sample; else the uid and a number. Never raises into a job; a batch it cannot read is one sentence and a gap.
    """
    if not recording(config):
        return
    with guarded("verl rollout"), scope(step=step):
        try:
            batch = Batch(data)
            record_samples(batch, _names.give(batch, keys), config, [False] * len(batch.rows), ())
        except EventError as error:
            refuse("rollout.sample", error)


def record_old_log_probs(
    data: Any,
    *,
    config: Any = None,
    step: int | None = None,
    keys: Sequence[str] | None = None,
    weight_version: str | int | None = None,
    field: str = "old_log_probs",
    source: str = "training",
) -> None:
    """Records one training-side column of a batch: old_log_probs, or `field="ref_log_prob", source="reference"`.

    weight_version: the weights it was computed with, as the engines name them (verl: the global step after which they
    were sent); without it the audit says that the version is unknown. Never raises into a job.
    """
    if not recording(config):
        return
    version = None if weight_version is None else str(weight_version)
    with guarded("verl log-probabilities"), scope(step=step):
        try:
            batch = Batch(data)
            ids, skip = _names.find(batch, keys), [False] * len(batch.rows)
            record_scores(batch, ids, field, source, training_contract(config, batch), version, skip)
        except EventError as error:
            refuse("logprobs", error)


__all__ = ["install", "ledgered", "record_old_log_probs", "record_rollout"]
