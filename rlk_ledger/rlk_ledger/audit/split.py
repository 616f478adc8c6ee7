"""Is drift concentrated in one level of a recorded dimension? (drift.split)

Response: log |d| minus the log of its median in the run's log-probability decile, because low-precision noise depends
on the log-probability. Two statistics a sample: the mean (typical size) and the log RMS (a garbled minority). Unit: the
sample. A dimension constant within a sample is tested by permuting membership within step, and within group where it
varies inside groups (prompts differ, and their samples share that); where it does not, the group means must differ as
well. A dimension that varies inside a sample is tested by sign flips of within-sample contrasts, the tail's over as
many tokens of the level as beside it; between samples the tail's growth with their length is taken off. At least 8
samples a level; Holm over everything tried; reported when adjusted p < 0.001 and the ratio is at least 2. The ratio of
rounded values overstates that of their noise (many are equal, and a little more noise makes many differ), so where the
typical size differs the mean size must be larger as well, by 1.6 times at least.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rlk_ledger.audit import dimensions, stats
from rlk_ledger.audit.dimensions import Dimension
from rlk_ledger.audit.finding import Finding
from rlk_ledger.audit.view import Tokens, View
from rlk_ledger_schemas.metrics import ZERO_DRIFT_FRACTION

Float64 = npt.NDArray[np.float64]
Bool = npt.NDArray[np.bool_]
Index = npt.NDArray[np.int64]

MIN_SAMPLES = 8
P_ADJUSTED = 0.001
RATIO = 2.0
P_GROUPS = 0.001
SIZE_RATIO = 1.6
_MIN_TOKENS = 4
_MIN_SIDE_TOKENS = 2
_DECILES = 10
_BINS, _BIN_TOKENS = 60, 40
_SCALE_FLOOR = 0.05
_LOW = -3.0
STATISTICS = ("typical", "tail")
_ALIAS_OVERLAP = 0.9
_NEXT = {
    "cache.stale": "Flush the prefix cache at every weight update: these samples read what older weights had written.",
    "spec.used": "Check the offsets of log-probabilities after rejected drafts; compare with a run without it.",
    "routes.incomplete": "Record and replay the experts of every token of these samples.",
    "training.shard_rank": "Check the sequence offsets, positions and collectives of context-parallel rank {level}.",
    "prefill.chunked": "Check what chunked prefill changes for these samples; compare with a run without it.",
    "versions.mixed": "Check what happens to a running response when weights are updated under it.",
    "seam.token": "Check token ids and positions right after tool or environment text.",
    "seam.after": "Check token ids, positions and the cache after tool or environment text.",
    "engine": "Compare engine {level} with the others: its weights, build, settings and device.",
}
"""What to do about a level of a dimension that names its own cause."""
_NEARLY = 0.75


@dataclass(slots=True)
class Test:
    """One (dimension, level, statistic) tried; `rows` (bool a token) are the level's compared tokens."""

    dimension: Dimension
    level: int
    statistic: str
    effect: float
    p: float
    samples: int
    adjusted: float = 1.0

    @property
    def ratio(self) -> float:
        """How many times larger drift is in the level than beside it."""
        return float(np.exp(min(self.effect, 50.0)))


def response(tokens: Tokens) -> Float64:
    """log(|d| / scale) of each compared token, at least -3; scale is the median |d| of its log-probability decile.

    The mean over tokens of nearly the same log-probability is taken off (`_centred`).

    A decile whose median is nearly zero (confident tokens) takes 0.05 of the run's own median instead.
    """
    size = np.abs(tokens.d)
    level = (tokens.r + tokens.t) / 2.0
    cuts = np.quantile(level, np.linspace(0, 1, _DECILES + 1)[1:-1])
    decile = np.searchsorted(cuts, level, side="right")
    nonzero = size[size > 0]
    floor = _SCALE_FLOOR * float(np.median(nonzero)) if nonzero.size else 1.0
    scale = np.full(_DECILES, floor)
    for i in range(_DECILES):
        rows = size[decile == i]
        if rows.size:
            scale[i] = max(float(np.median(rows)), floor)
    with np.errstate(divide="ignore"):
        y = np.maximum(np.log(size / scale[decile]), _LOW)
    return _centred(y, level)


def _centred(y: Float64, level: Float64) -> Float64:
    """y less its mean over tokens of nearly the same log-probability.

    Rounded values are equal or a quantum apart, and how often depends on the log-probability within a decile too:
    without this, a level of another kind of text would differ by its text alone.
    """
    bins = int(np.clip(len(y) // _BIN_TOKENS, 1, _BINS))
    bin_of = np.searchsorted(np.quantile(level, np.linspace(0, 1, bins + 1)[1:-1]), level, side="right")
    count = np.bincount(bin_of, minlength=bins)
    return np.asarray(y - (np.bincount(bin_of, weights=y, minlength=bins) / np.maximum(count, 1))[bin_of], np.float64)


def detect(view: View) -> Iterable[Finding]:
    """Levels of recorded dimensions whose drift is at least twice as large, beyond chance."""
    equal = view.pairing.equal_fraction
    if len(view.tokens) == 0 or (equal is not None and equal >= ZERO_DRIFT_FRACTION):
        return
    splitter = _Splitter(view)
    tests = splitter.all_tests(np.ones(len(view.tokens), np.bool_))
    for test, adjusted in zip(tests, stats.holm([t.p for t in tests])):
        test.adjusted = adjusted
    yield from splitter.report(tests)


class _Splitter:
    def __init__(self, view: View) -> None:
        self.view = view
        self.y = response(view.tokens)
        self.between = dimensions.between(view)
        self.within = dimensions.within(view)
        steps = [p.sample.step if p.sample.step is not None else -1 for p in view.pairs]
        groups = [p.sample.group_id or f"\0{i}" for i, p in enumerate(view.pairs)]
        self.step = _codes(steps)
        self.group = _codes(list(zip(steps, groups)))

    def all_tests(self, keep: Bool) -> list[Test]:
        """Every (dimension, level, statistic) over the kept tokens."""
        out: list[Test] = []
        for statistic in STATISTICS:
            value, usable = self.per_sample(keep, statistic)
            for dimension in self.between:
                for level in _levels(dimension):
                    out += self.test_between(dimension, level, statistic, value, usable)
            for dimension in self.within:
                for level in _levels(dimension):
                    out += self.test_within(dimension, level, statistic, keep)
        return out

    def per_sample(self, keep: Bool, statistic: str) -> tuple[Float64, Bool]:
        """(statistic, usable) of every pair over the kept tokens."""
        owner, n = self.view.tokens.sample[keep], len(self.view.pairs)
        count = np.bincount(owner, minlength=n)
        value, usable = _reduce(self.y[keep], owner, count, statistic), count >= _MIN_TOKENS
        return (_length_free(value, count, usable) if statistic == "tail" else value), usable

    def test_between(
        self, dimension: Dimension, level: int, statistic: str, value: Float64, usable: Bool
    ) -> list[Test]:
        rows = np.flatnonzero(usable & (dimension.codes >= 0))
        member = dimension.codes[rows] == level
        if min(np.count_nonzero(member), np.count_nonzero(~member)) < MIN_SAMPLES:
            return []
        x, group = value[rows], self.group[rows]
        share = np.bincount(group, weights=member) / np.maximum(np.bincount(group), 1)
        mixed = ((share > 0) & (share < 1))[group]
        if min(np.count_nonzero(member & mixed), np.count_nonzero(~member & mixed)) >= MIN_SAMPLES:
            effect, p = stats.permutation_tail(x[mixed], member[mixed], group[mixed])
        else:
            effect, p = stats.permutation_tail(x, member, self.step[rows])
            if p < P_GROUPS and self.group_p(x, member, group, self.step[rows]) > P_GROUPS:
                p = 1.0
        return [Test(dimension, level, statistic, effect, p, int(np.count_nonzero(member)))]

    def group_p(self, x: Float64, member: Bool, group: Index, step: Index) -> float:
        """One-sided p that groups of members have larger step-centred means: a few odd prompts are not a level."""
        centred = x - (np.bincount(step, weights=x) / np.maximum(np.bincount(step), 1))[step]
        size = np.bincount(group)
        mean = np.bincount(group, weights=centred) / np.maximum(size, 1)
        share = np.bincount(group, weights=member) / np.maximum(size, 1)
        held = size > 0
        return stats.welch_tail(mean[held & (share > 0.5)], mean[held & (share <= 0.5)])

    def test_within(self, dimension: Dimension, level: int, statistic: str, keep: Bool) -> list[Test]:
        rows = keep & (dimension.codes >= 0)
        member = rows & (dimension.codes == level)
        rest = rows & ~member
        n, owner = len(self.view.pairs), self.view.tokens.sample
        na, nb = (np.bincount(owner[side], minlength=n) for side in (member, rest))
        if statistic == "tail":
            member, rest = _evenly(member, owner, np.minimum(na, nb)), _evenly(rest, owner, np.minimum(na, nb))
        a, b = (
            _reduce(self.y[side], owner[side], np.bincount(owner[side], minlength=n), statistic)
            for side in (member, rest)
        )
        single = dimension.name in ("position.first", "position.last", "seam.token")
        both = (na >= (1 if single else _MIN_SIDE_TOKENS)) & (nb >= _MIN_SIDE_TOKENS)
        if np.count_nonzero(both) < MIN_SAMPLES:
            return []
        contrast, group = (a - b)[both], self.group[both]
        effect, p = stats.sign_flip_tail(contrast)
        held = np.bincount(group)
        mean = (np.bincount(group, weights=contrast) / np.maximum(held, 1))[held > 0]
        if p < P_GROUPS and stats.mean_tail(mean) > P_GROUPS:
            p = 1.0
        return [Test(dimension, level, statistic, effect, p, int(np.count_nonzero(both)))]

    def rows(self, test: Test) -> Bool:
        """The compared tokens (bool[n]) of a test's level."""
        codes = test.dimension.codes
        rows = codes == test.level if test.dimension.within else (codes == test.level)[self.view.tokens.sample]
        return np.asarray(rows, np.bool_)

    def report(self, tests: list[Test]) -> Iterable[Finding]:
        """One finding a cause: same rows are aliases, what is gone without the named rows is `also_explains`.

        Among tests nearly as strong as the strongest, a derived (causal) name is preferred.
        """
        keep = np.ones(len(self.view.tokens), np.bool_)
        remaining = [t for t in tests if t.adjusted < P_ADJUSTED and t.ratio >= RATIO and self.is_larger(t, keep)]
        while remaining:
            strongest = max(t.effect for t in remaining)
            head = min(
                remaining, key=lambda t: (t.effect < _NEARLY * strongest, _priority(t.dimension.name), -t.effect)
            )
            rows = self.rows(head)
            same = {id(t) for t in remaining if _overlap(rows, self.rows(t)) >= _ALIAS_OVERLAP}
            aliases = {t.dimension.name for t in remaining if id(t) in same} - {head.dimension.name}
            keep &= ~rows
            left = [t for t in remaining if id(t) not in same and self.holds(t, keep, len(tests))]
            explained = {t.dimension.name for t in remaining} - {t.dimension.name for t in left} - aliases
            yield self.finding(head, sorted(aliases), sorted(explained - {head.dimension.name}), len(tests))
            remaining = left

    def is_larger(self, test: Test, keep: Bool) -> bool:
        """Whether the mean size of |d| is larger too, sample by sample, where a test says its typical size is."""
        if test.statistic != "typical":
            return True
        again = self.again(test, keep, "size")
        return bool(again) and again[0].ratio >= SIZE_RATIO

    def again(self, test: Test, keep: Bool, statistic: str) -> list[Test]:
        """The same level tested over the kept tokens by a statistic."""
        if test.dimension.within:
            return self.test_within(test.dimension, test.level, statistic, keep)
        value, usable = self.per_sample(keep, statistic)
        return self.test_between(test.dimension, test.level, statistic, value, usable)

    def holds(self, test: Test, keep: Bool, tried: int) -> bool:
        """Whether a test stays significant without the tokens already explained."""
        again = self.again(test, keep, test.statistic)
        return bool(again) and again[0].p * tried < P_ADJUSTED and again[0].ratio >= RATIO

    def finding(self, test: Test, aliases: list[str], explained: list[str], tried: int) -> Finding:
        tokens, rows = self.view.tokens, self.rows(test)
        size = np.abs(tokens.d)
        worst = int(np.flatnonzero(rows)[np.argmax(size[rows])])
        where: dict[str, Any] = {"dimension": test.dimension.name, "level": test.dimension.labels[test.level]}
        where["aliases"] = aliases
        evidence = {
            "statistic": test.statistic,
            "ratio": test.ratio,
            "p_adjusted": test.adjusted,
            "tests_tried": tried,
            "also_explains": explained,
            "samples_in_level": test.samples,
            "tokens_in_level": int(np.count_nonzero(rows)),
            "abs_dlogp_mean_in_level": float(size[rows].mean()),
            "abs_dlogp_mean_elsewhere": float(size[~rows].mean()) if not rows.all() else None,
            "worst": self.view.place(int(tokens.sample[worst]), int(tokens.position[worst]))
            | {"dlogp": float(tokens.d[worst])},
        }
        return Finding("drift.split", where, evidence, _NEXT.get(test.dimension.name, "").format(**where))


def _levels(dimension: Dimension) -> Iterable[int]:
    return dimension.tested if dimension.tested is not None else range(len(dimension.labels))


def _codes(values: list[Any]) -> Index:
    index: dict[Any, int] = {}
    return np.array([index.setdefault(v, len(index)) for v in values], np.int64)


def _reduce(y: Float64, owner: Index, count: Index, statistic: str) -> Float64:
    """Per sample: the mean of y (typical), half the log of the mean of exp(2 y) (tail), or that of exp(y) (size)."""
    n, size = len(count), np.maximum(count, 1)
    if statistic == "typical":
        return np.asarray(np.bincount(owner, weights=y, minlength=n) / size, np.float64)
    k = 1.0 if statistic == "size" else 2.0
    power = np.bincount(owner, weights=np.exp(k * np.minimum(y, 300.0)), minlength=n) / size
    return np.asarray(np.log(np.maximum(power, np.exp(k * _LOW))) / k, np.float64)


def _evenly(rows: Bool, owner: Index, wanted: Index) -> Bool:
    """`wanted` (one a sample) of each sample's rows, evenly spread over them.

    The log RMS of heavy-tailed values grows with their number: only equal numbers on both sides compare.
    """
    at = np.flatnonzero(rows)
    count = np.bincount(owner[at], minlength=len(wanted))
    rank = np.arange(len(at)) - (np.cumsum(count) - count)[owner[at]]
    n, k = count[owner[at]], wanted[owner[at]]
    out = np.zeros_like(rows)
    out[at[(rank * k + k + n // 2) // n > (rank * k + n // 2) // n]] = True
    return out


def _length_free(value: Float64, count: Index, usable: Bool) -> Float64:
    """A tail statistic less the trend by which it grows with a sample's tokens (least squares on their log).

    As in `_evenly`: more tokens catch more of a heavy tail, in honest samples too. A falling trend is no such thing.
    """
    x = np.log(np.maximum(count, 1).astype(np.float64))
    if np.count_nonzero(usable) < 2 or np.ptp(x[usable]) == 0.0:
        return value
    centred = x - x[usable].mean()
    slope = float(np.dot(centred[usable], value[usable]) / np.dot(centred[usable], centred[usable]))
    return np.asarray(value - max(slope, 0.0) * centred, np.float64)


def _priority(name: str) -> tuple[int, str]:
    order = dimensions.DERIVED
    return (order.index(name) if name in order else len(order), name)


def _overlap(left: Bool, right: Bool) -> float:
    union = np.count_nonzero(left | right)
    return float(np.count_nonzero(left & right) / union) if union else 0.0
