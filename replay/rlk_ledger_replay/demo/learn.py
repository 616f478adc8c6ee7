"""Learning: group-normalised advantages, the clipped policy-gradient loss, AdamW on float32 master weights.

The loss is PPO's clipped surrogate (Schulman et al., 2017) with GRPO's advantages (Shao et al., 2024), averaged over
the tokens that count.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from rlk_ledger_replay.demo.exchange import Rolled
from rlk_ledger_replay.demo.score import micro_batches, response_logprobs
from rlk_ledger_replay.demo.settings import Numerics, Settings


class Lesson(msgspec.Struct, frozen=True):
    """One sample as the loss sees it: log-probabilities [n] before the update, mask [n], advantage."""

    sample: Rolled
    before: Tensor
    mask: Tensor
    advantage: float


class Update(msgspec.Struct, frozen=True):
    """What one optimiser step did: mean loss, share of clipped tokens, gradient norm."""

    loss: float
    clipped: float
    gradient_norm: float


def advantages(samples: Sequence[Rolled]) -> list[float]:
    """(reward - mean) / (standard deviation + 1e-4) within each sample's group."""
    rewards: dict[str, list[float]] = defaultdict(list)
    for sample in samples:
        rewards[sample.group_id].append(sample.reward)
    stats = {group: torch.tensor(values, dtype=torch.float64) for group, values in rewards.items()}
    mean = {group: float(values.mean()) for group, values in stats.items()}
    spread = {group: float(values.std(correction=0)) + 1e-4 for group, values in stats.items()}
    return [(s.reward - mean[s.group_id]) / spread[s.group_id] for s in samples]


def clipped_loss(now: Tensor, lesson: Lesson, clip: float) -> tuple[Tensor, Tensor]:
    """Sum over counted tokens of the clipped surrogate's negative, and how many of them were clipped."""
    ratio = (now - lesson.before).exp()
    bounded = ratio.clamp(1 - clip, 1 + clip)
    gain = torch.minimum(ratio * lesson.advantage, bounded * lesson.advantage)
    return -(gain * lesson.mask).sum(), ((ratio != bounded) * lesson.mask).sum()


class Learner:
    """Owns the float32 master weights and the optimiser; after each step the bf16 network is a rounding of them."""

    def __init__(self, network: Any, settings: Settings, numerics: Numerics) -> None:
        self._network = network
        self._settings = settings
        self._numerics = numerics
        self._parameters: list[Tensor] = list(network.parameters())
        self._masters = [p.detach().float().clone().requires_grad_() for p in self._parameters]
        self._optimiser = torch.optim.AdamW(
            self._masters, lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
        )

    def update(self, lessons: Sequence[Lesson]) -> Update:
        """One optimiser step over `lessons`, its gradient accumulated over micro-batches."""
        tokens = sum(float(lesson.mask.sum()) for lesson in lessons)
        loss = clipped = 0.0
        for part in micro_batches(lessons, self._settings.score_batch):
            values = response_logprobs(self._network, [lesson.sample for lesson in part], self._numerics)
            parts = [clipped_loss(now, lesson, self._settings.clip) for now, lesson in zip(values, part)]
            total = torch.stack([p[0] for p in parts]).sum() / tokens
            total.backward()  # type: ignore[no-untyped-call]
            loss += float(total.detach())
            clipped += float(torch.stack([p[1] for p in parts]).sum())
        return Update(loss, clipped / tokens, self._step())

    def _step(self) -> float:
        for master, parameter in zip(self._masters, self._parameters):
            master.grad = torch.zeros_like(master) if parameter.grad is None else parameter.grad.float()
            parameter.grad = None
        norm = torch.nn.utils.clip_grad_norm_(self._masters, 1.0)
        self._optimiser.step()
        with torch.no_grad():
            for master, parameter in zip(self._masters, self._parameters):
                parameter.copy_(master)
        return float(norm)
