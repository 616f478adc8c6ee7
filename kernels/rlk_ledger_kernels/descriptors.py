"""What operators and their backends declare about themselves: immutable, and readable without importing a backend.

An operator is a folder under `ops/` whose `__init__` holds `OPERATOR`. A declaration is a claim; the suites test it,
and the registry admits by it. Support is never guessed from an import: what is not declared is not supported.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from rlk_ledger_schemas.modes import Bucket

OpClass = Literal["elementwise", "reduction", "attention", "logprob"]
Autograd = Literal["forward", "backward"]
Parallel = Literal["single", "tp", "sp", "cp", "ep"]
WILDCARD = "*"


class Backend(msgspec.Struct, frozen=True, kw_only=True):
    """One way to run an operator: the module `<operator's package>.<name>`.

    bucket: contract_preserving, opportunistic or reference. devices: torch device types (`cpu`, `cuda`). dtypes: of the
    operands that carry activations. autograd: passes it implements. parallel: layouts it keeps its contract under, with
    the topology fields a request must then state in `requires`. shapes: (dimension, smallest, largest or None), both
    inclusive. contracts: contract versions it preserves. Only the word `*` is a wildcard; an empty tuple matches
    nothing. needs: distributions it imports when it runs. enable: one sentence for those who lack it.
    fallback: the backend that may stand in for it, or None. deterministic, batch_invariant: claims the suites test.
    """

    name: str
    bucket: Bucket
    devices: tuple[str, ...]
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")
    autograd: tuple[Autograd, ...] = ("forward",)
    parallel: tuple[Parallel, ...] = ("single",)
    requires: tuple[str, ...] = ()
    shapes: tuple[tuple[str, int, int | None], ...] = ()
    deterministic: bool = True
    batch_invariant: bool = True
    contracts: tuple[str, ...] = ("1",)
    lifecycle: Literal["stable", "experimental", "deprecated"] = "stable"
    fallback: str | None = "reference"
    needs: tuple[str, ...] = ()
    enable: str = ""


class Operator(msgspec.Struct, frozen=True, kw_only=True):
    """One operator. package: its folder as a dotted name. chain: its place in a forward pass, lowest first.

    op_class: the row of the tolerance table its accuracy is judged by. surface: names of the functions that every
    backend module defines with one signature. backends: best first.
    """

    name: str
    package: str
    chain: int
    op_class: OpClass
    surface: tuple[str, ...]
    backends: tuple[Backend, ...]
