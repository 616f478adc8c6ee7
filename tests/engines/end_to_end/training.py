"""One rank of the training process: Megatron-core scores each step's samples, learns from them, publishes weights.

    python training.py JOB.json RANK STORE

Two of these are one tensor-parallel job over gloo. The recorder is `rlk_ledger.integrations.megatron.attach`.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import megatron_model as megatron
import torch
import torch.distributed as dist
from torch import Tensor
from variants import (
    LEARNING_RATE,
    MICRO_BATCH,
    STEPS,
    TEMPERATURE,
    VARIANTS,
    WAIT_S,
    Job,
    Variant,
    read_job,
    version_name,
)

import rlk_ledger
from rlk_ledger.integrations import megatron as ledger_megatron
from rlk_ledger_replay.demo.exchange import Rolled, step_file, take
from rlk_ledger_replay.demo.learn import advantages
from rlk_ledger_replay.demo.score import micro_batches
from rlk_ledger_replay.demo.tasks import PAD

RANKS = 2


def run(job: Job, variant: Variant, rank: int) -> None:
    """One variant from the first published version to the last, recorded as one run."""
    model = megatron.build(job.model(variant), variant.training_dtype)
    if variant.float32_head:
        float32_head(model)
    lost = rank == variant.lost_rank
    rlk_ledger.init(
        job.ledger,
        run_id=variant.name,
        role="training",
        roles={"rollout": 1, "training": RANKS},
        spool=job.lost_node if lost else job.spool,
        shipper="off" if lost else "process",
        **ledger_megatron.init_options("training-0"),
    )
    watch = ledger_megatron.attach(model, "training-0", temperature=TEMPERATURE)
    learner = megatron.Learner(model, LEARNING_RATE)
    publish(job, variant, model, watch, 0)
    for step in range(STEPS):
        with rlk_ledger.scope(step=step, rollout_id=step):
            samples = take(step_file(job.work(variant), step), WAIT_S).samples
            score(model, watch, samples, step)
            learn(learner, samples)
            hold_what_is_published(model)
        with rlk_ledger.scope(step=step + 1):
            publish(job, variant, model, watch, step + 1)
    if not lost:
        rlk_ledger.flush("committed", timeout=WAIT_S)
    rlk_ledger.close(timeout=WAIT_S)


def float32_head(model: Any) -> None:
    """Lets the output layer multiply in float32 what the body computed in bf16."""
    multiply = model.output_layer.forward

    def forward(hidden: Tensor, weight: Tensor | None = None, **options: Any) -> Any:
        held = model.output_layer.weight if weight is None else weight
        return multiply(hidden.float(), weight=held.float(), **options)

    model.output_layer.forward = forward


def batch_of(part: Sequence[Rolled]) -> megatron.Batch:
    """A micro-batch as this engine lays it out: prompt and response in a row, padded on the right."""
    return megatron.pad([one.prompt for one in part], [one.response for one in part], PAD)


def score(model: Any, watch: Any, samples: Sequence[Rolled], step: int) -> None:
    """The log-probability pass: every sample under the weights that sampled it, before any update."""
    with watch.scoring("logprob", weight_version=version_name(step)) as scored:
        for part in micro_batches(samples, MICRO_BATCH):
            batch = batch_of(part)
            scored.batch(
                [one.sample_id for one in part],
                batch.rows,
                batch.responses,
                [one.loss_mask for one in part],
                global_batch=len(samples),
            )
            scored.values(megatron.score(model, batch, TEMPERATURE))


def learn(learner: megatron.Learner, samples: Sequence[Rolled]) -> None:
    """One optimiser step over the samples of a step."""
    gains = dict(zip((one.sample_id for one in samples), advantages(samples)))
    for part in micro_batches(samples, MICRO_BATCH):
        learner.backward(batch_of(part), [gains[one.sample_id] for one in part], TEMPERATURE)
    learner.step()


def hold_what_is_published(model: Any) -> None:
    """Rounds the parameters to bf16: a trainer in float32 then computes with the weights that vLLM gets."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())


def publish(job: Job, variant: Variant, model: Any, watch: Any, version: int) -> None:
    """Writes the weights of `version` as bf16, the dtype vLLM loads, and records their digest."""
    target = job.weights(variant, version)
    target.parent.mkdir(parents=True, exist_ok=True)
    megatron.export(model, job.model(variant), target, torch.bfloat16)
    watch.published(version_name(version), str(job.weights(variant, version)), dtype=torch.bfloat16)
    dist.barrier()


def main(path: str, rank: int, store: str) -> None:
    """Runs every variant in one tensor-parallel job."""
    job = read_job(path)
    megatron.start(rank, RANKS, store, tp=RANKS)
    for variant in VARIANTS:
        run(job, variant, rank)
        print(variant.name, "learned", flush=True)
    megatron.stop()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
