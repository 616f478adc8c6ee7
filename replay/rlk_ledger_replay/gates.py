"""Conditions for believing the numbers, each passed, failed or unknown; not measured is never passed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from rlk_ledger.audit.contracts import effective
from rlk_ledger.history import History
from rlk_ledger.pairs import PairedSample, Pairing
from rlk_ledger_kernels.registry import Decision as OperatorDecision
from rlk_ledger_replay.scores import Float32, Tokens
from rlk_ledger_replay.semantics import SIDES, Declared, Side
from rlk_ledger_replay.weights import Held
from rlk_ledger_schemas.contracts import differing_fields

Status = Literal["passed", "failed", "unknown"]

LAGS = (-2, -1, 1, 2)
LAG_GAIN = 3.0
"""A shifted reading counts as the true one when it is this many times closer to the reference."""


@dataclass(frozen=True)
class Gate:
    """One condition: its stable name, outcome, a sentence, and the evidence as plain values."""

    gate: str
    status: Status
    reason: str
    evidence: dict[str, Any] = field(default_factory=dict)


def comparability(pairs: Sequence[PairedSample]) -> list[Gate]:
    """One gate per semantic field of the logprob contracts that differs, or one that passed.

    Fields that come to the same (`raw` against `processed` at temperature 1) do not differ.
    """
    found: dict[str, Gate] = {}
    samples: dict[str, int] = defaultdict(int)
    for pair in pairs:
        left, right = pair.rollout_contract, pair.training_contract
        same_effect = effective(left) == effective(right)
        transforms = {"mode", "temperature", "top_p", "top_k", "min_p", "penalties"}
        for name, kind, a, b in differing_fields("logprob", left, right):
            if kind != "semantic" or (same_effect and name in transforms):
                continue
            samples[name] += 1
            found[name] = Gate(
                f"comparable.{name}",
                "failed",
                f"the sides declare different {name}: rollout {a!r}, training {b!r}",
                {"field": name, "rollout": a, "training": b, "samples": samples[name]},
            )
    return list(found.values()) or [Gate("comparable", "passed", "all declared semantic fields agree")]


def checkpoints(held: Iterable[Held]) -> list[Gate]:
    """Whether each checkpoint is the recorded one."""
    return [
        Gate(f"weights.digest.{one.version}", one.status, one.reason, {"folder": str(one.folder), "digest": one.digest})
        for one in held
    ]


def engine_weights(history: History, versions: Iterable[str]) -> list[Gate]:
    """Whether the engines took, under each version, the digest that was published under it."""
    published: dict[str, set[str]] = defaultdict(set)
    for fact in history.of("weights.published"):
        published[fact.fields["weight_version"]].add(fact.fields["digest"])
    wanted_versions = set(versions)
    gates = []
    for fact in history.of("weights.loaded"):
        version, found = fact.fields["weight_version"], fact.fields["digest"]
        scheme = found.partition(":")[0]
        wanted = {digest for digest in published.get(version, ()) if digest.partition(":")[0] == scheme}
        if version in wanted_versions and wanted and found not in wanted:
            others = sorted(name for name, digests in published.items() if found in digests)
            what = f"the weights of {', '.join(others)}" if others else "weights that were never published"
            gates.append(
                Gate(
                    f"weights.held.{version}",
                    "failed",
                    f"engine {fact.fields['engine']} held {what} under version {version}",
                    {"engine": fact.fields["engine"], "version": version, "holds": others, "digest": found},
                )
            )
    return gates


def evidence(
    declared: Mapping[Side, Sequence[Declared]], pairing: Pairing, unscorable: Mapping[str, int]
) -> list[Gate]:
    """Whether what the arms need was recorded: dtypes, supported semantics, whole shards, token ids."""
    gates = []
    for side in SIDES:
        missing = sorted({name for one in declared[side] for name in one.undeclared})
        assumed = {name: place for one in declared[side] for name, place in one.assumed.items()}
        cannot = sorted({name for one in declared[side] for name in one.unsupported})
        if missing:
            reason = f"the {side} side does not declare {', '.join(missing)}; its noise floor cannot be measured"
            gates.append(Gate(f"evidence.dtypes.{side}", "unknown", reason, {"missing": missing}))
        else:
            gates.append(Gate(f"evidence.dtypes.{side}", "passed", f"the {side} side's dtypes are declared", assumed))
        if cannot:
            reason = f"the reference cannot compute what the {side} side declares: {', '.join(cannot)}"
            gates.append(Gate(f"applied.semantics.{side}", "failed", reason, {"unsupported": cannot}))
    if pairing.missing_shards:
        gates.append(Gate("evidence.shards", "failed", f"{len(pairing.missing_shards)} sharded scores are incomplete"))
    else:
        gates.append(Gate("evidence.shards", "passed", "no score is missing a shard"))
    for reason, samples in unscorable.items():
        gates.append(
            Gate("evidence.samples", "unknown", f"{samples} samples were left out: {reason}", {"samples": samples})
        )
    return gates


def applied(decisions: Sequence[OperatorDecision]) -> list[Gate]:
    """Whether every operator of the reference ran on the backend that was asked for, and none on a stand-in."""
    swapped = [d for d in decisions if d.fallback or d.requested not in ("auto", d.actual)]
    trace = {d.operator: f"{d.requested} -> {d.actual}: {d.reason}" for d in decisions}
    if not decisions:
        return [Gate("applied.operators", "unknown", "no operator reported which backend ran")]
    if swapped:
        names = ", ".join(d.operator for d in swapped)
        return [Gate("applied.operators", "failed", f"{names} did not run on the requested backend", trace)]
    return [Gate("applied.operators", "passed", "every operator of the reference ran as resolved", trace)]


def self_check(prefill_N: Float32, decode_N: Float32) -> Gate:
    """Whether the reference's two execution paths agree bit for bit."""
    differ = np.flatnonzero(prefill_N.view(np.uint32) != decode_N.view(np.uint32))
    if np.isnan(prefill_N).any() or np.isnan(decode_N).any():
        return Gate("reference.self_check", "failed", "the reference gave NaN", {"tokens": len(prefill_N)})
    if len(differ):
        evidence = {"tokens": len(prefill_N), "differing": len(differ), "first": int(differ[0])}
        reason = f"decode differs from prefill at {len(differ)} of {len(prefill_N)} tokens"
        return Gate("reference.self_check", "failed", reason, evidence)
    reason = f"decode equals prefill bitwise at {len(prefill_N)} tokens"
    return Gate("reference.self_check", "passed", reason, {"tokens": len(prefill_N)})


def read_only(unchanged: Mapping[int, bool], versions: Sequence[str]) -> Gate:
    """Whether scoring left every checkpoint as it was."""
    if not unchanged:
        return Gate("scorer.read_only", "unknown", "no weights were scored with, so none were compared afterwards")
    touched = [versions[index] for index, same in unchanged.items() if not same]
    if touched:
        return Gate("scorer.read_only", "failed", f"scoring changed the weights of {', '.join(touched)}")
    return Gate("scorer.read_only", "passed", f"the weights of {len(unchanged)} versions are unchanged after scoring")


def alignment(side: Side, recorded_N: Float32, reference_N: Float32, tokens: Tokens) -> Gate:
    """Whether a side's values belong to their own tokens, by the lag at which they meet the reference best.

    Only neighbours within one sample are compared. Judged by the median of the absolute difference.
    """
    here = _median(recorded_N, reference_N)
    best, lag = min((_shifted(recorded_N, reference_N, tokens, lag), lag) for lag in LAGS)
    if here > LAG_GAIN * best and here > 0.05:
        reason = f"the {side} side's values meet the reference {lag:+d} tokens away ({best:.3f} instead of {here:.3f})"
        return Gate(f"alignment.{side}", "failed", reason, {"side": side, "lag": lag, "here": here, "there": best})
    return Gate(f"alignment.{side}", "passed", f"the {side} side's values belong to their own tokens", {"here": here})


def _shifted(recorded_N: Float32, reference_N: Float32, tokens: Tokens, lag: int) -> float:
    here, there = (slice(lag, None), slice(None, -lag)) if lag > 0 else (slice(None, lag), slice(-lag, None))
    neighbours = (tokens.pair_N[here] == tokens.pair_N[there]) & (
        tokens.position_N[here] - tokens.position_N[there] == lag
    )
    if not neighbours.any():
        return float("inf")
    return _median(recorded_N[there][neighbours], reference_N[here][neighbours])


def _median(left: Float32, right: Float32) -> float:
    difference: NDArray[np.float64] = np.abs(left.astype(np.float64) - right)
    return float(np.median(difference))
