"""Reference scores of both sides' paths for the compared tokens of paired samples.

A pass scores every sample under one numerics along one path. A token's score comes from the checkpoint of the weight
version its span claims: a sample whose spans name two versions is scored whole under both, and each position keeps
its own. Scoring reads weights only, one version at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from rlk_ledger.history import Sample
from rlk_ledger.pairs import PairedSample
from rlk_ledger_kernels.probe import using_threads
from rlk_ledger_kernels.registry import Decision, Provenance
from rlk_ledger_replay.checkpoint import load_checkpoint
from rlk_ledger_replay.decoder import Decoder
from rlk_ledger_replay.numerics import Numerics
from rlk_ledger_replay.selection import group_key
from rlk_ledger_replay.weights import live_digest

ExecutionPath = Literal["prefill", "decode"]
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

    version_N: the weight version to score each token with, where it is not the one its span claims.
    """

    name: str
    numerics: tuple[Numerics | None, ...]
    path: ExecutionPath
    version_N: Index | None = None

    def rows(self, tokens: Tokens, version: int) -> Index:
        """The tokens this pass scores with one weight version."""
        used = tokens.version_N if self.version_N is None else self.version_N
        return np.flatnonzero(used == version)


@dataclass(frozen=True)
class Scores:
    """What the passes gave: float32 nats [N] by pass name, NaN where a pair has no numerics in it.

    provenance: which backend ran each operator, once for each decision. unchanged: by version index, whether the
    weights' digest after scoring equals the one before.
    """

    values: Mapping[str, Float32]
    provenance: tuple[Provenance, ...]
    unchanged: Mapping[int, bool]

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
    folders: Mapping[int, Path],
    *,
    threads: int = 1,
    advance: Callable[[int], None] = lambda _: None,
) -> Scores:
    """Runs every pass over every pair; `advance` is called with the number of sample scorings just done.

    folders: checkpoint folder by version index; a version of `tokens` without one is a KeyError. Equal scorings of
    different passes run once. Raises what the decoder raises (OperandError, InvarianceError, CheckpointError).
    """
    values = {one.name: np.full(len(tokens), np.nan, dtype=np.float32) for one in passes}
    ran: dict[Decision, Provenance] = {}
    unchanged: dict[int, bool] = {}
    with using_threads(threads):
        for version in _versions(passes, tokens):
            decoder = Decoder(load_checkpoint(folders[version]))
            before = live_digest(decoder.checkpoint.tensors)
            for numerics, path, wanted in _distinct(passes, tokens, version):
                rounded = decoder.with_numerics(numerics)
                scored = _run(rounded, path, pairs, sorted({p for p, _ in wanted}), advance)
                _place(values, wanted, scored, tokens, version)
                ran |= {one.decision: one for one in rounded.operators.provenance}
            unchanged[version] = live_digest(decoder.checkpoint.tensors) == before
    return Scores(values, tuple(ran.values()), unchanged)


def scorings(tokens: Tokens, passes: Sequence[Pass]) -> int:
    """How many sample scorings `score` will do: the length of its progress bar."""
    total = 0
    for version in _versions(passes, tokens):
        total += sum(len({pair for pair, _ in wanted}) for _, _, wanted in _distinct(passes, tokens, version))
    return total


def _versions(passes: Sequence[Pass], tokens: Tokens) -> list[int]:
    used = [tokens.version_N if one.version_N is None else one.version_N for one in passes]
    return sorted({int(version) for one in used for version in np.unique(one)})


def _distinct(
    passes: Sequence[Pass], tokens: Tokens, version: int
) -> Iterator[tuple[Numerics, ExecutionPath, list[tuple[int, Pass]]]]:
    """Distinct (numerics, path) with the (pair, pass) they serve, for one weight version."""
    jobs: dict[tuple[Numerics, ExecutionPath], list[tuple[int, Pass]]] = {}
    for one in passes:
        for pair in np.unique(tokens.pair_N[one.rows(tokens, version)]).tolist():
            numerics = one.numerics[pair]
            if numerics is not None:
                jobs.setdefault((numerics, one.path), []).append((pair, one))
    for (numerics, path), wanted in jobs.items():
        yield numerics, path, wanted


def _run(
    decoder: Decoder,
    path: ExecutionPath,
    pairs: Sequence[PairedSample],
    wanted: Sequence[int],
    advance: Callable[[int], None],
) -> dict[int, Float32]:
    """Log-probabilities of whole responses, by pair."""
    run = decoder.prefill_logprobs_batch if path == "prefill" else decoder.decode_logprobs_batch
    out: dict[int, Float32] = {}
    for start in range(0, len(wanted), BATCH):
        part = wanted[start : start + BATCH]
        scored = run([_inputs(pairs[pair]) for pair in part])
        out |= {pair: values.numpy() for pair, values in zip(part, scored)}
        advance(len(part))
    return out


def _inputs(pair: PairedSample) -> tuple[torch.Tensor, int]:
    prompt = pair.sample.prompt_token_ids
    assert prompt is not None, "pairs without a prompt are left out before scoring"
    ids = np.concatenate([prompt, pair.sample.response_token_ids]).astype(np.int64)
    return torch.from_numpy(ids), len(prompt)


def _place(
    values: Mapping[str, Float32],
    wanted: Sequence[tuple[int, Pass]],
    scored: Mapping[int, Float32],
    tokens: Tokens,
    version: int,
) -> None:
    """Copies the scored positions of one version into the passes they serve."""
    rows = {one.name: one.rows(tokens, version) for _, one in wanted}
    for pair, one in wanted:
        at = rows[one.name][tokens.pair_N[rows[one.name]] == pair]
        values[one.name][at] = scored[pair][tokens.position_N[at]]


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
