"""`rlk_ledger_sdk.integrations.ray` under its public name."""

from rlk_ledger_sdk.integrations.ray import env_vars, labels

__all__ = ["env_vars", "labels"]
