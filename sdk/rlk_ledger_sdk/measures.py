"""Live drift metrics over flat columns: the definitions of `rlk_ledger_schemas.metrics`, with numpy and without.

Both ways classify a value before it is a number and agree with `rlk_ledger.metrics` within rounding. Two classes need
more than one batch and are left to the audit: `copied`, and sentinels found by recurrence.
"""

import math
from array import array
from collections.abc import Sequence
from typing import Any

import msgspec

from rlk_ledger_schemas.metrics import (
    CLIP_EPSILON,
    DEFAULTED_OTHER_BELOW,
    DEFAULTED_VALUES,
    EXTREME_TAU,
    IMPOSSIBLE_ABOVE,
    LIVE,
    LOG_RATIO_CLAMP,
    SENTINELS,
    VALUE_CLASSES,
)

FINITE, NAN, POS_INF, NEG_INF, SENTINEL, MISSING, IMPOSSIBLE, DEFAULTED, _ = range(len(VALUE_CLASSES))

_SENTINELS = array("f", SENTINELS)
_SENTINEL_SET = frozenset(_SENTINELS)
_SENTINELS_BELOW = -10.0
_CHUNK = 1 << 16
_LOW, _HIGH = math.log1p(-CLIP_EPSILON), math.log1p(CLIP_EPSILON)
_EXTREME = math.log(EXTREME_TAU)
_SUMS = ("abs", "d", "kl_k3", "ratio", "ratio_squared", "clipped", "error", "extreme", "clamped")


class Measured(msgspec.Struct, frozen=True):
    """Metrics of LIVE over the `tokens` that are finite on both sides; empty where there is none.

    `excluded` counts the rest as `<side>.<class>`, `worst` is (index into the columns, dlogp) of the largest |d|.
    """

    tokens: int
    clamped: int
    excluded: dict[str, int]
    metrics: dict[str, float]
    worst: tuple[int, float] | None


def measure(np: Any, rollout: Any, training: Any, missing: tuple[Sequence[int], Sequence[int]]) -> Measured:
    """Every metric of LIVE of two float32 columns; `np` is numpy, or None for `array("f")` columns."""
    return _with_numpy(np, rollout, training, missing) if np is not None else _without(rollout, training, missing)


def first_unmeasured(np: Any, values: Any, missing: Sequence[int]) -> tuple[int, str] | None:
    """(index, class) of the first value of a float32 column that is no measurement by its own bits or its absence."""
    if np is not None:
        codes = _own(np, values, missing)
        at = int((codes != FINITE).argmax()) if len(codes) else 0
        return (at, VALUE_CLASSES[codes[at]]) if len(codes) and codes[at] != FINITE else None
    gone = frozenset(missing)
    found = ((i, MISSING if i in gone else _class(v)) for i, v in enumerate(values))
    return next(((i, VALUE_CLASSES[code]) for i, code in found if code != FINITE), None)


def _named(sums: dict[str, float], n: int, size: dict[str, float], differ: int, present: int) -> dict[str, float]:
    """The metrics of LIVE from sums over `n` tokens and the order statistics `size` of |d|."""
    mean = {name: value / n for name, value in sums.items()}
    values = {
        "abs_dlogp_mean": mean["abs"],
        "dlogp_mean": mean["d"],
        "kl_k1": -mean["d"],
        "kl_k3": mean["kl_k3"],
        "ratio_mean": mean["ratio"],
        "ess": mean["ratio"] ** 2 / mean["ratio_squared"],
        "clip_fraction": mean["clipped"],
        "token_mult_prob_error": mean["error"],
        "extreme_token_fraction": mean["extreme"],
        "mismatch_fraction": differ / present,
        **size,
    }
    return {name: float(values[name]) for name in LIVE}


# -- with numpy ------------------------------------------------------------------------------------------------------


def _with_numpy(np: Any, rollout: Any, training: Any, missing: tuple[Sequence[int], Sequence[int]]) -> Measured:
    left, right = (_own(np, v, gone) for v, gone in ((rollout, missing[0]), (training, missing[1])))
    for values, codes, other, others in ((rollout, left, training, right), (training, right, rollout, left)):
        constant = np.isin(values, np.array(DEFAULTED_VALUES, np.float32)) & (codes != MISSING)
        if constant.any():
            codes[constant & (others == FINITE) & (other < DEFAULTED_OTHER_BELOW)] = DEFAULTED
    excluded = {}
    for side, codes in (("rollout", left), ("training", right)):
        for code, count in enumerate(np.bincount(codes, minlength=len(VALUE_CLASSES)).tolist()):
            if code != FINITE and count:
                excluded[f"{side}.{VALUE_CLASSES[code]}"] = count
    usable = (left == FINITE) & (right == FINITE)
    n = int(np.count_nonzero(usable))
    if n == 0:
        return Measured(0, 0, excluded, {}, None)
    where = None if n == len(usable) else np.flatnonzero(usable)
    r, t = (rollout, training) if where is None else (rollout[where], training[where])
    d = t.astype(np.float64)
    d -= r
    sums = _sums(np, d)
    worst = int(np.abs(d).argmax())
    at = (worst if where is None else int(where[worst]), float(d[worst]))
    np.abs(d, out=d)
    size = {"abs_dlogp_max": float(d.max())}
    size["abs_dlogp_p50"], size["abs_dlogp_p99"] = np.quantile(d, [0.5, 0.99], overwrite_input=True).tolist()
    present = (left != MISSING) & (right != MISSING)
    differ = np.count_nonzero((rollout.view(np.uint32) != training.view(np.uint32)) & present)
    metrics = _named(sums, n, size, int(differ), int(np.count_nonzero(present)))
    return Measured(n, int(sums["clamped"]), excluded, metrics, at)


def _own(np: Any, values: Any, missing: Sequence[int]) -> Any:
    """The class codes (uint8) that the values' own bits give, and those of missing ones."""
    codes = np.zeros(values.shape, np.uint8)
    with np.errstate(invalid="ignore"):
        codes[values > IMPOSSIBLE_ABOVE] = IMPOSSIBLE
        low = np.flatnonzero(values < _SENTINELS_BELOW)
    if low.size:
        codes[low[np.isin(values[low], np.array(_SENTINELS, np.float32))]] = SENTINEL
    special = ~np.isfinite(values)
    if special.any():
        codes[special & (values > 0)] = POS_INF
        codes[special & (values < 0)] = NEG_INF
        codes[np.isnan(values)] = NAN
    if missing:
        codes[np.array(missing, np.int64)] = MISSING
    return codes


def _sums(np: Any, d: Any) -> dict[str, float]:
    """Sums over tokens of what the means are made of, in pieces that stay in the cache."""
    sums = dict.fromkeys(_SUMS, 0.0)
    for at in range(0, len(d), _CHUNK):
        part = d[at : at + _CHUNK]
        size = np.abs(part)
        c = np.clip(part, -LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
        rho = np.exp(c)
        sums["abs"] += float(size.sum())
        sums["d"] += float(part.sum())
        sums["kl_k3"] += float((np.expm1(c) - c).sum())
        sums["ratio"] += float(rho.sum())
        sums["ratio_squared"] += float(np.square(rho).sum())
        sums["clipped"] += int(np.count_nonzero((part < _LOW) | (part > _HIGH)))
        sums["error"] += float(np.exp(np.abs(c)).sum())
        sums["extreme"] += int(np.count_nonzero(size > _EXTREME))
        sums["clamped"] += int(np.count_nonzero(size > LOG_RATIO_CLAMP))
    return sums


# -- without ---------------------------------------------------------------------------------------------------------


def _without(rollout: Any, training: Any, missing: tuple[Sequence[int], Sequence[int]]) -> Measured:
    gone = (frozenset(missing[0]), frozenset(missing[1]))
    counts: dict[str, int] = {}
    d: list[float] = []
    where: list[int] = []
    differ = present = 0
    bits = (memoryview(rollout).cast("B").cast("I"), memoryview(training).cast("B").cast("I"))
    for i, (r, t) in enumerate(zip(rollout, training)):
        left = MISSING if i in gone[0] else _class(r)
        right = MISSING if i in gone[1] else _class(t)
        if left != MISSING and right != MISSING:
            present += 1
            differ += bits[0][i] != bits[1][i]
        if r in DEFAULTED_VALUES and left != MISSING and right == FINITE and t < DEFAULTED_OTHER_BELOW:
            left = DEFAULTED
        elif t in DEFAULTED_VALUES and right != MISSING and left == FINITE and r < DEFAULTED_OTHER_BELOW:
            right = DEFAULTED
        if left == FINITE and right == FINITE:
            where.append(i)
            d.append(t - r)
        for side, code in (("rollout", left), ("training", right)):
            if code != FINITE:
                name = f"{side}.{VALUE_CLASSES[code]}"
                counts[name] = counts.get(name, 0) + 1
    if not d:
        return Measured(0, 0, counts, {}, None)
    sums = _summed(d)
    worst = max(range(len(d)), key=lambda k: abs(d[k]))
    ordered = sorted(map(abs, d))
    size = {"abs_dlogp_max": ordered[-1]}
    size |= {"abs_dlogp_p50": _quantile(ordered, 0.5), "abs_dlogp_p99": _quantile(ordered, 0.99)}
    metrics = _named(sums, len(d), size, differ, present)
    return Measured(len(d), int(sums["clamped"]), counts, metrics, (where[worst], d[worst]))


def _class(value: float) -> int:
    """The class that a float32 value's own bits give."""
    if value != value:
        return NAN
    if math.isinf(value):
        return POS_INF if value > 0 else NEG_INF
    if value > IMPOSSIBLE_ABOVE:
        return IMPOSSIBLE
    return SENTINEL if value < _SENTINELS_BELOW and value in _SENTINEL_SET else FINITE


def _summed(d: list[float]) -> dict[str, float]:
    clamped = [min(max(x, -LOG_RATIO_CLAMP), LOG_RATIO_CLAMP) for x in d]
    ratios = [math.exp(c) for c in clamped]
    return {
        "abs": math.fsum(map(abs, d)),
        "d": math.fsum(d),
        "kl_k3": math.fsum(math.expm1(c) - c for c in clamped),
        "ratio": math.fsum(ratios),
        "ratio_squared": math.fsum(rho * rho for rho in ratios),
        "clipped": sum(not _LOW <= x <= _HIGH for x in d),
        "error": math.fsum(math.exp(abs(c)) for c in clamped),
        "extreme": sum(abs(x) > _EXTREME for x in d),
        "clamped": sum(abs(x) > LOG_RATIO_CLAMP for x in d),
    }


def _quantile(ordered: list[float], q: float) -> float:
    """Linear interpolation between order statistics."""
    at = q * (len(ordered) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)
