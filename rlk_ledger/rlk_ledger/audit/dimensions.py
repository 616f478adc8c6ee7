"""Every recorded dimension drift can be split by, read from the events generically.

A plain value anywhere in a sample, its scores, its layout or its writers is a dimension; so are a few derived ones that
name a cause (`cache.stale`). A new field or event of the same kind becomes a dimension without code here.
"""

import itertools
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from rlk_ledger.audit.view import View
from rlk_ledger.pairs import PairedSample

Index = npt.NDArray[np.int64]

MAX_LEVELS = 64
_CATEGORIES = 8
_IDENTIFIERS = ("digest", "seed", "sample_id", "group_id", "prompt_id", "session_id", "pid", "parent_writer", "reward")
_DEEP = 3

DERIVED = (
    "cache.stale",
    "spec.used",
    "routes.incomplete",
    "training.shard_rank",
    "prefill.chunked",
    "versions.mixed",
    "seam.token",
    "seam.after",
    "cache.hit",
    "retried",
)
"""Derived dimensions, the most causal name first; aliases are reported under the first of these."""


@dataclass(frozen=True, slots=True)
class Dimension:
    """Level codes of one dimension: one a pair, or one a compared token when `within`; -1 where unknown.

    `tested` limits which levels may be called worse (None: all).
    """

    name: str
    codes: Index
    labels: tuple[str, ...]
    within: bool = False
    tested: tuple[int, ...] | None = None


def between(view: View, constant: bool = False) -> list[Dimension]:
    """Dimensions constant within a sample; those with one level only when `constant`."""
    shared = _Shared(view)
    rows = [dict(_sample_values(shared, pair)) for pair in view.pairs]
    names = dict.fromkeys(name for row in rows for name in row)
    found = [_coded(name, [row.get(name) for row in rows], 1 if constant else 2) for name in names]
    return [dimension for dimension in found if dimension is not None]


class _Shared:
    """Values many samples share - of a writer under each side's prefix, of a layout - flattened once."""

    def __init__(self, view: View) -> None:
        self._writers = {
            (side, writer): [*_flat(f"{side}.writer", opened), (f"{side}.writer", writer)]
            for writer, opened in view.history.writers.items()
            for side in ("rollout", "training")
        }
        self._layouts = {
            fact.fields["layout_id"]: list(_flat("layout", fact.fields)) for fact in view.history.of("batch.layout")
        }

    def writer(self, side: str, writer_id: str) -> list[tuple[str, Any]]:
        return self._writers.get((side, writer_id), [(f"{side}.writer", writer_id)])

    def layout(self, layout_id: str | None) -> list[tuple[str, Any]]:
        return self._layouts.get(layout_id, []) if layout_id is not None else []


def _sample_values(shared: _Shared, pair: PairedSample) -> Iterable[tuple[str, Any]]:
    sample = pair.sample
    rollout, training = pair.rollout_series.first, pair.training_series.first
    yield from _flat("", sample.dims)
    yield from _flat("labels", sample.labels)
    yield from _flat("sampling", sample.sampling)
    yield from _flat("rollout", rollout.dims)
    yield from _flat("training", training.dims)
    yield from shared.writer("rollout", rollout.writer_id)
    yield from shared.writer("training", training.writer_id)
    yield "layout_id", pair.layout_id
    yield from shared.layout(pair.layout_id)
    yield "length.response", len(sample)
    if sample.prompt_token_ids is not None:
        yield "length.prompt", len(sample.prompt_token_ids)
    yield from _derived(pair)


def _derived(pair: PairedSample) -> Iterable[tuple[str, Any]]:
    sample = pair.sample
    cached, written_by = sample.cache.get("cached_tokens"), sample.cache.get("writer_version")
    if cached is not None:
        yield "cache.hit", _Flag(cached > 0)
        version = sample.weight_spans[0][0] if sample.weight_spans else None
        if written_by is not None and version is not None:
            yield "cache.stale", _Flag(cached > 0 and written_by != version)
    spec = sample.dims.get("spec") or {}
    if spec.get("drafted") is not None:
        yield "spec.used", _Flag(spec["drafted"] > 0)
    if sample.chunks:
        yield "prefill.chunked", _Flag(len(sample.chunks) > 1)
    if sample.routed_experts.get("coverage") is not None:
        yield "routes.incomplete", _Flag(sample.routed_experts["coverage"] < 1.0)
    if sample.weight_spans:
        yield "versions.mixed", _Flag(len(sample.weight_spans) > 1)
    if sample.attempt is not None:
        yield "retried", _Flag(sample.attempt > 0)


class _Flag(str):
    """A derived yes/no: only `true` may be called worse."""

    __slots__ = ()

    def __new__(cls, value: bool) -> "_Flag":
        return super().__new__(cls, "true" if value else "false")


def _flat(prefix: str, value: Any, depth: int = 0) -> Iterable[tuple[str, Any]]:
    """Plain values under dotted names; identifiers, lists and free text are not dimensions."""
    if isinstance(value, dict) and depth < _DEEP:
        for key, inner in value.items():
            name = f"{prefix}.{key}" if prefix else str(key)
            if not _is_identifier(str(key)):
                yield from _flat(name, inner, depth + 1)
    elif isinstance(value, bool | int | float | str) and prefix:
        yield prefix, value


@cache
def _is_identifier(key: str) -> bool:
    return any(word in key for word in _IDENTIFIERS)


def _coded(name: str, values: list[Any], fewest: int) -> Dimension | None:
    """Levels of a column of plain values: categories, or thirds of a number with many; None below `fewest` levels."""
    known = [v for v in values if v is not None]
    numeric = bool(known) and all(isinstance(v, int | float) and not isinstance(v, bool) for v in known)
    if numeric and len(set(known)) > _CATEGORIES:
        return _thirds(name, values)
    flags = all(isinstance(v, _Flag) for v in known)
    texts = [None if v is None else str(v).lower() if isinstance(v, bool) else str(v) for v in values]
    counts = Counter(text for text in texts if text is not None)
    if len(counts) < fewest:
        return None
    labels = tuple(text for text, _ in counts.most_common(MAX_LEVELS))
    index = {text: i for i, text in enumerate(labels)}
    codes = np.array([-1 if text is None else index.get(text, -1) for text in texts], np.int64)
    return Dimension(name, codes, labels, tested=(index["true"],) if flags and "true" in index else None)


def _thirds(name: str, values: list[Any]) -> Dimension | None:
    known = np.array([v for v in values if v is not None], np.float64)
    if not np.isfinite(known).all():
        return None
    cuts = np.unique(np.quantile(known, [1 / 3, 2 / 3]))
    codes = np.array([-1 if v is None else int(np.searchsorted(cuts, v, side="right")) for v in values], np.int64)
    edges = ["-inf", *(f"{c:g}" for c in cuts), "inf"]
    labels = tuple(f"[{a}, {b})" for a, b in itertools.pairwise(edges))
    return Dimension(name, codes, labels) if len(np.unique(codes[codes >= 0])) > 1 else None


def within(view: View) -> list[Dimension]:
    """Dimensions that vary inside a sample, one code a compared token."""
    tokens, pairs = view.tokens, view.pairs
    if not len(tokens):
        return []
    lengths = np.array([len(p.sample) for p in pairs], np.int64)[tokens.sample]
    third = np.minimum(tokens.position * 3 // np.maximum(lengths, 1), 2)
    out = [Dimension("position.third", third, ("first", "middle", "last"), within=True)]
    if (tokens.rank >= 0).any():
        ranks = tuple(str(i) for i in range(int(tokens.rank.max()) + 1))
        out.append(Dimension("training.shard_rank", tokens.rank, ranks, within=True))
    segment = np.concatenate([_segment(p) for p in pairs])
    yes = ("false", "true")
    out.append(Dimension("seam.after", (segment > 0).astype(np.int64), yes, within=True, tested=(1,)))
    out.append(Dimension("seam.token", np.concatenate([_seam(p) for p in pairs]), yes, within=True, tested=(1,)))
    out.append(Dimension("position.first", (tokens.position == 0).astype(np.int64), yes, within=True, tested=(1,)))
    out.append(
        Dimension("position.last", (tokens.position == lengths - 1).astype(np.int64), yes, within=True, tested=(1,))
    )
    spans = np.concatenate([_span(p) for p in pairs])
    out.append(Dimension("weight_span", spans, ("first", "later"), within=True))
    return [d for d in out if len(np.unique(d.codes[d.codes >= 0])) > 1]


def _segment(pair: PairedSample) -> Index:
    """How many masked stretches (tool or environment text) lie before each compared token."""
    starts = np.diff(pair.active.astype(np.int8), prepend=np.int8(pair.active[0] if len(pair.active) else 0)) == 1
    return np.cumsum(starts)[pair.compared].astype(np.int64)


def _seam(pair: PairedSample) -> Index:
    """1 at the first active token after a masked stretch."""
    active = pair.active
    starts = np.zeros(len(active), np.int64)
    starts[1:] = active[1:] & ~active[:-1]
    return starts[pair.compared]


def _span(pair: PairedSample) -> Index:
    """0 in the first weight span of a sample, 1 in later ones, -1 where there is one span only."""
    version = pair.version[pair.compared]
    if not len(version) or (version == version[0]).all():
        return np.full(len(version), -1, np.int64)
    return np.asarray(version != version[0], np.int64)
