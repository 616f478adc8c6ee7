"""What a caller needs of an operator, and why a backend does not give it.

A request is matched field by field against what a backend declares. A field nobody stated matches nothing; only an
explicit `*` in the descriptor matches everything.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from rlk_ledger_kernels.descriptors import WILDCARD, Autograd, Backend, Parallel
from rlk_ledger_kernels.errors import ContractError

AUTO = "auto"
NATIVE = "native"
GROUPS = ("tp", "cp", "sp", "ep")
"""Parallel groups a topology gives the size of; every other size is a shape."""


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One operator under one numeric contract, on one device. A field left None was not stated.

    backend: `auto`, a backend's name, or `native` (the engine's own operator). device: torch device type. dtype: of the
    activations, as in a contract. autograd: `backward` where gradients are needed. parallel: every layout in force,
    ("single",) where there is none. topology: sizes (tp, cp, sp, ep). shapes: sizes by dimension name.
    contract_version, contract_id: of the contract to keep. deterministic, batch_invariant: properties to insist on.
    native: what the engine declares of its own operator; without it nothing is known of it.
    Raises ContractError when layouts and sizes contradict each other.
    """

    operator: str
    backend: str = AUTO
    device: str | None = None
    dtype: str | None = None
    autograd: Autograd | None = None
    parallel: tuple[Parallel, ...] | None = None
    topology: dict[str, int] = {}
    shapes: dict[str, int] = {}
    contract_version: str | None = None
    contract_id: str | None = None
    deterministic: bool = False
    batch_invariant: bool = False
    native: Backend | None = None

    def __post_init__(self) -> None:
        """Refuse layouts that contradict the sizes."""
        layouts = self.parallel
        if layouts is not None and (not layouts or ("single" in layouts and len(layouts) > 1)):
            raise ContractError(f"parallel is {layouts!r}; state `single` alone, or every layout in force")
        for name, size in self.topology.items():
            if size < 1:
                raise ContractError(f"topology {name} is {size}; a group has at least one rank")
            if size > 1 and layouts is not None and name in GROUPS and name not in layouts:
                raise ContractError(f"topology says {name}={size}, parallel says {layouts!r}; they contradict")


class Objection(NamedTuple):
    """Why a backend cannot serve a request: a code of `modes.REASONS`, a sentence, and what would enable it."""

    code: str
    reason: str
    enable: str = ""


def objection(backend: Backend, request: Request) -> Objection | None:
    """The first thing that keeps `backend` from serving `request`; None when all it declares covers it.

    Fields that are missing come first, then what the contract says, then capabilities.
    """
    missing = tuple(_missing(backend, request))
    if missing:
        fields = ", ".join(missing)
        return Objection(
            "required_field_missing",
            f"its descriptor needs {fields}, which the request does not state",
            f"state {fields}",
        )
    return next(_differences(backend, request), None)


def _declared(backend: Backend, request: Request) -> Iterator[tuple[str, str | None, tuple[str, ...]]]:
    """(field, what is stated, what is declared) of every field that is one of a list."""
    yield "contract_version", request.contract_version, backend.contracts
    yield "device", request.device, backend.devices
    yield "dtype", request.dtype, backend.dtypes
    yield "autograd", request.autograd, backend.autograd


def _missing(backend: Backend, request: Request) -> Iterator[str]:
    sizes = request.topology | request.shapes
    for field, stated, declared in _declared(backend, request):
        if stated is None and WILDCARD not in declared:
            yield field
    layouts = request.parallel
    if WILDCARD not in backend.parallel:
        if layouts is None:
            yield "parallel"
        elif layouts != ("single",):
            needed = dict.fromkeys((*backend.requires, *layouts))
            yield from (_place(name) for name in needed if name not in sizes)
    yield from (f"shapes.{name}" for name, _, _ in backend.shapes if name not in sizes)


def _place(name: str) -> str:
    return f"topology.{name}" if name in GROUPS else f"shapes.{name}"


def _differences(backend: Backend, request: Request) -> Iterator[Objection]:
    for field, stated, declared in _declared(backend, request):
        if WILDCARD not in declared and stated not in declared:
            code = "contract_not_preserved" if field == "contract_version" else "capability_missing"
            yield Objection(code, f"it declares {field} {', '.join(declared) or 'nothing'}, the request has {stated}")
    if WILDCARD not in backend.parallel:
        for layout in request.parallel or ():
            if layout not in backend.parallel:
                yield Objection(
                    "capability_missing",
                    f"it declares parallel {', '.join(backend.parallel) or 'nothing'}, the request has {layout}",
                )
    sizes = request.topology | request.shapes
    for name, low, high in backend.shapes:
        if sizes[name] < low or (high is not None and sizes[name] > high):
            span = f"{low} and above" if high is None else f"{low} to {high}"
            yield Objection("capability_missing", f"it declares {name} {span}, the request has {sizes[name]}")
    for name in ("deterministic", "batch_invariant"):
        if getattr(request, name) and not getattr(backend, name):
            yield Objection("capability_missing", f"the request insists on {name}, which it does not claim")
