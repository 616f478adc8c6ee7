"""Where the numbers come from: engines, environments, contracts, settings, weights; the two sides side by side."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from rlk_ledger.history import Fact, History
from rlk_ledger_replay.report.text import cut, flat, plain
from rlk_ledger_schemas.contracts import field_class

SIDES = ("rollout", "training")
_VALUES_SHOWN = 4
_ANSWERING = frozenset({"replay", "shipper"})

Mark = Literal["same", "differs", "path", "one side only"]


@dataclass(frozen=True)
class Row:
    """One field of both sides: what each recorded and how they compare; `klass` is a contract field's class."""

    name: str
    rollout: str
    training: str
    mark: Mark
    klass: str = ""


@dataclass(frozen=True)
class ContractTable:
    """The contracts of one kind, field by field."""

    kind: str
    rows: tuple[Row, ...]

    @property
    def differing(self) -> int:
        """How many fields differ or stand on one side only, path fields left out."""
        return sum(row.mark in ("differs", "one side only") for row in self.rows)


@dataclass(frozen=True)
class Knob:
    """One setting: asked for, materialised, in force. `agrees` is false where what ran is not what was asked for."""

    role: str
    path: str
    requested: str
    materialized: str
    actual: str
    status: str
    evidence: str
    agrees: bool


@dataclass(frozen=True)
class Operator:
    """Which backend an operator got."""

    role: str
    operator: str
    requested: str
    actual: str
    reason: str
    fallback: bool


@dataclass(frozen=True)
class Load:
    """One engine taking one version: `state` compares its digest with the published one."""

    engine: str
    step: int | None
    what: str
    digest: str
    state: Literal["equal", "differs", "not comparable"]
    skipped: tuple[str, ...]


@dataclass(frozen=True)
class Version:
    """One weight version: as published, as taken by the engines, and how many response tokens were sampled under it."""

    name: str
    step: int | None
    digest: str
    tensors: int | None
    sampled: int
    loads: tuple[Load, ...]


@dataclass(frozen=True)
class Provenance:
    """Everything about where the numbers come from."""

    engines: tuple[Row, ...]
    environment: tuple[Row, ...]
    contracts: tuple[ContractTable, ...]
    knobs: tuple[Knob, ...]
    operators: tuple[Operator, ...]
    versions: tuple[Version, ...]
    other_roles: tuple[str, ...]


def provenance(history: History) -> Provenance:
    """What a run recorded about its two sides."""
    roles = {w.get("role", "") for w in history.writers.values()}
    return Provenance(
        engines=tuple(_engine_row(name, held) for name, held in _engines(history).items()),
        environment=_rows(_environments(history)),
        contracts=tuple(_contracts(history)),
        knobs=tuple(_knobs(history)),
        operators=tuple(_operators(history)),
        versions=tuple(_versions(history)),
        other_roles=tuple(sorted(roles - set(SIDES) - _ANSWERING - {""})),
    )


Sided = dict[str, dict[str, list[str]]]
"""Field name to side to the distinct values that side recorded, in order."""


def _note(held: Sided, name: str, side: str, text: str) -> None:
    values = held.setdefault(name, {s: [] for s in SIDES})[side]
    if text not in values:
        values.append(text)


def _rows(held: Sided) -> tuple[Row, ...]:
    return tuple(_row(name, sides) for name, sides in held.items())


def _row(name: str, sides: dict[str, list[str]], klass: str = "") -> Row:
    left, right = (sides[side] for side in SIDES)
    mark: Mark = "same" if set(left) == set(right) else "differs" if left and right else "one side only"
    if klass == "path" and mark != "same":
        mark = "path"
    return Row(name, _joined(left), _joined(right), mark, klass)


def _engine_row(name: str, sides: dict[str, list[str]]) -> Row:
    """Two engines are two programs: only differing sources are worth a second look."""
    return _row(name, sides, "" if name in ("commit", "uncommitted changes") else "path")


def _joined(values: list[str]) -> str:
    shown = ", ".join(cut(value, 200) for value in values[:_VALUES_SHOWN])
    return shown + (f" and {len(values) - _VALUES_SHOWN} more" if len(values) > _VALUES_SHOWN else "")


def _sided(history: History, writer_id: str) -> str | None:
    role = history.role(writer_id)
    return role if role in SIDES else None


def _engines(history: History) -> Sided:
    held: Sided = {}
    for writer_id, opened in history.writers.items():
        side = _sided(history, writer_id)
        if side is None:
            continue
        engine = opened.get("engine") or {}
        revision = opened.get("revision") or {}
        facts = {
            "engine": engine.get("name"),
            "version": engine.get("version"),
            "instances": engine.get("instance"),
            "world size": opened.get("world_size"),
            "ranks": opened.get("rank"),
            "host": opened.get("host"),
            "commit": revision.get("commit"),
            "uncommitted changes": revision.get("dirty"),
        }
        for group, place in (opened.get("parallel") or {}).items():
            facts[f"{group} size"] = (place or {}).get("size")
        for name, value in facts.items():
            if value is not None:
                _note(held, name, side, plain(value))
    return held


def _environments(history: History) -> Sided:
    held: Sided = {}
    for writer_id, opened in history.writers.items():
        side = _sided(history, writer_id)
        environment = opened.get("environment")
        if side is None or not isinstance(environment, dict):
            continue
        for name, text in _environment_rows(environment):
            _note(held, name, side, text)
    return held


def _environment_rows(environment: dict[str, Any]) -> list[tuple[str, str]]:
    """The environment as rows; a list of library pins becomes one row a package."""
    pins = environment.get("pins")
    rows = flat({key: value for key, value in environment.items() if key != "pins" and value not in (None, {}, [])})
    if isinstance(pins, list):
        for pin in pins:
            if isinstance(pin, dict):
                rows.append((str(pin.get("package")), plain(pin.get("version") or pin.get("commit"))))
    return rows


def _contracts(history: History) -> Iterable[ContractTable]:
    kinds: dict[str, Sided] = {}
    for fact in history.of("contract.declared"):
        side, body = _sided(history, fact.writer_id), fact.fields.get("body")
        if side is None or not isinstance(body, dict):
            continue
        held = kinds.setdefault(str(fact.fields.get("kind")), {})
        for name, value in body.items():
            _note(held, str(name), side, plain(value))
    for kind, held in kinds.items():
        rows = (_row(name, sides, field_class(kind, name)) for name, sides in sorted(held.items()))
        yield ContractTable(kind, tuple(sorted(rows, key=lambda row: ("semantic", "numeric", "path").index(row.klass))))


def _knobs(history: History) -> list[Knob]:
    rows: dict[Knob, None] = {}
    for fact in history.of("knob.applied"):
        fields = fact.fields
        asked, got = fields.get("requested"), fields.get("actual")
        status = str(fields.get("status"))
        rows[
            Knob(
                role=_role_of(history, fact),
                path=str(fields.get("path")),
                requested=cut(plain(asked), 200),
                materialized=cut(plain(fields.get("materialized")), 200),
                actual=cut(plain(got), 200),
                status=status,
                evidence=str(fields.get("evidence") or ""),
                agrees=status == "applied" and (got is None or got == asked),
            )
        ] = None
    return sorted(rows, key=lambda knob: (knob.agrees, knob.path, knob.role))


def _operators(history: History) -> list[Operator]:
    rows: dict[Operator, None] = {}
    for fact in history.of("operator.decided"):
        fields = fact.fields
        rows[
            Operator(
                role=str(fields.get("side") or _role_of(history, fact)),
                operator=str(fields.get("operator")),
                requested=str(fields.get("requested_backend")),
                actual=str(fields.get("actual_backend")),
                reason=str(fields.get("reason") or ""),
                fallback=bool(fields.get("fallback")),
            )
        ] = None
    return sorted(rows, key=lambda row: (not row.fallback, row.operator, row.role))


def _role_of(history: History, fact: Fact) -> str:
    return history.role(fact.writer_id) or "unknown"


def _versions(history: History) -> list[Version]:
    """Every version seen, in the order published, then in the order first taken."""
    published: dict[str, Fact] = {}
    for fact in sorted(history.of("weights.published"), key=lambda f: (_step(f), f.seq)):
        published.setdefault(fact.fields["weight_version"], fact)
    loads: dict[str, list[Load]] = defaultdict(list)
    for fact in sorted(history.of("weights.loaded"), key=lambda f: (_step(f), f.seq)):
        name = fact.fields["weight_version"]
        loads[name].append(_load(fact, published.get(name)))
    sampled: dict[str, int] = defaultdict(int)
    for sample in history.samples:
        for name, start, end in sample.weight_spans:
            sampled[name] += end - start
    names = dict.fromkeys([*published, *loads, *sampled])
    return [_version(name, published.get(name), loads[name], sampled[name]) for name in names]


def _version(name: str, fact: Fact | None, loads: list[Load], sampled: int) -> Version:
    fields = {} if fact is None else fact.fields
    return Version(
        name=name,
        step=fields.get("step"),
        digest=fields.get("digest") or "",
        tensors=fields.get("tensor_count"),
        sampled=sampled,
        loads=tuple(loads),
    )


def _load(fact: Fact, published: Fact | None) -> Load:
    fields = fact.fields
    digest = fields["digest"]
    wanted = "" if published is None else published.fields["digest"]
    comparable = wanted.partition(":")[0] == digest.partition(":")[0]
    return Load(
        engine=str(fields["engine"]),
        step=fields.get("step"),
        what=fields.get("what") or "received",
        digest=digest,
        state="not comparable" if not comparable else "equal" if wanted == digest else "differs",
        skipped=tuple(fields.get("skipped") or ()),
    )


def _step(fact: Fact) -> int:
    step = fact.fields.get("step")
    return step if isinstance(step, int) else -1
