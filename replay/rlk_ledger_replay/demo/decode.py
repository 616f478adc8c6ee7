"""Generation: one KV cache, left-padded rows of several groups, rows leaving the batch as they finish."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rlk_ledger_replay.demo.network import cache_keyword, log_softmax
from rlk_ledger_replay.demo.settings import Numerics
from rlk_ledger_replay.demo.tasks import END, PAD, Task


@dataclass
class Request:
    """One response being generated; `logprobs` is NaN at inserted tokens, `forced` are those still to insert."""

    task: Task
    sample_id: str
    group_id: str
    tokens: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    forced: list[int] = field(default_factory=list)
    finish_reason: str | None = None

    def take(self, sampled: int, logprob: float) -> int:
        """Appends the next token, inserted or sampled, and returns it."""
        if self.forced:
            token = self.forced.pop(0)
            self.tokens.append(token)
            self.loss_mask.append(0)
            self.logprobs.append(float("nan"))
            return token
        self.tokens.append(sampled)
        self.loss_mask.append(1)
        self.logprobs.append(logprob)
        count = sum(self.loss_mask)
        if sampled == END:
            self.finish_reason = "stop"
        elif count == self.task.sampled:
            self.finish_reason = "length"
        elif self.task.tool and count == self.task.tool_after:
            self.forced = self.task.tool_tokens
        return sampled


class _Batch:
    """Rows still generating, their cache and their attention mask; all three shrink together."""

    def __init__(self, network: Any, requests: list[Request]) -> None:
        from transformers import DynamicCache

        width = max(len(r.task.prompt) for r in requests)
        padding = [width - len(r.task.prompt) for r in requests]
        self.rows = requests
        self.inputs = torch.tensor([[PAD] * pad + r.task.prompt for r, pad in zip(requests, padding)])
        self.mask = torch.tensor([[0] * pad + [1] * (width - pad) for pad in padding])
        self.positions = (self.mask.cumsum(1) - 1).clamp(min=0)
        self._network = network
        self._cache = DynamicCache(config=network.config)
        self._keyword = cache_keyword(network)

    def last_hidden(self) -> Tensor:
        """Runs the pending inputs; hidden states [B, H] of each row's last position."""
        out = self._network.model(
            input_ids=self.inputs,
            attention_mask=self.mask,
            position_ids=self.positions,
            use_cache=True,
            **{self._keyword: self._cache},
        )
        return out.last_hidden_state[:, -1]  # type: ignore[no-any-return]

    def advance(self, tokens: list[int]) -> None:
        """Makes `tokens` the next inputs and drops the rows that finished."""
        self.inputs = torch.tensor(tokens)[:, None]
        self.positions = self.positions[:, -1:] + 1
        self.mask = torch.cat([self.mask, torch.ones_like(self.inputs)], dim=1)
        keep = [i for i, row in enumerate(self.rows) if row.finish_reason is None]
        if keep and len(keep) < len(self.rows):
            index = torch.tensor(keep)
            self.inputs, self.positions, self.mask = self.inputs[index], self.positions[index], self.mask[index]
            self._cache.batch_select_indices(index)
        self.rows = [self.rows[i] for i in keep]


@torch.inference_mode()
def generate(network: Any, requests: list[Request], numerics: Numerics, generator: torch.Generator) -> None:
    """Completes `requests` in place: samples at the side's temperature and keeps each token's log-probability."""
    batch = _Batch(network, requests)
    while batch.rows:
        logprobs = log_softmax(network, batch.last_hidden(), numerics)
        chosen = torch.multinomial(logprobs.float().exp(), 1, generator=generator)
        values = logprobs.gather(1, chosen)[:, 0].float().tolist()
        taken = zip(batch.rows, chosen[:, 0].tolist(), values)
        batch.advance([row.take(token, value) for row, token, value in taken])
