"""`rlk_ledger_sdk.integrations.slime` under its public name: the hooks for slime's command line."""

from rlk_ledger_sdk.integrations.slime import (
    all_samples,
    before_log_prob,
    before_train_step,
    dynamic_filter,
    generate,
    log_rollout,
    postprocess,
    sample,
    tis,
)

__all__ = [
    "all_samples",
    "before_log_prob",
    "before_train_step",
    "dynamic_filter",
    "generate",
    "log_rollout",
    "postprocess",
    "sample",
    "tis",
]
