"""What the plugin does where RLK_VLLM asks for it: methods for the workers, hooks in the core, a watch per engine."""

import sys
from typing import Any

from rlk_ledger_sdk.integrations.vllm.worker import LedgerExtension


def install() -> None:
    """Prepares this process, whichever of vLLM's it is."""
    _prepare_cpu()
    _extend_workers()


def _prepare_cpu() -> None:
    """bf16 tiles must be asked for before a CPU build uses them: without it short prompts end in SIGILL."""
    torch = sys.modules.get("torch")
    begin = getattr(getattr(torch, "cpu", None), "_init_amx", None)
    if begin is not None and not torch.cuda.is_available():  # type: ignore[union-attr]
        begin()


def _extend_workers() -> None:
    """Adds the ledger's methods to the object that `collective_rpc` calls in every worker."""
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    wrapper: Any = WorkerWrapperBase
    for name, method in vars(LedgerExtension).items():
        if name.startswith("rlk_ledger_"):
            setattr(wrapper, name, method)
