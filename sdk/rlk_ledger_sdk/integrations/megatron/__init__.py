"""Megatron-core: `attach` to a model, then one `with` a pass. Written against megatron-core 0.16."""

from rlk_ledger_sdk.integrations.megatron.place import init_options, parallel
from rlk_ledger_sdk.integrations.megatron.watch import Off, Watch, attach

__all__ = ["Off", "Watch", "attach", "init_options", "parallel"]
