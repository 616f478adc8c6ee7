"""TRL: a GRPOTrainer records what it samples, what it scores and which weights it held."""

from rlk_ledger_sdk.integrations.trl import Watched, attach_trainer

__all__ = ["Watched", "attach_trainer"]
