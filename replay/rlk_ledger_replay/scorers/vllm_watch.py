"""What the live vLLM engine of this process really does, seen at its model runner; and the tokens it is made to take.

Lives in the scorer's process alone. Wraps methods of one runner and one sampler, by instance, and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

INDEX = "rlk_sequence"
"""The key of SamplingParams.extra_args that says which sequence a request scores."""


@dataclass
class Watch:
    """Steps of the engine and what was replaced in them. Owned by the engine's only thread.

    steps: per step, tokens scheduled by sequence. forced: sampled tokens replaced by recorded ones. scaled: rows of
    prompt logits divided by a temperature.
    """

    runner: Any
    steps: list[dict[int, int]] = field(default_factory=list)
    responses: Mapping[int, Sequence[int]] | None = None
    temperature: float | None = None
    forced: int = 0
    scaled: int = 0

    def install(self) -> None:
        """Wraps the runner's `execute_model` and the sampler's `sample` and `compute_logprobs`."""
        self._execute = self.runner.execute_model
        self._sample = self.runner.sampler.sample
        self._compute = self.runner.sampler.compute_logprobs
        self.runner.execute_model = self._seen
        self.runner.sampler.sample = self._forced
        self.runner.sampler.compute_logprobs = self._scaled

    def begin(self, responses: Mapping[int, Sequence[int]] | None = None, temperature: float | None = None) -> None:
        """Forgets what was seen; `responses` are forced by sequence, `temperature` divides the logits of prompts."""
        self.steps, self.responses, self.temperature = [], responses, temperature
        self.forced = self.scaled = 0

    def _index(self, request: str) -> int:
        return int(self.runner.requests[request].sampling_params.extra_args[INDEX])

    def _seen(self, scheduled: Any, *rest: Any, **named: Any) -> Any:
        out = self._execute(scheduled, *rest, **named)
        self.steps.append({self._index(name): count for name, count in scheduled.num_scheduled_tokens.items()})
        return out

    def _forced(self, logits: torch.Tensor, *rest: Any, **named: Any) -> Any:
        sampled, processed = self._sample(logits, *rest, **named)
        if self.responses is None:
            return sampled, processed
        names = self.runner.input_batch.req_ids[: len(sampled)]
        wanted = [self.responses[self._index(name)][len(self.runner.requests[name].output_token_ids)] for name in names]
        self.forced += len(wanted)
        return torch.tensor(wanted, dtype=sampled.dtype, device=sampled.device).view_as(sampled), processed

    def _scaled(self, logits: torch.Tensor) -> torch.Tensor:
        if self.temperature is None:
            return self._compute(logits)  # type: ignore[no-any-return]
        self.scaled += len(logits)
        return self._compute(logits.to(torch.float32) / self.temperature)  # type: ignore[no-any-return]


def prompt_values(output: Any, start: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The log-probabilities of a request's prompt tokens from `start` on; raises ValueError where one is missing."""
    ids, given = output.prompt_token_ids, output.prompt_logprobs
    if given is None or len(given) != len(ids) or given[0] is not None:
        raise ValueError("prompt_logprobs is not one entry for each prompt token with None at position 0")
    return np.array([given[at][ids[at]].logprob for at in range(start, len(ids))], dtype=np.float32)


def sampled_values(output: Any) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The log-probabilities of a request's sampled tokens."""
    taken = output.outputs[0]
    return np.array([given[token].logprob for token, given in zip(taken.token_ids, taken.logprobs)], dtype=np.float32)
