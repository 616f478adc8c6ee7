"""The faults the demo can inject: what is really done wrong, and on which side."""

from typing import Literal

import msgspec

from rlk_ledger_schemas.errors import UsageError

Side = Literal["rollout", "training"]


class Fault(msgspec.Struct, frozen=True):
    """One fault: the side that is wrong, what it does, and the findings that name it."""

    side: Side
    does: str
    named_by: tuple[str, ...]


FAULTS: dict[str, Fault] = {
    "bf16-head": Fault(
        "rollout",
        "the rollout engine computes logits and log-softmax in bfloat16, training in float32",
        ("contract.differs",),
    ),
    "no-temperature": Fault(
        "training",
        "training scores at temperature 1 what was sampled at temperature 0.7",
        ("contract.differs",),
    ),
    "stale-weights": Fault(
        "rollout",
        "the rollout engine keeps its first weights and reports each new version as loaded",
        ("weights.not_loaded",),
    ),
    "off-by-one": Fault(
        "training",
        "training slices its log-probabilities one position late, so each value belongs to the next token",
        ("alignment.shift",),
    ),
    "tool-tokens": Fault(
        "training",
        "training counts tool output as if the policy had sampled it",
        ("mask.differs",),
    ),
    "weights-ahead": Fault(
        "training",
        "training scores after its own update and records the version it had before",
        ("drift.attributed",),
    ),
}


def fault_named(name: str) -> Fault:
    """The fault called `name`; raises UsageError that lists the known ones."""
    try:
        return FAULTS[name]
    except KeyError:
        raise UsageError(f"unknown fault {name!r}; choose one of {', '.join(FAULTS)}.") from None
