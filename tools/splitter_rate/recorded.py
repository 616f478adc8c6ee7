"""Clean runs recorded from the demo's model: its generation with a KV cache, its scoring in micro-batches, in bf16.

The weights move a little from step to step, on both sides alike. The seed, the temperature, the batches of both sides
and which engine, rank and label a sample has vary from run to run; no level of these does anything to a value.
"""

from importlib import resources
from typing import Any

import numpy as np
import torch

from rlk_ledger_replay.demo.decode import Request, generate
from rlk_ledger_replay.demo.exchange import Rolled
from rlk_ledger_replay.demo.network import open_network
from rlk_ledger_replay.demo.score import micro_batches, score
from rlk_ledger_replay.demo.settings import Numerics
from rlk_ledger_replay.demo.tasks import tasks_of
from rlk_ledger_schemas.fingerprints import mask_digest, sha256, token_digest
from splitter_rate.runs import BODY, Event, Log


def demo_events(seed: int) -> list[Event]:
    """One run: two or three steps of eight groups of four, as the demo's two engines would record them."""
    torch.set_num_threads(1)
    rng = np.random.default_rng([seed, 88111])
    network, log = open_network(str(resources.files("rlk_ledger_replay") / "model")), Log()
    numerics = Numerics(float(rng.choice([0.7, 1.0])), "float32")
    contract = _open(log, numerics)
    for step in range(int(rng.integers(2, 4))):
        digest = sha256(f"{seed} {step}".encode())
        log.add("t0", "weights.published", weight_version=f"v{step}", tensor_count=1, step=step, digest=digest)
        groups = [(f"g{i}", task) for i, task in enumerate(tasks_of(step, 8))]
        requests = [Request(task, f"{step}.{group}.{k}", group) for group, task in groups for k in range(4)]
        layouts = _generate(network, requests, numerics, rng)
        _record(log, network, requests, layouts, numerics, contract, step, rng)
        _move(network, seed, step)
    return log.rows


def _open(log: Log, numerics: Numerics) -> str:
    log.add("r0", "run.opened", roles={"rollout": 1, "training": 2}, mode={"consistency": "audit"})
    body = {**BODY, "temperature": numerics.temperature}
    for writer, role, rank, size in (("r0", "rollout", 0, 1), ("t0", "training", 0, 2), ("t1", "training", 1, 2)):
        log.add(writer, "writer.opened", role=role, rank=rank, world_size=size)
        declared = log.add(writer, "contract.declared", kind="logprob", version="1", body=body)
    return str(declared["contract_id"])


def _generate(network: Any, requests: list[Request], numerics: Numerics, rng: np.random.Generator) -> list[str]:
    """Generates batch by batch; returns the name of each request's batch."""
    names: list[str] = []
    while len(names) < len(requests):
        size = int(rng.integers(4, 13))
        part = requests[len(names) : len(names) + size]
        generate(network, part, numerics, torch.Generator().manual_seed(int(rng.integers(1 << 31))))
        names += [f"b{len(part)}"] * len(part)
    return names


def _record(
    log: Log,
    network: Any,
    requests: list[Request],
    batches: list[str],
    numerics: Numerics,
    contract: str,
    step: int,
    rng: np.random.Generator,
) -> None:
    rolled = [Rolled(r.sample_id, r.group_id, r.task.prompt, r.tokens, r.loss_mask, [], 0.0) for r in requests]
    size, trained = int(rng.integers(3, 9)), []
    for part in micro_batches(rolled, size):
        trained += score(network, part, numerics)
    for number, (request, batch, values) in enumerate(zip(requests, batches, trained)):
        tokens, mask = np.array(request.tokens, np.int32), np.array(request.loss_mask, np.uint8)
        common = {"step": step, "sample_id": request.sample_id}
        log.add(
            "r0",
            "rollout.sample",
            **common,
            group_id=request.group_id,
            engine=f"e{int(rng.integers(2))}",
            response_token_ids=tokens,
            prompt_token_ids=np.array(request.task.prompt, np.int32),
            loss_mask=mask,
            finish_reason=request.finish_reason,
            turn=int(0 in request.loss_mask),
            weight_spans=[{"version": f"v{step}", "start": 0, "end": len(tokens)}],
            sampling={"temperature": numerics.temperature, "top_p": 1.0},
            labels={"batch": batch, "pool": f"p{int(rng.integers(3))}"},
        )
        given = {**common, "contract_id": contract, "weight_version": f"v{step}"}
        given |= {"token_digest": token_digest(tokens), "mask_digest": mask_digest(mask)}
        seen = np.array(request.logprobs, np.float32)
        codes = {"value_class": np.where(mask == 0, 5, 0).astype(np.uint8)} if 0 in request.loss_mask else {}
        log.add("r0", "logprobs", source="rollout", values=seen, **codes, **given)
        writer = f"t{number // size % 2}"
        log.add(writer, "logprobs", source="training", values=values.float().numpy(), layout_id=f"m{size}", **given)


def _move(network: Any, seed: int, step: int) -> None:
    """A small step of every weight, as an update would take."""
    generator = torch.Generator().manual_seed(seed * 101 + step)
    with torch.no_grad():
        for weight in network.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.add_((noise * weight.float().std().nan_to_num(0.0) * 0.01).to(weight.dtype))
