"""vLLM as a job to be timed: an offline LLM in this process that generates the same samples again and again."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from interleaved import Clock, Side, processor_seconds

# In one process: its CPU time is then the engine's. The engine reads these when it is imported.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
PROMPT = 32


class Rollout:
    """One engine. `samples` completions of `tokens` tokens each make a pass."""

    def __init__(self, folder: Path, samples: int, tokens: int) -> None:
        os.environ.update(ENVIRONMENT)
        import torch

        torch.cpu._init_amx()  # before vLLM forks: the permission is inherited
        from vllm import LLM, SamplingParams, __version__

        self.version = str(__version__)
        self.samples, self.tokens = samples, samples * tokens
        self.llm: Any = LLM(
            str(folder),
            enforce_eager=True,
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=512,
            logprobs_mode="processed_logprobs",
        )
        self._prompts = [{"prompt_token_ids": [(7 * i + j) % 250 for j in range(PROMPT)]} for i in range(samples)]
        self._params = [
            SamplingParams(temperature=0.7, seed=i, max_tokens=tokens, logprobs=0, detokenize=False, ignore_eos=True)
            for i in range(samples)
        ]
        self.clock = Clock()
        self._watched: list[tuple[Any, str, Any]] = []

    def run(self) -> None:
        """One pass."""
        self.llm.generate(self._prompts, self._params, use_tqdm=False)

    @property
    def off(self) -> Side:
        """The engine as it is: its classes' own methods."""
        return Side(self._unwatched, self.run)

    @property
    def on(self) -> Side:
        """The engine with every method that the watch put on its objects, each on the clock."""
        return Side(self._as_watched, self.run)

    def attach(self) -> dict[str, float]:
        """Watches the engine when `on`; returns the processor seconds of what is done once.

        `attach`: settings and contracts. `weights`: what the workers hold, read back, as after every load.
        """
        from rlk_ledger.integrations.vllm import attach
        from rlk_ledger_sdk.integrations.vllm.wraps import Wraps

        put, watches = Wraps.put, []

        def clocked(wraps: Any, target: Any, name: str, make: Callable[[Any], Any]) -> Any:
            original = put(wraps, target, name, lambda method: self.clock.inside(make(self.clock.outside(method))))
            if original is not None:
                self._watched.append((target, name, vars(target)[name]))
            return original

        Wraps.put = clocked  # type: ignore[method-assign]
        try:
            spent = {"attach": processor_seconds(lambda: watches.append(attach(self.llm, "rollout-0")))}
        finally:
            Wraps.put = put  # type: ignore[method-assign]
        return spent | {"weights": processor_seconds(lambda: watches[0].weights_loaded("v0"))}

    def _as_watched(self) -> None:
        for target, name, method in self._watched:
            setattr(target, name, method)

    def _unwatched(self) -> None:
        for target, name, _ in self._watched:
            vars(target).pop(name, None)
