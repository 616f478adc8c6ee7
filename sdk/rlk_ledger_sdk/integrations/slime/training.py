"""The hooks that run in Megatron trainer ranks: the log-prob pass, the training step, importance weighting.

`rollout_data` is the per-rank batch of slime's and vime's MegatronTrainRayActor: tokens, response_lengths,
total_lengths, loss_masks, sample_indices, rollout_log_probs and log_probs (both already cut to this context-parallel
rank), ref_log_probs. The rank that owns the values records them: tensor rank 0 of the last pipeline stage.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from rlk_ledger_schemas.errors import EventError
from rlk_ledger_sdk.api import current
from rlk_ledger_sdk.declared import Told
from rlk_ledger_sdk.guard import guarded
from rlk_ledger_sdk.integrations.slime.batch import Row, Rows, record_layout, rows_of
from rlk_ledger_sdk.integrations.slime.framework import Framework
from rlk_ledger_sdk.integrations.slime.job import own, recording
from rlk_ledger_sdk.integrations.slime.parallel import this_rank
from rlk_ledger_sdk.integrations.slime.scores import record_scores, training_contract
from rlk_ledger_sdk.integrations.slime.versions import TrainerVersion, calling_trainer
from rlk_ledger_sdk.knobs import read_back
from rlk_ledger_sdk.scope import scope

_DTYPES = {"torch.bfloat16": "bfloat16", "torch.float16": "float16", "torch.float32": "float32"}


class TrainingHooks:
    """One trainer rank's hooks; each calls the job's own function first and returns what it returned."""

    def __init__(self, framework: Framework) -> None:
        self.framework = framework
        self._versions = TrainerVersion()
        self._rows = Rows({})
        self._step: int | None = None  # None: no hook has said which update this is
        self._dtype: str | None = None
        self._told = Told()

    def postprocess(self, args: Any, *given: Any) -> Any:
        """--rollout-data-postprocess-path: records the log-probabilities this rank trains against.

        Called as (args, rollout_id, rollout_data). The job's own function (rlk_rollout_data_postprocess_path) runs
        first, because it may change masks.
        """
        inner = own(self.framework, args, "rollout_data_postprocess", hook=self.postprocess)
        result = None if inner is None else inner(args, *given)
        if recording(self.framework, args, "training"):
            with guarded(f"{self.framework.name} training batch"):
                self._given(args, given)
        return result

    def before_log_prob(self, args: Any, model: Any, store_prefix: str) -> Any:
        """--custom-megatron-before-log-prob-hook-path: reads back the precision the pass is about to run in."""
        inner = own(self.framework, args, "before_log_prob_hook", hook=self.before_log_prob)
        result = None if inner is None else inner(args, model, store_prefix)
        if recording(self.framework, args, "training") and (self._told.to_another() or self._dtype is None):
            with guarded(f"{self.framework.name} before log-prob"):
                self._read_back(args, model)
        return result

    def before_train_step(self, args: Any, rollout_id: int, step_id: int, *more: Any) -> Any:
        """--custom-megatron-before-train-step-hook-path: tells the importance-weighting hook which update it is in."""
        inner = own(self.framework, args, "before_train_step_hook", hook=self.before_train_step)
        self._step = int(step_id)
        return None if inner is None else inner(args, rollout_id, step_id, *more)

    def tis(self, *args: Any, **given: Any) -> Any:
        """--custom-tis-function-path: the job's own (rlk_tis_function_path) or the framework's weighting, recorded.

        It sees both sides' log-probabilities of a micro-batch, but neither tokens nor samples: those are known by the
        rollout_log_probs that `postprocess` saw, so it needs that hook too. What that hook recorded is not repeated.
        """
        job = args[0] if args else given.get("args")
        inner = own(self.framework, job, "tis_function", hook=self.tis)
        assert inner is not None, "every framework has a default importance-weighting function"
        result = inner(*args, **given)
        if recording(self.framework, job, "training"):
            with guarded(f"{self.framework.name} importance weighting"):
                self._update(job, given.get("train_log_probs"), given.get("rollout_log_probs"))
        return result

    def _given(self, args: Any, given: Sequence[Any]) -> None:
        """Records the batch among a hook's arguments; one it cannot read is one sentence and a stated gap."""
        data = given[-1] if given else None
        rollout_id = given[0] if len(given) > 1 and isinstance(given[0], int) else None
        try:
            if not isinstance(data, Mapping):
                error = f"{self.framework.name}: the postprocess hook was given no training batch, so nothing of it is"
                raise EventError(f"{error} recorded; it is called as (args, rollout_id, rollout_data).")
            with scope(step=rollout_id, rollout_id=rollout_id):
                self._batch(args, rollout_id, data)
        except EventError as error:
            current().rejected("logprobs", error)

    def _batch(self, args: Any, rollout_id: int | None, data: Mapping[str, Any]) -> None:
        self._step, self._rows, rank = None, Rows({}), this_rank()
        version = None if rollout_id is None else self._versions.at(args, rollout_id, calling_trainer())
        if rank.tp or not rank.last_stage:
            return
        self._rows = rows_of(self.framework.name, data, rank).named(version, rollout_id)
        record_layout(self.framework.name, args, self._rows, data, rollout_id, rank)
        contract = training_contract(args, data, self._dtype)
        for key, source in (("log_probs", "training"), ("ref_log_probs", "reference")):
            values = data.get(key)
            if isinstance(values, Sequence) and len(values) == len(self._rows.all):
                version_ = version if source == "training" else None
                record_scores(self.framework.name, self._rows.all, values, source, contract, rank, version_, key)
        if data.get("log_probs"):
            self._rows.keep(data["log_probs"])

    def _update(self, args: Any, trained: Any, rollout: Any) -> None:
        """Records current log-probabilities that the log-prob pass did not already give."""
        rank = this_rank()
        if trained is None or rollout is None or rank.tp or not rank.last_stage:
            return
        found: list[tuple[Row, Any]] = []
        for values, behaviour in zip(trained, rollout):
            row = self._rows.of(behaviour)
            if row is None:
                error = EventError(
                    f"{self.framework.name}: importance weighting saw a sample that the postprocess hook did not; set "
                    f"--rollout-data-postprocess-path to the recorder's hook as well."
                )
                current().rejected("logprobs", error)
                return
            if not self._rows.kept(values):
                found.append((row, values))
        if not found:
            return
        step = 0 if self._step is None and self._rows.one_update else self._step
        version = self._rows.version
        if version is not None and step != 0:  # the weights of a later update have no name of their own
            version = None if step is None else f"{version}/step{step}"
        contract = training_contract(args, self._rows.data, self._dtype)
        with scope(step=self._rows.rollout_id, rollout_id=self._rows.rollout_id):
            rows, values = [row for row, _ in found], [values for _, values in found]
            record_scores(self.framework.name, rows, values, "training", contract, rank, version, f"update-{step or 0}")

    def _read_back(self, args: Any, model: Any) -> None:
        chunk = model[0] if isinstance(model, list | tuple) and model else model
        parameter = next(iter(chunk.parameters()), None) if hasattr(chunk, "parameters") else None
        if parameter is None:
            return
        self._dtype = _DTYPES.get(str(parameter.dtype))
        asked = "bfloat16" if getattr(args, "bf16", False) else "float16" if getattr(args, "fp16", False) else None
        read_back(
            "training.params_dtype",
            requested=asked,
            actual=self._dtype or str(parameter.dtype),
            evidence="the model's first parameter",
            lifecycle="process",
        )
