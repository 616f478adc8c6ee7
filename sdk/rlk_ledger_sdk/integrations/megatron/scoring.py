"""One scoring pass: what the output layer's forward hook sees becomes `logprobs` and `batch.layout` events.

    with watch.scoring("logprob", weight_version="v3") as scored:
        for part in micro_batches:
            scored.batch(part.sample_ids, part.tokens, part.response_lengths, part.loss_masks)
            model(...)

The hook copies the rows it needs, computes this rank's partials (`shards`) and returns nothing: the engine's logits,
its loss and its gradients are what they are without it. Events are recorded when the next micro-batch is announced or
the block ends, so that a device is waited for only after it has been given more to do.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from rlk_ledger_schemas.errors import UsageError
from rlk_ledger_schemas.fingerprints import mask_digest, token_digest
from rlk_ledger_schemas.metrics import VALUE_CLASSES
from rlk_ledger_sdk.api import record
from rlk_ledger_sdk.guard import guarded
from rlk_ledger_sdk.integrations.megatron.layout import Layout, Row, Span, layout_of
from rlk_ledger_sdk.integrations.megatron.place import Place
from rlk_ledger_sdk.integrations.megatron.shards import Partials, partials, reduced

MISSING = VALUE_CLASSES.index("missing")


class Vocabulary(NamedTuple):
    """How many entries the output layer has, how many of them count in the softmax, and how many are tokens."""

    size: int
    counted: int
    real: int


class Declares(Protocol):
    """What a pass asks of the watch that opened it."""

    place: Place
    engine: str

    def logprob_contract(self, logits: Any, temperature: float) -> str:
        """The id of the contract under which these logits become log-probabilities."""

    def next_layout(self) -> int:
        """The number of the next micro-batch of this process."""


class _Seen:
    """One announced micro-batch and what was seen of it so far. Owned by the pass, touched by one thread."""

    def __init__(self, layout: Layout, spans: list[list[Span]], layout_id: str) -> None:
        self.layout = layout
        self.spans = spans
        self.layout_id = layout_id
        self.held: Partials | None = None
        self.whole = False
        self.ranges: tuple[tuple[int, int], ...] = ()
        self.contract = ""
        self.values: list[Any] | None = None


class Scoring:
    """A pass that records. Not for several threads at once."""

    def __init__(
        self,
        watch: Declares,
        vocabulary: Vocabulary,
        *,
        pass_id: str,
        weight_version: str,
        source: str,
        temperature: float,
        group: Any,
        values_follow: bool = False,
    ) -> None:
        self._watch = watch
        self._vocabulary = vocabulary
        self._pass_id = pass_id
        self._weight_version = weight_version
        self._source = source
        self._temperature = temperature
        self._group = group
        self._values_follow = values_follow
        self._seen: _Seen | None = None
        self._contracts: dict[Any, str] = {}

    def batch(
        self,
        sample_ids: Sequence[str],
        tokens: Sequence[Any],
        response_lengths: Sequence[int],
        loss_masks: Sequence[Any] | None = None,
        *,
        packed: bool = False,
        padded_to: int | Sequence[int] | None = None,
        global_batch: int | None = None,
    ) -> None:
        """Announces the micro-batch that the next forward scores, and its `batch.layout`.

        tokens: per sample the ids of prompt and response without padding. loss_masks: one entry a response token.
        packed: rows follow each other (thd) instead of standing side by side, padded on the right (bshd). padded_to:
        the width of every row, or one a row, before context parallelism cuts it; see `layout.layout_of`.
        """
        with guarded("megatron.scoring"):
            self.settle()
        with guarded("megatron.scoring"):
            place = self._watch.place
            layout = layout_of(sample_ids, tokens, response_lengths, loss_masks, packed, padded_to, place.cp)
            number = self._watch.next_layout()
            name = f"{self._watch.engine}/{self._weight_version}/{self._pass_id}/dp{place.dp.rank}/{number}"
            if place.last_stage:
                self._seen = _Seen(layout, layout.spans(place.cp), name)
            if place.owner:
                _record_layout(layout, name, global_batch)

    def values(self, values: Sequence[Any]) -> None:
        """The engine's own log-probabilities of the announced micro-batch: per sample one tensor of response tokens.

        With context parallelism each tensor holds this rank's tokens, in memory order. They are recorded as they are,
        beside the partials of the hook; without this call the values of a tensor-parallel pass are the merged partials.
        Where a fused loss never makes logits, they are the record.
        """
        with guarded("megatron.scoring"):
            if self._seen is None:
                if self._watch.place.last_stage:
                    raise UsageError("scoring.values: no micro-batch was announced; call batch() first.")
                return
            counts = [sum(span.tokens for span in spans) for spans in self._seen.spans]
            given = [len(one) for one in values]
            if given != counts:
                raise UsageError(f"scoring.values: got {given} values a sample, this rank scores {counts}.")
            self._seen.values = [one.detach() if hasattr(one, "detach") else one for one in values]

    def saw_logits(self, logits: Any) -> None:
        """Takes the output layer's result [S, B, v] for the announced micro-batch; of several calls the last wins."""
        seen = self._seen
        if seen is None:
            return
        tp = self._watch.place.tp
        width = logits.shape[-1]
        seen.whole = width >= self._vocabulary.size
        low = 0 if seen.whole else tp.rank * width
        high = min(low + width, self._vocabulary.counted)
        seen.ranges = ((min(low, high), high),)
        spans = [span for held in seen.spans for span in held]
        needed = max((span.start + span.tokens for span in spans), default=0)
        if needed > logits.shape[0] or any(span.row >= logits.shape[1] for span in spans):
            raise UsageError(
                f"scoring: logits are {tuple(logits.shape)}, the announced batch needs {needed} positions of "
                f"{1 + max(span.row for span in spans)} rows; say `packed` and `padded_to` as the engine lays it out."
            )
        seen.contract = self._contract(logits)
        if self._values_follow and seen.whole:
            return
        targets = [
            token
            for row, held in zip(seen.layout.rows, seen.spans)
            for span in held
            for token in row.response[span.first : span.first + span.tokens]
        ]
        seen.held = partials(logits, spans, targets, seen.ranges[0], self._temperature)
        if self._group is not None and not seen.whole:
            seen.held, seen.whole = reduced(seen.held, self._group), True

    def _contract(self, logits: Any) -> str:
        """The contract of these logits, read from the model once a pass and dtype: it walks every parameter."""
        dtype = None if logits is None else logits.dtype
        known = self._contracts.get(dtype)
        if known is None:
            known = self._contracts[dtype] = self._watch.logprob_contract(logits, self._temperature)
        return known

    def settle(self) -> None:
        """Records what was seen of the announced micro-batch; raises UsageError when no forward reached the hook."""
        seen, self._seen = self._seen, None
        if seen is None:
            return
        if seen.held is None and seen.values is None:
            what = "its values did not follow" if seen.contract else "no forward reached the output layer"
            raise UsageError(
                f"scoring: {seen.layout_id} was announced and {what}; the pass of its {len(seen.layout.rows)} samples "
                "is not recorded."
            )
        counts = [sum(span.tokens for span in spans) for spans in seen.spans]
        nothing: list[Any] = [None] * len(counts)
        parts: Sequence[Any] = nothing
        if seen.held is None:  # the engine's own values are all there is; a fused loss never makes logits
            seen.whole, seen.contract = True, seen.contract or self._contract(None)
        else:
            parts = Partials(*(tensor.cpu() for tensor in seen.held)).split(counts)
        for row, spans, held, values in zip(seen.layout.rows, seen.spans, parts, seen.values or nothing):
            for fields in self._events(seen, row, spans, held, values):
                record("logprobs", **fields)

    def _events(self, seen: _Seen, row: Row, spans: list[Span], held: Any, values: Any) -> Iterator[Mapping[str, Any]]:
        place = self._watch.place
        common = {
            "sample_id": row.sample_id,
            "source": self._source,
            "contract_id": seen.contract,
            "dtype": "float32",
            "weight_version": self._weight_version,
            "pass_id": self._pass_id,
            "layout_id": seen.layout_id,
            "token_digest": token_digest(row.response),
            "mask_digest": None if row.mask is None else mask_digest(row.mask),
        }
        if seen.whole or place.tp.size == 1:
            yield common | _whole(place, spans, held, values)
        elif place.cp.size == 1:
            yield common | _shard(place, seen.ranges, held, values)
        else:
            done = 0
            for span in spans:
                part = slice(done, done + span.tokens)
                piece = Partials(*(tensor[part] for tensor in held))
                given = None if values is None else values[part]
                yield common | _shard(place, seen.ranges, piece, given) | {"start": span.first}
                done += span.tokens


def _whole(place: Place, spans: list[Span], held: Any, values: Any) -> dict[str, Any]:
    """Values that need no other tensor rank; context-parallel ranks say which response tokens are theirs."""
    fields: dict[str, Any] = {"values": held.logprobs() if values is None else values}
    fields["metadata_source"] = {"values": "derived" if values is None else "measured"}
    if place.cp.size > 1:
        fields["shard"] = {
            "axis": "sequence",
            "rank": place.cp.rank,
            "world_size": place.cp.size,
            "ranges": [[span.first, span.first + span.tokens] for span in spans],
        }
    return fields


def _shard(place: Place, ranges: tuple[tuple[int, int], ...], held: Partials, values: Any) -> dict[str, Any]:
    """A tensor rank's partials, beside the engine's values where they were given."""
    shard = {"axis": "vocab", "rank": place.tp.rank, "world_size": place.tp.size, "ranges": ranges}
    fields: dict[str, Any] = {"shard": shard, "partials": held._asdict()}
    if values is None:
        count = len(held.max)
        fields |= {"values": [float("nan")] * count, "value_class": [MISSING] * count}
        fields["metadata_source"] = {"values": "absent", "partials": "measured"}
    else:
        fields |= {"values": values, "metadata_source": {"values": "measured", "partials": "measured"}}
    return fields


def _record_layout(layout: Layout, name: str, global_batch: int | None) -> None:
    record(
        "batch.layout",
        layout_id=name,
        micro_batch=len(layout.rows),
        global_batch=global_batch,
        sample_order=[row.sample_id for row in layout.rows],
        offsets=layout.offsets,
        sequence_lengths=[row.length for row in layout.rows],
        padding_side="none" if layout.packed and sum(layout.widths) == sum(r.length for r in layout.rows) else "right",
        packing=layout.packed,
        active_density=layout.active_density,
    )


class Unwatched:
    """A pass while recording is off: every call is one call that does nothing."""

    def batch(self, *given: Any, **named: Any) -> None:
        """Announces nothing."""

    def values(self, values: Sequence[Any]) -> None:
        """Takes nothing."""
