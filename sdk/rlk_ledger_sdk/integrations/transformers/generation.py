"""Responses of `generate()`: tokens, log-probabilities, how each ended, and the sampling that was in force.

Legend: B rows, P prompt width (padded), N generated tokens, V vocabulary.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlk_ledger_schemas.fingerprints import mask_digest, token_digest
from rlk_ledger_sdk.api import record
from rlk_ledger_sdk.integrations.torch import selected_logprobs

_KNOWN = frozenset({"Temperature", "TopK", "TopP", "MinP", "RepetitionPenalty", "LogitNormalization"})
"""Logits processors that a field of the logprob contract stands for."""


@dataclass(frozen=True)
class Drawn:
    """How the tokens of one call were drawn, as generate() resolved it: the merged configuration, not the request.

    `processors` are logits processors in force that no contract field names.
    """

    do_sample: bool = True
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    processors: tuple[str, ...] = ()

    def semantics(self, mode: str) -> dict[str, Any]:
        """The semantic fields of the logprob contract of values taken in `mode` (raw or processed)."""
        fields: dict[str, Any] = {"mode": mode, "temperature": self.temperature, "top_p": self.top_p}
        fields |= {"top_k": self.top_k or -1, "min_p": self.min_p, "execution_path": "decode"}
        if self.repetition_penalty != 1.0:
            fields["penalties"] = {"repetition": self.repetition_penalty}
        if self.processors:
            fields["processors"] = list(self.processors)
        return fields

    def sampling(self, n: int | None) -> dict[str, Any]:
        """The `sampling` field of a sample; generate() draws from torch's global generator, so there is no seed."""
        penalties = {"repetition": self.repetition_penalty} if self.repetition_penalty != 1.0 else None
        fields: dict[str, Any] = {
            "temperature": self.temperature if self.do_sample else 0.0,
            "top_p": self.top_p,
            "min_p": self.min_p,
        }
        fields |= {"top_k": self.top_k or -1, "penalties": penalties, "n": n}
        return {name: value for name, value in fields.items() if value is not None}


@dataclass(frozen=True)
class Generated:
    """One response. `logprobs` holds one value (nats) a token, or is None where the call gave none."""

    prompt: list[int]
    tokens: list[int]
    finish_reason: str
    logprobs: list[float] | None = None


@dataclass(frozen=True)
class Generation:
    """One call of generate(): its responses in row order, how they were drawn, and what the values are."""

    rows: list[Generated]
    drawn: Drawn
    mode: str
    prompt_width: int
    padding_side: str
    absent: dict[str, str] = field(default_factory=dict)


def drawn_from(config: Any, processors: Iterable[Any] = ()) -> Drawn:
    """The sampling a GenerationConfig stands for; without `do_sample` temperature and filters are not applied."""
    names = tuple(type(p).__name__ for p in processors)
    other = tuple(n for n in names if not any(n.startswith(known) for known in _KNOWN))
    penalty = getattr(config, "repetition_penalty", None) or 1.0
    if not getattr(config, "do_sample", False):
        return Drawn(do_sample=False, repetition_penalty=float(penalty), processors=other)
    return Drawn(
        temperature=_number(config, "temperature", 1.0),
        top_p=_number(config, "top_p", 1.0),
        top_k=int(getattr(config, "top_k", None) or 0),
        min_p=_number(config, "min_p", 0.0),
        repetition_penalty=float(penalty),
        processors=other,
    )


def generation_of(
    output: Any, config: Any, *, prompt_width: int, attention_mask: Any = None, drawn: Drawn | None = None
) -> Generation:
    """What a GenerateDecoderOnlyOutput holds.

    output: with `output_scores` its values are after every logits processor (processed); with `output_logits` alone
    they are the head's own (raw); with neither there are none. config: the GenerationConfig the call ran under.
    prompt_width: columns of `sequences` that were given. attention_mask: [B, P], which shows the padding; without it
    rows are taken as unpadded.
    """
    steps, mode = getattr(output, "scores", None), "processed"
    if not steps:
        steps, mode = getattr(output, "logits", None), "raw"
    values = None
    if steps:
        ids = output.sequences[:, prompt_width:]
        values = sys.modules["torch"].stack([selected_logprobs(s, ids[:, i]) for i, s in enumerate(steps)], 1)
    return assemble(output.sequences, values, config, prompt_width, attention_mask, drawn or drawn_from(config), mode)


def assemble(
    sequences: Any, values: Any, config: Any, prompt_width: int, attention_mask: Any, drawn: Drawn, mode: str
) -> Generation:
    """A Generation from sequences [B, P + N] and values [B, N] or None."""
    kept = _prompt_columns(attention_mask, sequences.shape[0])
    logprobs = None if values is None else values.tolist()
    ends, width = _ends(config), sequences.shape[1] - prompt_width
    full = width >= _limit(config, prompt_width)
    rows = []
    for row, ids in enumerate(sequences.tolist()):
        tokens = ids[prompt_width:]
        stop = next((i + 1 for i, token in enumerate(tokens) if token in ends), None)
        prompt = ids[:prompt_width] if kept is None else [t for t, k in zip(ids[:prompt_width], kept[row]) if k]
        length = width if stop is None else stop
        reason = "stop" if stop is not None else "length" if full else "stopping_criteria"
        rows.append(Generated(prompt, tokens[:length], reason, None if logprobs is None else logprobs[row][:length]))
    return Generation(rows, drawn, mode, prompt_width, padding_side(attention_mask))


def record_generation(
    generation: Generation,
    sample_ids: Sequence[str],
    *,
    contract_id: str,
    layout_id: str | None = None,
    weight_version: str | None = None,
    group_ids: Sequence[str | None] | None = None,
    dtype: str | None = None,
    per_sample: Mapping[str, Sequence[Any]] | None = None,
    **fields: Any,
) -> None:
    """Records a layout, and per response a `rollout.sample` and (where there are values) a `logprobs`.

    sample_ids, group_ids: one a row. dtype: of the logits the values were taken from. per_sample: further fields of
    the sample, one value a row (`reward`, `loss_mask` ...). fields: further fields of every sample (`engine` ...).
    """
    rows = generation.rows
    if layout_id is not None:
        record(
            "batch.layout",
            layout_id=layout_id,
            micro_batch=len(rows),
            sample_order=list(sample_ids),
            sequence_lengths=[len(row.prompt) for row in rows],
            padding_side=generation.padding_side,
            packing=False,
        )
    sources = {
        "sampling": "measured",
        "sampling.seed": "absent",
        "weight_spans": "derived" if weight_version else "absent",
    }
    sources |= {"logprobs": "absent"} if any(row.logprobs is None for row in rows) else {}
    for index, (sample_id, row) in enumerate(zip(sample_ids, rows, strict=True)):
        given = {name: values[index] for name, values in (per_sample or {}).items()}
        mask = given.pop("loss_mask", None) or [1] * len(row.tokens)
        digests = {"token_digest": token_digest(row.tokens), "mask_digest": mask_digest(mask)}
        spans = [{"version": weight_version, "start": 0, "end": len(row.tokens)}] if weight_version else None
        record(
            "rollout.sample",
            sample_id=sample_id,
            group_id=None if group_ids is None else group_ids[index],
            prompt_token_ids=row.prompt,
            response_token_ids=row.tokens,
            loss_mask=mask,
            sampling=generation.drawn.sampling(None),
            finish_reason=row.finish_reason,
            status="completed" if row.finish_reason == "stop" else "truncated",
            weight_spans=spans,
            metadata_source=sources,
            **{**fields, **given},
            **digests,
        )
        if row.logprobs is not None:
            record(
                "logprobs",
                sample_id=sample_id,
                source="rollout",
                contract_id=contract_id,
                values=row.logprobs,
                dtype=dtype,
                weight_version=weight_version,
                pass_id="generate",
                layout_id=layout_id,
                **digests,
            )


def padding_side(attention_mask: Any) -> str:
    """`left`, `right` or `none` as a mask [B, T] shows it; a row padded on both sides counts by its first column."""
    if attention_mask is None or bool(attention_mask.all()):
        return "none"
    return "left" if not bool(attention_mask[:, 0].all()) else "right"


def _prompt_columns(attention_mask: Any, rows: int) -> list[list[int]] | None:
    """The mask as lists, repeated where generate() repeated its rows (`num_return_sequences`)."""
    if attention_mask is None:
        return None
    if attention_mask.shape[0] != rows:
        attention_mask = attention_mask.repeat_interleave(rows // attention_mask.shape[0], 0)
    return attention_mask.tolist()  # type: ignore[no-any-return]


def _ends(config: Any) -> frozenset[int]:
    ends = getattr(config, "eos_token_id", None)
    return (
        frozenset() if ends is None else frozenset(ends) if isinstance(ends, list | tuple) else frozenset({int(ends)})
    )


def _limit(config: Any, prompt_width: int) -> float:
    """The most tokens the configuration lets a call generate."""
    most = getattr(config, "max_new_tokens", None)
    if most is None:
        length = getattr(config, "max_length", None)
        return float("inf") if length is None else length - prompt_width
    return float(most)


def _number(config: Any, name: str, default: float) -> float:
    value = getattr(config, name, None)
    return default if value is None else float(value)
