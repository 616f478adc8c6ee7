"""Scores of a forward pass over given tokens: which values belong to which response, and the events that keep them.

Legend: B rows, T positions of a row, V vocabulary. Logits at position j score the token at position j + 1, so the
first token of a sequence has no score.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlk_ledger_schemas.errors import UsageError
from rlk_ledger_schemas.fingerprints import mask_digest, token_digest
from rlk_ledger_schemas.metrics import VALUE_CLASSES
from rlk_ledger_sdk.api import record
from rlk_ledger_sdk.integrations.torch import selected_logprobs
from rlk_ledger_sdk.integrations.transformers.generation import padding_side

_FINITE, _MISSING = VALUE_CLASSES.index("finite"), VALUE_CLASSES.index("missing")


@dataclass(frozen=True)
class Response:
    """Where one response lies: row, first column of its sequence (prompt included), columns [start, stop) of it."""

    sample_id: str
    row: int
    first: int
    start: int
    stop: int


def responses_of(sample_ids: Sequence[str], response_mask: Any, attention_mask: Any = None) -> list[Response]:
    """One response a row, from a mask [B, T] that is 1 from its first to its last token, tool tokens included.

    attention_mask: [B, T], 0 at padding on either side; without it sequences begin in column 0. A row whose
    response_mask is all 0 is an empty response. Raises UsageError for a response in several pieces.
    """
    masks = response_mask.int().tolist()
    columns = None if attention_mask is None else attention_mask.int().tolist()
    if len(masks) != len(sample_ids):
        raise UsageError(f"scores: {len(sample_ids)} sample ids for {len(masks)} rows; give one a row.")
    out = []
    for row, (sample_id, mask) in enumerate(zip(sample_ids, masks)):
        first = 0 if columns is None else next((i for i, one in enumerate(columns[row]) if one), 0)
        count = sum(mask)
        start = mask.index(1) if count else first
        if count and sum(mask[start : start + count]) != count:
            raise UsageError(
                f"scores: the response of {sample_id!r} (row {row}) is in several pieces; mark tool tokens as part of "
                "the response and leave them out of the loss mask instead."
            )
        out.append(Response(sample_id, row, first, start, start + count))
    return out


def packed_responses(sample_ids: Sequence[str], response_mask: Any, position_ids: Any) -> list[Response]:
    """The responses of packed rows [B, T], in order of row and column: a sequence begins where `position_ids` is 0.

    Padding that stands at the end of a row with position 0 makes sequences without a response, which are left out.
    Raises UsageError when the sequences that have a response are not as many as `sample_ids`.
    """
    spans = []
    for row, (mask, positions) in enumerate(zip(response_mask.int().tolist(), position_ids.tolist())):
        firsts = [i for i, position in enumerate(positions) if position == 0]
        for first, end in zip(firsts, [*firsts[1:], len(positions)]):
            count = sum(mask[first:end])
            if count:
                start = mask.index(1, first, end)
                spans.append((row, first, start, start + count))
    if len(spans) != len(sample_ids):
        raise UsageError(f"scores: {len(sample_ids)} sample ids for {len(spans)} packed responses; give one each.")
    return [Response(sample_id, *span) for sample_id, span in zip(sample_ids, spans)]


def token_logprobs(logits: Any, input_ids: Any, temperature: float = 1.0) -> Any:
    """Log-probabilities [B, T] (nats, float32) of the tokens [B, T] under logits [B, T, V]; column 0 is NaN."""
    torch = sys.modules["torch"]
    values = torch.full(input_ids.shape, float("nan"), dtype=torch.float32, device=logits.device)
    if input_ids.shape[1] > 1:
        values[:, 1:] = selected_logprobs(logits[:, :-1], input_ids[:, 1:], temperature)
    return values


def record_scores(
    values: Any,
    input_ids: Any,
    responses: Sequence[Response],
    *,
    contract_id: str,
    source: str = "training",
    loss_mask: Any = None,
    layout_id: str | None = None,
    weight_version: str | None = None,
    pass_id: str = "logprob",
    dtype: str | None = None,
    entropy: Any = None,
    **fields: Any,
) -> None:
    """Records a pass: one `logprobs` a response.

    values: [B, T], entry j the log-probability (nats) of the token at column j (as `token_logprobs` gives them).
    loss_mask: [B, T], 1 where a token enters the loss; without it every token of a response does. entropy: [B, T],
    aligned like values. dtype: of the logits the values were taken from. fields: further fields of every `logprobs`.
    """
    scores, ids = values.detach().float().cpu(), input_ids.cpu()
    losses = None if loss_mask is None else loss_mask.int().cpu()
    spread = None if entropy is None else entropy.detach().float().cpu()
    for one in responses:
        columns, n = slice(one.start, one.stop), one.stop - one.start
        kept, classes = scores[one.row, columns], None
        if one.start == one.first and n:  # nothing comes before it, so whatever stands there is no score
            kept, classes = kept.clone(), [_MISSING] + [_FINITE] * (n - 1)
            kept[0] = float("nan")
        mask = [1] * n if losses is None else losses[one.row, columns]
        record(
            "logprobs",
            sample_id=one.sample_id,
            source=source,
            contract_id=contract_id,
            values=kept,
            value_class=classes,
            dtype=dtype,
            weight_version=weight_version,
            pass_id=pass_id,
            layout_id=layout_id,
            token_digest=token_digest(ids[one.row, columns]),
            mask_digest=mask_digest(mask),
            entropy=None if spread is None else spread[one.row, columns],
            **fields,
        )


def record_layout(
    layout_id: str,
    responses: Sequence[Response],
    shape: Sequence[int],
    *,
    loss_mask: Any = None,
    attention_mask: Any = None,
    packing: bool = False,
) -> None:
    """Records how a pass over rows [B, T] of `shape` laid `responses` out; masks are [B, T], as in `record_scores`."""
    lengths = [one.stop - one.start for one in responses]
    active = lengths if loss_mask is None else [int(loss_mask[r.row, r.start : r.stop].sum()) for r in responses]
    rows, width = (int(size) for size in shape)
    record(
        "batch.layout",
        layout_id=layout_id,
        micro_batch=rows,
        sample_order=[one.sample_id for one in responses],
        sequence_lengths=[one.stop - one.first for one in responses],
        offsets=[one.row * width + one.first for one in responses] if packing else None,
        padding_side="none" if packing else padding_side(attention_mask),
        packing=packing,
        active_density=sum(active) / (rows * width) if rows * width else None,
    )
