"""Whether a backend can run here, found out by running it: neither an import nor a version number is evidence.

One small case of the operator is run on the device and held against the float32 reference. This says that the kernels
work, not that they keep a contract bit by bit: the suites and the bitwise admission say that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from itertools import chain
from types import ModuleType

import msgspec

from rlk_ledger_kernels.availability import unavailable
from rlk_ledger_kernels.descriptors import Backend, Operator
from rlk_ledger_kernels.errors import KernelError
from rlk_ledger_kernels.fingerprint import installed
from rlk_ledger_kernels.suite import accuracy
from rlk_ledger_kernels.suite.case import Case, MaskedCase, SequenceCase
from rlk_ledger_kernels.suite.catalogue import cases, operators

_ROWS = 2
_SIZES = ("small", "large")
"""Large shapes are tried when a backend takes none of the small ones; both are cut to a few rows."""


class Capability(msgspec.Struct, frozen=True, kw_only=True):
    """What came of running one backend of one operator.

    runs: the case ran and lay within its tolerance. ran: the case. reason: one sentence. enable: what would make it
    run. versions: of the distributions the backend needs, "absent" where there is none.
    """

    operator: str
    backend: str
    device: str
    runs: bool
    reason: str
    ran: str = ""
    enable: str = ""
    versions: dict[str, str] = msgspec.field(default_factory=dict)


def capability(operator: Operator, backend: Backend, device: str) -> Capability:
    """Run one small case of `operator` on `backend` and `device` (a torch device type); failures are told."""
    runs, reason, ran = _tried(operator, backend, device)
    return Capability(
        operator=operator.name,
        backend=backend.name,
        device=device,
        runs=runs,
        reason=reason,
        ran=ran,
        enable="" if runs else backend.enable,
        versions={name: installed(name) or "absent" for name in backend.needs},
    )


def capabilities(device: str, names: tuple[str, ...] = ()) -> Iterator[Capability]:
    """`capability` of every backend of every operator, or of the backends named."""
    for operator in operators().values():
        for backend in operator.backends:
            if not names or backend.name in names:
                yield capability(operator, backend, device)


def _tried(operator: Operator, backend: Backend, device: str) -> tuple[bool, str, str]:
    """(whether it runs, why, what ran)."""
    if device not in backend.devices:
        return False, f"it is made for {' and '.join(backend.devices)}, not for {device}", ""
    objection = unavailable(backend, device)
    if objection is not None:
        return False, objection.reason, ""
    try:
        module = import_module(f"{operator.package}.{backend.name}")
    except Exception as error:  # another project's library may raise anything when it is imported
        return False, f"{type(error).__name__}: {_first_line(error)}", ""
    refusal = "it has no case of this operator to run"
    for case in chain.from_iterable(cases(operator, size) for size in _SIZES):
        if case.dtype not in backend.dtypes:
            continue
        tried = _short(case)
        try:
            return *_judged(tried, module, device), case.name
        except KernelError as error:  # this backend keeps no such contract; another case may fit it
            refusal = f"it refused {case.name}: {_first_line(error)}"
        except Exception as error:  # a kernel that does not build or run here
            return False, f"{type(error).__name__}: {_first_line(error)}", case.name
    return False, refusal, ""


def _judged(case: Case, module: ModuleType, device: str) -> tuple[bool, str]:
    worst = accuracy.measure(case, module, device)
    return (False, str(worst)) if worst.share > 1.0 else (True, "it ran within its tolerance")


def _short(case: Case) -> Case:
    """A few rows of a case, or its shortest sequence."""
    if isinstance(case, SequenceCase):
        return replace(case, sequences=[min(case.sequences, key=lambda one: len(one[0]))])
    if isinstance(case, MaskedCase):
        return case
    return replace(case, rows=tuple(operand[:_ROWS] for operand in case.rows))


def _first_line(error: Exception) -> str:
    return (str(error).strip() or "without a word").splitlines()[0]
