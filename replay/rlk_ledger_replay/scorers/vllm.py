"""The vLLM scorer: prompt log-probabilities for the prefill path, forced tokens for the true decode path.

Run as `python -m rlk_ledger_replay.scorers.vllm JOB ANSWER`. The engine core runs in this process, so that its model
runner can be watched: every guard is read from what it did, not from what it was asked for.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rlk_ledger_replay.scorers import vllm_guards as guards
from rlk_ledger_replay.scorers.held import held_guard
from rlk_ledger_replay.scorers.protocol import Guard, Job, Pass, Statement, Unsupported, plain_knobs
from rlk_ledger_replay.scorers.serve import main
from rlk_ledger_replay.scorers.vllm_held import LoadedTensors
from rlk_ledger_replay.scorers.vllm_watch import INDEX, Watch, prompt_values, sampled_values

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
FORCED = "the sampled token is replaced by the recorded one in Sampler.sample; the engine's own code gives its value"
TRACED = "trace replay: the engine takes the recorded tokens itself"


class VllmEngine:
    """One vLLM engine over one checkpoint."""

    def __init__(self, job: Job) -> None:
        """Starts the engine; raises what it raises."""
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        import vllm
        from vllm.platforms import current_platform

        self.job, self.version = job, str(vllm.__version__)
        on_cpu = current_platform.is_cpu()
        if on_cpu and hasattr(torch.cpu, "_init_amx"):
            torch.cpu._init_amx()
        self.traces = not on_cpu and "enable_trace_replay" in vars(vllm.EngineArgs)
        self.asked = _arguments(job, self.traces)
        with LoadedTensors() as loaded:
            self.llm = self._start(vllm.LLM)
        core = self.llm.llm_engine.engine_core.engine_core
        self.runner = core.model_executor.driver_worker.worker.model_runner
        self.scheduler = core.scheduler
        self.weights = held_guard(loaded.tensors, job, loaded.how)
        self.watch = Watch(self.runner)
        if not self.traces:
            self.watch.install()

    def _start(self, llm: Any) -> Any:
        """The engine; without trace replay where this device's model runner has none."""
        try:
            return llm(**self.asked)
        except ValueError as error:
            if not self.traces or "trace replay" not in str(error).lower():
                raise
            self.traces = False
            self.asked.pop("enable_trace_replay")
            return llm(**self.asked)

    def statement(self) -> Statement:
        """What runs, read from the live engine."""
        config = self.llm.llm_engine.vllm_config
        how = {"prefill": self._prefill_how(), "decode": TRACED if self.traces else FORCED}
        return Statement(
            engine="vllm",
            version=self.version,
            device=str(self.runner.device),
            dtype=guards.held_dtype(self.runner.model),
            how=how,
            knobs=plain_knobs(guards.knobs(self.asked, config, self.runner, self.scheduler)),
            guards=(self.weights, *guards.engine_guards(self.job, config, self.runner, self.scheduler)),
        )

    def score(self, task: Pass) -> tuple[list[NDArray[np.float32]], list[Guard]]:
        """Scores a layout batch by batch along one path."""
        values = [np.full(one.scored, np.nan, dtype=np.float32) for one in self.job.sequences]
        found: list[Guard] = []
        for batch in task.layout.batches:
            run = self._prefill if task.path == "prefill" else self._decode
            for index, row, checks in run(batch):
                values[index] = row
                found += checks
            found += [guards.UNWATCHED] if self.traces else guards.batch_guards(task, batch, self.job, self.watch)
        return values, guards.merged(found)

    def _prefill_how(self) -> str:
        if self.job.mode == "raw" or all(one.temperature == 1.0 for one in self.job.sequences):
            return "prompt_logprobs"
        return (
            "prompt_logprobs, which the engine leaves raw: its own log-softmax over its own prompt logits after they "
            "are divided by the temperature in float32"
        )

    def _prefill(self, batch: Sequence[int]) -> list[tuple[int, NDArray[np.float32], list[Guard]]]:
        from vllm import SamplingParams

        temperature = self._one_temperature(batch)
        self.watch.begin(temperature=temperature)
        wanted = [
            SamplingParams(temperature=1.0, max_tokens=1, prompt_logprobs=0, ignore_eos=True, extra_args={INDEX: index})
            for index in batch
        ]
        prompts = [{"prompt_token_ids": self.job.sequences[index].tokens} for index in batch]
        outputs = self.llm.generate(prompts, wanted, use_tqdm=False)
        rows = []
        for index, output in zip(batch, outputs):
            row = prompt_values(output, self.job.sequences[index].start)
            rows.append((index, row, guards.prefill_guards(output)))
        if temperature is not None:
            expected = sum(len(self.job.sequences[index].tokens) - 1 for index in batch)
            rows[0][2].append(guards.temperature_guard(self.watch.scaled, expected, temperature))
        return rows

    def _one_temperature(self, batch: Sequence[int]) -> float | None:
        """The temperature of a batch of prompts, None where their raw values are asked for."""
        found = {1.0 if self.job.mode == "raw" else self.job.sequences[index].temperature for index in batch}
        if len(found) > 1:
            raise Unsupported("prompt log-probabilities of one batch cannot have several temperatures")
        (temperature,) = found
        if temperature == 1.0:
            return None
        if self.traces:
            raise Unsupported("this model runner leaves prompt_logprobs raw; the declared temperature is not 1")
        return temperature

    def _decode(self, batch: Sequence[int]) -> list[tuple[int, NDArray[np.float32], list[Guard]]]:
        from vllm import SamplingParams

        responses = {index: self.job.sequences[index].tokens[self.job.sequences[index].start :] for index in batch}
        self.watch.begin(responses=responses)
        wanted = []
        for index in batch:
            temperature = 1.0 if self.job.mode == "raw" else self.job.sequences[index].temperature
            trace = {"trace_decode_token_ids": responses[index]} if self.traces else {}
            size = len(responses[index])
            named = {"max_tokens": size, "logprobs": 0, "ignore_eos": True, "extra_args": {INDEX: index}}
            wanted.append(SamplingParams(temperature=temperature, **named, **trace))
        sequences = [self.job.sequences[index] for index in batch]
        prompts = [{"prompt_token_ids": one.tokens[: one.start]} for one in sequences]
        outputs = self.llm.generate(prompts, wanted, use_tqdm=False)
        return [
            (index, sampled_values(output), guards.decode_guards(output, responses[index]))
            for index, output in zip(batch, outputs)
        ]


def _arguments(job: Job, traces: bool) -> dict[str, Any]:
    """What the engine is asked for: nothing that reorders, caches or cuts, everything named."""
    longest = max(len(one.tokens) for one in job.sequences)
    batches = [batch for task in job.passes for batch in task.layout.batches]
    together = max(sum(len(job.sequences[index].tokens) for index in batch) for batch in batches)
    asked: dict[str, Any] = {
        "model": job.folder,
        "skip_tokenizer_init": True,
        "dtype": job.dtype,
        "max_model_len": longest + 1,
        "max_num_seqs": max(map(len, batches)),
        "max_num_batched_tokens": max(together, longest + 1),
        "tensor_parallel_size": 1,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "enable_chunked_prefill": False,
        "async_scheduling": False,
        "logprobs_mode": f"{job.mode}_logprobs",
        "max_logprobs": 1,
        "generation_config": "vllm",
        "seed": 0,
    }
    product = job.logits or job.head or job.dtype
    if product != job.dtype:
        asked["hf_overrides"] = {"head_dtype": product}
    if traces:
        asked["enable_trace_replay"] = True
    for name in ("attention_backend", "block_size"):
        if name in job.settings:
            asked[name] = job.settings[name]
    return asked


if __name__ == "__main__":
    raise SystemExit(main(VllmEngine, "vllm"))
