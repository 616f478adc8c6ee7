"""Which values pair: drift exists only between values of one token under one weight version in one named pass.

A pair joins (sample, position): the rollout value with the first training pass whose weight version equals the span's
version at that position and whose token and mask digests agree. Later passes are their own series (`passes`), pairs of
different versions are `off_policy`, tokens one side never scored are `unobserved`. Nothing is pooled across these.
"""

import re
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from rlk_ledger import classes
from rlk_ledger.columns import Columns, join
from rlk_ledger.history import History, Sample, Score
from rlk_ledger.series import CONSTANTS, Missing, Replica, Series, assemble

SIDES = ("rollout", "training")


@dataclass(slots=True, eq=False)
class PairedSample:
    """One sample with both sides' values.

    `rollout`, `training` are float32[n], NaN where absent. `paired` (bool[n]) marks positions that pair; where it is
    false `training` still holds the first agreeing pass, for classes and off-policy tables. `version` (int32[n])
    indexes `Pairing.versions` (-1: unknown), `rank` (int16[n]) is the training shard's rank (-1: not sharded).
    `rollout_class`, `training_class` (uint8[n]) are value classes. `training_present` (bool[n]) and
    `training_recorded` (uint8[n]) belong to `training`, whose positions come from several passes where a sample has
    several weight versions: `origin` (int16[n]) indexes `held`. `training_series` is the first that paired.
    """

    sample: Sample
    rollout: npt.NDArray[np.float32]
    training: npt.NDArray[np.float32]
    paired: npt.NDArray[np.bool_]
    active: npt.NDArray[np.bool_]
    version: npt.NDArray[np.int32]
    rank: npt.NDArray[np.int16]
    rollout_class: npt.NDArray[np.uint8]
    training_class: npt.NDArray[np.uint8]
    training_present: npt.NDArray[np.bool_]
    training_recorded: npt.NDArray[np.uint8]
    rollout_series: Series
    training_series: Series
    rollout_contract: dict[str, Any]
    training_contract: dict[str, Any]
    pass_id: str | None
    layout_id: str | None
    held: list[Series]
    origin: npt.NDArray[np.int16]

    def source_of(self, position: int) -> Series:
        """The training series the value at a response position came from."""
        return self.held[int(self.origin[position])]

    @property
    def compared(self) -> npt.NDArray[np.bool_]:
        """Positions (bool[n]) that enter drift: paired, active and finite on both sides."""
        finite = (self.rollout_class == classes.FINITE) & (self.training_class == classes.FINITE)
        return np.asarray(self.paired & self.active & finite, np.bool_)


@dataclass(slots=True, eq=False)
class OffPolicy:
    """Active tokens whose only agreeing training pass has another weight version; `lag` counts versions apart."""

    sample: Sample
    rollout_version: str
    training_version: str
    lag: int | None
    positions: npt.NDArray[np.int64]
    dlogp: npt.NDArray[np.float64]


@dataclass(slots=True, eq=False)
class Unobserved:
    """Active tokens of a sample that `source` has no value for; `partial` when it scored other tokens of it."""

    sample: Sample
    source: str
    tokens: int
    partial: bool


@dataclass(slots=True, eq=False)
class Pass:
    """A later training pass, as (sample, series); its first pass is the paired one of the same version, if any."""

    sample: Sample
    series: Series
    first: Series | None


@dataclass(slots=True, eq=False)
class Pairing:
    """Everything the pairing rule makes of a history."""

    history: History
    versions: tuple[str, ...]
    pairs: list[PairedSample] = field(default_factory=list)
    off_policy: list[OffPolicy] = field(default_factory=list)
    unobserved: list[Unobserved] = field(default_factory=list)
    passes: list[Pass] = field(default_factory=list)
    disagreeing: list[tuple[Sample, Series]] = field(default_factory=list)
    ambiguous: list[str] = field(default_factory=list)
    remasked: list[Sample] = field(default_factory=list)
    unversioned: list[Sample] = field(default_factory=list)
    missing_shards: list[Missing] = field(default_factory=list)
    replicas: list[Replica] = field(default_factory=list)
    orphans: list[Score] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    series: dict[tuple[str, int | None], dict[str, list[Series]]] = field(default_factory=dict)
    equal_fraction: float | None = None
    columns: Columns = field(default_factory=lambda: join([]))


def pair(history: History) -> Pairing:
    """Applies the pairing rule of the event catalogue to a history."""
    pairing = Pairing(history, version_order(history))
    samples, scores = _unique(history, pairing)
    pairing.samples = samples
    skipped = _not_trained(history, samples)
    index = {version: i for i, version in enumerate(pairing.versions)}
    for sample in samples:
        held: dict[str, list[Series]] = {}
        for source in SIDES:
            got = assemble(history, sample, source, scores.get((*sample.key, source), ()))
            pairing.missing_shards += got.missing
            pairing.replicas += got.replicas
            held[source] = got.series
        pairing.series[sample.key] = held
        _pair_sample(pairing, sample, held["rollout"], held["training"], index)
        _coverage(pairing, sample, held, sample.key in skipped)
    pairing.columns = join(pairing.pairs)
    pairing.equal_fraction = pairing.columns.equal_fraction
    return pairing


def version_order(history: History) -> tuple[str, ...]:
    """Weight versions in the order they were published; one never published stands where its name sorts.

    Names sort naturally (v9 before v10): initial weights that nobody published come before the first published ones.
    """
    published = sorted(
        history.of("weights.published"),
        key=lambda f: (f.fields.get("step") if f.fields.get("step") is not None else -1, f.seq),
    )
    order = list(dict.fromkeys(fact.fields["weight_version"] for fact in published))
    seen = {score.weight_version for score in history.scores if score.weight_version is not None}
    seen |= {version for sample in history.samples for version, _, _ in sample.weight_spans}
    for version in sorted(seen.difference(order), key=_natural):
        later = (i for i, other in enumerate(order) if _natural(other) > _natural(version))
        order.insert(next(later, len(order)), version)
    return tuple(order)


def _natural(text: str) -> list[tuple[int, int | str]]:
    return [(0, int(part)) if part.isdecimal() else (1, part) for part in re.split(r"(\d+)", text) if part]


def _unique(history: History, pairing: Pairing) -> tuple[list[Sample], dict[tuple[str, int | None, str], list[Score]]]:
    """Samples by (id, attempt), ambiguous ids left out, and scores by (id, attempt, source)."""
    by_key: dict[tuple[str, int | None], list[Sample]] = defaultdict(list)
    by_id: dict[str, list[Sample]] = defaultdict(list)
    for sample in history.samples:
        by_key[sample.key].append(sample)
    ambiguous = {key for key, held in by_key.items() if len({s.token_digest for s in held}) > 1}
    pairing.ambiguous = sorted({key[0] for key in ambiguous})
    samples = [held[0] for key, held in by_key.items() if key not in ambiguous]
    pairing.remasked = [s for s in samples if len({again.own_mask_digest for again in by_key[s.key]}) > 1]
    for sample in samples:
        by_id[sample.sample_id].append(sample)
    scores: dict[tuple[str, int | None, str], list[Score]] = defaultdict(list)
    for score in history.scores:
        if score.source not in SIDES:
            continue
        owner = _owner(score, by_id.get(score.sample_id, []))
        if owner is not None:
            scores[(*owner.key, score.source)].append(score)
        elif score.sample_id not in pairing.ambiguous:
            pairing.orphans.append(score)
    return samples, scores


def _owner(score: Score, candidates: list[Sample]) -> Sample | None:
    """The sample a score belongs to: by attempt where recorded, else the only one, else the one with its tokens."""
    if score.attempt is not None:
        exact = [s for s in candidates if s.attempt == score.attempt]
        if exact:
            return exact[0]
        candidates = [s for s in candidates if s.attempt is None]
    if len(candidates) == 1:
        return candidates[0]
    matching = [s for s in candidates if score.token_digest and s.token_digest == score.token_digest]
    if not matching:
        matching = [s for s in candidates if s.writer_id == score.writer_id and s.seq < score.seq][-1:]
    return matching[0] if len(matching) == 1 else None


def _not_trained(history: History, samples: list[Sample]) -> set[tuple[str, int | None]]:
    """Keys of the samples that dynamic sampling dropped on record: training owes no value for them.

    A group id that several steps use stands for the group of the step of the layout that dropped it.
    """
    ids: set[str] = set()
    groups: dict[str, set[int | None]] = defaultdict(set)
    for fact in history.of("batch.layout"):
        for decision in fact.fields.get("decisions") or ():
            if decision.get("kept"):
                continue
            if decision.get("sample_id"):
                ids.add(decision["sample_id"])
            elif decision.get("group_id"):
                groups[decision["group_id"]].add(fact.fields.get("step"))
    steps: dict[str, set[int | None]] = defaultdict(set)
    for sample in samples:
        steps[sample.group_id or ""].add(sample.step)
    return {s.key for s in samples if s.sample_id in ids or _dropped(s, groups, steps)}


def _dropped(sample: Sample, groups: dict[str, set[int | None]], steps: dict[str, set[int | None]]) -> bool:
    dropped_in = groups.get(sample.group_id or "", set())
    return sample.step in dropped_in or bool(dropped_in and len(steps[sample.group_id or ""]) == 1)


def _pair_sample(
    pairing: Pairing, sample: Sample, rollouts: list[Series], trainings: list[Series], index: dict[str, int]
) -> None:
    agreeing = [series for series in trainings if series.agrees]
    rollout = next((series for series in rollouts if series.agrees), None)
    pairing.disagreeing += [(sample, series) for series in (*rollouts, *trainings) if not series.agrees]
    first: dict[str | None, Series] = {}
    for series in agreeing:
        version = series.first.weight_version
        if version in first:
            pairing.passes.append(Pass(sample, series, first[version]))
        else:
            first[version] = series
    if rollout is None or not agreeing:
        return
    whole = _whole_pair(pairing, sample, rollout, first, index)
    if whole is not None:
        pairing.pairs.append(whole)
        return
    pair_ = _blank(pairing, sample, rollout, agreeing[0], index)
    if pair_.version.size and (None in first or (pair_.active & (pair_.version < 0)).any()):
        pairing.unversioned.append(sample)
    for version, series in first.items():
        same = (pair_.version == index.get(version, -2)) if version is not None else np.ones(len(sample), np.bool_)
        _take(pair_, series, (same | (pair_.version < 0)) & ~pair_.paired)
    pairing.pairs.append(pair_)
    _off_policy(pairing, pair_, first, index)


def _whole_pair(
    pairing: Pairing, sample: Sample, rollout: Series, first: dict[str | None, Series], index: dict[str, int]
) -> PairedSample | None:
    """The pair of a sample all of which both sides scored once under one version: what the general way makes of it."""
    name, training = next(iter(first.items()))
    n, version = len(sample), _one_version(sample, rollout, index)
    if len(first) > 1 or not (n and rollout.whole and training.whole) or version is None:
        return None
    if name is not None and 0 <= version != index[name]:
        return None
    active = sample.loss_mask.astype(np.bool_)
    if name is None or (version < 0 and active.any()):
        pairing.unversioned.append(sample)
    return PairedSample(
        sample=sample,
        rollout=rollout.values,
        training=training.values,
        paired=CONSTANTS.of("bool", 1, n),
        active=active,
        version=np.full(n, version, np.int32),
        rank=training.rank,
        rollout_class=CONSTANTS.of("uint8", 0, n),
        training_class=CONSTANTS.of("uint8", 0, n),
        training_present=training.present,
        training_recorded=training.recorded,
        held=[training],
        origin=CONSTANTS.of("int16", 0, n),
        **_ends(pairing, rollout, training),
    )


def _one_version(sample: Sample, rollout: Series, index: dict[str, int]) -> int | None:
    """The number of the version a whole rollout was sampled under (-1: none is recorded), None where there are more."""
    if not sample.weight_spans:
        recorded = rollout.first.weight_version
        return -1 if recorded is None else index[recorded]
    name, start, end = sample.weight_spans[0]
    return index[name] if len(sample.weight_spans) == 1 and start == 0 and end >= len(sample) else None


def _ends(pairing: Pairing, rollout: Series, training: Series) -> dict[str, Any]:
    """What a pair says of the two series it begins with."""
    contracts = pairing.history.contracts
    return {
        "rollout_series": rollout,
        "training_series": training,
        "rollout_contract": contracts.get(rollout.first.contract_id, {}).get("body", {}),
        "training_contract": contracts.get(training.first.contract_id, {}).get("body", {}),
        "pass_id": training.first.pass_id,
        "layout_id": training.first.layout_id,
    }


def _blank(pairing: Pairing, sample: Sample, rollout: Series, training: Series, index: dict[str, int]) -> PairedSample:
    version = np.full(len(sample), -1, np.int32)
    for name, start, end in sample.weight_spans:
        version[start:end] = index[name]
    if not sample.weight_spans:
        for score in rollout.scores:
            if score.weight_version is not None:
                version[score.start : score.start + len(score.values)] = index[score.weight_version]
    return PairedSample(
        sample=sample,
        rollout=rollout.values,
        training=training.values.copy(),
        paired=np.zeros(len(sample), np.bool_),
        active=sample.loss_mask.astype(np.bool_),
        version=version,
        rank=training.rank.copy(),
        rollout_class=np.zeros(len(sample), np.uint8),
        training_class=np.zeros(len(sample), np.uint8),
        training_present=training.present.copy(),
        training_recorded=training.recorded.copy(),
        held=[training],
        origin=np.zeros(len(sample), np.int16),
        **_ends(pairing, rollout, training),
    )


def _take(pair_: PairedSample, series: Series, where: npt.NDArray[np.bool_]) -> None:
    """Pairs the positions in `where` that both sides scored with this training series."""
    where = where & series.present & pair_.rollout_series.present
    if not where.any():
        return
    if not pair_.paired.any():
        pair_.training_series, pair_.pass_id, pair_.layout_id = series, series.first.pass_id, series.first.layout_id
        _hold(pair_, series, np.ones(len(where), np.bool_))
    _hold(pair_, series, where)
    pair_.paired |= where


def _hold(pair_: PairedSample, series: Series, where: npt.NDArray[np.bool_]) -> None:
    """Takes everything about the training value at these positions from one series."""
    pair_.training[where] = series.values[where]
    pair_.training_present[where] = series.present[where]
    pair_.training_recorded[where] = series.recorded[where]
    pair_.rank[where] = series.rank[where]
    if not any(series is one for one in pair_.held):
        pair_.held.append(series)
    pair_.origin[where] = next(i for i, one in enumerate(pair_.held) if one is series)


def _off_policy(pairing: Pairing, pair_: PairedSample, passes: dict[str | None, Series], index: dict[str, int]) -> None:
    """Active positions that no pass of their own version scored, each with the first pass that did score it."""
    left = pair_.rollout_series.present & pair_.active & ~pair_.paired & (pair_.version >= 0)
    for name, series in passes.items():
        both = left & series.present
        if name is None or not both.any():
            continue
        _hold(pair_, series, both)
        left &= ~both
        delta = series.values.astype(np.float64) - pair_.rollout
        for number in np.unique(pair_.version[both]).tolist():
            at = np.flatnonzero(both & (pair_.version == number))
            lag = index[name] - number
            pairing.off_policy.append(OffPolicy(pair_.sample, pairing.versions[number], name, lag, at, delta[at]))


def _coverage(pairing: Pairing, sample: Sample, held: dict[str, list[Series]], skipped: bool) -> None:
    """Active tokens no pass of a side scored; a pass that scored other tokens counts as seen.

    A sample that was aborted, failed or dropped on record owes no training values, and no rollout values either while
    training never scored it: nothing is compared on it.
    """
    if all(len(held[source]) == 1 and held[source][0].whole for source in SIDES):
        return  # a whole series is in full view, or scored other tokens and counts as seen
    active = sample.loss_mask.astype(np.bool_)
    sharded = {m.source for m in pairing.missing_shards if m.sample is sample}
    unused = skipped or sample.status in ("aborted", "failed")
    trained = bool(held["training"]) or "training" in sharded
    for source in SIDES:
        if source in sharded or (unused and (source == "training" or not trained)):
            continue
        seen = np.zeros(len(sample), np.bool_)
        for series in held[source]:
            seen |= series.present if series.agrees else True
        missing = int(np.count_nonzero(active & ~seen))
        if missing:
            pairing.unobserved.append(Unobserved(sample, source, missing, bool(held[source])))
