"""transformers: one model attached, what it is, what it generated, what it scored, which weights it held."""

from rlk_ledger_sdk.integrations.transformers import *  # noqa: F403
from rlk_ledger_sdk.integrations.transformers import __all__ as __all__
