"""Which weight version sampled which response position.

The frameworks keep one list of versions, an entry a generation call, and one list of tokens. Which call made which
token is exact when one call was made since the last look, or when all calls saw one version; else it is read from the
loss mask, if it has exactly one run of trained tokens a call; else it is not known and not recorded.
"""

import weakref
from collections.abc import Sequence
from typing import Any

import msgspec

Span = tuple[str, int, int]


class Seen(msgspec.Struct):
    """What is known of one sample: tokens and calls looked at, spans so far (None: underivable), recorded under."""

    alive: Any
    length: int = 0
    calls: int = 0
    spans: list[Span] | None = msgspec.field(default_factory=list)
    recorded: bool = False


class Tracker:
    """Follows samples from one generation call to the next; a sample that is gone is forgotten."""

    def __init__(self) -> None:
        self._seen: dict[int, Seen] = {}

    def look(self, sample: Any) -> Seen:
        """Brings what is known of a sample up to its present tokens, versions and mask."""
        seen = self._get(sample)
        versions = [str(v) for v in getattr(sample, "weight_versions", None) or ()]
        length = int(getattr(sample, "response_length", 0) or 0)
        if length < seen.length or len(versions) < seen.calls:  # the framework started it again
            seen.length, seen.calls, seen.spans, seen.recorded = 0, 0, [], False
        if length > seen.length:
            mask = list(getattr(sample, "loss_mask", None) or [1] * length)[seen.length : length]
            new = derive(versions[seen.calls :], mask, seen.length)
            seen.spans = None if new is None or seen.spans is None else joined(seen.spans + new)
        seen.length, seen.calls = length, len(versions)
        return seen

    def _get(self, sample: Any) -> Seen:
        seen = self._seen.get(id(sample))
        if seen is not None and seen.alive() is sample:
            return seen
        key = id(sample)
        try:
            seen = self._seen[key] = Seen(weakref.ref(sample, lambda _: self._seen.pop(key, None)))
        except TypeError:  # cannot be followed, only looked at
            seen = Seen(lambda: sample)
        return seen


def derive(versions: Sequence[str], mask: Sequence[int], start: int) -> list[Span] | None:
    """The spans of the tokens from `start` on, whose mask is `mask`, made by calls under `versions`; None: unknown."""
    if len(set(versions)) == 1:
        return [(versions[0], start, start + len(mask))]
    runs = trained_runs(mask, start)
    if not versions or len(runs) != len(versions):
        return None
    return [(version, a, b) for version, (a, b) in zip(versions, runs)]


def trained_runs(mask: Sequence[int], start: int = 0) -> list[tuple[int, int]]:
    """The half-open ranges of ones in a mask, counted from `start`."""
    edges = [0, *[int(bool(m)) for m in mask], 0]
    ups = [i for i in range(1, len(edges)) if edges[i] > edges[i - 1]]
    downs = [i for i in range(1, len(edges)) if edges[i] < edges[i - 1]]
    return [(start + a - 1, start + b - 1) for a, b in zip(ups, downs)]


def joined(spans: list[Span]) -> list[Span]:
    """Adjacent spans of one version as one."""
    out: list[Span] = []
    for version, start, end in spans:
        if out and out[-1][0] == version and out[-1][2] == start:
            out[-1] = (version, out[-1][1], end)
        else:
            out.append((version, start, end))
    return out
