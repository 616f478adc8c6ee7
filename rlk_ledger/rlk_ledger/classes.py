"""Value classes: what a recorded log-probability is before it is a number.

Codes are indices into `rlk_ledger_schemas.metrics.VALUE_CLASSES`. A value's own bits give `nan`, `pos_inf`, `neg_inf`,
`impossible` and `sentinel`; the other side of the pair gives `defaulted` and `copied`; the recorder gives `missing`.
Exact zeros at confident tokens are ordinary in low precision, so zero alone is never a class.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rlk_ledger_schemas.metrics import (
    COPIED_PROBABILITY,
    COPIED_RUN,
    DEFAULTED_OTHER_BELOW,
    DEFAULTED_VALUES,
    IMPOSSIBLE_ABOVE,
    SENTINELS,
    VALUE_CLASSES,
    ZERO_DRIFT_FRACTION,
)

Float32 = npt.NDArray[np.float32]
Codes = npt.NDArray[np.uint8]
Bool = npt.NDArray[np.bool_]
Index = npt.NDArray[np.int64]

FINITE, NAN, POS_INF, NEG_INF, SENTINEL, MISSING, IMPOSSIBLE, DEFAULTED, COPIED = range(len(VALUE_CLASSES))

SENTINEL_BITS = np.array(SENTINELS, np.float32).view(np.uint32)
"""The bits of SENTINELS."""

RECURS_BELOW = -50.0
"""A value below this (probability under 2e-22) whose exact bits recur is a clamp too: sampling it twice is not."""
_FLOOR_COUNT = 4
_FLOOR_AT_MOST = -10.0
_FLOOR_NEIGHBOURHOOD = 2.0
_FLOOR_EXCESS = 3
_PILE_COUNT = 8
_PILE_EXCESS = 4

_EQUALITY_BINS = 20
_REST_TOKENS = 12
"""Tokens a sample needs outside its longest equal run before its equality rate says anything."""


class Crossed(NamedTuple):
    """Classes after comparing the sides, and the share of compared tokens that are bitwise equal (None: none)."""

    rollout: Codes
    training: Codes
    equal_fraction: float | None
    copied_runs: tuple[tuple[int, int], ...]


def own_classes(
    values: Float32, recorded: Codes | None = None, sentinels: npt.NDArray[np.uint32] | None = None
) -> Codes:
    """The class of each value (float32[n]) from its own bits; `recorded` codes (uint8[n]) above 0 win.

    `sentinels` are the bits this side's run uses as a clamp (`recurring_sentinels`), added to the known ones.
    """
    bits = np.ascontiguousarray(values).view(np.uint32)
    codes = np.zeros(values.shape, np.uint8)
    codes[values > IMPOSSIBLE_ABOVE] = IMPOSSIBLE
    low = values < _FLOOR_AT_MOST
    if low.any():
        known = SENTINEL_BITS if sentinels is None else np.concatenate([SENTINEL_BITS, sentinels])
        at = np.flatnonzero(low)
        codes[at[np.isin(bits[at], known)]] = SENTINEL
    special = ~np.isfinite(values)
    if special.any():
        codes[special & (values > 0)] = POS_INF
        codes[special & (values < 0)] = NEG_INF
        codes[np.isnan(values)] = NAN
    if recorded is not None and recorded.any():
        codes = np.where(recorded > 0, recorded, codes).astype(np.uint8)
    return codes


def recurring_sentinels(values: Float32) -> npt.NDArray[np.uint32]:
    """Bits (uint32[k]) that stand for a clamp in one side of a run, found by recurrence.

    Three shapes: exact bits below -50 that occur twice; a floor, where a whole-numbered minimum at or below -10 is
    piled up (at least 4 times, at least 3 times as often as any other value within 2 nats of it); and the same pile
    above the minimum, where only a part of the run was clamped (at least 8 times, 4 times as often).
    """
    tail = values[values <= _FLOOR_AT_MOST]
    tail = tail[np.isfinite(tail)]
    if tail.size == 0:
        return np.empty(0, np.uint32)
    distinct, count = np.unique(tail, return_counts=True)
    found = distinct[(distinct < RECURS_BELOW) & (count >= 2)].tolist()
    for index in np.flatnonzero((count >= _FLOOR_COUNT) & (distinct == np.floor(distinct))).tolist():
        least, excess = (_FLOOR_COUNT, _FLOOR_EXCESS) if index == 0 else (_PILE_COUNT, _PILE_EXCESS)
        near = np.abs(distinct - distinct[index]) <= _FLOOR_NEIGHBOURHOOD
        near[index] = False
        crowd = int(count[near].max(initial=1))
        if count[index] >= max(least, excess * crowd):
            found.append(float(distinct[index]))
    return np.unique(np.array(found, np.float32).view(np.uint32))


def cross_classes(
    rollout: Float32, training: Float32, left: Codes, right: Codes, active: Bool, sample: Index
) -> Crossed:
    """Adds `defaulted` and `copied` to the classes of two sides of the same tokens.

    All arrays have one entry a token, samples one after the other; `sample` (int64[n]) numbers them. Only active tokens
    are compared. The side that holds the constant is `defaulted`. Both sides of a copied run are `copied`, because the
    bits do not say who copied. When 99 % or more of the compared tokens are equal nothing is `copied`.
    """
    left, right = left.copy(), right.copy()
    for values, codes, other, others in ((rollout, left, training, right), (training, right, rollout, left)):
        constant = np.isin(values, DEFAULTED_VALUES) & (other < DEFAULTED_OTHER_BELOW)
        if constant.any():
            codes[constant & active & (others == FINITE) & (codes != MISSING)] = DEFAULTED
    comparable = active & (left == FINITE) & (right == FINITE)
    compared = int(np.count_nonzero(comparable))
    if compared == 0:
        return Crossed(left, right, None, ())
    equal = _bits(rollout)[comparable] == _bits(training)[comparable]
    fraction = float(np.count_nonzero(equal) / compared)
    if fraction >= ZERO_DRIFT_FRACTION or not _has_run(equal, COPIED_RUN):
        return Crossed(left, right, fraction, ())
    at = np.flatnonzero(comparable)
    runs = _copied_runs(rollout[at], equal, sample[at])
    for start, end in runs:
        rows = at[start:end]
        rows = rows[rollout[rows] != 0.0]
        left[rows] = right[rows] = COPIED
    return Crossed(left, right, fraction, tuple((int(at[a]), int(at[b - 1]) + 1) for a, b in runs))


def _bits(values: Float32) -> npt.NDArray[np.uint32]:
    return np.ascontiguousarray(values).view(np.uint32)


def _has_run(equal: Bool, length: int) -> bool:
    """Whether `length` equal tokens could stand in one run: saturated ones, which a run skips, are equal too."""
    differ = np.flatnonzero(~equal)
    gaps = np.diff(differ, prepend=-1, append=len(equal)) - 1
    return bool((gaps >= length).any())


def _copied_runs(values: Float32, equal: Bool, sample: Index) -> list[tuple[int, int]]:
    """Runs [start, end) of equal tokens too long for the run's own equality rate.

    Saturated tokens (both sides exactly 0.0) cluster in confident text, so they neither extend nor break a run nor
    count in the rate. The rate is the larger of two: that of the token's log-probability bin, because values near 0
    have few distinct bits, and that of the most equal sample outside its longest run, because samples differ in noise.
    The threshold is 1e-6, and lower where a run has so many tokens that 1e-6 is expected by chance.
    """
    saturated = equal & (values == 0.0)
    index = np.flatnonzero(~saturated)
    if index.size < COPIED_RUN:
        return []
    hits, owners = equal[index], sample[index]
    limit = np.log(min(COPIED_PROBABILITY, 1e-3 / index.size))
    edges = np.flatnonzero((hits[1:] != hits[:-1]) | (owners[1:] != owners[:-1])) + 1
    starts, ends = np.concatenate([[0], edges]), np.concatenate([edges, [index.size]])
    long = hits[starts] & (ends - starts >= COPIED_RUN)
    if not long.any():
        return []
    log_rate = np.maximum(_log_equality_rate(values[index], hits), _log_sample_rate(owners, hits, starts, ends))
    total = np.concatenate([[0.0], np.cumsum(log_rate)])
    chosen = long & (total[ends] - total[starts] < limit)
    return [(int(index[a]), int(index[b - 1]) + 1) for a, b in zip(starts[chosen], ends[chosen])]


def _log_sample_rate(owners: Index, hits: Bool, starts: Index, ends: Index) -> float:
    """log of the highest equality rate a sample shows outside its longest equal run (with enough tokens there)."""
    _, owner = np.unique(owners, return_inverse=True)
    size = np.bincount(owner)
    longest = np.zeros(len(size), np.int64)
    equal = hits[starts]
    np.maximum.at(longest, owner[starts[equal]], (ends - starts)[equal])
    rest = size - longest
    share = (np.bincount(owner, weights=hits.astype(np.float64)) - longest + 1.0) / (rest + 2.0)
    enough = rest >= _REST_TOKENS
    return float(np.log(share[enough].max())) if enough.any() else -np.inf


def _log_equality_rate(values: Float32, hits: Bool) -> npt.NDArray[np.float64]:
    """log of the equality rate of each token's log-probability bin, never above the log of the (n+1)/(n+2) rule."""
    cuts = np.quantile(values, np.linspace(0, 1, _EQUALITY_BINS + 1)[1:-1])
    bins = np.searchsorted(cuts, values, side="right")
    size = np.bincount(bins, minlength=_EQUALITY_BINS).astype(np.float64)
    share = np.bincount(bins, weights=hits.astype(np.float64), minlength=_EQUALITY_BINS)
    return np.asarray(np.log((share + 1.0) / (size + 2.0))[bins], np.float64)


def class_counts(left: Codes, right: Codes) -> dict[str, int]:
    """How many of these tokens have each class other than `finite` on either side, as `<side>.<class>` -> count."""
    out: dict[str, int] = {}
    for side, codes in (("rollout", left), ("training", right)):
        counts = np.bincount(codes, minlength=len(VALUE_CLASSES))
        for code, name in enumerate(VALUE_CLASSES):
            if code != FINITE and code < len(counts) and counts[code]:
                out[f"{side}.{name}"] = int(counts[code])
    return out
