"""The token-level views - tokens, drift, off_policy - from the same pairing the audit uses."""

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rlk_ledger import classes
from rlk_ledger.history import History, Sample, Score
from rlk_ledger.pairs import SIDES, PairedSample, Pairing, pair
from rlk_ledger.series import Series, assemble
from rlk_ledger_schemas.metrics import LOG_RATIO_CLAMP, VALUE_CLASSES

_TEXT = pa.dictionary(pa.int32(), pa.string())
_NAN_IS_NULL = frozenset({"dlogp", "abs_dlogp", "rho"})


class _Columns:
    """Columns under construction: per block of tokens either one value or one array."""

    def __init__(self, types: dict[str, pa.DataType]) -> None:
        self.types = types
        self.sizes: list[int] = []
        self.parts: dict[str, list[Any]] = {name: [] for name in types}

    def block(self, size: int, values: dict[str, Any]) -> None:
        """`size` rows; a scalar stands for all of them, an absent column is null."""
        self.sizes.append(size)
        for name, parts in self.parts.items():
            parts.append(values.get(name))

    def table(self) -> pa.Table:
        """The finished Arrow table."""
        return pa.table({name: self._column(name, kind) for name, kind in self.types.items()})

    def _column(self, name: str, kind: pa.DataType) -> pa.Array:
        parts = self.parts[name]
        if kind == _TEXT:
            return self._text(parts)
        dtype = next((part.dtype for part in parts if isinstance(part, np.ndarray)), None)
        if dtype is None:
            index = np.repeat(np.arange(len(parts)), self.sizes)
            return pa.array([_held(part) for part in parts], kind).take(pa.array(index))
        absent = np.repeat([part is None for part in parts], self.sizes)
        blank = [np.zeros(size, dtype) if part is None else part for part, size in zip(parts, self.sizes)]
        joined = np.concatenate(blank).astype(dtype)
        if name == "shard_rank":
            absent |= joined < 0
        elif name in _NAN_IS_NULL:
            absent |= np.isnan(joined)
        return pa.array(joined, kind, mask=absent)

    def _text(self, parts: list[Any]) -> pa.Array:
        known: dict[str, int] = {}
        codes = []
        for part, size in zip(parts, self.sizes):
            if isinstance(part, np.ndarray):
                codes.append(part.astype(np.int32))
            else:
                code = -1 if part is None else known.setdefault(str(part), len(known))
                codes.append(np.full(size, code, np.int32))
        joined = np.concatenate(codes) if codes else np.empty(0, np.int32)
        labels = list(VALUE_CLASSES) if any(isinstance(p, np.ndarray) for p in parts) else list(known)
        indices = pa.array(joined, pa.int32(), mask=joined < 0)
        return pa.DictionaryArray.from_arrays(indices, pa.array(labels, pa.string()))


_KEYS: dict[str, pa.DataType] = {
    "run_id": _TEXT,
    "step": pa.int64(),
    "sample_id": _TEXT,
    "attempt": pa.int64(),
    "group_id": _TEXT,
    "position": pa.int32(),
    "token_id": pa.uint64(),
}
_PLACE: dict[str, pa.DataType] = {
    "engine": _TEXT,
    "weight_version": _TEXT,
    "pass_id": _TEXT,
    "layout_id": _TEXT,
}
TOKENS = {
    **_KEYS,
    "source": _TEXT,
    **_PLACE,
    "contract_id": _TEXT,
    "writer_id": _TEXT,
    "shard_rank": pa.int16(),
    "mask": pa.bool_(),
    "value": pa.float32(),
    "value_class": _TEXT,
    "dlogp": pa.float64(),
    "abs_dlogp": pa.float64(),
}
DRIFT = {
    **_KEYS,
    **_PLACE,
    "rollout": pa.float32(),
    "training": pa.float32(),
    "dlogp": pa.float64(),
    "abs_dlogp": pa.float64(),
    "rho": pa.float64(),
    "rollout_rank": pa.int64(),
    "training_rank": pa.int64(),
    "shard_rank": pa.int16(),
    "rollout_contract": _TEXT,
    "training_contract": _TEXT,
    "turn": pa.int64(),
    "cached_tokens": pa.int64(),
    "chunks": pa.int64(),
    "response_length": pa.int64(),
}
OFF_POLICY = {
    **_KEYS,
    "rollout_version": _TEXT,
    "training_version": _TEXT,
    "lag": pa.int64(),
    "dlogp": pa.float64(),
    "abs_dlogp": pa.float64(),
}

Builder = Callable[[Iterable[History]], pa.Table]


def _keys(history: History, sample: Sample, at: npt.NDArray[np.int64]) -> dict[str, Any]:
    tokens = sample.response_token_ids
    return {
        "run_id": history.run_id,
        "step": sample.step,
        "sample_id": sample.sample_id,
        "attempt": sample.attempt,
        "group_id": sample.group_id,
        "position": at.astype(np.int32),
        "token_id": tokens[at].astype(np.uint64) if len(tokens) == len(sample) else None,
    }


def tokens_table(histories: Iterable[History]) -> pa.Table:
    """One row per (sample, position, source, pass): value, class, mask, token id and where it came from.

    `dlogp` and `abs_dlogp` stand on the training row of a compared token.
    """
    out = _Columns(TOKENS)
    for history in histories:
        pairing = pair(history)
        paired = {p.sample.key: p for p in pairing.pairs}
        others = _other_sources(history, pairing)
        for sample in pairing.samples:
            held = {**pairing.series[sample.key], **others.get(sample.key, {})}
            for source, series in held.items():
                for one in series:
                    _token_blocks(out, pairing, sample, source, one, paired.get(sample.key))
    return out.table()


def _other_sources(history: History, pairing: Pairing) -> dict[Any, dict[str, list[Series]]]:
    """Series of reference, teacher and replay scores, by sample key."""
    by_sample: dict[str, dict[str, list[Any]]] = {}
    for score in history.scores:
        if score.source not in SIDES:
            by_sample.setdefault(score.sample_id, {}).setdefault(score.source, []).append(score)
    out: dict[Any, dict[str, list[Series]]] = {}
    for sample in pairing.samples:
        for source, scores in by_sample.get(sample.sample_id, {}).items():
            out.setdefault(sample.key, {})[source] = assemble(history, sample, source, scores).series
    return out


def _token_blocks(
    out: _Columns, pairing: Pairing, sample: Sample, source: str, series: Series, paired: PairedSample | None
) -> None:
    """One series of a sample; the rollout's in a block per weight version, since its spans may name several."""
    codes = classes.own_classes(series.values, series.recorded)
    drift = np.full(len(sample), np.nan)
    at = np.flatnonzero(series.present)
    rows = {series.first.weight_version: at}
    if paired is not None and series is paired.rollout_series:
        codes = paired.rollout_class
        rows = {
            pairing.versions[i] if i >= 0 else series.first.weight_version: at[paired.version[at] == i]
            for i in np.unique(paired.version[at]).tolist()
        }
    elif paired is not None and source == "training":
        own = [paired.origin == i for i, held in enumerate(paired.held) if held is series]
        where = own[0] if own else np.zeros(len(sample), np.bool_)
        codes = np.where(where, paired.training_class, codes)
        where = where & paired.compared
        drift[where] = series.values[where].astype(np.float64) - paired.rollout[where]
    for version, where in rows.items():
        values = {
            "value_class": codes[where].astype(np.uint8),
            "dlogp": drift[where],
            "abs_dlogp": np.abs(drift[where]),
        }
        out.block(len(where), values | _token_values(pairing.history, sample, source, series, version, where))


def _token_values(
    history: History,
    sample: Sample,
    source: str,
    series: Series,
    version: str | None,
    at: npt.NDArray[np.int64],
) -> dict[str, Any]:
    first = series.first
    return _keys(history, sample, at) | {
        "source": source,
        "engine": sample.engine if source == "rollout" else None,
        "weight_version": version,
        "pass_id": first.pass_id,
        "layout_id": first.layout_id,
        "contract_id": first.contract_id,
        "writer_id": first.writer_id,
        "shard_rank": series.rank[at],
        "mask": sample.loss_mask[at].astype(np.bool_),
        "value": series.values[at],
    }


def drift_table(histories: Iterable[History], columns: Collection[str] | None = None) -> pa.Table:
    """One row per compared token: paired, active and finite on both sides. Only `columns` are made, when given."""
    wanted = {name: kind for name, kind in DRIFT.items() if columns is None or name in columns}
    wanted = wanted or {"step": DRIFT["step"]}  # `count(*)` takes none, and counts rows
    tables = [_drift_of(history, wanted) for history in histories]
    if not tables:
        return pa.schema(list(wanted.items())).empty_table()
    return tables[0] if len(tables) == 1 else pa.concat_tables(tables).unify_dictionaries()


def _drift_of(history: History, wanted: dict[str, pa.DataType]) -> pa.Table:
    """The columns `wanted` of one history's compared tokens: what a token has of its own, and what its block shares."""
    pairing = pair(history)
    blocks = _Blocks(pairing)
    made: dict[str, pa.Array] = {}
    for name, kind in wanted.items():
        if name in _OF_A_TOKEN:
            values, absent = _OF_A_TOKEN[name](blocks)
            made[name] = pa.array(values, kind, mask=absent)
        else:
            made[name] = _spread([_OF_A_BLOCK[name](one) for one in blocks.held], blocks.sizes, kind)
    return pa.table(made)


class _Block(NamedTuple):
    """Compared tokens of one pair, of one weight version and one training pass."""

    pairing: Pairing
    pair: PairedSample
    version: int
    training: Score

    @property
    def rollout(self) -> Score:
        return self.pair.rollout_series.first

    def rank(self, score: Score) -> Any:
        return self.pairing.history.writers.get(score.writer_id, {}).get("rank")


class _Blocks:
    """The compared tokens of a run, as rows of its columns and as blocks of them."""

    def __init__(self, pairing: Pairing) -> None:
        self.columns, self.pairing = pairing.columns, pairing
        self.rows = rows = self.columns.rows()
        self.all = len(rows) == len(self.columns.owner)
        keys = [self.take(key) for key in (self.columns.owner, self.columns.version, self.columns.origin)]
        new = np.zeros(max(len(rows) - 1, 0), np.bool_)
        for key in keys:
            new |= key[1:] != key[:-1]
        starts = np.concatenate([np.zeros(min(len(rows), 1), np.int64), np.flatnonzero(new) + 1])
        self.sizes = np.diff(starts, append=len(rows))
        places = zip(*(key[starts].tolist() for key in keys))
        self.held = [self._block(*place) for place in places]

    def take(self, column: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """A column of the run at the compared tokens."""
        return column if self.all else column[self.rows]

    def _block(self, owner: int, version: int, origin: int) -> _Block:
        one = self.pairing.pairs[owner]
        return _Block(self.pairing, one, version, one.held[origin].first)

    @cached_property
    def dlogp(self) -> npt.NDArray[np.float64]:
        """t - r of each compared token, in nats."""
        return np.asarray(
            self.take(self.columns.training).astype(np.float64) - self.take(self.columns.rollout), np.float64
        )


def _token_ids(blocks: _Blocks) -> tuple[npt.NDArray[Any], npt.NDArray[np.bool_] | None]:
    """Token ids (uint64), absent where a sample was recorded without them."""
    samples = [p.sample for p in blocks.pairing.pairs]
    known = [len(s.response_token_ids) == len(s) for s in samples]
    parts = [s.response_token_ids if there else np.zeros(len(s), np.int32) for s, there in zip(samples, known)]
    ids = np.concatenate([part.astype(np.uint64) for part in parts]) if parts else np.empty(0, np.uint64)
    return blocks.take(ids), None if all(known) else ~np.array(known)[blocks.take(blocks.columns.owner)]


def _whole(values: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], None]:
    return values, None


_Cells = tuple[npt.NDArray[Any], npt.NDArray[np.bool_] | None]
_OF_A_TOKEN: dict[str, Callable[[_Blocks], _Cells]] = {
    "position": lambda b: _whole(b.columns.position(b.rows).astype(np.int32)),
    "token_id": _token_ids,
    "rollout": lambda b: _whole(b.take(b.columns.rollout)),
    "training": lambda b: _whole(b.take(b.columns.training)),
    "dlogp": lambda b: _whole(b.dlogp),
    "abs_dlogp": lambda b: _whole(np.abs(b.dlogp)),
    "rho": lambda b: _whole(np.exp(np.clip(b.dlogp, -LOG_RATIO_CLAMP, LOG_RATIO_CLAMP))),
    "shard_rank": lambda b: (b.take(b.columns.rank), b.take(b.columns.rank) < 0),
}
"""Columns that differ from token to token: (values, which are absent or None)."""
_OF_A_BLOCK: dict[str, Callable[[_Block], Any]] = {
    "run_id": lambda b: b.pairing.history.run_id,
    "step": lambda b: b.pair.sample.step,
    "sample_id": lambda b: b.pair.sample.sample_id,
    "attempt": lambda b: b.pair.sample.attempt,
    "group_id": lambda b: b.pair.sample.group_id,
    "engine": lambda b: b.pair.sample.engine,
    "weight_version": lambda b: b.pairing.versions[b.version] if b.version >= 0 else None,
    "pass_id": lambda b: b.training.pass_id,
    "layout_id": lambda b: b.training.layout_id,
    "rollout_rank": lambda b: b.rank(b.rollout),
    "training_rank": lambda b: b.rank(b.training),
    "rollout_contract": lambda b: b.rollout.contract_id,
    "training_contract": lambda b: b.training.contract_id,
    "turn": lambda b: b.pair.sample.dims.get("turn"),
    "cached_tokens": lambda b: b.pair.sample.cache.get("cached_tokens"),
    "chunks": lambda b: len(b.pair.sample.chunks) or None,
    "response_length": lambda b: len(b.pair.sample),
}
"""Columns whose value a block shares."""


def _held(value: Any) -> Any:
    """The value of a cell; a count that no column holds is absent."""
    return None if isinstance(value, int) and abs(value) >= 1 << 63 else value


def _spread(values: list[Any], sizes: npt.NDArray[np.int64], kind: pa.DataType) -> pa.Array:
    """One value a block, repeated over its tokens; text as codes into its distinct values."""
    if kind == _TEXT:
        known: dict[str, int] = {}
        codes = [-1 if value is None else known.setdefault(str(value), len(known)) for value in values]
        joined = np.repeat(np.array(codes, np.int32), sizes)
        indices = pa.array(joined, pa.int32(), mask=joined < 0 if -1 in codes else None)
        return pa.DictionaryArray.from_arrays(indices, pa.array(list(known), pa.string()))
    values = [_held(value) for value in values]
    absent = np.array([value is None for value in values], np.bool_)
    cells = np.array([0 if value is None else value for value in values], np.int64)
    return pa.array(np.repeat(cells, sizes), kind, mask=np.repeat(absent, sizes) if absent.any() else None)


def off_policy_table(histories: Iterable[History]) -> pa.Table:
    """One row per active token whose training pass has another weight version."""
    out = _Columns(OFF_POLICY)
    for history in histories:
        for row in pair(history).off_policy:
            values = _keys(history, row.sample, row.positions) | {
                "rollout_version": row.rollout_version,
                "training_version": row.training_version,
                "lag": row.lag,
                "dlogp": row.dlogp,
                "abs_dlogp": np.abs(row.dlogp),
            }
            out.block(len(row.positions), values)
    return out.table()


BUILDERS: dict[str, Builder] = {"tokens": tokens_table, "drift": drift_table, "off_policy": off_policy_table}
NEEDS: Sequence[str] = (
    "rollout.sample",
    "logprobs",
    "writer.opened",
    "weights.published",
    "batch.layout",
    "contract.declared",
)
"""Event types the token views are built from; other segments are not read."""
