"""`rlk_ledger_sdk.integrations.verl` under its public name."""

from rlk_ledger_sdk.integrations.verl import install, ledgered, record_old_log_probs, record_rollout

__all__ = ["install", "ledgered", "record_old_log_probs", "record_rollout"]
