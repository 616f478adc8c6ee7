"""From score events to series: one side's values of one pass over one sample, shards reassembled.

Scores of one pass that cover different positions are joined; a score that covers positions again is another pass
(an inner epoch), unless it comes from a tensor-parallel replica, which must agree bit for bit. Sharded scores become
a series only when every rank of one world size is present; otherwise they are `Missing`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from rlk_ledger.classes import FINITE, MISSING
from rlk_ledger.history import History, Sample, Score


@dataclass(slots=True, eq=False)
class Series:
    """Values (float32[n], NaN where absent) one side gave to a sample in one pass.

    `present` (bool[n]) says where a value was recorded, `recorded` (uint8[n]) holds the recorder's class codes,
    `rank` (int16[n]) the shard rank that scored a position (-1: not sharded). `token_differs` and `mask_differs` say
    that this side scored other tokens or masks than the sample's; `excess` counts values beyond the last token. Of a
    `whole` series, which one score is, every position was recorded; its arrays are shared and read-only.
    """

    source: str
    values: npt.NDArray[np.float32]
    present: npt.NDArray[np.bool_]
    recorded: npt.NDArray[np.uint8]
    rank: npt.NDArray[np.int16]
    scores: list[Score] = field(default_factory=list)
    versions: list[str | None] = field(default_factory=list)
    token_differs: bool = False
    mask_differs: bool = False
    excess: int = 0
    whole: bool = False

    @property
    def first(self) -> Score:
        """The score that opened the series."""
        return self.scores[0]

    @property
    def agrees(self) -> bool:
        """Whether this side scored the sample's own tokens under the sample's own mask."""
        return not (self.token_differs or self.mask_differs or self.excess)


@dataclass(slots=True, eq=False)
class Missing:
    """A sharded pass some of whose ranks never recorded."""

    sample: Sample
    source: str
    world_sizes: tuple[int, ...]
    missing_ranks: tuple[int, ...]
    tokens: int


@dataclass(slots=True, eq=False)
class Replica:
    """Replicated ranks that recorded different bits: the two writers and the first position that differs."""

    sample: Sample
    source: str
    writers: tuple[str, str]
    position: int


@dataclass(slots=True, eq=False)
class Assembled:
    """What the scores of one sample and source come to."""

    series: list[Series] = field(default_factory=list)
    missing: list[Missing] = field(default_factory=list)
    replicas: list[Replica] = field(default_factory=list)


def assemble(history: History, sample: Sample, source: str, scores: Sequence[Score]) -> Assembled:
    """The series of one sample and source, in the order their first scores were recorded."""
    out = Assembled()
    if len(scores) == 1 and _says_all(scores[0], len(sample)):
        out.series.append(_whole(sample, source, scores[0]))
        return out
    sharded: dict[tuple[str | None, str | None, str, int], list[Score]] = {}
    for score in scores:
        if score.shard is not None:
            axis = score.shard["axis"]
            key = (score.pass_id, score.weight_version, axis, score.start if axis == "vocab" else 0)
            sharded.setdefault(key, []).append(score)
        else:
            _place_whole(history, sample, source, score, out)
    for (_, _, axis, _), group in sharded.items():
        for one_pass in _passes(history, sample, source, group, out):
            _place_shards(history, sample, source, axis, one_pass, out)
    out.series.sort(key=lambda s: (s.first.step if s.first.step is not None else -1, s.first.seq))
    return out


class Constants:
    """Read-only arrays of one value each, of any length: what is the same at every position is held once."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, int], npt.NDArray[Any]] = {}

    def of(self, dtype: str, value: int, n: int) -> npt.NDArray[Any]:
        """`n` times `value`."""
        held = self._held.get((dtype, value))
        if held is None or len(held) < n:
            held = np.full(max(n, 1024), value, dtype)
            held.flags.writeable = False
            self._held[dtype, value] = held
        return held[:n]


CONSTANTS = Constants()


def _says_all(score: Score, n: int) -> bool:
    classed = score.value_class is None or len(score.value_class) == n
    return score.shard is None and score.start == 0 and len(score.values) == n and classed


def _whole(sample: Sample, source: str, score: Score) -> Series:
    """The series of a score that says every position of a sample: nothing is copied."""
    n = len(sample)
    recorded = CONSTANTS.of("uint8", 0, n) if score.value_class is None else score.value_class
    series = Series(
        source, score.values, CONSTANTS.of("bool", 1, n), recorded, CONSTANTS.of("int16", -1, n), whole=True
    )
    _note(series, sample, score)
    return series


def _place_whole(history: History, sample: Sample, source: str, score: Score, out: Assembled) -> None:
    n, end = len(sample), score.start + len(score.values)
    where = slice(score.start, min(end, n))
    for series in out.series:
        same_version = source == "rollout" or series.first.weight_version == score.weight_version
        if series.first.pass_id != score.pass_id or not same_version or series.first.shard is not None:
            continue
        if not series.present[where].any():
            _fill(series, sample, score, where)
            return
        if _replicates(history, series.first, score):
            _compare(sample, series, score, where, out)
            return
    series = _empty(source, n)
    out.series.append(series)
    _fill(series, sample, score, where)


def _empty(source: str, n: int) -> Series:
    return Series(
        source, np.full(n, np.nan, np.float32), np.zeros(n, np.bool_), np.zeros(n, np.uint8), np.full(n, -1, np.int16)
    )


def _fill(series: Series, sample: Sample, score: Score, where: slice) -> None:
    count = max(where.stop - where.start, 0)
    series.values[where] = score.values[:count]
    series.present[where] = True
    if score.value_class is not None:
        series.recorded[where] = score.value_class[:count]
    series.excess += max(score.start + len(score.values) - len(sample), 0)
    _note(series, sample, score)


def _note(series: Series, sample: Sample, score: Score) -> None:
    """Keeps the score's provenance and whether it scored the sample's tokens and mask (unknown digests agree)."""
    series.scores.append(score)
    series.versions.append(score.weight_version)
    if score.token_digest and sample.token_digest and _comparable(score.token_digest, sample.token_digest):
        series.token_differs |= score.token_digest != sample.token_digest
    if score.token_ids is not None and len(sample.response_token_ids) and score.token_key == sample.token_key:
        scored = sample.response_token_ids[score.start : score.start + len(score.token_ids)]
        series.token_differs |= not np.array_equal(score.token_ids, scored)
    if score.mask_digest and _comparable(score.mask_digest, sample.mask_digest):
        series.mask_differs |= score.mask_digest != sample.mask_digest


def _comparable(left: str, right: str) -> bool:
    return left.partition(":")[0] == right.partition(":")[0]


def _replicates(history: History, left: Score, right: Score) -> bool:
    """Whether two writers hold the same values by construction: same role, only their tp or sp rank differs."""
    if left.writer_id == right.writer_id:
        return False
    a, b = history.writers.get(left.writer_id), history.writers.get(right.writer_id)
    if a is None or b is None or a.get("role") != b.get("role"):
        return False
    places = [{k: (v or {}).get("rank") for k, v in (w.get("parallel") or {}).items()} for w in (a, b)]
    differing = {k for k in places[0].keys() | places[1].keys() if places[0].get(k) != places[1].get(k)}
    return bool(differing) and differing <= {"tp", "sp"}


def _compare(sample: Sample, series: Series, score: Score, where: slice, out: Assembled) -> None:
    _agree(series, sample, score, where, score.values[: where.stop - where.start], out)


def _agree(
    series: Series, sample: Sample, score: Score, where: slice, values: npt.NDArray[np.float32], out: Assembled
) -> None:
    """Notes where `values` of another writer or shard differ in a bit from those a series already holds."""
    if not series.present[where].any():
        return
    held = np.ascontiguousarray(series.values[where]).view(np.uint32)
    differs = np.flatnonzero((held != np.ascontiguousarray(values).view(np.uint32)) & series.present[where])
    if differs.size:
        writers = (series.first.writer_id, score.writer_id)
        out.replicas.append(Replica(sample, series.source, writers, where.start + int(differs[0])))


def _passes(history: History, sample: Sample, source: str, scores: list[Score], out: Assembled) -> list[list[Score]]:
    """Sharded scores split into passes: a rank seen again opens another one, unless a tensor-parallel replica says it.

    A replica belongs to the first pass that its writer has not spoken in; where it says other bits, that is noted.
    """
    passes: list[dict[int, list[Score]]] = []
    for score in scores:
        rank = (score.shard or {})["rank"]
        for held in passes:
            twins = held.setdefault(rank, [])
            if not twins:
                twins.append(score)
                break
            if all(_replicates(history, twin, score) for twin in twins):
                twins.append(score)
                _note_replica(sample, source, twins[0], score, out)
                break
        else:
            passes.append({rank: [score]})
    return [[twins[0] for twins in held.values() if twins] for held in passes]


def _note_replica(sample: Sample, source: str, first: Score, again: Score, out: Assembled) -> None:
    count = min(len(first.values), len(again.values))
    bits = [np.ascontiguousarray(one.values[:count]).view(np.uint32) for one in (first, again)]
    differs = np.flatnonzero(bits[0] != bits[1])
    if differs.size:
        spans = (
            (first.shard or {})["ranges"] if (first.shard or {})["axis"] == "sequence" else [(first.start, len(sample))]
        )
        places = [place for start, end in spans for place in range(start, end)]
        out.replicas.append(Replica(sample, source, (first.writer_id, again.writer_id), places[int(differs[0])]))


def _place_shards(
    history: History, sample: Sample, source: str, axis: str, scores: list[Score], out: Assembled
) -> None:
    shards = [score.shard or {} for score in scores]
    sizes = sorted({shard["world_size"] for shard in shards})
    missing = sorted(set(range(sizes[-1])) - {shard["rank"] for shard in shards})
    if missing or len(sizes) > 1:
        n = int(np.count_nonzero(sample.loss_mask))
        out.missing.append(Missing(sample, source, tuple(sizes), tuple(missing), n))
        return
    series = _empty(source, len(sample))
    ordered = sorted(zip(shards, scores), key=lambda pair: pair[0]["rank"])
    if axis == "sequence":
        _join_sequence(series, sample, ordered, out)
    else:
        _join_vocab(series, sample, ordered, out)
        series.rank[series.present] = _context_rank(history, ordered[0][1])
        if _continue(series, out):
            return
    out.series.append(series)


def _context_rank(history: History, score: Score) -> int:
    """The context-parallel rank of the writer, -1 without context parallelism."""
    place = (history.writers.get(score.writer_id, {}).get("parallel") or {}).get("cp") or {}
    return int(place["rank"]) if place.get("size", 1) > 1 else -1


def _continue(part: Series, out: Assembled) -> bool:
    """Joins vocabulary shards of other positions (of another context-parallel rank) to the series they continue."""
    for series in out.series:
        same = series.first.pass_id == part.first.pass_id and series.first.weight_version == part.first.weight_version
        axis = (series.first.shard or {}).get("axis")
        if same and axis == "vocab" and series.first.start != part.first.start:
            if (series.present & part.present).any():
                continue
            at = part.present
            series.values[at], series.recorded[at], series.rank[at] = part.values[at], part.recorded[at], part.rank[at]
            series.present |= at
            series.scores += part.scores
            series.versions += part.versions
            series.token_differs |= part.token_differs
            series.mask_differs |= part.mask_differs
            series.excess += part.excess
            return True
    return False


def _join_sequence(series: Series, sample: Sample, ordered: list[tuple[dict[str, Any], Score]], out: Assembled) -> None:
    n = len(sample)
    for shard, score in ordered:
        _note(series, sample, score)
        at = 0
        for start, end in shard["ranges"]:
            where = slice(min(start, n), min(end, n))
            count = max(where.stop - where.start, 0)
            _agree(series, sample, score, where, score.values[at : at + count], out)
            series.values[where] = score.values[at : at + count]
            series.present[where] = True
            series.rank[where] = shard["rank"]
            if score.value_class is not None:
                series.recorded[where] = score.value_class[at : at + count]
            series.excess += max(end - n, 0) - max(start - n, 0)
            at += end - start


def _join_vocab(series: Series, sample: Sample, ordered: list[tuple[dict[str, Any], Score]], out: Assembled) -> None:
    """Vocabulary shards: from their partials when all ranks recorded them, else the values every rank repeats.

    Partials that cannot be merged - the token ids are redacted, so that no rank is known to own a target, the ranks'
    ranges are no partition of the vocabulary, or they scored different lengths - leave the values missing.
    """
    first = ordered[0][1]
    where = slice(first.start, min(first.start + len(first.values), len(sample)))
    _fill(series, sample, first, where)
    for _, score in ordered[1:]:
        _note(series, sample, score)
        if len(score.values) == len(first.values):
            _compare(sample, series, score, where, out)
    partials = [score.partials for _, score in ordered]
    if not all({"max", "sum_exp", "target_logit"} <= held.keys() for held in partials):
        return
    lengths = {len(array) for held in partials for array in held.values()}
    if _owned(sample, where, ordered) and lengths == {len(first.values)}:
        series.values[where] = _merge_partials(sample, ordered, where)[: where.stop - where.start]
        series.recorded[where] = FINITE  # a rank alone may say `missing`; what the merged bits are, they say themselves
    else:
        series.values[where], series.recorded[where] = np.nan, MISSING


def _owned(sample: Sample, where: slice, ordered: list[tuple[dict[str, Any], Score]]) -> bool:
    """Whether every scored token id is known and lies in exactly one rank's part of the vocabulary."""
    ids = sample.response_token_ids
    if ids.dtype != np.int32 or len(ids) != len(sample):
        return False
    edge = 0
    for start, end in sorted(tuple(span) for shard, _ in ordered for span in shard["ranges"]):
        if start != edge:
            return False
        edge = end
    return bool((ids[where] < edge).all())


def _merge_partials(
    sample: Sample, ordered: list[tuple[dict[str, Any], Score]], where: slice
) -> npt.NDArray[np.float32]:
    """target logit - log-sum-exp over ranks, in rank order (float64); the owner of a token id gives its logit.

    What the ranks recorded may be anything; a sum that has no logarithm gives a value of class `nan` or `pos_inf`.
    """
    peaks = np.stack([s.partials["max"] for _, s in ordered]).astype(np.float64)
    sums = np.stack([s.partials["sum_exp"] for _, s in ordered]).astype(np.float64)
    targets = np.stack([s.partials["target_logit"] for _, s in ordered]).astype(np.float64)
    top = peaks.max(axis=0)
    with np.errstate(all="ignore"):
        lse = top + np.log((sums * np.exp(peaks - top)).sum(axis=0))
    ids = sample.response_token_ids[where].astype(np.int64)
    owner = np.zeros(len(ids), np.int64)
    for index, (shard, _) in enumerate(ordered):
        for start, end in shard["ranges"]:
            owner[(ids >= start) & (ids < end)] = index
    with np.errstate(all="ignore"):
        return np.asarray(targets[owner, np.arange(len(ids))] - lse[: len(ids)], np.float32)
