"""Samples, scores and batch layouts."""

import re
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from rlk_ledger_schemas.arrays import ArraySpec
from rlk_ledger_schemas.errors import EventError
from rlk_ledger_schemas.events.base import Arrays, Count, Digest, Event, Fraction, Name, register

_SOURCES = frozenset({"rollout", "training", "reference", "teacher"})
Measured = Literal["measured", "derived", "defaulted", "absent"]
TOKENS = ArraySpec("int32", required=True, tokens=True)


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Sampling parameters in force for one sample."""

    temperature: Annotated[float, Meta(ge=0.0)] | None = None
    top_p: Fraction | None = None
    top_k: int | None = None
    min_p: Fraction | None = None
    penalties: dict[str, float] | None = None
    seed: int | None = None
    n: Count | None = None


class WeightSpan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Response positions [start, end) sampled under one weight version."""

    version: Name
    start: Count
    end: Count


class Cache(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Prefix cache state of a request."""

    cached_tokens: Count | None = None
    writer_version: str | None = None
    block_size: Count | None = None


class Spec(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Speculative decoding counts."""

    drafted: Count | None = None
    accepted: Count | None = None


class RoutedExperts(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Which experts served each token: a digest, the share of tokens covered, and optionally the array."""

    digest: Digest | None = None
    coverage: Fraction | None = None
    layers: Count | None = None
    top_k: Count | None = None


@register
class PromptRecorded(Event, frozen=True, kw_only=True):
    """A prompt stored once; `prefix_of` names the prompt it extends, whose tokens come first."""

    TYPE: ClassVar[str] = "prompt.recorded"
    ARRAYS = MappingProxyType({"token_ids": TOKENS})
    prompt_id: Name
    token_ids: Any = None
    prefix_of: Name | None = None


@register
class RolloutSample(Event, frozen=True, kw_only=True):
    """One sampled response with everything its log-probabilities depend on. Positions count from the response start."""

    TYPE: ClassVar[str] = "rollout.sample"
    ARRAYS = MappingProxyType(
        {
            "response_token_ids": TOKENS,
            "loss_mask": ArraySpec("uint8", required=True, doc="1 where the token enters the loss"),
            "prompt_token_ids": ArraySpec("int32", tokens=True),
            "position_ids": ArraySpec("int32", doc="omitted when 0..n-1"),
            "kept_mass": ArraySpec("float32", doc="probability kept by top-p / top-k / min-p at each position"),
            "support": ArraySpec("int32", tokens=True, doc="token ids kept at each position, concatenated"),
            "support_offsets": ArraySpec("int32", doc="start of each position's support, plus the total"),
            "routed_experts.array": ArraySpec("int32", doc="token x layer x top_k, flattened"),
        }
    )
    sample_id: Name
    response_token_ids: Any = None
    loss_mask: Any = None
    prompt_token_ids: Any = None
    prompt_id: Name | None = None
    group_id: Name | None = None
    session_id: Name | None = None
    turn: Count | None = None
    position_ids: Any = None
    token_digest: Digest | None = None
    mask_digest: Digest | None = None
    tokenizer: str | None = None
    sampling: Sampling | None = None
    finish_reason: str | None = None
    status: Literal["completed", "truncated", "aborted", "failed"] | None = None
    reward: float | None = None
    weight_spans: tuple[WeightSpan, ...] | None = None
    stamp_rule: str | None = None
    engine: str | None = None
    model: str | None = None
    cache: Cache | None = None
    chunks: tuple[Count, ...] | None = None
    spec: Spec | None = None
    routed_experts: RoutedExperts | None = None
    kept_mass: Any = None
    support: Any = None
    support_offsets: Any = None
    metadata_source: dict[str, Measured] | None = None

    @classmethod
    def check_lengths(cls, wire: Any, arrays: Arrays) -> None:
        n = len(arrays["response_token_ids"])
        mask = arrays["loss_mask"].data
        if len(mask) != n:
            raise EventError(f"rollout.sample: `loss_mask` has {len(mask)} entries for {n} response tokens.")
        if "kept_mass" in arrays and len(arrays["kept_mass"]) != n:
            raise EventError(
                f"rollout.sample: `kept_mass` has {len(arrays['kept_mass'])} entries for {n} response tokens."
            )
        if mask.translate(None, b"\0\1"):
            raise EventError("rollout.sample: `loss_mask` must hold 0 and 1 only.")
        for span in wire.weight_spans or ():
            if not span.start <= span.end <= n:
                raise EventError(
                    f"rollout.sample: weight span [{span.start}, {span.end}) of {span.version!r} is outside "
                    f"the {n} response tokens."
                )
        if "support" in arrays and len(arrays.get("support_offsets", ())) != n + 1:
            raise EventError(f"rollout.sample: `support` needs `support_offsets` with {n + 1} entries.")


class Shard(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The part of a sample one rank scored: its axis, rank, world size and half-open ranges."""

    axis: Literal["vocab", "sequence"]
    rank: Count
    world_size: Annotated[int, Meta(ge=1)]
    ranges: tuple[tuple[Count, Count], ...]


class Partials(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Stands for the nested arrays of vocabulary-parallel partials; it holds nothing itself."""


@register
class Logprobs(Event, frozen=True, kw_only=True):
    """Log-probabilities (nats, float32) one side gave to a sample's response tokens in one named pass.

    `start` is the response position of `values[0]`. `source` is rollout, training, reference, teacher or
    `replay:<scorer>`. `value_class` holds one code of VALUE_CLASSES a token and is present when not all are finite.
    """

    TYPE: ClassVar[str] = "logprobs"
    ARRAYS = MappingProxyType(
        {
            "values": ArraySpec("float32", required=True),
            "value_class": ArraySpec("uint8"),
            "token_ids": ArraySpec("int32", tokens=True, doc="what this side scored, when it differs"),
            "entropy": ArraySpec("float32"),
            "partials.max": ArraySpec("float32"),
            "partials.sum_exp": ArraySpec("float32"),
            "partials.target_logit": ArraySpec("float32"),
        }
    )
    sample_id: Name
    source: Name
    contract_id: Name
    values: Any = None
    start: Count = 0
    value_class: Any = None
    dtype: str | None = None
    weight_version: Name | None = None
    pass_id: Name | None = None
    layout_id: Name | None = None
    token_digest: Digest | None = None
    mask_digest: Digest | None = None
    token_ids: Any = None
    shard: Shard | None = None
    partials: Partials | None = None
    entropy: Any = None
    metadata_source: dict[str, Measured] | None = None

    @classmethod
    def check_lengths(cls, wire: Any, arrays: Arrays) -> None:
        if wire.source not in _SOURCES and not re.fullmatch(r"replay:[A-Za-z0-9._-]+", wire.source):
            raise EventError(
                f"logprobs: `source` must be one of {', '.join(sorted(_SOURCES))} or replay:<scorer>, "
                f"got {wire.source!r}."
            )
        if len(arrays) == 1 and wire.shard is None:
            return
        n = len(arrays["values"])
        for name in ("value_class", "entropy", "partials.max", "partials.sum_exp", "partials.target_logit"):
            if name in arrays and len(arrays[name]) != n:
                raise EventError(f"logprobs: `{name}` has {len(arrays[name])} entries for {n} values.")
        if wire.shard is None:
            return
        if wire.shard.rank >= wire.shard.world_size:
            raise EventError(f"logprobs: shard rank {wire.shard.rank} is outside a world of {wire.shard.world_size}.")
        if any(b < a for a, b in wire.shard.ranges):
            raise EventError("logprobs: a shard range [a, b) has b < a.")
        covered = sum(b - a for a, b in wire.shard.ranges)
        if wire.shard.axis == "sequence" and covered != n:
            raise EventError(f"logprobs: the shard's ranges cover {covered} positions, `values` has {n}.")


class Kept(msgspec.Struct, frozen=True, omit_defaults=True):
    """A dynamic-sampling decision about one sample or group."""

    kept: bool
    reason: str
    sample_id: str | None = None
    group_id: str | None = None


@register
class BatchLayout(Event, frozen=True, kw_only=True):
    """How a pass laid its samples out in memory."""

    TYPE: ClassVar[str] = "batch.layout"
    ARRAYS = MappingProxyType({"offsets": ArraySpec("int32"), "sequence_lengths": ArraySpec("int32")})
    layout_id: Name
    micro_batch: Count | None = None
    global_batch: Count | None = None
    sample_order: tuple[str, ...] | None = None
    offsets: Any = None
    sequence_lengths: Any = None
    padding_side: Literal["left", "right", "none"] | None = None
    packing: bool | None = None
    active_density: Fraction | None = None
    decisions: tuple[Kept, ...] | None = None
