"""One rank of two: shards the shipped model in every way, records, and writes what it saw for the test to judge.

python fsdp_ranks.py RANK FOLDER
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import Qwen3ForCausalLM

import rlk_ledger
from rlk_ledger.integrations import fsdp
from rlk_ledger.integrations import transformers as hf
from rlk_ledger_sdk.testing import capture
from rlk_ledger_sdk.weights import state_digest

MODEL = Path(__file__).parent.parent.parent / "replay" / "rlk_ledger_replay" / "model"
WORLD = 2
SAMPLES = {
    "s0": [256, *b"def close(self):"], "s1": [256, *b"import os"],
    "s2": [256, *b"while True:"], "s3": [256, *b"return None"],
}  # fmt: skip
PROMPT = 4


def opened() -> Any:
    return Qwen3ForCausalLM.from_pretrained(str(MODEL), dtype=torch.float32).eval()


def by_module(model: Any, mesh: Any = None, **policy: Any) -> Any:
    """FSDP2: every layer and the root."""
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, **policy)
    return fully_shard(model, mesh=mesh, **policy)


def flat(model: Any, **options: Any) -> Any:
    """FSDP1 over the layers."""
    wrap = ModuleWrapPolicy({type(model.model.layers[0])})
    return FullyShardedDataParallel(model, auto_wrap_policy=wrap, device_id=torch.device("cpu"), **options)


def gathered(model: Any) -> str:
    """The digest of the whole tensors, gathered: what the product never does."""
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model, writeback=False):
            whole = {name: tensor.clone() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
        return state_digest(whole)[0]
    whole = {name: p.full_tensor() if hasattr(p, "full_tensor") else p for name, p in model.named_parameters()}
    return state_digest(whole)[0]


def train(model: Any, ids: Any) -> None:
    """One step of the optimiser on this rank's samples."""
    optimiser = torch.optim.SGD(model.parameters(), lr=1e-2)
    logits = model(ids).logits
    torch.nn.functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten()).backward()
    optimiser.step()
    optimiser.zero_grad()


def batch(names: list[str]) -> tuple[Any, Any, Any]:
    """(ids, attention mask, response mask) of samples, padded on the right."""
    width = max(len(SAMPLES[name]) for name in names)
    ids = [SAMPLES[n] + [258] * (width - len(SAMPLES[n])) for n in names]
    seen = [[1] * len(SAMPLES[n]) + [0] * (width - len(SAMPLES[n])) for n in names]
    response = [[0] * PROMPT + row[PROMPT:] for row in seen]
    return torch.tensor(ids), torch.tensor(seen), torch.tensor(response)


def shard_everyhow(rank: int) -> dict[str, Any]:
    """Per way of sharding: the digest before, the sharded one, and both after a step."""
    mesh = init_device_mesh("cpu", (WORLD,))
    replicas = init_device_mesh("cpu", (WORLD, 1), mesh_dim_names=("replicate", "shard"))
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    ways = {
        "fsdp2": lambda m: by_module(m, mesh),
        "fsdp2-mixed": lambda m: by_module(m, mesh, mp_policy=mixed),
        "fsdp2-hybrid": lambda m: by_module(m, replicas),
        "fsdp2-root-only": lambda m: fully_shard(m, mesh=mesh),
        "fsdp1": lambda m: flat(m, use_orig_params=True),
        "fsdp1-flat": lambda m: flat(m),
        "fsdp1-replicated": lambda m: flat(m, sharding_strategy=ShardingStrategy.NO_SHARD),
        "fsdp1-mixed": lambda m: flat(m, mixed_precision=MixedPrecision(param_dtype=torch.bfloat16)),
    }
    found: dict[str, Any] = {}
    names = list(SAMPLES)[rank::WORLD]
    for way, shard in ways.items():
        plain = opened()
        before = state_digest(hf.held_tensors(plain))[0]
        model = shard(plain)
        start = fsdp.sharded_digest(model)[0]
        train(model, batch(names)[0])
        after, each = fsdp.sharded_digest(model)
        partials = fsdp.partial_sums(model)
        found[way] = {
            "before": before, "sharded": start, "after": after, "gathered": gathered(model),
            "names": sorted(each), "empty": sum(pair == (0, 0) for pair in partials.values()),
        }  # fmt: skip
        with capture() as events:
            hf.attach(model).contract(mode="raw")
        found[way]["settings"] = {e.fields["path"]: e.fields.get("actual") for e in events.of("knob.applied")}
        bodies = [e.fields["body"] for e in events.of("contract.declared") if e.fields["kind"] == "logprob"]
        found[way]["contract"] = bodies[0]
    return found


def columns(rank: int) -> dict[str, str]:
    """A tensor cut along its second axis, as a row-parallel projection is."""
    mesh = init_device_mesh("cpu", (WORLD,))
    layer = torch.nn.Linear(6, 5, bias=False)
    torch.nn.init.normal_(layer.weight, generator=torch.Generator().manual_seed(0))
    whole = state_digest({"weight": layer.weight})[0]
    layer.weight = torch.nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Shard(1)]))
    return {"whole": whole, "cut": fsdp.sharded_digest(layer)[0]}


def record(rank: int, folder: Path) -> None:
    """Each rank scores its own samples under FSDP2 and records them; the weights are recorded once."""
    rlk_ledger.init(
        folder / "ledger",
        run_id="fsdp",
        role="training",
        roles={"training": WORLD},
        spool=folder / f"spool-{rank}",
        shipper="inline",
        on_error="raise",
        **fsdp.place(),
    )
    model = by_module(opened(), init_device_mesh("cpu", (WORLD,)))
    watched = hf.attach(model, engine=f"training-{rank}", requested={"fsdp.param_dtype": "bfloat16"})
    names = list(SAMPLES)[rank::WORLD]
    ids, seen, response = batch(names)
    with rlk_ledger.scope(step=0), torch.no_grad():
        watched.published("v0")
        logits = model(ids, attention_mask=seen).logits
        watched.scored(ids, sample_ids=names, response_mask=response, logits=logits, attention_mask=seen)
    rlk_ledger.close()


def one_rank_silent(rank: int, folder: Path) -> str | None:
    """Only rank 0 records; both call, and neither waits for the other for ever."""
    if rank == 0:
        options = {"spool": folder / "spool-silent", "shipper": "inline", "on_error": "warn", **fsdp.place()}
        rlk_ledger.init(folder / "ledger", run_id="silent", role="training", roles={"training": WORLD}, **options)
    model = by_module(opened(), init_device_mesh("cpu", (WORLD,)))
    digest = fsdp.record_weights("weights.published", model, "v0", timeout_s=0.5)
    rlk_ledger.close()
    return digest


def main(rank: int, folder: Path) -> None:
    """Runs everything and writes `rank-<rank>.json`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=WORLD)
    found = {"ways": shard_everyhow(rank), "columns": columns(rank)}
    record(rank, folder)
    found["silent"] = one_rank_silent(rank, folder)
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
