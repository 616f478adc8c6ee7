"""One rank of a small Megatron job: scores and learns from given samples, publishes its weights, records all of it.

Run as `python megatron_job.py JOB.json RANK`; the tests write the JSON and start the ranks. Keys of the job: store,
world, tp, pp, model, ledger, run_id, spool, samples [{sample_id, prompt, response, mask}], version, and what else the
branches below read.
"""

import json
import sys
from pathlib import Path
from typing import Any

import megatron_model as mm
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.timers import Timers
from megatron.core.transformer.module import Float16Module

import rlk_ledger
from rlk_ledger.integrations import megatron

PAD = 258


def micro_batches(job: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """This data-parallel rank's samples, `micro_batch` at a time."""
    size = job.get("micro_batch", 3)
    mine = job["samples"][parallel_state.get_data_parallel_rank() :: parallel_state.get_data_parallel_world_size()]
    return [mine[i : i + size] for i in range(0, len(mine), size)]


def wrap(model: Any) -> Any:
    """The model as Megatron's training loop wraps it."""
    config = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    return DistributedDataParallel(model.config, config, Float16Module(model.config, model))


def batch_of(part: list[dict[str, Any]]) -> mm.Batch:
    """A micro-batch padded on the right."""
    return mm.pad([s["prompt"] for s in part], [s["response"] for s in part], PAD)


def announce(scored: Any, part: list[dict[str, Any]], batch: mm.Batch) -> None:
    """Tells the pass what the next forward scores."""
    masks = [s["mask"] for s in part]
    scored.batch([s["sample_id"] for s in part], batch.rows, batch.responses, masks, padded_to=batch.ids.shape[1])


def open_recorder(job: dict[str, Any]) -> None:
    """Starts recording as one rank of the training side."""
    rlk_ledger.init(
        job["ledger"],
        run_id=job["run_id"],
        role="training",
        roles={"rollout": 1, "training": job["world"]},
        spool=job["spool"],
        shipper="off",
        on_error="warn" if job.get("silent") else "raise",
        **megatron.init_options("training-0"),
    )


def score_pass(job: dict[str, Any], model: Any, watch: Any) -> list[list[float]]:
    """The log-prob pass; returns the engine's own values."""
    scores = []
    how = {name: job.get(name, False) for name in ("reduce", "values_follow")}
    with watch.scoring("logprob", weight_version=job["version"], **how) as scored:
        for part in micro_batches(job):
            batch = batch_of(part)
            announce(scored, part, batch)
            values = mm.score(model, batch, job["temperature"])
            if job.get("give_values") and values:
                scored.values(values)
            scores += [row.tolist() for row in values]
    return scores


def train_pass(job: dict[str, Any], learner: mm.Learner, watch: Any) -> list[float]:
    """Gradients over all micro-batches, and their reduction where the model is wrapped; returns the losses."""
    losses = []
    with watch.scoring("train", weight_version=job["version"]) as scored:
        for part in micro_batches(job):
            batch = batch_of(part)
            announce(scored, part, batch)
            losses.append(learner.backward(batch, [1.0, -0.5, 0.25][: len(part)], job["temperature"]))
    if job.get("wrap"):
        learner.model.config.timers = Timers(2, "max")
        finalize_model_grads([learner.model])
        watch.timed()
    return losses


def profile_pass(job: dict[str, Any], model: Any, watch: Any) -> None:
    """One more forward under torch.profiler."""
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu) as profile, torch.profiler.record_function("rescore"):
        mm.score(model, batch_of(micro_batches(job)[0]), job["temperature"])
    watch.profiled(profile, ["rescore", "never ran"])


def score_for_ever(job: dict[str, Any], model: Any, watch: Any, rank: int) -> None:
    """Passes without end, each followed by a line that says how far this rank's record is acknowledged."""
    with Path(job["acks"], str(rank)).open("w", buffering=1) as acks:
        for step in range(1_000_000):
            with rlk_ledger.scope(step=step):
                score_pass(job, model, watch)
            acks.write(f"{rlk_ledger.current().writer_id} {rlk_ledger.flush('spooled')['spooled']}\n")


def run(job: dict[str, Any], rank: int) -> dict[str, Any]:
    """The whole job on this rank; returns what the tests compare."""
    mm.start(rank, job["world"], job["store"], tp=job["tp"], pp=job.get("pp", 1))
    if job.get("ledger") and rank not in job.get("silent", []):
        open_recorder(job | {"run_id": "before"} if job.get("again") else job)
    model = mm.build(job["model"], job.get("dtype", "bfloat16"), vocab=job.get("vocab"))
    watched = wrap(model) if job.get("wrap") else model
    watch = megatron.attach(
        watched,
        "training-0",
        temperature=job["temperature"],
        vocab_size=job.get("vocab_size"),
        requested=job.get("requested"),
    )
    if job.get("again"):
        open_recorder(job)
    out: dict[str, Any] = {}
    if job.get("acks"):
        score_for_ever(job, watched, watch, rank)
    with rlk_ledger.scope(step=0):
        watch.published(job["version"], job["model"], timeout_s=2.0 if job.get("silent") else 60.0)
        out["values"] = score_pass(job, watched, watch)
        if job.get("profile"):
            profile_pass(job, watched, watch)
        learner = mm.Learner(watched)
        out["losses"] = train_pass(job, learner, watch)
        out["gradients"] = [None if p.grad is None else p.grad.float().sum().item() for p in model.parameters()]
        learner.step()
    if job.get("export"):
        mm.export(model, job["model"], job["export"])
        with rlk_ledger.scope(step=1):
            watch.published(job["version"] + "+1", job["export"])
        out["weights"] = [p.float().sum().item() for p in model.parameters()]
    rlk_ledger.close()
    return out


def main(path: str, rank: int) -> None:
    """Runs the job and writes this rank's result beside it."""
    torch.manual_seed(0)
    job = json.loads(Path(path).read_text())
    result = run(job, rank)
    Path(path).with_name(f"result-{rank}.json").write_text(json.dumps(result))
    dist.barrier()
    mm.stop()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
