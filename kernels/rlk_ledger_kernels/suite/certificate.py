"""The certificate of one device: every operator and backend through every suite, and the proof that suites can fail.

The caller records it (`Certificate.to_event` gives the fields of `kernels.certified`) and shows it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from types import ModuleType
from typing import Any, Literal

import msgspec
import torch

from rlk_ledger_kernels.availability import present, unavailable
from rlk_ledger_kernels.descriptors import Backend, Operator
from rlk_ledger_kernels.errors import ContractError
from rlk_ledger_kernels.fingerprint import build_facts
from rlk_ledger_kernels.suite import catalogue, golden
from rlk_ledger_kernels.suite.backend_check import BackendCheck, check_backend, compare_backends
from rlk_ledger_kernels.suite.case import Wrong
from rlk_ledger_kernels.suite.layouts import TRANSFORMS
from rlk_ledger_kernels.suite.mistakes import mistakes
from rlk_ledger_kernels.suite.proof import Proof, prove
from rlk_ledger_schemas import tolerances
from rlk_ledger_schemas.events.certificates import OperatorChecked, Unavailable

Size = Literal["small", "large"]
Verdict = Literal["pass", "fail", "inconclusive"]
COLUMNS = ("invariance", "backward", "accuracy", "parity", "recorded_bits")
Progress = Callable[[str, int, int], None]
"""(what is under way, steps done, steps in all)."""


@dataclass(frozen=True)
class Scope:
    """What to check. backends, operators: names, empty for all that this device can run.

    Raises ContractError for a name that no operator, or no backend of the chosen ones, has.
    """

    device: str = "cpu"
    size: Size = "small"
    operators: tuple[str, ...] = ()
    backends: tuple[str, ...] = ()

    def chosen(self) -> list[tuple[Operator, Backend]]:
        """Pairs in chain order, best backend first; the reference only where it is named."""
        known = catalogue.operators()
        for name in self.operators:
            if name not in known:
                raise ContractError(f"operator {name!r} does not exist; known are {', '.join(known)}")
        chosen = [known[name] for name in known if not self.operators or name in self.operators]
        names = {backend.name for operator in chosen for backend in operator.backends}
        for name in self.backends:
            if name not in names:
                raise ContractError(f"no operator chosen has a backend {name!r}; they have {', '.join(sorted(names))}")
        return [
            (operator, backend)
            for operator in chosen
            for backend in operator.backends
            if (backend.name in self.backends if self.backends else backend.bucket != "reference")
        ]


@dataclass(frozen=True)
class Certificate:
    """What was found. missed: wrong operators a suite did not catch, or whose right twin it accused."""

    scope: Scope
    checked: tuple[OperatorChecked, ...]
    unavailable: tuple[Unavailable, ...]
    proofs: tuple[Proof, ...]
    device_class: str
    build: dict[str, str]
    seconds: float
    golden: dict[str, golden.Bits] = field(default_factory=dict)

    @property
    def missed(self) -> tuple[Proof, ...]:
        """Proofs that failed."""
        return tuple(proof for proof in self.proofs if proof.caught is None or proof.accused is not None)

    @property
    def reason(self) -> str | None:
        """The first thing that is wrong, of the operator lowest in the forward chain; None where nothing is."""
        for one in self.checked:
            for column in COLUMNS:
                found = getattr(one, column)
                if found.outcome == "failed":
                    return f"{one.operator} ({one.backend}): {column.replace('_', ' ')}: {found.detail}"
        for proof in self.missed:
            what = (
                "was not caught" if proof.caught is None else f"was caught, but so was its right twin: {proof.accused}"
            )
            return f"the {proof.wrong.suite} suite can not be believed: {proof.wrong.mistake}: {what}"
        return None

    @property
    def gap(self) -> str | None:
        """What was asked for by name and could not be measured, or that nothing was; None where all was."""
        if self.scope.backends and self.unavailable:
            lacking = self.unavailable[0]
            return f"{lacking.operator} ({lacking.backend}) was not measured: {lacking.reason}"
        for one in self.checked:
            if not one.cases:
                return f"{one.operator} ({one.backend}) was not measured: {one.accuracy.detail}"
            if one.invariance.outcome == "not_measured":
                return (
                    f"{one.operator} ({one.backend}) claims invariance, which was not measured: {one.invariance.detail}"
                )
        if not self.checked:
            return "nothing could be measured on this device"
        return None

    @property
    def verdict(self) -> Verdict:
        """fail: something is wrong; inconclusive: what was asked for was not measured; pass."""
        return "fail" if self.reason else "inconclusive" if self.gap else "pass"

    def to_event(self) -> dict[str, Any]:
        """The fields of `kernels.certified`."""
        return {
            "device": self.scope.device,
            "device_class": self.device_class,
            "verdict": self.verdict,
            "operators": [msgspec.to_builtins(one) for one in self.checked],
            "transforms": list(TRANSFORMS),
            "size": self.scope.size,
            "wrong_shipped": len(self.proofs),
            "wrong_caught": len(self.proofs) - len(self.missed),
            "tolerance_version": tolerances.VERSION,
            "tolerance_fingerprint": tolerances.FINGERPRINT,
            "build": self.build,
            "unavailable": [msgspec.to_builtins(one) for one in self.unavailable],
            "reason": self.reason or self.gap,
            "elapsed_s": round(self.seconds, 3),
        }


def certify(scope: Scope, progress: Progress = lambda what, done, total: None) -> Certificate:
    """Run every suite on what `scope` names. Raises ContractError for names that do not exist."""
    began = time.monotonic()
    pairs = scope.chosen()
    shipped = list(_shipped(scope))
    total = len(pairs) + len(shipped)
    checks: list[BackendCheck] = []
    absent: list[Unavailable] = []
    for done, (operator, backend) in enumerate(pairs):
        progress(f"{operator.name}, {backend.name}", done, total)
        module = _loaded(operator, backend, scope.device)
        if isinstance(module, Unavailable):
            absent.append(module)
        else:
            checks.append(check_backend(operator, backend, module, scope.device, scope.size))
    proofs = []
    for done, (wrong, module) in enumerate(shipped, start=len(pairs)):
        progress(f"a wrong {wrong.case.operator}", done, total)
        proofs.append(prove(wrong, scope.device, module))
    bits: dict[str, golden.Bits] = {}
    for one in checks:
        backends = bits.setdefault(one.device_class, {}).setdefault(one.operator.name, {})
        backends[one.backend.name] = one.golden
    return Certificate(
        scope=scope,
        checked=tuple(compare_backends(checks, scope.device)),
        unavailable=tuple(absent),
        proofs=tuple(proofs),
        device_class=golden.device_class(scope.device),
        build=_build(scope.device),
        seconds=time.monotonic() - began,
        golden=bits,
    )


def _loaded(operator: Operator, backend: Backend, device: str) -> ModuleType | Unavailable:
    """The backend's module, or why there is none here."""
    if device not in backend.devices and not _interpretable(backend, device):
        reason = f"it runs on {', '.join(backend.devices)}, not on {device}"
        return Unavailable(operator.name, backend.name, reason, f"--device {backend.devices[0]}")
    lacking = unavailable(backend, device)
    if lacking is not None:
        return Unavailable(operator.name, backend.name, lacking.reason, lacking.enable or None)
    try:
        return import_module(f"{operator.package}.{backend.name}")
    except Exception as error:  # whatever the import of another project's library raises
        return Unavailable(operator.name, backend.name, f"it cannot be imported: {error}", backend.enable or None)


def _interpretable(backend: Backend, device: str) -> bool:
    return device == "cpu" and "triton" in backend.needs


def _shipped(scope: Scope) -> Iterator[tuple[Wrong, ModuleType]]:
    """Every wrong operator with the module it may be built on; none on a device that is not here."""
    if not present(scope.device):
        return
    for wrong in mistakes():
        yield wrong, ModuleType("no_backend")
    for operator in catalogue.operators().values():
        if scope.operators and operator.name not in scope.operators:
            continue
        for wrong in catalogue.own_mistakes(operator):
            base = next((b for b in operator.backends if b.name == "torch"), operator.backends[0])
            module = _loaded(operator, base, scope.device)
            if isinstance(module, ModuleType):
                yield wrong, module


def _build(device: str) -> dict[str, str]:
    facts = dict(build_facts(("triton", "numpy"), device))
    facts |= {"threads": str(torch.get_num_threads()), "cores": str(os.cpu_count())}
    return {name: str(value) for name, value in facts.items()}  # torch names its version by a class of its own
