"""The hooks that run in the rollout manager: generation, sample hooks, dynamic sampling, the finished batch."""

import inspect
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rlk_ledger_sdk.api import record
from rlk_ledger_sdk.guard import guarded
from rlk_ledger_sdk.integrations.slime.framework import Framework
from rlk_ledger_sdk.integrations.slime.job import own, recording
from rlk_ledger_sdk.integrations.slime.samples import record_sample, sample_id
from rlk_ledger_sdk.integrations.slime.spans import Tracker
from rlk_ledger_sdk.scope import scope


class RolloutHooks:
    """One process's hooks; each calls the job's own function first and returns what it returned.

    A sample is recorded once: when generation finished it, if the job uses `generate` or `sample`, else with its batch.
    """

    def __init__(self, framework: Framework) -> None:
        self.framework = framework
        self.tracker = Tracker()
        self._finished: list[tuple[int, str]] = []  # (identity, sample id) of what all_samples() was shown last

    async def generate(self, args: Any, sample: Any, sampling_params: dict[str, Any], evaluation: bool = False) -> Any:
        """--custom-generate-function-path: the job's own or the framework's default generation, recorded."""
        inner = own(self.framework, args, "generate_function", hook=self.generate)
        assert inner is not None, "every framework has a default generate function"
        active = not evaluation and recording(self.framework, args, "rollout")
        asked = dict(sampling_params) if active else {}
        if active:
            with guarded(f"{self.framework.name} generate"):
                self.tracker.look(sample)
        extra = {"evaluation": evaluation} if "evaluation" in inspect.signature(inner).parameters else {}
        result = await inner(args, sample, sampling_params, **extra)
        if active:
            with guarded(f"{self.framework.name} generate"):
                self._finish(args, result, asked)
        return result

    def sample(self, args: Any, sample: Any, *, rollout_id: int | None = None, evaluation: bool = False) -> None:
        """--rollout-sample-hook-path: records a generated sample and changes nothing."""
        if evaluation or not recording(self.framework, args, "rollout"):
            return
        with guarded(f"{self.framework.name} sample hook"), _at(rollout_id):
            self._finish(args, sample, None)

    def dynamic_filter(self, args: Any, samples: Sequence[Any], **more: Any) -> Any:
        """--dynamic-sampling-filter-path: the job's own filter (rlk_dynamic_filter_path), its refusals recorded."""
        inner = own(self.framework, args, "dynamic_filter", hook=self.dynamic_filter)
        verdict = True if inner is None else inner(args, samples, **more)
        if recording(self.framework, args, "rollout"):
            with guarded(f"{self.framework.name} dynamic filter"):
                if not getattr(verdict, "keep", verdict):
                    reason = getattr(verdict, "reason", None) or "refused by the dynamic filter"
                    self._dropped([(sample, reason) for sample in flat(samples)], f"filter-{_group(samples)}")
        return verdict

    def all_samples(self, args: Any, samples: Sequence[Any], data_source: Any) -> Any:
        """--rollout-all-samples-process-path: remembers what was finished, so that surplus is told from loss."""
        inner = own(self.framework, args, "all_samples_process", hook=self.all_samples)
        result = None if inner is None else inner(args, samples, data_source)
        if recording(self.framework, args, "rollout"):
            with guarded(f"{self.framework.name} all samples"):
                self._finished = [(id(sample), sample_id(sample)) for sample in flat(samples)]
        return result

    def log_rollout(self, rollout_id: int, args: Any, samples: Sequence[Any], extra_metrics: Any, time_s: Any) -> Any:
        """--custom-rollout-log-function-path: records the batch that will be trained on, rewards included.

        Returns what the job's own log function (rlk_rollout_log_function_path) does, else False: log as usual.
        """
        inner = own(self.framework, args, "rollout_log_function", hook=self.log_rollout)
        verdict = False if inner is None else inner(rollout_id, args, samples, extra_metrics, time_s)
        if recording(self.framework, args, "rollout"):
            with guarded(f"{self.framework.name} rollout batch"), _at(rollout_id):
                self._batch(rollout_id, args, list(flat(samples)))
        return verdict

    def _finish(self, args: Any, result: Any, asked: Mapping[str, Any] | None) -> None:
        """Records what one generation returned: a sample, or several that share its index and differ by `attempt`."""
        several, later = isinstance(result, list), _masked_later(args)
        for number, sample in enumerate(flat(result)):
            seen = self.tracker.look(sample)
            if later or seen.recorded or not self._complete(args, sample):
                continue
            seen.recorded = True
            record_sample(self.framework, args, sample, seen.spans, asked, attempt=number if several else None)

    def _complete(self, args: Any, sample: Any) -> bool:
        """False while the framework may still go on with a sample: pending, or aborted under partial rollout."""
        status = getattr(getattr(sample, "status", None), "value", None)
        return not (status == "pending" or (status == "aborted" and getattr(args, "partial_rollout", False)))

    def _batch(self, rollout_id: int, args: Any, samples: list[Any]) -> None:
        siblings = Counter(getattr(sample, "index", None) for sample in samples)
        taken: Counter[Any] = Counter()
        for sample in samples:
            seen, index = self.tracker.look(sample), getattr(sample, "index", None)
            attempt = taken[index] if siblings[index] > 1 else None
            taken[index] += 1
            if not seen.recorded:
                seen.recorded = True
                record_sample(self.framework, args, sample, seen.spans, attempt=attempt)
        self._layout(rollout_id, samples)

    def _layout(self, rollout_id: int, samples: list[Any]) -> None:
        """The order of the batch, and what will not be trained on: removed samples and surplus ones."""
        chosen = {id(sample) for sample in samples}
        surplus = [name for identity, name in self._finished if identity not in chosen]
        self._finished = []
        removed = [sample_id(s) for s in samples if getattr(s, "remove_sample", False)]
        decisions = [{"kept": False, "reason": "remove_sample", "sample_id": name} for name in removed]
        decisions += [{"kept": False, "reason": "not in the batch", "sample_id": name} for name in surplus]
        order = [sample_id(s) for s in samples]
        record("batch.layout", layout_id=f"rollout-{rollout_id}", sample_order=order, decisions=decisions or None)

    def _dropped(self, samples: Iterable[tuple[Any, str]], layout_id: str) -> None:
        decisions = [{"kept": False, "reason": str(why), "sample_id": sample_id(s)} for s, why in samples]
        record("batch.layout", layout_id=layout_id, decisions=decisions)


def _masked_later(args: Any) -> bool:
    """Whether a sample filter may still mask samples out before `log_rollout` sees them: they are recorded there."""
    logged = str(getattr(args, "custom_rollout_log_function_path", None) or "")
    return bool(getattr(args, "rollout_sample_filter_path", None)) and logged.endswith(".log_rollout")


def flat(samples: Any) -> Iterable[Any]:
    """The samples of any nesting of lists."""
    if isinstance(samples, list | tuple):
        for item in samples:
            yield from flat(item)
    else:
        yield samples


def _group(samples: Sequence[Any]) -> str:
    first = next(iter(flat(samples)), None)
    return str(getattr(first, "group_index", None))


def _at(rollout_id: Any) -> Any:
    known = isinstance(rollout_id, int) and not isinstance(rollout_id, bool)
    return scope(step=rollout_id, rollout_id=rollout_id) if known else scope()
