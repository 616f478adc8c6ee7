"""One backend of one operator through the suites, and what each suite says of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType

import torch

from rlk_ledger_kernels.descriptors import Backend, Operator
from rlk_ledger_kernels.errors import ContractError
from rlk_ledger_kernels.fingerprint import build_fingerprint, source_fingerprint
from rlk_ledger_kernels.probe import using_threads
from rlk_ledger_kernels.suite import accuracy, catalogue, golden, invariance, parity
from rlk_ledger_kernels.suite.case import Case, MaskedCase, moved
from rlk_ledger_schemas.events.certificates import Checked, OperatorChecked

_NO_CASE = Checked("not_measured", "its folder has no case of a dtype this backend declares")


@dataclass(frozen=True)
class BackendCheck:
    """What the suites said of one backend alone; parity needs the others. golden: case name -> digest."""

    operator: Operator
    backend: Backend
    module: ModuleType
    cases: tuple[Case, ...]
    invariance: Checked
    backward: Checked
    accuracy: Checked
    recorded_bits: Checked
    device_class: str
    golden: dict[str, str]


def check_backend(operator: Operator, backend: Backend, module: ModuleType, device: str, size: str) -> BackendCheck:
    """Invariance forward and backward, accuracy, golden bits; what the operator raises is a failure with its text."""
    interpreted = device == "cpu" and "triton" in backend.needs
    fitting = tuple(case for case in catalogue.cases(operator, size) if case.dtype in backend.dtypes)
    with using_threads(1 if device == "cpu" else torch.get_num_threads()):
        held = _invariance(backend, module, fitting, device, interpreted)
        back = _backward(operator, backend, module, fitting, device, interpreted)
        near = _accuracy(module, fitting, device)
        name = golden.device_class(device, backend.needs)
        bits, stands = _golden(operator, backend, module, _thinned(fitting, interpreted), device, name)
    return BackendCheck(operator, backend, module, fitting, held, back, near, stands, name, bits)


def compare_backends(checks: Sequence[BackendCheck], device: str) -> Iterator[OperatorChecked]:
    """The checks with parity: each backend against one of its operator that passed invariance, torch where it did."""
    for one in checks:
        peers = [p for p in checks if p.operator.name == one.operator.name and p.invariance.outcome == "passed"]
        peers.sort(key=lambda peer: peer.backend.name != "torch")
        yield OperatorChecked(
            operator=one.operator.name,
            backend=one.backend.name,
            contracts=one.backend.contracts,
            cases=len(one.cases),
            invariance=one.invariance,
            backward=one.backward,
            accuracy=one.accuracy,
            parity=_parity(one, peers[0] if peers else None, device),
            recorded_bits=one.recorded_bits,
            source=source_fingerprint(one.module.__name__),
            build=build_fingerprint(one.backend.needs, device),
            golden=one.golden,
        )


def _each(cases: Sequence[Case], find: Callable[[Case], str | None]) -> Checked:
    """The first thing `find` reports of a case, in their order; a case whose contract is refused is not measured."""
    refused = None
    for case in cases:
        try:
            found = find(case)
        except ContractError as error:
            refused = refused or f"{case.name}: {error}"
            continue
        except Exception as error:  # whatever a kernel raises is a finding about that kernel
            found = f"{case.name}: {type(error).__name__}: {error}"
        if found is not None:
            return Checked("failed", found)
    if not cases:
        return _NO_CASE
    return Checked("passed") if refused is None else Checked("not_measured", refused)


def _invariance(backend: Backend, module: ModuleType, cases: Sequence[Case], device: str, interpreted: bool) -> Checked:
    if not backend.batch_invariant:
        return Checked("not_claimed", "it does not claim batch invariance")
    threaded = device == "cpu" and not interpreted and (os.cpu_count() or 1) > 1

    def find(case: Case) -> str | None:
        found = invariance.check(case, module, device, effort="brief" if interpreted else "full")
        if found is None and threaded:
            found = invariance.check(case, module, device, effort="brief", threads=2)
            return None if found is None else f"on 2 threads: {found}"
        return None if found is None else str(found)

    return _told(_each(_thinned(cases, interpreted), find), cases, interpreted)


def _backward(
    operator: Operator, backend: Backend, module: ModuleType, cases: Sequence[Case], device: str, interpreted: bool
) -> Checked:
    """Invariance of the gradient, and its distance from the reference's where that has one.

    The distance is asked of float32 alone: the table of tolerances is about outputs, and has no entry for a gradient
    through the roundings of a narrow forward pass.
    """
    if "backward" not in backend.autograd:
        return Checked("not_claimed", "it declares no backward pass")
    graded = [case for case in cases if not isinstance(case, MaskedCase) and case.gradient is not None]
    if not graded:
        return Checked("not_measured", "no case has a gradient")
    knows = any(one.name == "reference" and "backward" in one.autograd for one in operator.backends)
    reference = import_module(f"{operator.package}.reference") if knows else None
    shares = [0.0]
    thinned = _thinned(graded, interpreted)

    def find(case: Case) -> str | None:
        if backend.batch_invariant and (case is thinned[0] or not interpreted):
            mismatch = invariance.check(case, module, device, "backward", "brief" if interpreted else "full")
            if mismatch is not None:
                return str(mismatch)
        if reference is None or case.dtype != "float32":
            return None
        here = moved(case, device)
        got, expected = accuracy.gradients(here, module), accuracy.gradients(here, reference)
        if got is None or expected is None:
            return None
        worst = accuracy.worst(case, got, expected)
        shares.append(worst.share)
        return str(worst) if worst.share > 1.0 else None

    return _told(_with_share(_each(thinned, find), shares), graded, interpreted)


def first_of_each_dtype(cases: Sequence[Case]) -> list[Case]:
    """One case a dtype, in the order of the cases."""
    return list({case.dtype: case for case in reversed(cases)}.values())[::-1]


def _thinned(cases: Sequence[Case], interpreted: bool) -> Sequence[Case]:
    """All cases; in Triton's interpreter, where a launch takes a thousand times as long, the first of each dtype."""
    return first_of_each_dtype(cases) if interpreted else cases


def _told(found: Checked, cases: Sequence[Case], interpreted: bool) -> Checked:
    """A pass in the interpreter says how much of it ran."""
    if not interpreted or found.outcome != "passed":
        return found
    ran = len(_thinned(cases, True))
    return Checked("passed", f"{ran} of {len(cases)} cases, in Triton's interpreter", found.share)


def _accuracy(module: ModuleType, cases: Sequence[Case], device: str) -> Checked:
    shares = [0.0]

    def find(case: Case) -> str | None:
        worst = accuracy.measure(case, module, device)
        shares.append(worst.share)
        left = worst if worst.share > 1.0 else accuracy.classes(case, module, device)
        return None if left is None else str(left)

    return _with_share(_each(cases, find), shares)


def _with_share(found: Checked, shares: list[float]) -> Checked:
    finite = [share for share in shares if share != float("inf")]
    return Checked(found.outcome, found.detail, max(finite)) if len(shares) > 1 else found


def _golden(
    operator: Operator, backend: Backend, module: ModuleType, cases: Sequence[Case], device: str, name: str
) -> tuple[dict[str, str], Checked]:
    """The digest of each case, and how they compare with those recorded for this class of device."""
    if not backend.deterministic:
        return {}, Checked("not_claimed", "it does not claim to be deterministic")
    measured: dict[str, str] = {}

    def take(case: Case) -> str | None:
        measured[case.name] = golden.fingerprint(case, module, device)
        return None

    taken = _each(cases, take)
    if taken.outcome != "passed":
        return measured, taken
    before = (golden.recorded(name) or {}).get(operator.name, {}).get(backend.name, {})
    for case in cases:
        if case.name in before and before[case.name] != measured[case.name]:
            detail = f"{operator.name}, {case.name}: the bits are not those recorded for {name}"
            return measured, Checked("failed", detail)
    unknown = [case.name for case in cases if case.name not in before]
    if unknown:
        return measured, Checked("not_recorded", f"{len(unknown)} of {len(cases)} cases of class {name}")
    return measured, Checked("passed")


def _parity(one: BackendCheck, peer: BackendCheck | None, device: str) -> Checked:
    if one.invariance.outcome == "not_measured":
        return Checked("not_measured", f"nor was invariance: {one.invariance.detail}")
    if one.invariance.outcome != "passed":
        return Checked("refused", "it must pass invariance alone before it is compared")
    if peer is None or peer is one:
        return Checked("not_measured", "no other backend here to compare with")
    shares, equal = [0.0], []

    def find(case: Case) -> str | None:
        found = parity.compare(case, one.module, case, peer.module, device)
        shares.append(found.worst.share)
        equal.append(found.bitwise)
        return f"against {peer.backend.name}: {found.worst}" if found.worst.share > 1.0 else None

    shared = [case for case in one.cases if case.dtype in peer.backend.dtypes]
    found = _with_share(_each(shared, find), shares)
    told = found.detail or f"against {peer.backend.name}, {sum(equal)} of {len(equal)} cases bit for bit"
    return Checked(found.outcome, told, found.share, bool(equal) and all(equal))
