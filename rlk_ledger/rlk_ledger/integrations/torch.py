"""torch: determinism readback, boundary capture, selected log-probabilities."""

from rlk_ledger_sdk.integrations.torch import (
    LAYERS,
    OPERATORS,
    Boundaries,
    capture_boundaries,
    record_determinism,
    selected_logprobs,
)

__all__ = ["LAYERS", "OPERATORS", "Boundaries", "capture_boundaries", "record_determinism", "selected_logprobs"]
