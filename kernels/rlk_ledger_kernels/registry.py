"""Which backend runs an operator, decided once and told: requested, actual, and why.

The caller records the decision; nothing here falls back in silence.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

import msgspec

from rlk_ledger_kernels.errors import ContractError

OPERATORS = (
    "attention",
    "embedding",
    "linear",
    "masked_mean",
    "rms_norm",
    "rope",
    "selected_logprob",
    "swiglu",
)


class Backend(msgspec.Struct, frozen=True):
    """What a backend declares about itself. deterministic and batch_invariant are claims the suite tests."""

    name: str
    devices: tuple[str, ...]
    deterministic: bool
    batch_invariant: bool


BACKENDS = (
    Backend(name="torch", devices=("cpu",), deterministic=True, batch_invariant=True),
    Backend(name="reference", devices=("cpu",), deterministic=False, batch_invariant=False),
)


class Decision(msgspec.Struct, frozen=True):
    """The outcome for one operator on one device. implementation is the module that runs."""

    operator: str
    requested: str
    actual: str
    implementation: str
    reason: str


def resolve(operator: str, requested: str = "auto", device: str = "cpu") -> Decision:
    """Choose a backend: `auto` takes the first batch-invariant one for the device, a name takes that one.

    Raises ContractError naming the operator, backend or device that does not exist; a name never falls back.
    """
    if operator not in OPERATORS:
        raise ContractError(f"operator {operator!r} does not exist; known are {', '.join(OPERATORS)}")
    names = tuple(backend.name for backend in BACKENDS)
    if requested not in ("auto", *names):
        raise ContractError(f"backend {requested!r} of {operator} does not exist; choose auto, {', '.join(names)}")
    for backend in BACKENDS:
        wanted = backend.batch_invariant if requested == "auto" else backend.name == requested
        if wanted and device in backend.devices:
            reason = "first batch-invariant backend for this device" if requested == "auto" else "requested by name"
            module = f"rlk_ledger_kernels.ops.{operator}.{backend.name}"
            return Decision(operator, requested, backend.name, module, reason)
    raise ContractError(f"no backend of {operator} runs on device {device!r} as requested ({requested})")


def load(decision: Decision) -> ModuleType:
    """The module a decision names."""
    return import_module(decision.implementation)
