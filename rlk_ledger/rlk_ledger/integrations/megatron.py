"""`rlk_ledger_sdk.integrations.megatron` under its public name."""

from rlk_ledger_sdk.integrations.megatron import Off, Watch, attach, init_options, parallel

__all__ = ["Off", "Watch", "attach", "init_options", "parallel"]
