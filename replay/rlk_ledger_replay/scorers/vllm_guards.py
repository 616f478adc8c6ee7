"""The pitfalls of scoring with vLLM, each checked on the live engine.

A setting is read from the object that acts on it (the scheduler, the cache configuration, the attention groups of the
runner, the parameters); what can be seen in the schedule and in the outputs is checked there instead.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

from rlk_ledger_replay.scorers.protocol import Guard, Job, Pass, Status
from rlk_ledger_replay.scorers.vllm_watch import Watch

Knobs = dict[str, tuple[Any, Any]]

UNWATCHED = Guard("steps.watched", "unknown", "this model runner's steps are not watched: its batches are not known")


def held_dtype(model: Any) -> str:
    """The dtypes of the model's parameters, joined where there are several."""
    return "+".join(sorted({str(p.dtype).removeprefix("torch.") for p in model.parameters()}))


def backends(runner: Any) -> list[str]:
    """The attention backends the runner's layers are grouped by."""
    return sorted({str(group.backend.get_name()) for groups in runner.attn_groups for group in groups})


def head_dtype(model: Any) -> str:
    """The dtype of the head's product, from the live logits processor."""
    found = getattr(model.logits_processor, "head_dtype", None)
    return held_dtype(model) if found is None else str(found).removeprefix("torch.")


def knobs(asked: dict[str, Any], config: Any, runner: Any, scheduler: Any) -> Knobs:
    """Settings as (requested, actual), the actual ones read from the live engine."""
    schedule, cache = scheduler.scheduler_config, config.cache_config
    actual = {
        "dtype": held_dtype(runner.model),
        "max_model_len": scheduler.max_model_len,
        "max_num_seqs": scheduler.max_num_running_reqs,
        "max_num_batched_tokens": scheduler.max_num_scheduled_tokens,
        "tensor_parallel_size": config.parallel_config.tensor_parallel_size,
        "enforce_eager": config.model_config.enforce_eager,
        "enable_prefix_caching": cache.enable_prefix_caching,
        "enable_chunked_prefill": schedule.enable_chunked_prefill,
        "async_scheduling": schedule.async_scheduling,
        "logprobs_mode": runner.sampler.logprobs_mode,
        "attention_backend": "+".join(backends(runner)),
        "block_size": cache.block_size,
        "kv_cache_dtype": cache.cache_dtype,
        "head_dtype": head_dtype(runner.model),
        "quantization": config.model_config.quantization,
    }
    return {name: (asked.get(name), value) for name, value in actual.items()}


def engine_guards(job: Job, config: Any, runner: Any, scheduler: Any) -> list[Guard]:
    """Conditions on the engine as a whole."""
    schedule = scheduler.scheduler_config
    collectives = config.parallel_config.world_size
    return [
        _guard("chunked_prefill.off", not schedule.enable_chunked_prefill, "the scheduler may cut prompts into chunks"),
        _guard("prefix_cache.off", not config.cache_config.enable_prefix_caching, "prefix caching is on"),
        _guard("speculation.off", config.speculative_config is None, "speculative decoding is on"),
        _guard("quantization.off", config.model_config.quantization is None, "the weights are quantised"),
        _guard("async_scheduling.off", not schedule.async_scheduling, "scheduling is asynchronous"),
        _guard("collectives.one_rank", collectives == 1, f"{collectives} ranks reduce in an order nobody pinned"),
        *_numerics(job, runner),
        _mode(job, runner),
        _attention(job, runner),
        _splits(runner),
        _batch_invariance(),
    ]


def _numerics(job: Job, runner: Any) -> list[Guard]:
    """The engine has one dtype for the head's operands and its product; operands of the model's dtype widen exactly."""
    dtype, head = held_dtype(runner.model), head_dtype(runner.model)
    operands = job.head or job.dtype
    logits = job.logits or operands
    return [
        _guard("dtype", dtype == job.dtype, f"the parameters are {dtype}, {job.dtype} was asked for"),
        _guard("head_dtype", operands in (head, dtype), f"the head computes in {head}, {operands} is declared"),
        _guard("logits_dtype", head == logits, f"the logits are {head}, {logits} is declared"),
    ]


def _mode(job: Job, runner: Any) -> Guard:
    found = runner.sampler.logprobs_mode
    return _guard("logprobs_mode", found == f"{job.mode}_logprobs", f"the sampler gives {found}")


def _attention(job: Job, runner: Any) -> Guard:
    found = backends(runner)
    wanted = job.settings.get("attention_backend")
    evidence = {"backends": found, "requested": wanted}
    if len(found) != 1 or (wanted is not None and found != [wanted]):
        return Guard("attention.backend", "failed", f"{', '.join(found) or 'no backend'} runs, not {wanted}", evidence)
    if wanted is None and runner.device.type != "cpu":
        return Guard(
            "attention.backend", "unknown", f"{found[0]} runs; which one the job ran is not recorded", evidence
        )
    return Guard("attention.backend", "passed", f"{found[0]} runs in every layer", evidence)


def _splits(runner: Any) -> Guard:
    if runner.device.type == "cpu":
        return Guard("attention.num_splits", "passed", "the CPU backend takes no num_splits")
    return Guard("attention.num_splits", "unknown", "how many splits the attention kernel chose cannot be read")


def _batch_invariance() -> Guard:
    asked = os.environ.get("VLLM_BATCH_INVARIANT", "0") not in ("", "0")
    status: Status = "unknown" if asked else "passed"
    reason = "batch invariance is asked for, which is no evidence of it" if asked else "batch invariance is not claimed"
    return Guard("batch_invariance", status, reason)


def prefill_guards(output: Any) -> list[Guard]:
    """Conditions on one prompt's answer: None at position 0, a value for every other, nothing taken from a cache."""
    given = output.prompt_logprobs
    whole = given is not None and given[0] is None and len(given) == len(output.prompt_token_ids)
    return [
        _guard("prefill.position_zero", whole, "position 0 has a value, or a later one has none"),
        _uncached(output),
    ]


def decode_guards(output: Any, response: Sequence[int]) -> list[Guard]:
    """Conditions on one response's answer: exactly the recorded tokens, nothing taken from a cache."""
    taken = list(output.outputs[0].token_ids)
    reason = f"the engine took {len(taken)} tokens that are not the {len(response)} recorded ones"
    return [_guard("decode.tokens", taken == list(response), reason), _uncached(output)]


def _uncached(output: Any) -> Guard:
    found = output.num_cached_tokens
    if found is None:
        return Guard("prefix_cache.unused", "unknown", "the output does not say how many tokens came from a cache")
    return _guard("prefix_cache.unused", found == 0, f"{found} tokens came from the prefix cache")


def temperature_guard(scaled: int, expected: int, temperature: float) -> Guard:
    """Whether every row of prompt logits was divided by the temperature."""
    reason = f"{scaled} of {expected} prompt positions were divided by the temperature {temperature:g}"
    return _guard("prefill.temperature", scaled == expected, reason)


def batch_guards(task: Pass, batch: Sequence[int], job: Job, watch: Watch) -> list[Guard]:
    """Conditions on the steps one batch took: prompts whole and together, then one token of each a step."""
    sizes = {index: len(job.sequences[index].tokens) for index in batch}
    prompts = {index: sizes[index] if task.path == "prefill" else job.sequences[index].start for index in batch}
    steps = [step for step in watch.steps if step]
    first = steps[0] if steps else {}
    cut = [index for index in batch if not any(step.get(index) == prompts[index] for step in steps[: len(batch)])]
    out = [
        _guard("prefill.whole", not cut, f"{len(cut)} of {len(batch)} prompts were computed in pieces"),
        _guard("layout.together", set(first) == set(batch), f"{len(first)} of {len(batch)} sequences began together"),
    ]
    if task.path == "decode":
        responses = sum(job.sequences[index].scored for index in batch)
        later = sum(count for step in steps for count in step.values()) - sum(prompts.values())
        single = all(count == 1 for step in steps[1:] for count in step.values())
        out += [
            _guard("decode.one_at_a_time", single, "a decode step computed several tokens of one sequence"),
            _guard("decode.steps", later == responses - len(batch), f"{later} decode tokens for {responses} responses"),
            _guard("decode.forced", watch.forced == responses, f"{watch.forced} of {responses} tokens were forced"),
        ]
    return out


def merged(found: Iterable[Guard]) -> list[Guard]:
    """One guard a name: the worst outcome, with how often it was checked."""
    order = {"failed": 0, "unknown": 1, "passed": 2}
    worst: dict[str, Guard] = {}
    checked: dict[str, int] = {}
    for guard in found:
        checked[guard.name] = checked.get(guard.name, 0) + 1
        held = worst.get(guard.name)
        if held is None or order[guard.status] < order[held.status]:
            worst[guard.name] = guard
    return [Guard(g.name, g.status, g.reason, {**g.evidence, "checked": checked[name]}) for name, g in worst.items()]


def _guard(name: str, fine: bool, wrong: str) -> Guard:
    return Guard(name, "passed" if fine else "failed", "as it should be" if fine else wrong)
