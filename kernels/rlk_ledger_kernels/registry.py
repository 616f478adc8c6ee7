"""The registry: which operators exist, and which backend runs one, decided once and told with every reason.

The caller records the decision; nothing here falls back in silence, and no backend is imported to decide.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from importlib import import_module
from threading import RLock
from types import MappingProxyType, ModuleType

from rlk_ledger_kernels.availability import unavailable
from rlk_ledger_kernels.decision import Decision, Provenance, callable_id, confirm
from rlk_ledger_kernels.descriptors import Operator
from rlk_ledger_kernels.discovery import discover, in_order, objection_to
from rlk_ledger_kernels.errors import ContractError, DecisionError
from rlk_ledger_kernels.fingerprint import build_fingerprint, source_fingerprint
from rlk_ledger_kernels.request import AUTO, Request
from rlk_ledger_kernels.resolution import choose
from rlk_ledger_schemas.events import Rejected
from rlk_ledger_schemas.modes import Consistency, Fast

__all__ = [
    "Decision",
    "Provenance",
    "Registry",
    "Request",
    "callable_id",
    "confirm",
    "default",
    "load",
    "operators",
    "resolve",
]

_log = logging.getLogger("rlk_ledger")


class Registry:
    """Operators by name, and how often they changed. Safe to use from several threads.

    generation: rises whenever what is registered changes; a decision made on an earlier one is stale.
    """

    def __init__(self) -> None:
        """Look around once: folders under `ops/` and installed entry points."""
        self._lock = RLock()
        self._registered: dict[str, Operator] = {}
        self._warned: set[tuple[str, str, str]] = set()
        found = discover()
        self._found = found.operators
        self._rejected = found.rejected
        self.generation = 1

    @property
    def operators(self) -> Mapping[str, Operator]:
        """Operators by name, in the order of a forward pass."""
        with self._lock:
            return MappingProxyType(in_order({**self._registered, **self._found}))

    @property
    def rejected(self) -> tuple[Rejected, ...]:
        """Declarations that cannot be used, with their reasons."""
        return self._rejected

    def register(self, operator: Operator) -> None:
        """Add one operator to this process; raises ContractError for a taken name or an unusable declaration."""
        reason = objection_to(operator)
        with self._lock:
            if reason is None and operator.name in self.operators:
                reason = "an operator of that name exists already"
            if reason is not None:
                raise ContractError(f"operator {getattr(operator, 'name', operator)!r} cannot be registered: {reason}")
            self._registered[operator.name] = operator
            self.generation += 1

    def refresh(self) -> None:
        """Look around again; the generation rises when anything is not as it was."""
        found = discover()
        with self._lock:
            if (found.operators, found.rejected) != (self._found, self._rejected):
                self._found, self._rejected = found.operators, found.rejected
                self.generation += 1

    def operator(self, name: str) -> Operator:
        """One operator; raises ContractError naming those that exist."""
        known = self.operators
        if name in known:
            return known[name]
        about = [one for one in self._rejected if name in one.backend or repr(name) in one.reason]
        refused = "".join(f"; {one.backend} was refused: {one.reason}" for one in about)
        raise ContractError(f"operator {name!r} does not exist; known are {', '.join(sorted(known))}{refused}")

    def resolve(
        self,
        request: Request,
        fast: Fast = "auto",
        consistency: Consistency = "strict",
        failed: Mapping[str, str] = MappingProxyType({}),
    ) -> Decision:
        """Decide which backend runs. failed: backends that did not load in this case, with the error, as text.

        Raises DecisionError (its `code` is the reason), ContractError for a name that does not exist, UsageError for a
        value that is no mode. A fallback is logged as a warning, once for each operator and reason.
        """
        with self._lock:
            operator, generation = self.operator(request.operator), self.generation
        outcome = choose(operator, request, fast, consistency, unavailable, failed)
        made = partial(
            Decision,
            operator=operator.name,
            requested=request.backend,
            reason=outcome.reason,
            bucket=outcome.bucket,
            fallback=outcome.fallback,
            rejected=outcome.rejected,
            contract_id=request.contract_id,
            fast=fast,
            consistency=consistency,
            device=request.device,
            generation=generation,
        )
        backend = outcome.backend
        if backend is None:
            decision = made(actual="native", implementation="")
        else:
            module = f"{operator.package}.{backend.name}"
            build = build_fingerprint(backend.needs, request.device or "cpu")
            decision = made(actual=backend.name, implementation=module, build=build, source=source_fingerprint(module))
        if decision.fallback:
            self._warn(decision)
        return decision

    def check_current(self, decision: Decision) -> None:
        """Raise DecisionError `stale_registry` when the registry changed after `decision` was made on it."""
        if decision.generation not in (None, self.generation):
            told = f"{decision.operator} was decided on generation {decision.generation} of the registry, which is now "
            raise DecisionError("stale_registry", f"{told}{self.generation}")

    def _warn(self, decision: Decision) -> None:
        why = "; ".join(f"{one.backend}: {one.reason}" for one in decision.rejected if one.code is not None)
        key = (decision.operator, decision.actual, why)
        with self._lock:
            if key in self._warned:
                return
            self._warned.add(key)
        _log.warning("%s falls back to %s (%s)", decision.operator, decision.actual, why)


_default: Registry | None = None
_default_lock = RLock()


def default() -> Registry:
    """The registry of this process; made when it is first asked for."""
    global _default
    with _default_lock:
        if _default is None:
            _default = Registry()
        return _default


def operators() -> dict[str, Operator]:
    """Every operator of this process by name, in the order of a forward pass."""
    return dict(default().operators)


def resolve(
    operator: str | Request,
    requested: str = AUTO,
    device: str = "cpu",
    *,
    dtype: str = "float32",
    shapes: Mapping[str, int] = MappingProxyType({}),
    fast: Fast = "auto",
    consistency: Consistency = "strict",
) -> Decision:
    """Decide on the registry of this process, for a Request or for the plain case of an operator's name.

    The plain case is forward, one rank and contract version 1, and `auto` insists on batch invariance; `shapes` may
    name more dimensions than an operator knows. The default mode is that of a reference: the best backend that
    preserves the contract, or an error. Raises as `Registry.resolve` does.
    """
    request = operator if isinstance(operator, Request) else _plain(operator, requested, device, dtype, dict(shapes))
    return default().resolve(request, fast, consistency)


def _plain(operator: str, requested: str, device: str, dtype: str, shapes: dict[str, int]) -> Request:
    return Request(
        operator=operator,
        backend=requested,
        device=device,
        dtype=dtype,
        shapes=shapes,
        autograd="forward",
        parallel=("single",),
        contract_version="1",
        batch_invariant=requested == AUTO,
    )


def load(decision: Decision, registry: Registry | None = None) -> ModuleType:
    """The module a decision names, imported now.

    Raises DecisionError `stale_registry` when the registry changed since, ContractError for `native`, which has none.
    """
    if not decision.implementation:
        raise ContractError(f"{decision.operator} was decided to run as the engine's own operator; there is no module")
    (registry or default()).check_current(decision)
    return import_module(decision.implementation)
