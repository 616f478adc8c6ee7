"""How a micro-batch lies in memory: which of this rank's logits score which response tokens.

The logits of position i score token i + 1, so response token j of a row whose prompt has p tokens is scored at
p - 1 + j. Context parallelism cuts every row (or every packed sequence), padded to a multiple of 2 x cp, as
`rlk_ledger_sdk.ring` says.

Legend: n response tokens, S positions of this rank, B rows of this rank's logits.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rlk_ledger_schemas.errors import UsageError
from rlk_ledger_sdk.integrations.megatron.place import Axis
from rlk_ledger_sdk.ring import ring_chunks


class Row(NamedTuple):
    """One sample of a micro-batch: its prompt length, response ids and loss mask (None where not given)."""

    sample_id: str
    prompt: int
    response: list[int]
    mask: list[int] | None

    @property
    def length(self) -> int:
        """Tokens of the row without padding."""
        return self.prompt + len(self.response)


class Span(NamedTuple):
    """Local logits [start, start + tokens) of row `row` score response tokens [first, first + tokens)."""

    row: int
    start: int
    first: int
    tokens: int


@dataclass(frozen=True)
class Layout:
    """The rows of a micro-batch and where each begins.

    `widths` are the padded lengths of the rows before context parallelism cuts them; `packed` says that all rows follow
    each other in one (thd), instead of standing in rows of equal width padded on the right (bshd).
    """

    rows: tuple[Row, ...]
    widths: tuple[int, ...]
    packed: bool

    def spans(self, cp: Axis) -> list[list[Span]]:
        """For every row the spans of it that this context-parallel rank scores, in memory order."""
        out, offset = [], 0
        for index, (row, width) in enumerate(zip(self.rows, self.widths)):
            place = (0, offset) if self.packed else (index, 0)
            out.append(_row_spans(row, width, cp, *place))
            offset += width // cp.size
        return out

    @property
    def offsets(self) -> list[int]:
        """Where each row begins: in the packed sequence, else in the flattened batch (tokens)."""
        edges = [0]
        for width in self.widths:
            edges.append(edges[-1] + width)
        return edges[:-1]

    @property
    def active_density(self) -> float | None:
        """Share of all positions, padding included, that carry an active response token; None without masks."""
        if any(row.mask is None for row in self.rows):
            return None
        return sum(sum(row.mask or ()) for row in self.rows) / sum(self.widths)


def _row_spans(row: Row, width: int, cp: Axis, logits_row: int, offset: int) -> list[Span]:
    begin, end = row.prompt - 1, row.prompt - 1 + len(row.response)
    spans = []
    for local, low, high in chunks(width, cp):
        low, high, shift = max(low, begin), min(high, end), local - low
        if high > low:
            spans.append(Span(logits_row, offset + shift + low, low - begin, high - low))
    return spans


def chunks(width: int, cp: Axis) -> list[tuple[int, int, int]]:
    """(local position, first, end) of the parts of a row of `width` positions that context rank `cp` holds."""
    out, local = [], 0
    for low, high in ring_chunks(width, *cp):
        out.append((local, low, high))
        local += high - low
    return out


def layout_of(
    sample_ids: Sequence[str],
    tokens: Sequence[Any],
    response_lengths: Sequence[int],
    loss_masks: Sequence[Any] | None,
    packed: bool,
    padded_to: int | Sequence[int] | None,
    cp: Axis,
) -> Layout:
    """The layout of a micro-batch as its caller describes it; raises UsageError where the parts do not fit.

    tokens: per sample prompt and response ids without padding. loss_masks: per sample one entry a response token.
    padded_to: the width of all rows, or one a row; by default the longest row, or each row itself when packed, rounded
    up to what context parallelism needs.
    """
    masks = [None] * len(sample_ids) if loss_masks is None else list(loss_masks)
    if not len(sample_ids) == len(tokens) == len(response_lengths) == len(masks):
        raise UsageError(
            f"scoring.batch: {len(sample_ids)} sample_ids, {len(tokens)} tokens, {len(response_lengths)} "
            f"response_lengths and {len(masks)} loss_masks; give one of each a sample."
        )
    rows = tuple(_row(*given) for given in zip(sample_ids, tokens, response_lengths, masks))
    widths = _widths(rows, packed, padded_to, 2 * cp.size if cp.size > 1 else 1)
    return Layout(rows, widths, packed)


def _row(sample_id: str, tokens: Any, response: int, mask: Any) -> Row:
    ids = ints(tokens)
    if not 0 <= response < len(ids):
        raise UsageError(
            f"scoring.batch: sample {sample_id!r} has {len(ids)} tokens and a response of {response}; a response needs "
            "at least one token before it."
        )
    flags = None if mask is None else list(bytes(map(bool, ints(mask))))
    if flags is not None and len(flags) != response:
        raise UsageError(f"scoring.batch: sample {sample_id!r} has {response} response tokens, a mask of {len(flags)}.")
    prompt = len(ids) - response
    return Row(sample_id, prompt, ids[prompt:], flags)


def _widths(rows: tuple[Row, ...], packed: bool, padded_to: Any, multiple: int) -> tuple[int, ...]:
    lengths = [row.length for row in rows]
    if padded_to is None:
        needed = lengths if packed else [max(lengths, default=0)] * len(rows)
        return tuple(-(-length // multiple) * multiple for length in needed)
    widths = tuple(ints(padded_to)) if not isinstance(padded_to, int) else (padded_to,) * len(rows)
    bad = [i for i, (width, length) in enumerate(zip(widths, lengths)) if width < length or width % multiple]
    if len(widths) != len(rows) or bad:
        raise UsageError(
            f"scoring.batch: padded_to is {list(widths)} for rows of {lengths} tokens; each must hold its row and be a "
            f"multiple of {multiple}."
        )
    return widths


def ints(values: Any) -> list[int]:
    """Token ids or flags as a list, from a list, numpy array or tensor on any device."""
    return list(values.tolist() if hasattr(values, "tolist") else values)
