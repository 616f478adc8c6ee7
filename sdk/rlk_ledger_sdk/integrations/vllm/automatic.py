"""What the plugin does where RLK_VLLM asks for it: methods for the workers, hooks in the core, a watch per engine."""

import dataclasses
import functools
import importlib
import multiprocessing
import os
import sys
from collections.abc import Callable
from typing import Any

from rlk_ledger_sdk.api import current
from rlk_ledger_sdk.guard import guarded
from rlk_ledger_sdk.integrations.vllm import scheduler
from rlk_ledger_sdk.integrations.vllm.steps import Steps
from rlk_ledger_sdk.integrations.vllm.worker import LedgerExtension
from rlk_ledger_sdk.modes import disabled

ENGINE = "rollout-0"
_requested: dict[str, dict[str, Any]] = {}
"""Engine arguments that differ from vLLM's defaults, by the configuration's instance id."""


def install(variable: str, attach_all: bool) -> None:
    """Prepares this process, whichever of vLLM's it is. `variable` names the environment variable that asked."""
    _prepare_cpu()
    if disabled():
        return
    _extend_workers()
    _extend_core(_engine_name(variable) or (ENGINE if attach_all else None))
    _remember_arguments()
    if attach_all:
        _attach_to_all(variable)


def requested(config: Any) -> dict[str, Any]:
    """The engine arguments a user gave for this configuration, as far as they differ from the defaults."""
    return _requested.get(str(getattr(config, "instance_id", "")), {})


def _engine_name(variable: str) -> str | None:
    value = os.environ.get(variable, "")
    return None if value in ("", "1", "true") else value


def _prepare_cpu() -> None:
    """bf16 tiles must be asked for before a CPU build uses them: without it short prompts end in SIGILL."""
    torch = sys.modules.get("torch")
    begin = getattr(getattr(torch, "cpu", None), "_init_amx", None)
    if torch is not None and begin is not None and not torch.cuda.is_available():
        begin()


def _extend_workers() -> None:
    """Adds the ledger's methods to the object that `collective_rpc` calls in every worker."""
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    wrapper: Any = WorkerWrapperBase
    for name, method in vars(LedgerExtension).items():
        if name.startswith("rlk_ledger_"):
            setattr(wrapper, name, method)


def _extend_core(engine: str | None) -> None:
    """Lets an engine core that has a process of its own tell its settings and record its steps.

    vLLM loads plugins while that core is being built, before its scheduler is.
    """
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore

    core: Any = EngineCore
    core.rlk_ledger_scheduler = scheduler.settings_in_force

    def watched(self: Any) -> None:
        if multiprocessing.current_process().name.startswith("EngineCore"):
            with guarded("vllm engine core"):
                prefix = os.environ.get("RLK_PARENT_WRITER", "")
                steps = Steps(engine, prefix)
                self.schedule = steps.wrap(self.schedule)

    kind: Any = Scheduler
    kind.__init__ = _followed_by(kind.__init__, watched)


def _remember_arguments() -> None:
    from vllm.engine.arg_utils import EngineArgs

    arguments: Any = EngineArgs
    original = arguments.create_engine_config

    @functools.wraps(original)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        given: dict[str, Any] = {}
        with guarded("vllm arguments"):  # before the call, which fills in what was left open
            given = {
                field.name: getattr(self, field.name)
                for field in dataclasses.fields(self)
                if field.default is not dataclasses.MISSING and getattr(self, field.name) != field.default
            }
        config = original(self, *args, **kwargs)
        _requested[str(getattr(config, "instance_id", ""))] = given
        return config

    arguments.create_engine_config = create_engine_config


def _attach_to_all(variable: str) -> None:
    """Every engine built in this process is attached to as it is built; recording starts if the job did not do it."""
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.llm_engine import LLMEngine

    def watched(self: Any) -> None:
        from rlk_ledger_sdk.integrations.vllm.attach import attach

        with guarded("vllm engine"):
            attach(self, engine=_engine_name(variable) or ENGINE)

    kinds: tuple[Any, ...] = (LLMEngine, AsyncLLM)
    for kind in kinds:
        kind.__init__ = _followed_by(kind.__init__, watched)
    if not current().enabled and os.environ.get("RLK_LEDGER") and not os.environ.get("RLK_PARENT_WRITER"):
        # By name: the package above lends the recorder its shipper, and this layer imports nothing above itself.
        importlib.import_module("rlk_ledger").init(role=os.environ.get("RLK_ROLE", "rollout"))


def _followed_by(original: Callable[..., None], after: Callable[[Any], None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        after(self)

    return __init__
