"""vime: the hooks of slime under vime's names, its own log-prob contract, and its linear-logp provider.

    --custom-rollout-log-function-path rlk_ledger.integrations.vime.log_rollout
    --rollout-data-postprocess-path    rlk_ledger.integrations.vime.postprocess

vime is slime's data flow with vLLM as the rollout engine: `rlk_ledger.integrations.slime` says what each hook does.
Stands on vllm-project/vime's main branch of autumn 2026 (docs/en/get_started/customization.md, vime/rollout/
vllm_rollout.py, vime/backends/vllm_utils/vllm_engine.py, vime/backends/megatron_utils/); read, not run.

vime starts its engines with --logprobs-mode processed_logprobs unless told otherwise, so the rollout contract includes
the temperature and, with it, top-p and top-k. Where an engine returns no log-probability vime fills in 0.0; the values
are recorded as they are, and the audit tells a fill from a confident token.

`logp_provider` goes to --linear-logp-provider (RL-Kernel's boundary) in front of the job's own, named by
`RLK_LINEAR_LOGP_PROVIDER_PATH`; what ran is recorded as operator.decided.
"""

from collections.abc import Mapping
from typing import Any

from rlk_ledger_sdk.api import record
from rlk_ledger_sdk.guard import guarded
from rlk_ledger_sdk.integrations.slime.framework import VIME
from rlk_ledger_sdk.integrations.slime.job import own, recording
from rlk_ledger_sdk.integrations.slime.rollout import RolloutHooks
from rlk_ledger_sdk.integrations.slime.training import TrainingHooks


class ProviderUnavailable(RuntimeError):
    """No provider of the job's own is named: vime's native log-probabilities run (mode `auto`) or the job ends."""

    linear_logp_provider_unavailable = True


class LogpProvider:
    """Stands in front of the job's linear-logp provider; states each backend that ran, once."""

    def __init__(self) -> None:
        self._stated: set[tuple[str, str]] = set()

    def __call__(self, request: Any) -> Any:
        """The job's provider's answer to a LinearLogpRequest; its exceptions pass through."""
        inner = own(VIME, None, "linear_logp_provider", hook=self)
        if inner is None:
            raise ProviderUnavailable("RLK_LINEAR_LOGP_PROVIDER_PATH names no provider")
        asked = f"{getattr(inner, '__module__', '')}.{getattr(inner, '__qualname__', type(inner).__name__)}"
        try:
            answer = inner(request)
        except Exception as error:
            if getattr(error, "linear_logp_provider_unavailable", False):
                self._state(asked, "native", str(error) or type(error).__name__)
            raise
        backend = answer.get("backend_id") if isinstance(answer, Mapping) else getattr(answer, "backend_id", None)
        self._state(asked, str(backend or asked), None)
        return answer

    def _state(self, asked: str, ran: str, refusal: str | None) -> None:
        if (ran, refusal or "") in self._stated or not recording(VIME, None, "training"):
            return
        self._stated.add((ran, refusal or ""))
        with guarded("vime linear-logp provider"):
            record(
                "operator.decided",
                operator="linear_logp",
                side="training",
                requested_backend=asked if refusal else ran,
                actual_backend=ran,
                fallback=refusal is not None,
                reason=refusal or f"provider {asked}",
            )


_rollout, _training = RolloutHooks(VIME), TrainingHooks(VIME)

generate = _rollout.generate
sample = _rollout.sample
dynamic_filter = _rollout.dynamic_filter
all_samples = _rollout.all_samples
log_rollout = _rollout.log_rollout
postprocess = _training.postprocess
before_log_prob = _training.before_log_prob
before_train_step = _training.before_train_step
tis = _training.tis
logp_provider = LogpProvider()

__all__ = [
    "all_samples",
    "before_log_prob",
    "before_train_step",
    "dynamic_filter",
    "generate",
    "log_rollout",
    "logp_provider",
    "postprocess",
    "sample",
    "tis",
]
