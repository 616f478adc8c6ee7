"""Recording vLLM: `attach(llm)` for an engine of yours, `enable()` (or RLK_VLLM=1) before one starts."""

from rlk_ledger_sdk.integrations.vllm.attach import attach
from rlk_ledger_sdk.integrations.vllm.plugin import enable
from rlk_ledger_sdk.integrations.vllm.watch import Watch
from rlk_ledger_sdk.integrations.vllm.worker import QUALIFIED as WORKER_EXTENSION

__all__ = ["WORKER_EXTENSION", "Watch", "attach", "enable"]
