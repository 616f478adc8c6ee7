"""TRL: a GRPOTrainer records what it samples, what it scores and which weights it held, one call before `train()`.

What the trainer computes passes through four of its own methods, which are wrapped on the instance: the one that makes
a generation batch, the one that rewards it, the one that scores tokens, and `compute_loss`. A batch carries one more
entry on the way, `rlk_row`, the row each sample had when it was generated: the trainer shuffles and splits its batches,
and equal responses cannot be told apart by their tokens.

One process is rollout and training at once, so both sides' events come from it and `source` tells them apart.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from rlk_ledger_schemas.errors import UsageError
from rlk_ledger_sdk.api import record, recording, token_name
from rlk_ledger_sdk.declared import declare
from rlk_ledger_sdk.guard import guarded
from rlk_ledger_sdk.integrations.transformers import (
    Attached,
    Drawn,
    Generated,
    Generation,
    Response,
    attach,
    listening,
    record_generation,
    record_scores,
    trainer_callback,
    version_of,
)
from rlk_ledger_sdk.integrations.transformers.generation import padding_side
from rlk_ledger_sdk.integrations.transformers.numerics import logprob_body
from rlk_ledger_sdk.integrations.trl.pieces import Pieces, loss_mask, unpadded
from rlk_ledger_sdk.knobs import read_back

ROW = "rlk_row"
_GENERATE, _SCORE, _LOSS, _REWARD = (
    "_generate_and_score_completions",
    "_get_per_token_logps_and_entropies",
    "compute_loss",
    "_calculate_rewards",
)
_SETTINGS = (
    "num_generations", "num_iterations", "steps_per_generation", "temperature", "top_p", "top_k", "use_vllm",
    "vllm_importance_sampling_correction", "vllm_importance_sampling_mode", "loss_type", "beta", "bf16", "fp16",
    "cast_lm_head_to_fp32", "mask_truncated_completions", "importance_sampling_level",
)  # fmt: skip


@dataclass
class _Sample:
    """A response on its way through training: id, tokens, and how many update passes have scored it."""

    sample_id: str
    length: int
    updates: int = 0


class Watched:
    """What `attach_trainer` returns; `detach()` puts the trainer's own methods back."""

    def __init__(self, trainer: Any, attached: Attached) -> None:
        self._trainer, self._attached = trainer, attached
        self._before: dict[str, Callable[..., Any]] = {}
        self._own: dict[str, Any] = {}
        self._callback: Any = None
        self._samples: dict[int, _Sample] = {}
        self._rewards: Any = None
        self._completions: list[Any] = []
        self._loss_inputs: Any = None
        self._loaded: str | None = None

    def wrap(self, callback: Any) -> None:
        """Puts the recording versions of the trainer's methods on the instance, and the callback into its list."""
        self._callback = callback
        self._trainer.add_callback(callback)
        around = {_GENERATE: self._generate, _SCORE: self._score, _LOSS: self._loss, _REWARD: self._reward}
        for name, replacement in around.items():
            method = getattr(self._trainer, name, None)
            if method is not None:
                self._before[name], self._own[name] = method, vars(self._trainer).get(name)
                setattr(self._trainer, name, replacement)

    def detach(self) -> None:
        """Takes the callback off and puts back what was there, unless another wrapper stands in front of ours.

        A second call does nothing.
        """
        callback, self._callback = self._callback, None
        if callback is None:
            return
        self._trainer.remove_callback(callback)
        self._attached.on = False
        held = vars(self._trainer)
        for name, own in self._own.items():
            if getattr(held.get(name), "__self__", None) is not self:
                continue
            if own is None:
                held.pop(name)
            else:
                held[name] = own

    # -- what the trainer calls -------------------------------------------------------------------------------------

    def _generate(self, inputs: Any) -> Any:
        if self._callback is None or not self._trainer.model.training:  # an evaluation's responses train nothing
            return self._before[_GENERATE](inputs)
        with guarded("trl weights"):
            self._hold()
        nothing: list[Generation] = []
        hearing: AbstractContextManager[list[Generation]] = nullcontext(nothing)
        if self._listens():
            hearing = listening(self._trainer.model)
        with hearing as heard:
            batch = self._before[_GENERATE](inputs)
        with guarded("trl generation"):
            self._record_generation(batch, heard)
        return batch

    def _reward(self, *args: Any, **kwargs: Any) -> Any:
        """(inputs, prompts, completions, completion_ids_list): the lists are what was generated, before any padding."""
        self._rewards = self._before[_REWARD](*args, **kwargs)
        self._completions = args[3] if len(args) > 3 else kwargs.get("completion_ids_list", [])
        return self._rewards

    def _loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self._loss_inputs = inputs if self._trainer.model.training else None
        try:
            return self._before[_LOSS](model, inputs, *args, **kwargs)
        finally:
            self._loss_inputs = None

    def _score(self, *args: Any, **kwargs: Any) -> Any:
        scored = self._before[_SCORE](*args, **kwargs)
        inputs = self._loss_inputs
        if self._callback is not None and inputs is not None and ROW in inputs:
            with guarded("trl scores"):
                self._record_update(inputs, scored)
        return scored

    # -- what is recorded -------------------------------------------------------------------------------------------

    def _listens(self) -> bool:
        return not getattr(self._trainer, "use_vllm", False)

    def _hold(self) -> None:
        """Generation in this process runs on the live parameters: their digest, once a version."""
        version = version_of(self._trainer.state.global_step)
        self._attached.weight_version = version
        if self._listens() and version != self._loaded:
            self._loaded = version
            self._attached.loaded(version, caches_flushed=True)

    def _record_generation(self, batch: dict[str, Any], heard: list[Generation]) -> None:
        rows = batch["completion_ids"].shape[0]
        prompts = unpadded(batch["prompt_ids"], batch["prompt_mask"])
        losses = loss_mask(batch)
        step, rank = self._trainer.state.global_step, self._trainer.accelerator.process_index
        lengths = self._lengths(batch)
        generation = self._generation(batch, prompts, lengths, heard)
        samples = [_Sample(f"{step}-{rank}-{row}", length) for row, length in enumerate(lengths)]
        self._samples = dict(enumerate(samples))
        body = self._rollout_body(generation)
        record_generation(
            generation,
            [sample.sample_id for sample in samples],
            contract_id=declare("logprob", body),
            layout_id=f"rollout-{step}-{rank}",
            weight_version=self._attached.weight_version,
            group_ids=[f"{step}-{name}" if (name := token_name(prompt)) else None for prompt in prompts],
            dtype=body.get("logits_dtype"),
            per_sample={
                "loss_mask": [losses[i, : len(g.tokens)].tolist() for i, g in enumerate(generation.rows)],
                "reward": self._rewards_of(rows, rank),
            },
            engine=self._attached.engine,
        )
        for key, source, pass_id in (
            ("old_per_token_logps", "training", "old"),
            ("ref_per_token_logps", "reference", "reference"),
        ):
            if batch.get(key) is not None:
                self._record_pass(batch, batch[key], samples, source=source, pass_id=pass_id)
        batch[ROW] = batch["completion_ids"].new_tensor(range(rows))

    def _lengths(self, batch: Mapping[str, Any]) -> list[int]:
        """Tokens of each completion as generated: a mask may have been zeroed since (`mask_truncated_completions`)."""
        completions, self._completions = self._completions, []
        if len(completions) == batch["completion_ids"].shape[0]:
            return [len(tokens) for tokens in completions]
        return [int(n) for n in batch["completion_mask"].sum(1).tolist()]

    def _generation(
        self, batch: dict[str, Any], prompts: list[list[int]], lengths: list[int], heard: list[Generation]
    ) -> Generation:
        """The rows of `batch` with the log-probabilities they were drawn with, where the sampler gave any."""
        ids = batch["completion_ids"].tolist()
        sampled = batch.get("sampling_per_token_logps")
        drawn = heard[0].drawn if heard else self._requested()
        ends = set(getattr(self._trainer, "eos_token_ids", None) or [])
        pieces = Pieces(heard)
        rows = []
        for i, prompt in enumerate(prompts):
            tokens = ids[i][: lengths[i]]
            values = sampled[i, : lengths[i]].tolist() if sampled is not None else pieces.values(prompt, tokens)
            reason = "stop" if tokens and tokens[-1] in ends else "length"
            rows.append(Generated(prompt, tokens, reason, values))
        width, side = batch["prompt_ids"].shape[1], padding_side(batch["prompt_mask"])
        return Generation(rows, drawn, "processed", width, side)

    def _requested(self) -> Drawn:
        args = self._trainer.args
        return Drawn(
            temperature=args.temperature,
            top_p=args.top_p if args.top_p is not None else 1.0,
            top_k=max(0, args.top_k or 0),
            min_p=args.min_p or 0.0,
            repetition_penalty=args.repetition_penalty,
        )

    def _rollout_body(self, generation: Generation) -> dict[str, Any]:
        """vLLM's dtypes are not seen from here: its contract names only what its values include."""
        semantics = generation.drawn.semantics("processed")
        if self._listens():
            return logprob_body(self._trainer.model, **semantics)
        return {**semantics, "alignment": "token_i_given_before_i"}

    def _record_update(self, inputs: Mapping[str, Any], scored: Any) -> None:
        samples = [self._samples[row] for row in inputs[ROW].tolist()]
        values = scored[0] if isinstance(scored, tuple) else scored
        entropy = scored[1] if isinstance(scored, tuple) and len(scored) > 1 else None
        self._attached.weight_version = version_of(self._trainer.state.global_step)
        pass_id = f"update-{samples[0].updates}" if samples else "update"
        self._record_pass(inputs, values, samples, source="training", pass_id=pass_id, entropy=entropy)
        for sample in samples:
            sample.updates += 1

    def _record_pass(
        self,
        batch: Mapping[str, Any],
        values: Any,
        samples: list[_Sample],
        *,
        source: str,
        pass_id: str,
        entropy: Any = None,
    ) -> None:
        """values: [B, C], entry j of the completion token at column j."""
        body = self._training_body()
        record_scores(
            values,
            batch["completion_ids"],
            [Response(sample.sample_id, row, -1, 0, sample.length) for row, sample in enumerate(samples)],
            contract_id=declare("logprob", body),
            source=source,
            loss_mask=loss_mask(batch),
            weight_version=None if source == "reference" else self._attached.weight_version,
            pass_id=pass_id,
            layout_id=self._record_layout(batch, samples, pass_id),
            dtype=body.get("logits_dtype"),
            entropy=entropy,
        )

    def _training_body(self) -> dict[str, Any]:
        semantics: dict[str, Any] = {"mode": "processed", "temperature": float(self._trainer.temperature)}
        semantics |= {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "execution_path": "full_prefill"}
        if getattr(self._trainer.args, "cast_lm_head_to_fp32", False):
            semantics |= {"head_dtype": "float32", "logits_dtype": "float32"}
        return logprob_body(self._trainer.model, **semantics)

    def _record_layout(self, batch: Mapping[str, Any], samples: list[_Sample], pass_id: str) -> str:
        """Rows are prompts padded on the left beside completions padded on the right: no single side."""
        names = [sample.sample_id for sample in samples]
        layout_id = f"{pass_id}-{names[0] if names else ''}-at-{self._trainer.state.global_step}"
        prompts = [int(n) for n in batch["prompt_mask"].sum(1).tolist()]
        width = batch["prompt_ids"].shape[1] + batch["completion_ids"].shape[1]
        record(
            "batch.layout",
            layout_id=layout_id,
            micro_batch=len(names),
            sample_order=names,
            sequence_lengths=[n + sample.length for n, sample in zip(prompts, samples)],
            packing=False,
            active_density=float(loss_mask(batch).sum()) / max(1, len(names) * width),
        )
        return layout_id

    def _rewards_of(self, rows: int, rank: int) -> list[float | None]:
        """This process's weighted rewards; `_calculate_rewards` gathers those of all processes in rank order."""
        gathered, self._rewards = self._rewards, None
        weights = getattr(self._trainer, "reward_weights", None)
        if gathered is None or weights is None or gathered.shape[0] < (rank + 1) * rows:
            return [None] * rows
        own = gathered[rank * rows : (rank + 1) * rows] * weights.to(gathered.device)
        return [None if value != value else value for value in own.nansum(1).tolist()]


def attach_trainer(
    trainer: Any, *, engine: str = "trl", every: int = 1, requested: Mapping[str, Any] | None = None
) -> Watched:
    """Makes a `trl.GRPOTrainer` record; call it once, after the trainer is built and before `train()`.

    Recorded: settings and contracts of the model; per generation batch its samples with rewards, groups, loss masks and
    the log-probabilities they were drawn with (transformers generation, vLLM's `sampling_per_token_logps`, or a
    `rollout_func`'s); the old, reference and update passes under the weights they ran on; the live weights before
    training and after every `every`th step. Evaluation is left alone. requested: see `transformers.attach`. With
    recording off nothing is looked at or wrapped; a trainer that is watched already gives the same object again. Raises
    UsageError for a trainer without the methods recording stands on.
    """
    if not recording():
        return Watched(trainer, Attached(getattr(trainer, "model", None), engine))
    already = getattr(getattr(trainer, _LOSS, None), "__self__", None)
    if isinstance(already, Watched):
        return already
    missing = [name for name in (_GENERATE, _SCORE, _LOSS) if not hasattr(trainer, name)]
    if missing:
        raise UsageError(
            f"trl: {type(trainer).__name__} has no {missing[0]}(); this version of TRL is not known, so record from a "
            "rollout_func and a callback instead."
        )
    attached = attach(trainer.model, engine=engine, requested=requested)
    watched = Watched(trainer, attached)
    attached.once(lambda: _record_settings(trainer))
    watched.wrap(trainer_callback(attached, every=every))
    return watched


def _record_settings(trainer: Any) -> None:
    for name in _SETTINGS:
        _setting(trainer, name)


def _setting(trainer: Any, name: str) -> None:
    asked, held = getattr(trainer.args, name, None), getattr(trainer, name, None)
    if isinstance(asked, int | float | str):
        actual = held if isinstance(held, int | float | str) else asked
        read_back(
            f"trl.{name}", requested=asked, actual=actual, evidence="the trainer after it was built", lifecycle="engine"
        )
