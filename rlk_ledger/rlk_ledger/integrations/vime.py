"""`rlk_ledger_sdk.integrations.vime` under its public name: the hooks for vime's command line."""

from rlk_ledger_sdk.integrations.vime import (
    all_samples,
    before_log_prob,
    before_train_step,
    dynamic_filter,
    generate,
    log_rollout,
    logp_provider,
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
    "logp_provider",
    "postprocess",
    "sample",
    "tis",
]
