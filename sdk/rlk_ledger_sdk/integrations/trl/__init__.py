"""TRL: a GRPOTrainer records what it samples, what it scores and which weights it held."""

from rlk_ledger_sdk.integrations.trl.trainer import ROW, Watched, attach_trainer

__all__ = ["ROW", "Watched", "attach_trainer"]
