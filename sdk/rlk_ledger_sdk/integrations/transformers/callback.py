"""A callback for `transformers.Trainer`: a scope a step, and the weights at a chosen cadence."""

import sys
from typing import Any

from rlk_ledger_sdk.guard import guarded
from rlk_ledger_sdk.integrations.fsdp import is_sharded
from rlk_ledger_sdk.integrations.transformers.attached import Attached
from rlk_ledger_sdk.scope import scope


def version_of(step: int) -> str:
    """The name of the weights after `step` optimiser steps."""
    return f"v{step}"


def trainer_callback(attached: Attached, *, every: int = 1, dtype: Any = None) -> Any:
    """A TrainerCallback that records what `attached` holds before training and after every `every`th step.

    Every event between the beginning and the end of a step carries that step; step k works on weights `v<k>`. dtype:
    the wire dtype of the published weights. The class is made here because its base belongs to transformers.
    """
    base = sys.modules["transformers"].TrainerCallback
    return type("LedgerCallback", (_Steps, base), {})(attached, every, dtype)


class _Steps:
    """The body of the callback. `_open` is the scope of the step under way; one that was interrupted is closed next."""

    def __init__(self, attached: Attached, every: int, dtype: Any) -> None:
        self._attached, self._every, self._dtype = attached, max(1, every), dtype
        self._open: Any = None
        self._published: int | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The weights training starts from."""
        self._publish(state, "before the first step")

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Every event from here on belongs to this step."""
        self._leave()
        self._attached.weight_version = version_of(state.global_step)
        self._open = scope(step=state.global_step)
        self._open.__enter__()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The optimiser has stepped: `global_step` counts it."""
        self._leave()
        self._attached.weight_version = version_of(state.global_step)
        if state.global_step % self._every == 0:
            self._publish(state, "after the optimiser's step")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The last weights are always recorded."""
        self._leave()
        if self._published != state.global_step:
            self._publish(state, "after the optimiser's last step")

    def _publish(self, state: Any, rule: str) -> None:
        self._published = state.global_step
        if getattr(state, "is_world_process_zero", True) or is_sharded(self._attached.model):
            with scope(step=state.global_step):
                version = version_of(state.global_step)
                self._attached.published(version, dtype=self._dtype, stamp_rule=rule)

    def _leave(self) -> None:
        opened, self._open = self._open, None
        if opened is not None:
            with guarded("transformers callback"):
                opened.__exit__(None, None, None)
