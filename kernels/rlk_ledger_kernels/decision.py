"""What was decided for one operator, and what then ran: facts the framework derived, kept apart from any claim."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from rlk_ledger_kernels.errors import DecisionError
from rlk_ledger_schemas.events import OperatorDecided, Rejected
from rlk_ledger_schemas.modes import Bucket, Consistency, Fast


class Decision(msgspec.Struct, frozen=True):
    """The outcome for one operator on one device. implementation: the module that runs; empty for `native`.

    fallback: the mode asked for an optimised backend and something else stands in. rejected: every other candidate
    with its reason. build, source: fingerprints. generation: of the registry it was made on; None binds to none.
    """

    operator: str
    requested: str
    actual: str
    implementation: str
    reason: str
    bucket: Bucket | None = None
    fallback: bool = False
    rejected: tuple[Rejected, ...] = ()
    build: str | None = None
    source: str | None = None
    contract_id: str | None = None
    fast: Fast | None = None
    consistency: Consistency | None = None
    device: str | None = None
    generation: int | None = None


class Provenance(msgspec.Struct, frozen=True):
    """One decision as it came to run. callables: function name to the loaded function's own id.

    reported: what the backend says about itself; never merged with the rest.
    """

    decision: Decision
    callables: dict[str, str] = {}
    reported: dict[str, Any] | None = None

    def to_event(self, side: str) -> OperatorDecided:
        """The `operator.decided` event for the caller to record. side: rollout, training or reference."""
        made = self.decision
        return OperatorDecided(
            operator=made.operator,
            side=side,
            requested_backend=made.requested,
            actual_backend=made.actual,
            fallback=made.fallback,
            mode={"fast": made.fast, "consistency": made.consistency} if made.fast is not None else None,
            contract_id=made.contract_id,
            bucket=made.bucket,
            reason=made.reason,
            rejected=made.rejected or None,
            implementation=made.implementation or None,
            build=made.build,
            source=made.source,
            callables=dict(self.callables) or None,
            reported=self.reported,
        )


def callable_id(function: Callable[..., Any]) -> str:
    """`module.qualified_name`, read from the loaded function itself and never from what somebody says it is.

    Raises TypeError for an object that carries neither, such as a partial: nothing could be known of it.
    """
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str):
        raise TypeError(f"{function!r} has no module and qualified name of its own; pass the function it wraps.")
    return f"{module}.{name}"


def confirm(decision: Decision, ran: str | Callable[..., Any], callables: Mapping[str, str] | None = None) -> None:
    """Raise DecisionError `silent_fallback` when what ran is not what was decided.

    ran: the name of the backend, of its module, or the very function that ran. callables: the ids the decision's
    backend was loaded with (`Provenance.callables`), where functions may be defined in a module it shares.
    """
    name = ran if isinstance(ran, str) else callable_id(ran)
    module = decision.implementation
    within = bool(module) and (name == module or name.startswith(f"{module}."))
    if name == decision.actual or within or name in (callables or {}).values():
        return
    raise DecisionError(
        "silent_fallback",
        f"{decision.operator} was decided to run on {decision.actual} ({module or 'the engine'}), and {name} ran",
        decision.rejected,
    )
