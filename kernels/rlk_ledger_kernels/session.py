"""One case: resolves operators, loads them, records what ran, and leaves nothing behind.

A case is one scoring, one test or one certificate. What failed to load, what was cached and what a probe found belongs
to the session and ends with it; the next case starts as if there had been none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch

from rlk_ledger_kernels.decision import Decision, Provenance, callable_id, confirm
from rlk_ledger_kernels.descriptors import Operator
from rlk_ledger_kernels.errors import ContractError, DecisionError
from rlk_ledger_kernels.native import Run, Verdict, Verdicts, admit_native
from rlk_ledger_kernels.registry import Registry, default, load
from rlk_ledger_kernels.request import Request
from rlk_ledger_schemas.errors import FingerprintError
from rlk_ledger_schemas.fingerprints import canonical_json
from rlk_ledger_schemas.modes import Consistency, Fast


class Bound:
    """A resolved operator within one case: its functions by name, as attributes. target: what holds them.

    For the engine's own operator there are none: the engine runs it.
    """

    def __init__(self, decision: Decision, target: Any, functions: Mapping[str, Callable[..., Any]]) -> None:
        """Made by Session.bind."""
        self.decision = decision
        self.target = target
        self._functions = dict(functions)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """A function of the operator's surface; raises AttributeError naming what there is."""
        functions: dict[str, Callable[..., Any]] = self.__dict__.get("_functions", {})
        if name in functions:
            return functions[name]
        there = ", ".join(functions) or "nothing: its case is closed, or the engine runs its own operator"
        raise AttributeError(f"the operator bound here has no {name!r}; it has {there}")

    def close(self) -> None:
        """Let go of the backend; done by the session."""
        self.target = None
        self._functions.clear()


class Session:
    """Operators of one case under one mode. A context manager; used by one thread.

    verdicts: what probes of native backends found in this case. cache: for what a caller derives in this case (packed
    weights, workspaces); both are emptied when the case ends.
    """

    def __init__(
        self, *, fast: Fast = "auto", consistency: Consistency = "strict", registry: Registry | None = None
    ) -> None:
        """Open a case on `registry`, by default that of this process."""
        self.fast = fast
        self.consistency = consistency
        self.registry = registry or default()
        self.verdicts = Verdicts()
        self.cache: dict[Any, Any] = {}
        self._bound: list[Bound] = []
        self._provenance: list[Provenance] = []
        self._failed: dict[str, dict[str, str]] = {}
        self._open = True

    def __enter__(self) -> Session:
        """The open session."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the case, however it ended."""
        self.close()

    @property
    def provenance(self) -> tuple[Provenance, ...]:
        """Every decision of this case in order, for the caller to record; stays readable after the end."""
        return tuple(self._provenance)

    def bind(self, request: Request) -> Bound:
        """Resolve, load and instantiate one operator.

        A backend whose module fails to load is rejected for this case and the next candidate is taken where the mode
        allows one. Raises DecisionError with its reason code, ContractError for a name that does not exist.
        """
        if not self._open:
            raise ContractError("this case is closed; open a new Session")
        operator = self.registry.operator(request.operator)
        failed = self._failed.setdefault(operator.name, {})
        while True:
            decision = self.registry.resolve(request, self.fast, self.consistency, failed)
            try:
                target, functions = self._instantiate(operator, decision, request)
                ids = {name: callable_id(function) for name, function in functions.items()}
            except DecisionError:
                raise
            except Exception as error:  # any library under a backend may fail to load in any way
                failed[decision.actual] = f"it did not load: {type(error).__name__}: {error}"
                continue
            self._provenance.append(Provenance(decision, ids, _reported(target)))
            self._bound.append(Bound(decision, target, functions))
            return self._bound[-1]

    def confirm(self, bound: Bound, ran: str | Callable[..., Any]) -> None:
        """Raise DecisionError `silent_fallback` when `ran` is not what was bound, `stale_registry` on a changed one."""
        self.registry.check_current(bound.decision)
        ids = next((one.callables for one in self._provenance if one.decision is bound.decision), {})
        confirm(bound.decision, ran, ids)

    def fallbacks(self) -> int | None:
        """How many decisions of this case fell back; None where fallback is no declared knob (fast is not `auto`)."""
        return sum(one.decision.fallback for one in self._provenance) if self.fast == "auto" else None

    def admit_native(
        self,
        decision: Decision,
        inputs: Sequence[torch.Tensor],
        run: Run,
        reference_run: Run,
        configuration: str = "",
    ) -> Verdict:
        """Probe the decided backend on these very inputs, or give the verdict this case already has on them."""
        backend = next(one for one in self.registry.operator(decision.operator).backends if one.name == decision.actual)
        return admit_native(
            backend,
            decision.operator,
            inputs,
            run,
            reference_run,
            configuration=configuration,
            verdicts=self.verdicts,
        )

    def close(self) -> None:
        """End the case: let go of every backend, cached value, verdict and failure. Closing twice is once."""
        self._open = False
        for bound in self._bound:
            bound.close()
        self._bound.clear()
        self.cache.clear()
        self.verdicts.clear()
        self._failed.clear()

    def _instantiate(
        self, operator: Operator, decision: Decision, request: Request
    ) -> tuple[Any, dict[str, Callable[..., Any]]]:
        """The module, or what its `instance(request)` makes for this case, and the functions of the surface."""
        if not decision.implementation:
            return None, {}
        target: Any = load(decision, self.registry)
        if hasattr(target, "instance"):
            target = target.instance(request)
        absent = [name for name in operator.surface if not callable(getattr(target, name, None))]
        if absent:
            raise ContractError(f"{decision.implementation} lacks {', '.join(absent)} of the operator's surface")
        return target, {name: getattr(target, name) for name in operator.surface}


def _reported(target: Any) -> dict[str, Any] | None:
    """What a backend's `describe()` says of itself, copied; words about the failure where it says nothing readable."""
    describe = getattr(target, "describe", None)
    if describe is None:
        return None
    try:
        told = describe()
        canonical_json(told)
    except FingerprintError as error:
        return {"unreadable": str(error)}
    except Exception as error:  # a claim that cannot be made is no reason to stop
        return {"unreadable": f"describe() raised {type(error).__name__}: {error}"}
    return _copied(told) if isinstance(told, Mapping) else {"unreadable": f"describe() gave a {type(told).__name__}"}


def _copied(value: Any) -> Any:
    """Plain containers of its own, so that the backend cannot change what was recorded."""
    if isinstance(value, Mapping):
        return {name: _copied(one) for name, one in value.items()}
    return [_copied(one) for one in value] if isinstance(value, list | tuple) else value
