"""Importing this makes verl's trainers record: the value for VERL_USE_EXTERNAL_MODULES in the task runner."""

from rlk_ledger_sdk.integrations.verl import install

TRAINERS = install()
