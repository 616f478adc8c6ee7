"""Scores what a side may have computed: its declaration, placebo schedules, and every variant that can be tried.

A variant that cannot be tried is kept with the reason; one that asks for what the side declares anyway is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from rlk_ledger.pairs import PairedSample
from rlk_ledger_kernels.dtypes import torch_dtype
from rlk_ledger_kernels.errors import ContractError
from rlk_ledger_kernels.schedule import placebo_schedules
from rlk_ledger_replay.checkpoint import ModelConfig
from rlk_ledger_replay.explain.answer import Scored
from rlk_ledger_replay.explain.variant import Variant
from rlk_ledger_replay.intervals import Floats
from rlk_ledger_replay.numerics import Numerics
from rlk_ledger_replay.scores import Float32, Pass, Scores, Tokens, score, scorings
from rlk_ledger_replay.semantics import Declared, Side

PLACEBOS = 8
REPEATS = 3
"""Placebo schedules under which the best variants are scored again."""
REFERENCE, DECLARED, DECODE = "reference", "declared", "reference.decode"


@dataclass(frozen=True)
class Subject:
    """One side of the chosen samples: what is needed to imitate it.

    declared: by pair. folders: checkpoint by version index. config: of the model.
    """

    side: Side
    pairs: Sequence[PairedSample]
    tokens: Tokens
    declared: Sequence[Declared]
    folders: Mapping[int, Path]
    config: ModelConfig
    threads: int = 1

    @property
    def values_N(self) -> Float32:
        """The recorded log-probabilities, float32 nats [tokens]."""
        return self.tokens.rollout_N if self.side == "rollout" else self.tokens.training_N


@dataclass(frozen=True)
class Tried:
    """The variants that can be scored, those that cannot with the reason, and those that are what is declared."""

    variants: tuple[Variant, ...]
    unmet: Mapping[str, str]
    same: tuple[str, ...]


def choose(subject: Subject, variants: Sequence[Variant]) -> Tried:
    """Sorts variants by whether they can be tried on this side."""
    able: list[Variant] = []
    unmet: dict[str, str] = {}
    same: list[str] = []
    for one in variants:
        reason = _unmet(one, subject)
        if reason is not None:
            unmet[one.name] = reason
        elif _as_declared(one, subject):
            same.append(one.name)
        else:
            able.append(one)
    return Tried(tuple(able), unmet, tuple(same))


def base_passes(subject: Subject) -> list[Pass]:
    """The reference along both paths, the declaration, and its placebo schedules."""
    reference = tuple(one.reference for one in subject.declared)
    imitation = tuple(one.imitation for one in subject.declared)
    out = [
        Pass(REFERENCE, reference, "prefill"),
        Pass(DECODE, reference, "decode"),
        Pass(DECLARED, imitation, "prefill"),
    ]
    for number, schedule in enumerate(placebo_schedules(PLACEBOS)):
        numerics = tuple(None if one is None else replace(one, schedule=schedule) for one in imitation)
        out.append(Pass(f"placebo.{number}", numerics, "prefill"))
    return out


def variant_pass(variant: Variant, subject: Subject) -> Pass | None:
    """The scoring a variant needs; None for one that only rewrites the declared values."""
    used_N = _versions(variant, subject.tokens)
    if not variant.changes and used_N is None:
        return None
    numerics = tuple(changed(one.imitation, variant) for one in subject.declared)
    return Pass(variant.name, numerics, "prefill", used_N)


def changed(numerics: Numerics | None, variant: Variant) -> Numerics | None:
    """Declared numerics with a variant's changes."""
    return None if numerics is None else replace(numerics, **variant.changes)


def repeated_passes(variants: Sequence[Variant], subject: Subject) -> list[Pass]:
    """The scorings of variants under the first placebo schedules; none for those that only rewrite values."""
    out = []
    for variant in variants:
        one = variant_pass(variant, subject)
        if one is None:
            continue
        for number, schedule in enumerate(placebo_schedules(REPEATS)):
            numerics = tuple(None if n is None else replace(n, schedule=schedule) for n in one.numerics)
            out.append(replace(one, name=_again(variant, number), numerics=numerics))
    return out


def repeated(variants: Sequence[Variant], subject: Subject, values: Mapping[str, Float32]) -> dict[str, Floats]:
    """What variants predict under the first placebo schedules, float64 nats [schedules, tokens]."""
    out = {}
    for variant in variants:
        rows = [values.get(_again(variant, n), values[f"placebo.{n}"]) for n in range(REPEATS)]
        out[variant.name] = np.stack([rewritten(variant, row, subject) for row in rows]).astype(np.float64)
    return out


def _again(variant: Variant, number: int) -> str:
    return f"{variant.name}.again.{number}"


def run_passes(subject: Subject, passes: Sequence[Pass], advance: Callable[[int], None]) -> Scores:
    """Scores passes over the side's samples; see `scores.score` for what it raises."""
    return score(subject.pairs, subject.tokens, passes, subject.folders, threads=subject.threads, advance=advance)


def work(subject: Subject, passes: Sequence[Pass]) -> int:
    """How many sample scorings the passes take."""
    return scorings(subject.tokens, passes)


def predictions(subject: Subject, variants: Sequence[Variant], scores: Mapping[str, Float32]) -> dict[str, Floats]:
    """What each variant predicts, float64 nats [tokens], NaN where it says nothing."""
    return {
        one.name: rewritten(one, scores.get(one.name, scores[DECLARED]), subject).astype(np.float64) for one in variants
    }


def scored(subject: Subject, values: Mapping[str, Float32], variants: Sequence[Variant]) -> Scored:
    """Everything the answer is made from."""
    placebo_KN = np.stack([values[f"placebo.{number}"] for number in range(PLACEBOS)]).astype(np.float64)
    return Scored(
        values_N=subject.values_N.astype(np.float64),
        reference_N=values[REFERENCE].astype(np.float64),
        declared_N=values[DECLARED].astype(np.float64),
        placebo_KN=placebo_KN,
        variants=predictions(subject, variants, values),
    )


def rewritten(variant: Variant, scored_N: Float32, subject: Subject) -> Float32:
    """Scored values as the variant would have recorded them."""
    out = scored_N
    if variant.kept:
        out = out - np.log(_kept(subject))
    if variant.round_to is not None:
        out = torch.from_numpy(out).to(torch_dtype(variant.round_to)).to(torch.float32).numpy()
    return _shifted(out, subject.tokens, variant.lag) if variant.lag else out


def _shifted(values_N: Float32, tokens: Tokens, lag: int) -> Float32:
    """The value of the compared token `lag` positions later in the same sample; NaN where there is none."""
    out = np.full_like(values_N, np.nan)
    at = {(int(p), int(i)): n for n, (p, i) in enumerate(zip(tokens.pair_N, tokens.position_N))}
    for (pair, position), row in at.items():
        source = at.get((pair, position + lag))
        if source is not None:
            out[row] = values_N[source]
    return out


def _kept(subject: Subject) -> Float32:
    kept_N = np.full(len(subject.tokens), np.nan, dtype=np.float32)
    for index, pair in enumerate(subject.pairs):
        rows = np.flatnonzero(subject.tokens.pair_N == index)
        if pair.sample.kept_mass is not None:
            kept_N[rows] = pair.sample.kept_mass[subject.tokens.position_N[rows]]
    return np.where(kept_N > 0.0, kept_N, np.float32(np.nan))


def _versions(variant: Variant, tokens: Tokens) -> np.ndarray | None:
    if variant.version is not None:
        return np.full(len(tokens), variant.version, dtype=np.int64)
    return np.maximum(tokens.version_N - 1, 0) if variant.before else None


def _unmet(variant: Variant, subject: Subject) -> str | None:
    experts = subject.config.experts is not None
    if "experts" in variant.needs and not experts:
        return "the model has no experts"
    if "dense" in variant.needs and experts:
        return "shares of experts are not cut over simulated ranks here"
    if "kept_mass" in variant.needs and not np.isfinite(_kept(subject)).all():
        return "the kept probability (`kept_mass`) was not recorded for every token"
    if "versions" in variant.needs:
        used_N = _versions(variant, subject.tokens)
        missing = set(np.unique(used_N).tolist()) - set(subject.folders) if used_N is not None else set()
        if missing:
            return "the checkpoint of that weight version is not to be had"
    return None


def _as_declared(variant: Variant, subject: Subject) -> bool:
    """Whether it asks for nothing else than what the side declares."""
    used_N = _versions(variant, subject.tokens)
    if used_N is not None and not np.array_equal(used_N, subject.tokens.version_N):
        return False
    if variant.lag or variant.round_to or variant.kept:
        return False
    return all(
        one.imitation is None or _effective(changed(one.imitation, variant)) == _effective(one.imitation)
        for one in subject.declared
    )


def _effective(numerics: Numerics | None) -> object:
    """Numerics with every default written out; raises ContractError as Numerics does."""
    if numerics is None:
        raise ContractError("explain: a side without declared dtypes has nothing to depart from")
    return numerics.spelled_out()
