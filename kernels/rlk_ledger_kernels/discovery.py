"""Which operators exist: the folders under `ops/`, and what installed distributions offer as `rlk_ledger.operators`.

A declaration is read and checked here; a backend is not imported. What cannot be used is one rejected entry with its
reason, and everything else goes on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pkgutil import iter_modules
from types import ModuleType
from typing import Any

import msgspec

from rlk_ledger_kernels import ops
from rlk_ledger_kernels.descriptors import Operator
from rlk_ledger_kernels.fingerprint import source_file
from rlk_ledger_schemas.events import Rejected

GROUP = "rlk_ledger.operators"
BROKEN = "declaration_broken"


class Found(msgspec.Struct, frozen=True):
    """What a look around gave: operators by name in chain order, and what was refused, with its reason."""

    operators: dict[str, Operator]
    rejected: tuple[Rejected, ...]


def discover() -> Found:
    """Read every folder under `ops/` and every entry point of GROUP. Raises nothing a plugin may raise."""
    rejected: list[Rejected] = []
    own = _named(_folders(), rejected)
    offered = _named(_plugins(), rejected)
    for name in sorted(offered.keys() & own.keys()):
        rejected.append(Rejected(name, f"{offered[name].package} names an operator that exists already", BROKEN))
    return Found(in_order({**offered, **own}), tuple(rejected))


def in_order(operators: dict[str, Operator]) -> dict[str, Operator]:
    """By their place in a forward pass, then by name."""
    return {one.name: one for one in sorted(operators.values(), key=lambda one: (one.chain, one.name))}


def objection_to(operator: object) -> str | None:
    """Why a declaration cannot be used, as one sentence; None when it can."""
    if not isinstance(operator, Operator):
        return f"OPERATOR is a {type(operator).__name__}, not an Operator"
    try:
        msgspec.convert(msgspec.to_builtins(operator), Operator)
    except msgspec.ValidationError as error:
        return f"its declaration is malformed: {error}"
    if not operator.name.isidentifier():
        return f"its name {operator.name!r} is no identifier"
    if not operator.surface or not operator.backends:
        return "it declares no function or no backend"
    names = [backend.name for backend in operator.backends]
    for backend in operator.backends:
        if names.count(backend.name) > 1 or backend.name in ("auto", "native"):
            return f"backend {backend.name!r} is declared twice, or under a reserved name"
        if backend.bucket == "native":
            return f"backend {backend.name!r} is in the bucket `native`, which is the engine's own operator"
        if backend.fallback is not None and backend.fallback not in names:
            return f"backend {backend.name!r} falls back to {backend.fallback!r}, which is not declared"
        if source_file(f"{operator.package}.{backend.name}") is None:
            return f"backend {backend.name!r} has no file {operator.package.replace('.', '/')}/{backend.name}.py"
    return None


def _folders() -> Iterator[tuple[str, object]]:
    """(folder, its OPERATOR or the error that reading it raised)."""
    for info in iter_modules(ops.__path__):
        if info.ispkg:
            yield info.name, _read(partial(import_module, f"{ops.__name__}.{info.name}"))


def _plugins() -> Iterator[tuple[str, object]]:
    """(entry point, its OPERATOR or the error that reading it raised), each target once."""
    offered: dict[tuple[str, str], EntryPoint] = {(one.name, one.value): one for one in entry_points(group=GROUP)}
    for _, entry in sorted(offered.items()):
        yield f"{entry.name} = {entry.value}", _read(entry.load)


def _read(load: Callable[[], Any]) -> object:
    """What a declaration's module holds. A plugin may raise anything, `SystemExit` too."""
    try:
        target = load()
        return target.OPERATOR if isinstance(target, ModuleType) else target
    except (Exception, SystemExit) as error:
        return error


def _named(declared: Iterator[tuple[str, object]], rejected: list[Rejected]) -> dict[str, Operator]:
    """The usable declarations by operator name; a name that is offered twice is refused for all who offer it."""
    good: list[tuple[str, Operator]] = []
    for where, target in declared:
        if isinstance(target, BaseException):
            rejected.append(Rejected(where, f"it raised {type(target).__name__}: {target}", BROKEN))
            continue
        reason = objection_to(target)
        if reason is not None:
            rejected.append(Rejected(where, reason, BROKEN))
        elif isinstance(target, Operator):
            good.append((where, target))
    count = Counter(operator.name for _, operator in good)
    for where, operator in good:
        if count[operator.name] > 1:
            rejected.append(
                Rejected(where, f"operator {operator.name!r} is declared {count[operator.name]} times", BROKEN)
            )
    return {operator.name: operator for _, operator in good if count[operator.name] == 1}
