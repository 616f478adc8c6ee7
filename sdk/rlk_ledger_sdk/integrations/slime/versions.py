"""Which weights a training pass scored with, in the names the rollout engines report.

The frameworks' weight updater counts updates and stamps every engine with its count. No hook is handed that count; it
is read from the trainer that calls the hook (`weight_updater.weight_version`), or the version stays unknown.
"""

import sys
from typing import Any

_DEPTH = 6


class TrainerVersion:
    """The version of the weights in force at each rollout's log-prob pass."""

    def __init__(self) -> None:
        self._first_round: dict[int, int] = {}  # update count -> rollout id at which it was first seen

    def at(self, args: Any, rollout_id: int, trainer: Any) -> str | None:
        """The version name, or None where the trainer shows no count.

        After n further rounds of training without an update the weights are ahead of every engine: "4+n". With
        keep_old_actor the pass runs the weights of the update before (update_weights_interval 1), else of the last one.
        """
        count = update_count(trainer)
        if count is None:
            return None
        first = self._first_round.setdefault(count, rollout_id)
        if getattr(args, "keep_old_actor", False):
            behind = 1 if getattr(args, "update_weights_interval", 1) == 1 else 0
            return str(max(count - behind, 1))
        ahead = rollout_id - first
        return f"{count}+{ahead}" if ahead > 0 else str(count)


def update_count(trainer: Any) -> int | None:
    """How many weight updates a trainer has sent; None where it shows none."""
    count = getattr(getattr(trainer, "weight_updater", None), "weight_version", None)
    return count if isinstance(count, int) and not isinstance(count, bool) else None


def calling_trainer() -> Any | None:
    """The nearest caller's `self` that has a weight updater: the trainer whose hook is running."""
    frame = sys._getframe(1)
    for _ in range(_DEPTH):
        if frame is None:
            return None
        trainer = frame.f_locals.get("self")
        if update_count(trainer) is not None:
            return trainer
        frame = frame.f_back  # type: ignore[assignment]
    return None
