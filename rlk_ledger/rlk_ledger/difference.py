"""How two recorded runs differ, aspect by aspect in causal order: what comes first can cause what comes after it.

Nothing is judged and no model is needed. What only one run recorded is `unknown`: it is neither equal nor different.
Names that a run makes up (writer ids, hosts, process ids, times) are left out: they differ in every run.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from rlk_ledger.audit.finding import plain
from rlk_ledger.history import Fact, History, Sample, Score
from rlk_ledger.metrics import measure
from rlk_ledger.pairs import Pairing, pair
from rlk_ledger_schemas.fingerprints import sha256

Status = Literal["equal", "differs", "unknown"]
Facts = dict[tuple[Any, ...], Any]

_SHOWN = 200
"""Differences kept per aspect; all are counted."""
_OWN = frozenset({"host", "pid", "parent_writer", "instance"})
_ABSENT = object()


@dataclass(frozen=True, slots=True)
class Item:
    """One thing compared: its aspect and name, and what each run recorded (None where it did not)."""

    aspect: str
    name: str
    status: Status
    left: Any
    right: Any

    def to_dict(self) -> dict[str, Any]:
        """Plain values with stable keys."""
        return {
            "aspect": self.aspect,
            "name": self.name,
            "status": self.status,
            "left": plain(self.left),
            "right": plain(self.right),
        }


@dataclass(slots=True)
class Aspect:
    """One aspect of two runs: how many things were compared, and those that are not equal."""

    name: str
    equal: int = 0
    differs: int = 0
    unknown: int = 0
    items: list[Item] | None = None

    @property
    def status(self) -> Status:
        """`differs` before `unknown` before `equal`; an aspect neither run recorded is unknown."""
        if self.differs:
            return "differs"
        return "unknown" if self.unknown or not self.equal else "equal"


@dataclass(slots=True)
class Difference:
    """Two runs side by side; `aspects` are in causal order."""

    left: str
    right: str
    aspects: list[Aspect]

    @property
    def first(self) -> Item | None:
        """The first thing that differs, in causal order."""
        items = (i for a in self.aspects for i in a.items or () if i.status == "differs")
        return next(items, None)

    @property
    def exit_code(self) -> int:
        """1 where something differs, 3 where something was recorded on one side only or nowhere, else 0."""
        states = {a.status for a in self.aspects}
        return 1 if "differs" in states else 3 if "unknown" in states else 0

    def to_dict(self) -> dict[str, Any]:
        """One document with stable keys."""
        return {
            "left": self.left,
            "right": self.right,
            "exit_code": self.exit_code,
            "first": None if self.first is None else self.first.to_dict(),
            "aspects": [
                {
                    "aspect": a.name,
                    "status": a.status,
                    "equal": a.equal,
                    "differs": a.differs,
                    "unknown": a.unknown,
                    "items": [i.to_dict() for i in a.items or ()],
                }
                for a in self.aspects
            ],
        }


def compare_runs(left: History, right: History) -> Difference:
    """Every aspect of two runs, in causal order."""
    aspects = [_aspect(name, read(left), read(right)) for name, read in ASPECTS.items()]
    pairings = pair(left), pair(right)
    aspects.append(_aspect("drift", _drift(pairings[0]), _drift(pairings[1])))
    return Difference(left.run_id, right.run_id, aspects)


def _aspect(name: str, left: Facts, right: Facts) -> Aspect:
    out = Aspect(name, items=[])
    assert out.items is not None
    for key in dict.fromkeys([*left, *right]):
        a, b = left.get(key, _ABSENT), right.get(key, _ABSENT)
        if a is not _ABSENT and b is not _ABSENT and _same(a, b):
            out.equal += 1
            continue
        status: Status = "unknown" if a is _ABSENT or b is _ABSENT else "differs"
        out.differs += status == "differs"
        out.unknown += status == "unknown"
        kept = [None if v is _ABSENT else _shown(v) for v in (a, b)]
        item = Item(name, ".".join(map(str, key)), status, *kept)
        if len(out.items) < _SHOWN:
            out.items.append(item)
        elif status == "differs" and all(i.status == "unknown" for i in out.items):
            out.items[-1] = item  # the first difference is always among those kept
    return out


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return a.dtype == b.dtype and a.tobytes() == b.tobytes()
    return bool(a == b)


def _shown(value: Any) -> Any:
    if not isinstance(value, np.ndarray):
        return value
    return f"{len(value)} values, {sha256(value.tobytes())[:19]}"


# -- aspects, in causal order ---------------------------------------------------------------------------------------


def _flat(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """The leaves of nested mappings; lists are leaves."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if key not in _OWN:
                yield from _flat(inner, (*at, key))
    elif value is not None:
        yield at, value


def _writers(history: History, fields: tuple[str, ...]) -> Facts:
    """Fields of every recording process, by role and rank."""
    out: Facts = {}
    for opened in history.writers.values():
        if opened.get("role") in ("replay", "shipper", "retention", "import"):
            continue
        for name in fields:
            for key, value in _flat(opened.get(name)):
                out[opened.get("role"), opened.get("rank"), name, *key] = value
    return out


def _provenance(history: History) -> Facts:
    out = _writers(history, ("engine", "revision", "world_size", "parallel"))
    for fact in history.of("run.opened"):
        for name in ("roles", "mode", "redaction", "sampling_policy"):
            for key, value in _flat(fact.fields.get(name)):
                out.setdefault(("run", name, *key), value)
    return out


def _contracts(history: History) -> Facts:
    """Fields of each side's contracts, by role and kind; a second contract of a kind is its own entry."""
    out: Facts = {}
    counts: dict[tuple[Any, ...], dict[str, None]] = {}
    for fact in history.of("contract.declared"):
        key = (history.role(fact.writer_id), fact.fields.get("kind"))
        held = counts.setdefault(key, {})
        identity = fact.fields.get("contract_id") or ""
        if identity in held:
            continue
        held[identity] = None
        place = key if len(held) == 1 else (*key, len(held))
        out[(*place, "version")] = fact.fields.get("version")
        for name, value in _flat(fact.fields.get("body")):
            out[(*place, *name)] = value
    return out


def _weights(history: History) -> Facts:
    """Digest and tensor count of each version, as published and as each engine holds it."""
    out: Facts = {}
    for kind, what in (("weights.published", "published"), ("weights.loaded", "loaded")):
        for fact in history.of(kind):
            place = (fact.fields["weight_version"], what, *((history.role(fact.writer_id),) * (what == "loaded")))
            for name in ("digest", "tensor_count", "skipped"):
                if fact.fields.get(name) is not None:
                    out.setdefault((*place, name), fact.fields[name])
    return out


def _knobs(history: History) -> Facts:
    out: Facts = {}
    for fact in history.of("knob.applied"):
        actual = fact.fields.get("actual", fact.fields.get("materialized"))
        if actual is not None:
            out[history.role(fact.writer_id), fact.fields["path"]] = actual
    return out


def _decisions(history: History) -> Facts:
    out: Facts = {}
    for fact in history.of("operator.decided"):
        place = (history.role(fact.writer_id), fact.fields["operator"])
        for name in ("requested_backend", "actual_backend", "fallback", "reason"):
            if fact.fields.get(name) is not None:
                out.setdefault((*place, name), fact.fields[name])
    return out


def _layouts(history: History) -> Facts:
    out: Facts = {}
    for number, fact in enumerate(_once(history.of("batch.layout"), "layout_id")):
        place = (history.role(fact.writer_id), fact.fields["layout_id"])
        told = {k: v for k, v in fact.fields.items() if k not in ("layout_id", "step", "rollout_id", "decisions")}
        for name, value in told.items():
            out[(*place, name)] = value
        for name, array in fact.arrays.items():
            out[(*place, name)] = np.frombuffer(array.data, np.uint8)
        if number > 100_000:
            break
    return out


def _once(facts: Iterable[Fact], name: str) -> Iterator[Fact]:
    seen: set[tuple[str, Any]] = set()
    for fact in facts:
        key = (fact.writer_id, fact.fields.get(name))
        if key not in seen:
            seen.add(key)
            yield fact


def _samples(history: History) -> Facts:
    """Tokens and masks, prompt and sampling of every sample both may hold, by its id and attempt."""
    out: Facts = {}
    for sample in history.samples:
        out |= _sample(sample)
    return out


def _sample(sample: Sample) -> Facts:
    place = (sample.sample_id, *(() if sample.attempt is None else (sample.attempt,)))
    out: Facts = {}
    if sample.prompt_token_ids is not None:
        out[(*place, "prompt_token_ids")] = sample.prompt_token_ids
    if sample.token_digest:
        out[(*place, "token_digest")] = sample.token_digest
    out[(*place, "mask_digest")] = sample.mask_digest
    for key, value in _flat(sample.sampling):
        out[(*place, "sampling", *key)] = value
    return out


def _versions(history: History) -> Facts:
    return {(s.sample_id, *(() if s.attempt is None else (s.attempt,)), "weights"): s.weight_spans
            for s in history.samples if s.weight_spans}  # fmt: skip


def _values(history: History) -> Facts:
    """The log-probabilities of each side, bit for bit, by sample, source and pass."""
    out: Facts = {}
    for score in history.scores:
        out.setdefault(_score_place(score), score.values)
    return out


def _score_place(score: Score) -> tuple[Any, ...]:
    shard = score.shard or {}
    extra = tuple(v for v in (score.attempt, score.pass_id, shard.get("rank")) if v is not None)
    return score.source, score.sample_id, *extra, *((score.start,) if score.start else ())


def _drift(pairing: Pairing) -> Facts:
    """The metrics of the paired active tokens; a run in which nothing pairs has none."""
    columns = pairing.columns
    rows = columns.paired & columns.active
    found = measure(
        columns.rollout[rows],
        columns.training[rows],
        sample=columns.owner[rows],
        classes=(columns.rollout_class[rows], columns.training_class[rows]),
    )
    if found.status != "measured":
        return {}
    return {("tokens",): found.tokens, **{(name,): value for name, value in found.values.items() if value is not None}}


ASPECTS: dict[str, Callable[[History], Facts]] = {
    "provenance": _provenance,
    "environment": lambda history: _writers(history, ("environment",)),
    "contracts": _contracts,
    "weights": _weights,
    "knobs": _knobs,
    "decisions": _decisions,
    "samples": _samples,
    "versions": _versions,
    "layouts": _layouts,
    "values": _values,
}
"""What is compared before drift, causes first."""
