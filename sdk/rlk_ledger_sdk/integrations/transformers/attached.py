"""One model of a job, attached: what it is, which weights it holds, what it generated, what it scored."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlk_ledger_sdk.api import recording
from rlk_ledger_sdk.declared import Told, declare
from rlk_ledger_sdk.guard import guarded
from rlk_ledger_sdk.integrations.fsdp import is_sharded, record_sharding
from rlk_ledger_sdk.integrations.torch import short_dtype
from rlk_ledger_sdk.integrations.transformers import held
from rlk_ledger_sdk.integrations.transformers.generation import Generation, record_generation
from rlk_ledger_sdk.integrations.transformers.listening import listening
from rlk_ledger_sdk.integrations.transformers.numerics import declare_numerics, logprob_body, narrower
from rlk_ledger_sdk.integrations.transformers.readback import record_settings
from rlk_ledger_sdk.integrations.transformers.scoring import (
    Response,
    packed_responses,
    record_layout,
    record_scores,
    responses_of,
    token_logprobs,
)


class Attached:
    """What `attach` returns. With recording off every method does nothing but what the model itself would do."""

    def __init__(self, model: Any, engine: str | None) -> None:
        self.model, self.engine = model, engine
        self.weight_version: str | None = None
        self.on = recording()
        self._layouts = 0
        self._told = Told()
        self._once: list[Callable[[], None]] = []

    def once(self, say: Callable[[], None]) -> None:
        """Runs `say`, which records what the model or its job is, now and for every writer that begins later."""
        if self.on:
            self._once.append(say)
            with guarded("transformers attach"):
                say()

    def _tell_another(self) -> None:
        if self._told.to_another():
            for say in self._once:
                with guarded("transformers attach"):
                    say()

    def contract(self, **semantics: Any) -> str:
        """Declares a logprob contract with these semantics over the model's own dtypes; returns its id."""
        return declare("logprob", logprob_body(self.model, **semantics))

    def published(self, weight_version: str, *, dtype: Any = None, **fields: Any) -> None:
        """Records the digests of what the model holds as `weights.published`; see `held.published`."""
        self.weight_version = weight_version
        if self.on:
            self._tell_another()
            with guarded("transformers weights"):
                held.published(self.model, weight_version, dtype=dtype, **fields)

    def loaded(self, weight_version: str, **fields: Any) -> None:
        """Records the digest of what the model holds as `weights.loaded`: call it after every load or copy."""
        self.weight_version = weight_version
        if self.on:
            self._tell_another()
            with guarded("transformers weights"):
                engine = self.engine or type(self.model).__name__
                held.loaded(self.model, weight_version, engine=engine, **fields)

    def generate(
        self,
        *args: Any,
        sample_ids: Sequence[str],
        group_ids: Sequence[str] | None = None,
        mode: str = "processed",
        per_sample: Mapping[str, Sequence[Any]] | None = None,
        **kwargs: Any,
    ) -> Any:
        """`model.generate(*args, **kwargs)` and the record of it; returns what the model returned.

        sample_ids, group_ids: one a returned row. mode: `processed` records the log-probabilities the tokens were drawn
        from, `raw` those of the head. per_sample: further fields of each sample, one value a row.
        """
        if not self.on:
            return self.model.generate(*args, **kwargs)
        with listening(self.model, mode) as heard:
            output = self.model.generate(*args, **kwargs)
        with guarded("transformers generate()"):
            for generation in heard[-1:]:
                self.recorded(generation, sample_ids, group_ids=group_ids, per_sample=per_sample)
        return output

    def recorded(
        self,
        generation: Generation,
        sample_ids: Sequence[str],
        *,
        group_ids: Sequence[str] | None = None,
        per_sample: Mapping[str, Sequence[Any]] | None = None,
        **fields: Any,
    ) -> None:
        """Records a Generation (see `generation_of`) under this model's contract and weight version."""
        if not self.on:
            return
        self._tell_another()
        with guarded("transformers generation"):
            body = logprob_body(self.model, **generation.drawn.semantics(generation.mode))
            record_generation(
                generation,
                sample_ids,
                contract_id=declare("logprob", body),
                layout_id=self._next_layout("generate"),
                weight_version=self.weight_version,
                group_ids=group_ids,
                dtype=body.get("logits_dtype"),
                per_sample=per_sample,
                engine=self.engine,
                **fields,
            )

    def scored(
        self,
        input_ids: Any,
        *,
        sample_ids: Sequence[str],
        response_mask: Any,
        logits: Any = None,
        logprobs: Any = None,
        attention_mask: Any = None,
        position_ids: Any = None,
        loss_mask: Any = None,
        temperature: float = 1.0,
        source: str = "training",
        pass_id: str = "logprob",
        **fields: Any,
    ) -> None:
        """Records a forward pass over given tokens [B, T], from its logits [B, T, V] or its own log-probabilities.

        logprobs: [B, T], entry j of the token at column j (its column 0 is ignored). response_mask: [B, T], 1 from the
        first to the last token of each response. position_ids: given for packed rows, where a sequence begins at each
        0. loss_mask: [B, T]. temperature: what the values include: it divides the logits here, and is only declared
        for logprobs that already have it.
        """
        if not self.on:
            return
        self._tell_another()
        with guarded("transformers scores"):
            packed = position_ids is not None
            where: list[Response] = (
                packed_responses(sample_ids, response_mask, position_ids)
                if packed
                else responses_of(sample_ids, response_mask, attention_mask)
            )
            values = logprobs if logits is None else token_logprobs(logits, input_ids, temperature)
            semantics = {"mode": "processed", "temperature": temperature, "top_p": 1.0, "top_k": -1, "min_p": 0.0}
            body = logprob_body(self.model, **semantics, execution_path="full_prefill")
            if logits is not None:
                body["logits_dtype"] = narrower(body.get("logits_dtype"), short_dtype(logits.dtype))
            layout_id = self._next_layout(pass_id)
            record_layout(
                layout_id, where, input_ids.shape, loss_mask=loss_mask, attention_mask=attention_mask, packing=packed
            )
            record_scores(
                values,
                input_ids,
                where,
                contract_id=declare("logprob", body),
                source=source,
                loss_mask=loss_mask,
                layout_id=layout_id,
                weight_version=fields.pop("weight_version", self.weight_version),
                pass_id=pass_id,
                dtype=body.get("logits_dtype"),
                **fields,
            )

    def _next_layout(self, name: str) -> str:
        self._layouts += 1
        return f"{self.engine or 'model'}-{name}-{self._layouts - 1}"


def attach(model: Any, *, engine: str | None = None, requested: Mapping[str, Any] | None = None) -> Attached:
    """Records what `model` (a transformers causal language model, wrapped or not) is: its settings and contracts.

    engine: the name its samples and weights carry. requested: what the job asked for, by setting (`model.dtype`,
    `model.attention`, `torch.deterministic_algorithms` ...). Nothing of the model is changed.
    """
    attached = Attached(model, engine)

    def say() -> None:
        record_settings(model, requested)
        if is_sharded(model):
            record_sharding(model, requested)
        declare_numerics(model)

    attached.once(say)
    return attached
