"""Process B: the training engine. It publishes weights, re-scores each step's samples, learns from them, records.

Run as `python -m rlk_ledger_replay.demo.training SETTINGS.json`; the demo command does.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

import rlk_ledger
from rlk_ledger_replay.demo import declare
from rlk_ledger_replay.demo.exchange import Rolled, step_file, take
from rlk_ledger_replay.demo.learn import Learner, Lesson, Update, advantages
from rlk_ledger_replay.demo.network import open_network, save_weights
from rlk_ledger_replay.demo.score import micro_batches, score
from rlk_ledger_replay.demo.settings import Settings, read_settings, version_name
from rlk_ledger_schemas.fingerprints import file_digest

SIDE: Final = "training"


class TrainingEngine:
    """The engine's state: its network, its learner, and the contract it scores under."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        declare.prepare_torch(settings)
        declare.open_recorder(settings, SIDE)
        self.network: Any = open_network(settings.model)
        self.numerics = settings.numerics(SIDE)
        self.learner = Learner(self.network, settings, self.numerics)
        self.attached = declare.attach_network(settings, SIDE, self.network)
        self.contract = declare.declare_logprobs(settings, SIDE, self.attached)

    def publish(self, version: int, labels: dict[str, str]) -> None:
        """Writes the held weights under `version` and records their digests, whole and by tensor."""
        folder = self.settings.weights(version)
        save_weights(self.network, Path(self.settings.model), folder)
        self.attached.published(
            version_name(version),
            stamp_rule="after the optimiser's last step",
            path=self.settings.weights_path(version),
            file_digest=file_digest(folder / "model.safetensors"),
            labels=labels,
        )

    def step(self, step: int) -> dict[str, str]:
        """Scores and learns from one step's samples; returns what the update did, as labels."""
        samples = take(step_file(self.settings.work, step), self.settings.wait_s).samples
        masks = [self.mask(sample) for sample in samples]
        if self.settings.fault == "weights-ahead":
            before = [_sampled_values(sample) for sample in samples]
            updates = self._learn(samples, masks, before)
            self._score(samples, masks, step)
        else:
            before = self._score(samples, masks, step)
            updates = self._learn(samples, masks, before)
        return {
            "reward_mean": f"{sum(s.reward for s in samples) / len(samples):.4f}",
            "loss": " ".join(f"{u.loss:.5f}" for u in updates),
            "clip_fraction": " ".join(f"{u.clipped:.5f}" for u in updates),
            "gradient_norm": " ".join(f"{u.gradient_norm:.4f}" for u in updates),
        }

    def mask(self, sample: Rolled) -> list[int]:
        """The loss mask training uses."""
        return [1] * len(sample.response) if self.settings.fault == "tool-tokens" else sample.loss_mask

    def _score(self, samples: Sequence[Rolled], masks: Sequence[list[int]], step: int) -> list[Tensor]:
        """Re-scores all samples in this engine's own micro-batches and records the pass."""
        values: list[Tensor] = []
        for index, part in enumerate(micro_batches(samples, self.settings.score_batch)):
            layout = f"{SIDE}-{step}-{index}"
            self._record_layout(layout, part, masks[len(values) : len(values) + len(part)])
            for sample, row in zip(part, score(self.network, part, self.numerics)):
                self._record(sample, row, masks[len(values)], step, layout)
                values.append(row)
        return values

    def _record_layout(self, layout: str, part: Sequence[Rolled], masks: Sequence[list[int]]) -> None:
        lengths = [len(sample.prompt) + len(sample.response) for sample in part]
        rlk_ledger.record(
            "batch.layout",
            layout_id=layout,
            micro_batch=len(part),
            global_batch=self.settings.groups * self.settings.group_size,
            sample_order=[sample.sample_id for sample in part],
            sequence_lengths=lengths,
            padding_side="right",
            packing=False,
            active_density=sum(map(sum, masks)) / (len(part) * max(lengths)),
        )

    def _record(self, sample: Rolled, values: Tensor, mask: list[int], step: int, layout: str) -> None:
        rlk_ledger.record(
            "logprobs",
            sample_id=sample.sample_id,
            source=SIDE,
            contract_id=self.contract,
            values=values,
            dtype=self.numerics.head_dtype,
            weight_version=version_name(step),
            pass_id="logprob",
            layout_id=layout,
            token_digest=rlk_ledger.token_digest(sample.response),
            mask_digest=rlk_ledger.mask_digest(mask),
        )

    def _learn(self, samples: Sequence[Rolled], masks: Sequence[list[int]], before: Sequence[Tensor]) -> list[Update]:
        """The step's optimiser updates, each over its own share of the groups."""
        gains = advantages(samples)
        lessons = [
            Lesson(sample, old, torch.tensor(mask, dtype=torch.float32), gain)
            for sample, old, mask, gain in zip(samples, before, masks, gains)
        ]
        parts = self.settings.updates_per_step
        return [self.learner.update(lessons[part::parts]) for part in range(parts)]


def _sampled_values(sample: Rolled) -> Tensor:
    """The rollout engine's own log-probabilities, zero where nothing was sampled."""
    return torch.tensor([0.0 if value is None else value for value in sample.logprobs])


def main(path: str) -> None:
    """Publishes the first weights, runs every step, then waits until all that was recorded is in the bucket."""
    settings = read_settings(path)
    engine = TrainingEngine(settings)
    with rlk_ledger.scope(step=0):
        engine.publish(0, {"origin": "shipped model"})
    for step in range(settings.steps):
        with rlk_ledger.scope(step=step, rollout_id=step):
            labels = engine.step(step)
        with rlk_ledger.scope(step=step + 1):
            engine.publish(step + 1, labels)
    rlk_ledger.flush("committed", timeout=settings.wait_s)
    rlk_ledger.close(timeout=settings.wait_s)


if __name__ == "__main__":
    main(sys.argv[1])
