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
from rlk_ledger.history import History, Sample, Score
from rlk_ledger.series import Missing, Replica, Series, assemble

SIDES = ("rollout", "training")


@dataclass(slots=True, eq=False)
class PairedSample:
    """One sample with both sides' values.

    `rollout`, `training` are float32[n], NaN where absent. `paired` (bool[n]) marks positions that pair; where it is
    false `training` still holds the first agreeing pass, for classes and off-policy tables. `version` (int32[n])
    indexes `Pairing.versions` (-1: unknown), `rank` (int16[n]) is the training shard's rank (-1: not sharded).
    `rollout_class`, `training_class` (uint8[n]) are value classes.
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
    rollout_series: Series
    training_series: Series
    rollout_contract: dict[str, Any]
    training_contract: dict[str, Any]
    pass_id: str | None
    layout_id: str | None

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
    unversioned: list[Sample] = field(default_factory=list)
    missing_shards: list[Missing] = field(default_factory=list)
    replicas: list[Replica] = field(default_factory=list)
    orphans: list[Score] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    series: dict[tuple[str, int | None], dict[str, list[Series]]] = field(default_factory=dict)
    equal_fraction: float | None = None


def pair(history: History) -> Pairing:
    """Applies the pairing rule of the event catalogue to a history."""
    pairing = Pairing(history, version_order(history))
    samples, scores = _unique(history, pairing)
    pairing.samples = samples
    skipped = _not_trained(history)
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
        _coverage(pairing, sample, held, skipped)
    _classify(pairing)
    return pairing


def version_order(history: History) -> tuple[str, ...]:
    """Weight versions in the order they were published, then every other one seen, in natural order."""
    published = sorted(
        history.of("weights.published"),
        key=lambda f: (f.fields.get("step") if f.fields.get("step") is not None else -1, f.seq),
    )
    order = dict.fromkeys(fact.fields["weight_version"] for fact in published)
    seen = {score.weight_version for score in history.scores if score.weight_version is not None}
    seen |= {version for sample in history.samples for version, _, _ in sample.weight_spans}
    return (*order, *sorted(seen - order.keys(), key=_natural))


def _natural(text: str) -> list[tuple[int, int | str]]:
    return [(0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"(\d+)", text) if part]


def _unique(history: History, pairing: Pairing) -> tuple[list[Sample], dict[tuple[str, int | None, str], list[Score]]]:
    """Samples by (id, attempt), ambiguous ids left out, and scores by (id, attempt, source)."""
    by_key: dict[tuple[str, int | None], list[Sample]] = defaultdict(list)
    by_id: dict[str, list[Sample]] = defaultdict(list)
    for sample in history.samples:
        by_key[sample.key].append(sample)
    ambiguous = {key for key, held in by_key.items() if len({s.token_digest for s in held}) > 1}
    pairing.ambiguous = sorted({key[0] for key in ambiguous})
    samples = [held[0] for key, held in by_key.items() if key not in ambiguous]
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


def _not_trained(history: History) -> set[str]:
    """Sample and group ids that dynamic sampling dropped on record: training owes no value for them."""
    dropped: set[str] = set()
    for fact in history.of("batch.layout"):
        for decision in fact.fields.get("decisions") or ():
            if not decision.get("kept"):
                dropped |= {decision[k] for k in ("sample_id", "group_id") if decision.get(k)}
    return dropped


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
    pair_ = _blank(pairing, sample, rollout, agreeing[0], index)
    if pair_.version.size and (None in first or (pair_.version < 0).any()):
        pairing.unversioned.append(sample)
    for version, series in first.items():
        same = (pair_.version == index.get(version, -2)) if version is not None else np.ones(len(sample), np.bool_)
        _take(pair_, series, (same | (pair_.version < 0)) & ~pair_.paired)
    pairing.pairs.append(pair_)
    _off_policy(pairing, pair_, next(iter(first)))


def _blank(pairing: Pairing, sample: Sample, rollout: Series, training: Series, index: dict[str, int]) -> PairedSample:
    contracts = pairing.history.contracts
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
        rank=training.rank,
        rollout_class=np.zeros(len(sample), np.uint8),
        training_class=np.zeros(len(sample), np.uint8),
        rollout_series=rollout,
        training_series=training,
        rollout_contract=contracts.get(rollout.first.contract_id, {}).get("body", {}),
        training_contract=contracts.get(training.first.contract_id, {}).get("body", {}),
        pass_id=training.first.pass_id,
        layout_id=training.first.layout_id,
    )


def _take(pair_: PairedSample, series: Series, where: npt.NDArray[np.bool_]) -> None:
    """Pairs the positions in `where` that both sides scored with this training series."""
    where = where & series.present & pair_.rollout_series.present
    if not where.any():
        return
    if not pair_.paired.any():
        pair_.training_series, pair_.pass_id, pair_.layout_id = series, series.first.pass_id, series.first.layout_id
        pair_.training, pair_.rank = series.values.copy(), series.rank
    pair_.training[where] = series.values[where]
    pair_.paired |= where


def _off_policy(pairing: Pairing, pair_: PairedSample, training_version: str | None) -> None:
    both = pair_.rollout_series.present & pair_.training_series.present & pair_.active & ~pair_.paired
    if training_version is None or not both.any():
        return
    order = {version: i for i, version in enumerate(pairing.versions)}
    delta = pair_.training.astype(np.float64) - pair_.rollout.astype(np.float64)
    for number in np.unique(pair_.version[both]).tolist():
        if number < 0:
            continue
        at = np.flatnonzero(both & (pair_.version == number))
        lag = order[training_version] - number
        pairing.off_policy.append(
            OffPolicy(pair_.sample, pairing.versions[number], training_version, lag, at, delta[at])
        )


def _coverage(pairing: Pairing, sample: Sample, held: dict[str, list[Series]], skipped: set[str]) -> None:
    """Active tokens no pass of a side scored; a pass that scored other tokens counts as seen."""
    active = sample.loss_mask.astype(np.bool_)
    sharded = {m.source for m in pairing.missing_shards if m.sample is sample}
    for source in SIDES:
        if source in sharded:
            continue
        if source == "training" and (
            skipped & {sample.sample_id, sample.group_id} or sample.status in ("aborted", "failed")
        ):
            continue
        seen = np.zeros(len(sample), np.bool_)
        for series in held[source]:
            seen |= series.present if series.agrees else True
        missing = int(np.count_nonzero(active & ~seen))
        if missing:
            pairing.unobserved.append(Unobserved(sample, source, missing, bool(held[source])))


def _classify(pairing: Pairing) -> None:
    """Fills the value classes of every pair, over the whole run at once."""
    pairs = pairing.pairs
    if not pairs:
        return
    lengths = [len(p.sample) for p in pairs]
    owner = np.repeat(np.arange(len(pairs)), lengths)
    active = np.concatenate([p.active for p in pairs])
    codes = []
    for side in SIDES:
        values = np.concatenate([getattr(p, side) for p in pairs])
        series = [getattr(p, f"{side}_series") for p in pairs]
        present = np.concatenate([s.present for s in series])
        if side == "training":  # a sample of several versions takes positions from several passes
            present |= np.concatenate([p.paired for p in pairs])
        recorded = np.concatenate([s.recorded for s in series])
        own = classes.own_classes(values, recorded, classes.recurring_sentinels(values[active & present]))
        own[~present] = classes.MISSING
        codes.append((values, own))
    (rollout, left), (training, right) = codes
    crossed = classes.cross_classes(rollout, training, left, right, active, owner)
    pairing.equal_fraction = crossed.equal_fraction
    edges = np.cumsum([0, *lengths])
    for p, start, end in zip(pairs, edges[:-1], edges[1:]):
        p.rollout_class, p.training_class = crossed.rollout[start:end], crossed.training[start:end]
