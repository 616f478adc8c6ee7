"""The recorder: `init`, `record`, `scope`, `flush`, `close`. Nothing heavier than msgspec is imported."""

from rlk_ledger_sdk.api import close, current, flush, init, record
from rlk_ledger_sdk.hooks import install
from rlk_ledger_sdk.recorder import Recorder
from rlk_ledger_sdk.reference import Reference
from rlk_ledger_sdk.scope import scope

__all__ = ["Recorder", "Reference", "close", "current", "flush", "init", "install", "record", "scope"]
