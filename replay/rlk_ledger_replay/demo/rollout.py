"""Process A: the rollout engine. It loads each published version, generates a step of samples, records, hands over.

Run as `python -m rlk_ledger_replay.demo.rollout SETTINGS.json`; the demo command does.
"""

import math
import sys
from collections.abc import Sequence
from typing import Any, Final

import torch

import rlk_ledger
from rlk_ledger_replay.demo import declare
from rlk_ledger_replay.demo.decode import Request, generate
from rlk_ledger_replay.demo.exchange import Rolled, RolledStep, put, step_file, wait_for
from rlk_ledger_replay.demo.network import copy_weights, open_network
from rlk_ledger_replay.demo.settings import Settings, read_settings, version_name
from rlk_ledger_replay.demo.tasks import reward, tasks_of
from rlk_ledger_schemas.metrics import VALUE_CLASSES

SIDE: Final = "rollout"
_FINITE, _MISSING = VALUE_CLASSES.index("finite"), VALUE_CLASSES.index("missing")


class RolloutEngine:
    """The engine's state: its network, the contract it scores under, and which prompts it has recorded."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        declare.prepare_torch(settings)
        declare.open_recorder(settings, SIDE)
        self.network: Any = open_network(settings.model)
        self.attached = declare.attach_network(settings, SIDE, self.network)
        self.contract = declare.declare_logprobs(settings, SIDE, self.attached)
        self._prompts: set[str] = set()

    def load(self, version: int) -> None:
        """Takes `version` and records the digest of the parameters held afterwards, read back from the network."""
        folder = self.settings.weights(version)
        wait_for(folder, self.settings.wait_s)
        if not (self.settings.fault == "stale-weights" and version > 0):
            copy_weights(self.network, folder)
        self.attached.loaded(version_name(version), caches_flushed=True, path=self.settings.weights_path(version))

    def step(self, step: int) -> None:
        """Generates, records and hands over the samples of one step, batch by batch."""
        requests = self._requests(step)
        done: list[Rolled] = []
        for index, size in enumerate(self.settings.generation_batches):
            batch = requests[len(done) : len(done) + size]
            generator = torch.Generator().manual_seed(self._seed(step, index))
            generate(self.network, batch, self.settings.numerics(SIDE), generator)
            layout = f"{SIDE}-{step}-{index}"
            self._record_layout(layout, batch)
            done += [self._record(request, step, layout, self._seed(step, index)) for request in batch]
        put(step_file(self.settings.work, step), RolledStep(step, step, done))

    def _seed(self, step: int, batch: int) -> int:
        return self.settings.seed * 1_000_003 + step * 1_009 + batch

    def _requests(self, step: int) -> list[Request]:
        requests = []
        for index, task in enumerate(tasks_of(step, self.settings.groups)):
            if task.prompt_id not in self._prompts:
                rlk_ledger.record("prompt.recorded", prompt_id=task.prompt_id, token_ids=task.prompt)
                self._prompts.add(task.prompt_id)
            group = f"step{step}-group{index}"
            requests += [Request(task, f"{group}-{k}", group) for k in range(self.settings.group_size)]
        return requests

    def _record_layout(self, layout: str, batch: Sequence[Request]) -> None:
        rlk_ledger.record(
            "batch.layout",
            layout_id=layout,
            micro_batch=len(batch),
            global_batch=self.settings.groups * self.settings.group_size,
            sample_order=[request.sample_id for request in batch],
            sequence_lengths=[len(request.task.prompt) for request in batch],
            padding_side="left",
            packing=False,
        )

    def _record(self, request: Request, step: int, layout: str, seed: int) -> Rolled:
        """Records one finished response and its log-probabilities; returns what the trainer gets."""
        score = reward(request.tokens, request.loss_mask)
        digests = {
            "token_digest": rlk_ledger.token_digest(request.tokens),
            "mask_digest": rlk_ledger.mask_digest(request.loss_mask),
        }
        self._record_sample(request, version_name(step), seed, score, digests)
        missing = [math.isnan(value) for value in request.logprobs]
        rlk_ledger.record(
            "logprobs",
            sample_id=request.sample_id,
            source=SIDE,
            contract_id=self.contract,
            values=request.logprobs,
            value_class=[_MISSING if gone else _FINITE for gone in missing] if any(missing) else None,
            dtype=self.settings.numerics(SIDE).head_dtype,
            weight_version=version_name(step),
            pass_id="generate",
            layout_id=layout,
            **digests,
        )
        return Rolled(
            sample_id=request.sample_id,
            group_id=request.group_id,
            prompt=request.task.prompt,
            response=request.tokens,
            loss_mask=request.loss_mask,
            logprobs=[None if gone else value for gone, value in zip(missing, request.logprobs)],
            reward=score,
        )

    def _record_sample(self, request: Request, version: str, seed: int, score: float, digests: dict[str, str]) -> None:
        rlk_ledger.record(
            "rollout.sample",
            sample_id=request.sample_id,
            group_id=request.group_id,
            prompt_id=request.task.prompt_id,
            response_token_ids=request.tokens,
            loss_mask=request.loss_mask,
            tokenizer="bytes",
            model="rlk-ledger-demo",
            sampling={
                "temperature": self.settings.numerics(SIDE).temperature,
                "top_p": 1.0,
                "top_k": -1,
                "seed": seed,
                "n": self.settings.group_size,
            },
            finish_reason=request.finish_reason,
            status="completed" if request.finish_reason == "stop" else "truncated",
            reward=score,
            weight_spans=[{"version": version, "start": 0, "end": len(request.tokens)}],
            stamp_rule="version held while the whole batch was generated",
            engine=declare.INSTANCE[SIDE],
            cache={"cached_tokens": 0},
            chunks=[len(request.task.prompt)],
            metadata_source={"reward": "derived", "weight_spans": "measured", "sampling": "measured"},
            **digests,
        )


def main(path: str) -> None:
    """Runs every step, then waits until all that was recorded is in the bucket."""
    settings = read_settings(path)
    engine = RolloutEngine(settings)
    for step in range(settings.steps):
        with rlk_ledger.scope(step=step, rollout_id=step):
            engine.load(step)
            engine.step(step)
    rlk_ledger.flush("committed", timeout=settings.wait_s)
    rlk_ledger.close(timeout=settings.wait_s)


if __name__ == "__main__":
    main(sys.argv[1])
