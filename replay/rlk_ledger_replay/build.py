"""Which build scores: what decides the bits of the reference, as one fingerprint.

Operators with their build and source fingerprints, the sources of the kernels and of the decoder, torch, processor.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import torch

import rlk_ledger_kernels
from rlk_ledger_kernels.decision import Provenance
from rlk_ledger_schemas.fingerprints import canonical_json, file_digest, sha256

_BESIDE = ("demo", "report", "explain")
"""Parts of this package that compute no score."""


def scorer_fingerprint(ran: Iterable[Provenance]) -> str:
    """`sha256:<hex>` of everything besides weights, numerics and inputs that may decide a bit of a score."""
    operators = [
        {
            "operator": one.decision.operator,
            "actual": one.decision.actual,
            "implementation": one.decision.implementation,
            "build": one.decision.build,
            "source": one.decision.source,
            "callables": dict(one.callables),
        }
        for one in ran
    ]
    operators.sort(key=lambda one: str(one["operator"]))
    return sha256(canonical_json({"operators": operators, "sources": _sources(), **_machine()}))


@cache
def _sources() -> str:
    """One digest over the Python sources of the kernels and of replay, by their place in the package."""
    found = []
    for root in (Path(rlk_ledger_kernels.__path__[0]), Path(__file__).parent):
        for file in sorted(root.rglob("*.py")):
            place = file.relative_to(root)
            if place.parts[0] not in _BESIDE:
                found.append([root.name, place.as_posix(), file_digest(file)])
    return sha256(canonical_json(found))


@cache
def _machine() -> dict[str, str]:
    return {
        "torch": str(torch.__version__),
        "machine": platform.machine(),
        "capability": torch.backends.cpu.get_cpu_capability(),
    }
