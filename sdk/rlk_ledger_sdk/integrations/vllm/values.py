"""The sampled tokens' log-probabilities out of vLLM's containers, and what is not a number among them."""

import math
from collections.abc import Sequence
from typing import Any

from rlk_ledger_schemas.metrics import VALUE_CLASSES

_FINITE, _NAN, _POS, _NEG, _MISSING = (
    VALUE_CLASSES.index(name) for name in ("finite", "nan", "pos_inf", "neg_inf", "missing")
)


class Sampled:
    """The sampled tokens' values alone, in the shape of vLLM's flat container."""

    def __init__(self, values: list[float | None]) -> None:
        self.logprobs = values
        self.start_indices = range(len(values))


def sampled(logprobs: Any, token_ids: Sequence[int]) -> list[float | None]:
    """One value per token: what the engine gave for the token it sampled; None where it gave none.

    `logprobs` is a FlatLogprobs (primitive lists, the sampled token first at each position) or a list of dicts from
    token id to an object with `logprob`. Where it is shorter than `token_ids`, the rest is None.
    """
    starts = getattr(logprobs, "start_indices", None)
    if starts is not None:
        flat: list[float | None] = logprobs.logprobs
        values = flat if len(flat) == len(starts) else [flat[i] for i in starts]
    else:
        try:
            values = [entries[token].logprob for entries, token in zip(logprobs, token_ids)]
        except (KeyError, TypeError):
            values = [_one(entries, token) for entries, token in zip(logprobs, token_ids)]
    missing = len(token_ids) - len(values)
    return values if missing <= 0 else [*values, *[None] * missing]


def classes(values: Sequence[float | None]) -> list[int] | None:
    """One class code per value when not all are finite numbers, else None."""
    try:
        if math.isfinite(sum(values)):  # type: ignore[arg-type]
            return None
    except TypeError:
        pass
    found = [_class(value) for value in values]
    return found if any(found) else None


def numbers(values: Sequence[float | None]) -> list[float]:
    """`values` with NaN where there is none."""
    return [math.nan if value is None else value for value in values]


def _one(entries: Any, token: int) -> float | None:
    entry = entries.get(token) if entries else None
    return None if entry is None else entry.logprob


def _class(value: float | None) -> int:
    if value is None:
        return _MISSING
    if math.isfinite(value):
        return _FINITE
    if math.isnan(value):
        return _NAN
    return _POS if value > 0 else _NEG
