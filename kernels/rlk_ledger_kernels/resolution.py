"""fast x consistency applied to one operator: which backend runs, which were rejected and why, or which error.

The table is `rlk_ledger_schemas.modes.behaviour`. Precedence: `fast=strict` decides first, then `consistency=strict`
leaves only what preserves the contract, then what is left may fall back. A backend asked for by name runs or fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import msgspec

from rlk_ledger_kernels.descriptors import Backend, Operator
from rlk_ledger_kernels.errors import ContractError, DecisionError
from rlk_ledger_kernels.request import AUTO, NATIVE, Objection, Request, objection
from rlk_ledger_schemas.events import Rejected
from rlk_ledger_schemas.modes import OPTIMISED, Behaviour, Bucket, Consistency, Fast, behaviour

Availability = Callable[[Backend, str | None], Objection | None]

_GRAVEST = ("required_field_missing", "contract_not_preserved", "capability_missing", "backend_unavailable")


class Outcome(msgspec.Struct, frozen=True):
    """What was chosen: a backend, or None for the engine's own operator. rejected: all others, in declared order."""

    backend: Backend | None
    bucket: Bucket
    reason: str
    fallback: bool
    rejected: tuple[Rejected, ...]


class _Candidate(msgspec.Struct, frozen=True):
    """A backend with what keeps it from serving (unfit) and what keeps the mode from letting it (barred)."""

    backend: Backend
    unfit: Objection | None
    barred: Objection | None

    @property
    def eligible(self) -> bool:
        return self.unfit is None and self.barred is None


def choose(
    operator: Operator,
    request: Request,
    fast: Fast,
    consistency: Consistency,
    unavailable: Availability,
    failed: Mapping[str, str],
) -> Outcome:
    """Choose a backend of `operator` for `request`.

    unavailable: what a backend lacks in this process. failed: backends that did not load in this case, with the error.
    Raises DecisionError with a code of `modes.REASONS` and every candidate's reason; ContractError for a backend that
    does not exist; UsageError for a value that is no mode.
    """
    rule = behaviour(fast, consistency)
    names = [backend.name for backend in operator.backends]
    if request.backend not in (AUTO, NATIVE, *names):
        raise ContractError(
            f"backend {request.backend!r} of {operator.name} does not exist; choose {AUTO}, {', '.join(names)}"
        )
    candidates = [
        _Candidate(one, _unfit(one, request, unavailable, failed), _barred(one, request, fast, consistency))
        for one in operator.backends
    ]
    if request.backend not in (AUTO, NATIVE):
        return _by_name(request, candidates)
    if request.backend == NATIVE:
        return _native(request, candidates, rule, _closed("native", fast, consistency))
    return _best(request, candidates, rule, fast)


def _unfit(
    backend: Backend, request: Request, unavailable: Availability, failed: Mapping[str, str]
) -> Objection | None:
    if backend.name in failed:
        return Objection("backend_unavailable", failed[backend.name], backend.enable)
    return objection(backend, request) or unavailable(backend, request.device)


def _barred(backend: Backend, request: Request, fast: Fast, consistency: Consistency) -> Objection | None:
    return _closed(backend.bucket, fast, consistency) or _by_name_only(backend, request)


def _by_name_only(backend: Backend, request: Request) -> Objection | None:
    """Why `auto` never takes a backend that a name may ask for."""
    if request.backend != AUTO:
        return None
    if backend.lifecycle == "experimental":
        return Objection("mode_excludes", "it is experimental, which `auto` never takes", "ask for it by its name")
    if "triton" in backend.needs and request.device == "cpu":
        return Objection("mode_excludes", "Triton's interpreter is for checking kernels", "ask for it by its name")
    return None


def _closed(bucket: Bucket, fast: Fast, consistency: Consistency) -> Objection | None:
    """Why a mode lets no backend of this kind run; None when it does."""
    if bucket in behaviour(fast, consistency).buckets:
        return None
    mode = f"fast={fast}, consistency={consistency}"
    if fast == "strict" and bucket not in OPTIMISED:
        return Objection("no_optimised_backend", f"it is {bucket}, and {mode} takes optimised operators only")
    if bucket in behaviour(fast, "off").buckets:
        return Objection("contract_not_preserved", f"it is {bucket}, and {mode} takes what preserves the contract only")
    return Objection("mode_excludes", f"it is {bucket}, which {mode} does not run")


def _by_name(request: Request, candidates: list[_Candidate]) -> Outcome:
    """The backend asked for, or its own reason as an error."""
    (mine,) = (one for one in candidates if one.backend.name == request.backend)
    others = [one for one in candidates if one is not mine]
    if mine.eligible:
        return _outcome(mine, "requested by name", False, others)
    why = mine.barred or mine.unfit
    assert why is not None
    told = f"backend {request.backend!r} of {request.operator} was asked for by name and cannot run"
    raise DecisionError(why.code, told, tuple(_rejections([mine])))


def _native(
    request: Request, candidates: list[_Candidate], rule: Behaviour, closed: Objection | None, note: str = ""
) -> Outcome:
    """The engine's own operator. Under consistency=strict it must declare that it preserves the contract."""
    rejected = tuple(_rejections(candidates))
    if closed is None and rule.preserve:
        closed = _undeclared(request)
    if closed is not None:
        told = f"the engine's own {request.operator} cannot run: {closed.reason}"
        raise DecisionError(closed.code, told, rejected)
    return Outcome(None, "native", note or "the engine's own operator", bool(note), rejected)


def _undeclared(request: Request) -> Objection | None:
    if request.native is None:
        return Objection("required_field_missing", "it declares nothing; pass its descriptor as `native`")
    if request.native.bucket == "opportunistic":
        return Objection("contract_not_preserved", "it is declared opportunistic")
    return objection(request.native, request)


def _best(request: Request, candidates: list[_Candidate], rule: Behaviour, fast: Fast) -> Outcome:
    """The best kind first, and within a kind the order of declaration."""
    optimised = [one for one in candidates if one.backend.bucket in OPTIMISED]
    if fast == "strict" and not any(one.unfit is None and not _by_name_only(one.backend, request) for one in optimised):
        told = f"no optimised backend of {request.operator} is eligible"
        raise DecisionError("no_optimised_backend", told, tuple(_rejections(candidates)))
    for bucket in rule.buckets:
        if bucket == "native":
            note = "no optimised backend is eligible" if rule.without == "fall_back" else ""
            return _native(request, candidates, rule, None, note)
        for one in candidates:
            if one.eligible and one.backend.bucket == bucket and _may_stand_in(one, candidates):
                others = [other for other in candidates if other is not one]
                instead = bucket not in OPTIMISED
                reason = "stands in: no optimised backend is eligible" if instead else "best eligible backend"
                return _outcome(one, reason, instead, others)
    told = f"no backend of {request.operator} preserves the contract as asked"
    raise DecisionError(_gravest(candidates, rule), told, tuple(_rejections(candidates)))


def _may_stand_in(one: _Candidate, candidates: list[_Candidate]) -> bool:
    """The fallback policy: a reference runs for others only where one of them names it, or where there is no other."""
    if one.backend.bucket in OPTIMISED:
        return True
    others = [other.backend.fallback for other in candidates if other.backend.bucket in OPTIMISED]
    return not others or one.backend.name in others


def _gravest(candidates: list[_Candidate], rule: Behaviour) -> str:
    """The code that says most about why nothing is eligible: strict kept out one that could run, or the worst fault."""
    if any(one.unfit is None and one.barred and one.barred.code == "contract_not_preserved" for one in candidates):
        return "contract_not_preserved"
    codes = {one.unfit.code for one in candidates if one.unfit is not None and one.backend.bucket in rule.buckets}
    return next((code for code in _GRAVEST if code in codes), "contract_not_preserved")


def _outcome(one: _Candidate, reason: str, fallback: bool, others: list[_Candidate]) -> Outcome:
    return Outcome(one.backend, one.backend.bucket, reason, fallback, tuple(_rejections(others)))


def _rejections(candidates: list[_Candidate]) -> Iterator[Rejected]:
    """Why each was not chosen. One that could have run has no code: it only comes later, or was not asked for."""
    for one in candidates:
        why = one.barred or one.unfit
        if why is None:
            yield Rejected(one.backend.name, "eligible, and another one was chosen")
        else:
            yield Rejected(one.backend.name, why.reason, why.code, why.enable or None)
