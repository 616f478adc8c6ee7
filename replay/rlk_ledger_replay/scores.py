"""Reference scores of both sides' paths for the compared tokens of paired samples.

A pass scores every sample under one numerics along one path. A token's score comes from the checkpoint of the weight
version its span claims: a sample whose spans name two versions is scored whole under both, and each position keeps
its own. Scoring reads weights only, one version at a time.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rlk_ledger.history import Sample
from rlk_ledger.pairs import PairedSample
from rlk_ledger_kernels.registry import Decision, Provenance
from rlk_ledger_kernels.request import AUTO
from rlk_ledger_replay.adapters import How
from rlk_ledger_replay.attempts import Attempts
from rlk_ledger_replay.build import scorer_fingerprint
from rlk_ledger_replay.checkpoint import parse_config
from rlk_ledger_replay.executors import Plan, chosen
from rlk_ledger_replay.executors.lanes import deal
from rlk_ledger_replay.layout import Layout
from rlk_ledger_replay.numerics import Numerics
from rlk_ledger_replay.operators import bind_operators
from rlk_ledger_replay.routes import routes_of
from rlk_ledger_replay.selection import group_key
from rlk_ledger_replay.work import Entry, ExecutionPath, Model, Outcome, Scored, Unit

Float32 = NDArray[np.float32]
Index = NDArray[np.int64]

BATCH = 32
"""Samples handed to the decoder at once; bounds memory and paces progress, changes no bit."""


@dataclass(frozen=True)
class Tokens:
    """The compared tokens of the chosen pairs, one after the other; every array is [N].

    pair_N, position_N: where a token stands. version_N: index into `Pairing.versions`. cluster_N: its group.
    rollout_N, training_N: recorded log-probabilities, float32 nats.
    """

    pair_N: Index
    position_N: Index
    version_N: Index
    cluster_N: Index
    rollout_N: Float32
    training_N: Float32

    def __len__(self) -> int:
        return len(self.pair_N)

    @property
    def clusters(self) -> int:
        """How many groups the tokens come from."""
        return len(np.unique(self.cluster_N))


@dataclass(frozen=True)
class Pass:
    """One scoring of all samples: a name, numerics by pair (None: not this sample) and the execution path.

    version_N: the weight version to score each token with, where it is not the one its span claims. how: how an
    adapter is applied, where the version has one and it is not applied as the model says.
    """

    name: str
    numerics: tuple[Numerics | None, ...]
    path: ExecutionPath
    version_N: Index | None = None
    how: How | None = None

    def rows(self, tokens: Tokens, version: int) -> Index:
        """The tokens this pass scores with one weight version."""
        used = tokens.version_N if self.version_N is None else self.version_N
        return np.flatnonzero(used == version)


@dataclass(frozen=True)
class Scores:
    """What the passes gave: float32 nats [N] by pass name, NaN where a pair has no numerics in it.

    provenance: which backend ran each operator, once for each decision. unchanged: by version index, whether the
    weights' digest after scoring equals the one before. lost: by pair, why a worker could not score it; such a pair has
    NaN. routes: (token, layer) pairs `covered` by recorded routes and `agreeing` with them, over routed passes.
    """

    values: Mapping[str, Float32]
    provenance: tuple[Provenance, ...]
    unchanged: Mapping[int, bool]
    lost: Mapping[int, str] = field(default_factory=dict)
    routes: Mapping[str, int] = field(default_factory=dict)

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """Which backend ran each operator, and why."""
        return tuple(one.decision for one in self.provenance)


def compared_tokens(pairs: Sequence[PairedSample]) -> Tokens:
    """The compared tokens of `pairs`; raises ValueError when there is none."""
    at = [np.flatnonzero(pair.compared) for pair in pairs]
    if not sum(map(len, at)):
        raise ValueError("no compared token: no position is active, finite and paired on both sides.")
    labels: dict[tuple[str, ...], int] = {}
    cluster = [labels.setdefault(group_key(pair), len(labels)) for pair in pairs]
    sizes = [len(positions) for positions in at]
    return Tokens(
        pair_N=np.repeat(np.arange(len(pairs)), sizes),
        position_N=np.concatenate(at),
        version_N=np.concatenate([pair.version[where] for pair, where in zip(pairs, at)]).astype(np.int64),
        cluster_N=np.repeat(np.array(cluster, dtype=np.int64), sizes),
        rollout_N=np.concatenate([pair.rollout[where] for pair, where in zip(pairs, at)]),
        training_N=np.concatenate([pair.training[where] for pair, where in zip(pairs, at)]),
    )


def score(
    pairs: Sequence[PairedSample],
    tokens: Tokens,
    passes: Sequence[Pass],
    folders: Mapping[int, Path | Model],
    *,
    threads: int = 1,
    advance: Callable[[int], None] = lambda _: None,
    plan: Plan | None = None,
    attempts: Attempts | None = None,
) -> Scores:
    """Runs every pass over every pair; `advance` is called with the number of sample scorings just done.

    folders: weights by version index; a version of `tokens` without any is a KeyError. Equal scorings of different
    passes run once. plan: who scores; no plan changes a bit. attempts: what earlier replays left, and where this one
    keeps its own. What the decoder raises in this process is raised (OperandError, InvarianceError, CheckpointError);
    what is raised in a worker, or ends it, is `lost`.
    """
    plan = plan or Plan()
    run = _Run(pairs, tokens, passes, plan, advance, attempts)
    lanes: list[list[Unit]] = [[] for _ in range(max(1, plan.workers))]
    for version in _versions(passes, tokens):
        for job in _distinct(passes, tokens, version):
            for lane, batches in zip(lanes, run.dealt(job, _model(folders[version], job.how), threads)):
                lane.extend(batches)
    unchanged = chosen(plan, threads).run(lanes, run.take) if any(lanes) else {}
    same = {version: _same(unchanged, folders[version]) for version in _versions(passes, tokens)}
    return Scores(run.values, tuple(run.ran.values()), same, run.lost, run.routes)


def _model(weights: Path | Model, how: How | None) -> Model:
    """The weights a job is scored with."""
    model = weights if isinstance(weights, Model) else Model(weights)
    if model.adapter is None or how is None:
        return model
    return replace(model, adapter=replace(model.adapter, how=how))


def _same(unchanged: Mapping[Model, bool], weights: Path | Model) -> bool:
    """Whether everything that was held of one version's weights was left as it was."""
    folder = weights.folder if isinstance(weights, Model) else weights
    return all(same for model, same in unchanged.items() if model.folder == folder)


@dataclass(frozen=True)
class _Job:
    """One distinct scoring under one weight version, and the (pair, pass) it serves."""

    version: int
    numerics: Numerics
    path: ExecutionPath
    how: How | None
    wanted: tuple[tuple[int, Pass], ...]


class _Run:
    """What one `score` gathers; fed from one thread, whoever computes."""

    def __init__(
        self,
        pairs: Sequence[PairedSample],
        tokens: Tokens,
        passes: Sequence[Pass],
        plan: Plan,
        advance: Callable[[int], None],
        attempts: Attempts | None,
    ) -> None:
        self.values = {one.name: np.full(len(tokens), np.nan, dtype=np.float32) for one in passes}
        self.ran: dict[Decision, Provenance] = {}
        self.lost: dict[int, str] = {}
        self.routes: Counter[str] = Counter()
        self._pairs, self._tokens, self._plan, self._advance, self._attempts = pairs, tokens, plan, advance, attempts
        self._first = np.searchsorted(tokens.pair_N, np.arange(len(pairs) + 1))
        self._jobs: dict[tuple[Model, Numerics, ExecutionPath], _Job] = {}
        self._index = {_key(pair.sample): index for index, pair in enumerate(pairs)}

    def dealt(self, job: _Job, model: Model, threads: int) -> list[list[Unit]]:
        """The units of a job by lane, without what an earlier attempt has."""
        config = parse_config(json.loads((model.folder / "config.json").read_bytes()))
        bound = bind_operators(config, job.numerics, Layout(), AUTO, "cpu").provenance
        self.ran |= {one.decision: one for one in bound}
        self._jobs[model, job.numerics, job.path] = job
        unit = Unit(model, job.numerics, job.path, (), scorer_fingerprint(bound), threads)
        left = []
        for index in sorted({pair for pair, _ in job.wanted}):
            entry = _entry(self._pairs[index], job.path)
            held = None if self._attempts is None else self._attempts.find(unit, entry)
            if held is None:
                left.append(entry)
            else:
                self._place(replace(unit, entries=(entry,)), held)
        hands = deal(left, max(1, self._plan.workers), BATCH)
        return [[replace(unit, entries=entries) for entries in hand] for hand in hands]

    def take(self, unit: Unit, outcome: Outcome) -> None:
        """One unit is done: kept, placed, shown."""
        if self._attempts is not None:
            self._attempts.keep(unit, outcome)
        if isinstance(outcome, Scored):
            self._place(unit, outcome)
        else:
            self.lost |= {self._index[entry.sample]: outcome.reason for entry in unit.entries}
            self._advance(len(unit.entries))

    def _place(self, unit: Unit, outcome: Scored) -> None:
        """Copies the scored positions of one version into the passes they serve."""
        job = self._jobs[unit.model, unit.numerics, unit.path]
        scored = {self._index[entry.sample]: part for entry, part in zip(unit.entries, outcome.values, strict=True)}
        for pair, one in job.wanted:
            if pair not in scored:
                continue
            at = np.arange(self._first[pair], self._first[pair + 1])
            used_N = self._tokens.version_N if one.version_N is None else one.version_N
            at = at[used_N[at] == job.version]
            self.values[one.name][at] = scored[pair][self._tokens.position_N[at]]
        for covered, agreeing in outcome.routes:
            self.routes.update(covered=covered, agreeing=agreeing)
        self._advance(len(unit.entries))


def _key(sample: Sample) -> str:
    """What tells samples of a run apart: two records may carry one id."""
    return f"{sample.sample_id}/{sample.writer_id}/{sample.seq}"


def _entry(pair: PairedSample, path: ExecutionPath) -> Entry:
    prompt = pair.sample.prompt_token_ids
    assert prompt is not None, "pairs without a prompt are left out before scoring"
    ids = np.concatenate([prompt, pair.sample.response_token_ids]).astype(np.int32)
    return Entry(_key(pair.sample), ids, len(prompt), routes_of(pair.sample) if path == "routed" else None)


def scorings(tokens: Tokens, passes: Sequence[Pass]) -> int:
    """How many sample scorings `score` will do: the length of its progress bar."""
    total = 0
    for version in _versions(passes, tokens):
        total += sum(len({pair for pair, _ in job.wanted}) for job in _distinct(passes, tokens, version))
    return total


def _versions(passes: Sequence[Pass], tokens: Tokens) -> list[int]:
    used = [tokens.version_N if one.version_N is None else one.version_N for one in passes]
    return sorted({int(version) for one in used for version in np.unique(one)})


def _distinct(passes: Sequence[Pass], tokens: Tokens, version: int) -> Iterator[_Job]:
    """Distinct scorings with the (pair, pass) they serve, for one weight version."""
    jobs: dict[tuple[Numerics, ExecutionPath, How | None], list[tuple[int, Pass]]] = {}
    for one in passes:
        for pair in np.unique(tokens.pair_N[one.rows(tokens, version)]).tolist():
            numerics = one.numerics[pair]
            if numerics is not None:
                jobs.setdefault((numerics, one.path, one.how), []).append((pair, one))
    for (numerics, path, how), wanted in jobs.items():
        yield _Job(version, numerics, path, how, tuple(wanted))


def is_redacted(sample: Sample) -> bool:
    """Whether the response's token ids are hashes, or were left out."""
    return len(sample.response_token_ids) != len(sample.loss_mask) or sample.response_token_ids.dtype != np.int32


def why_unscorable(pair: PairedSample, positions: int, vocabulary: int) -> str | None:
    """Why the decoder cannot score a sample, or None.

    positions, vocabulary: the model's limits.
    """
    sample = pair.sample
    prompt, response = sample.prompt_token_ids, sample.response_token_ids
    if is_redacted(sample):
        return "token ids are redacted"
    if prompt is None or not len(prompt):
        return "the prompt was not recorded"
    if prompt.dtype != np.int32:
        return "token ids are redacted"
    if len(prompt) + len(response) > positions:
        return f"longer than the model's {positions} positions"
    if (pair.version[pair.compared] < 0).any():
        return "no weight version was recorded"
    ids = np.concatenate([prompt, response])
    if ids.min() < 0 or ids.max() >= vocabulary:
        return f"token ids outside the model's vocabulary of {vocabulary}"
    given = sample.position_ids
    if given is not None and (np.diff(given) != 1).any():
        return "positions are not consecutive"
    return None
