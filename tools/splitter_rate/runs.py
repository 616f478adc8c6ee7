"""Clean runs of ten kinds, harder than a made run: nothing in them is wrong, and nothing in them is uniform.

Every source of honest unevenness may coincide with a recorded dimension: kinds of text by group, difficulty and noise
by length, engines by group, caches hit by all but the first of a group, layouts packed by length, tool turns of
another kind of text, steps that drift, noise that is autocorrelated along a response. No recorded level is truly
more than 1.5 times noisier than the rest, given its log-probabilities.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlk_ledger_schemas.codec import decode_envelope
from rlk_ledger_schemas.events import check_fields, encode
from rlk_ledger_schemas.fingerprints import mask_digest, sha256, token_digest
from splitter_rate.text import TEXT, both_sides, truth

Event = tuple[str, int, dict[str, Any], dict[str, Any]]
KINDS = (
    "mixed", "quanta", "lengths", "groups", "engines", "turns", "steps", "heavy", "bursts", "everything",
)  # fmt: skip
BODY = {"mode": "processed", "temperature": 1.0, "top_p": 1.0, "alignment": "token_i_given_before_i"}


@dataclass
class Plan:
    """What is drawn once for a run; a fault may change it, and `factor` multiplies the noise of a sample's tokens."""

    rng: np.random.Generator
    steps: int
    groups: int
    per_group: int
    length: float
    noise: float
    tail_df: float
    rounding: str
    group_spread: float = 0.3
    sample_spread: float = 0.3
    by_length: float = 0.0
    engines: tuple[float, ...] = (1.0, 1.0)
    engine_by_group: bool = False
    turns: bool = False
    shards: int = 1
    ranks: int = 1
    drift: float = 0.0
    growth: float = 0.0
    bursts: float = 0.0
    one_text: str | None = None
    factor: Callable[[dict[str, Any]], Any] | None = None
    only: set[int] | None = None
    """Numbers of the samples that alone have tool turns and shards (None: all of those that the plan gives some)."""


def draw_plan(kind: str, seed: int) -> Plan:
    """The plan of the clean run `seed` of one kind."""
    rng = np.random.default_rng([KINDS.index(kind), seed, 77003])
    every = kind == "everything"
    plan = Plan(
        rng,
        steps=int(rng.integers(1, 7)),
        groups=int(rng.integers(2, 9)),
        per_group=int(rng.choice([2, 4, 6, 8])),
        length=float(rng.uniform(20, 200)),
        noise=float(10 ** rng.uniform(-3.5, -1.3)),
        tail_df=float(rng.choice([2.2, 3.0, 5.0, 1e6])),
        rounding=str(rng.choice(["none", "logits", "values", "saturated"])),
        engines=tuple(1.0 for _ in range(int(rng.integers(1, 4)))),
        engine_by_group=bool(rng.integers(2)),
        shards=int(rng.choice([1, 1, 2])),
        ranks=int(rng.choice([1, 2, 4])),
    )
    if kind == "quanta" or (every and rng.random() < 0.5):
        plan.rounding, plan.noise = str(rng.choice(["logits", "values"])), float(10 ** rng.uniform(-3.0, -1.7))
    if kind == "lengths" or every:
        plan.by_length = float(rng.uniform(0.1, 0.2 if every else 0.35))
    if kind == "groups" or every:
        plan.group_spread, plan.sample_spread = float(rng.uniform(0.6, 1.1)), float(rng.uniform(0.2, 0.6))
    if kind == "engines" or every:
        plan.engines = tuple(np.exp(rng.uniform(0, np.log(1.5), int(rng.integers(2, 5)))).tolist())
    if kind == "turns" or every:
        plan.turns, plan.length = True, max(plan.length, 60.0)
    if kind == "steps" or every:
        plan.steps, plan.drift = int(rng.integers(4, 12)), float(rng.uniform(-0.12, 0.12))
    if kind == "heavy" or every:
        plan.tail_df, plan.sample_spread = float(rng.uniform(1.6, 2.4)), float(rng.uniform(0.4, 0.9))
    if kind == "bursts" or every:
        plan.bursts, plan.growth = float(rng.uniform(0.3, 1.0)), float(rng.uniform(0.0, 0.3 if every else 1.0))
    return plan


class Log:
    """Numbers events per writer, encoded and decoded as the recorder and the reader would."""

    def __init__(self) -> None:
        self.seq: dict[str, int] = {}
        self.rows: list[Event] = []

    def add(self, writer: str, kind: str, /, **fields: Any) -> dict[str, Any]:
        seq = self.seq.get(writer, 0)
        self.seq[writer] = seq + 1
        assigned = {"schema_version": 1, "seq": seq, "wall_ns": seq, "mono_ns": seq, "run_id": "clean"}
        wire, arrays = check_fields(kind, fields, {**assigned, "writer_id": writer})
        envelope = decode_envelope(encode(wire))
        self.rows.append((writer, seq, envelope, arrays))
        return envelope


def events(plan: Plan) -> list[Event]:
    """The run of a plan."""
    log = Log()
    ids = _open(log, plan)
    for step in range(plan.steps):
        digest = sha256(f"w{step}".encode())
        common = {"weight_version": f"v{step}", "tensor_count": 3, "step": step, "digest": digest}
        log.add("t0", "weights.published", **common)
        for engine in range(len(plan.engines)):
            log.add("r0", "weights.loaded", engine=f"e{engine}", what="received", **common)
        for group in range(plan.groups):
            for row in _group(plan, step, group):
                _record(log, plan, ids, row)
    return log.rows


def _open(log: Log, plan: Plan) -> dict[str, str]:
    roles = {"rollout": 1, "training": plan.ranks}
    log.add("r0", "run.opened", roles=roles, mode={"consistency": "audit"})
    log.add("r0", "writer.opened", role="rollout", rank=0, world_size=1, engine={"name": "vllm"})
    ids = {"r": log.add("r0", "contract.declared", kind="logprob", version="1", body=BODY)["contract_id"]}
    for rank in range(plan.ranks):
        log.add(f"t{rank}", "writer.opened", role="training", rank=rank, world_size=plan.ranks)
        ids["t"] = log.add(f"t{rank}", "contract.declared", kind="logprob", version="1", body=BODY)["contract_id"]
    for i in range(4):
        log.add("t0", "batch.layout", layout_id=f"L{i}", micro_batch=1 << i, padding_side="right")
    return ids


def _group(plan: Plan, step: int, group: int) -> Iterator[dict[str, Any]]:
    rng = plan.rng
    text = plan.one_text or str(rng.choice(list(TEXT)))
    effect, length = float(np.exp(rng.normal(0, plan.group_spread))), plan.length * float(np.exp(rng.normal(0, 0.3)))
    shared, prompt = int(rng.integers(len(plan.engines))), int(rng.integers(4, 400))
    turns = int(rng.integers(0, 4)) if plan.turns else 0
    for i in range(plan.per_group):
        n = int(np.clip(rng.lognormal(np.log(length), 0.5), 6, 600))
        row = {
            "id": f"{step}.{group}.{i}",
            "number": (step * plan.groups + group) * plan.per_group + i,
            "step": step,
            "group": f"g{group}",
            "n": n,
            "engine": shared if plan.engine_by_group else int(rng.integers(len(plan.engines))),
            "cached": 0 if i == 0 else 16 * (prompt // 16),
            "chunks": [0] if prompt < 200 else [0, 200],
            "prompt": prompt,
            "turns": turns if rng.random() < 0.8 else 0,
            "rank": int(rng.integers(plan.ranks)),
            "layout": int(np.clip(np.log2(n / 20 + 1), 0, 3)),
            "spec": bool(rng.integers(2)),
        }
        row["marked"] = plan.only is None or row["number"] in plan.only
        row["turns"] *= row["marked"]
        row["mask"], late = _mask(rng, n, row["turns"])
        hard = float(np.exp(0.15 * plan.drift * step)) * (n / plan.length) ** (0.3 * np.sign(plan.by_length))
        row["true"] = truth(rng, n, text, hard)
        row["true"][late] *= float(rng.uniform(0.3, 1.5))
        scale = plan.noise * effect * float(np.exp(rng.normal(0, plan.sample_spread))) * plan.engines[row["engine"]]
        scale *= (n / plan.length) ** plan.by_length * float(np.exp(plan.drift * step))
        noise = scale * (1.0 + plan.growth * np.arange(n) / max(n, 200)) * _bursts(rng, n, plan.bursts)
        row["noise"] = noise * (plan.factor(row) if plan.factor is not None else 1.0)
        yield row


def _mask(rng: np.random.Generator, n: int, turns: int) -> tuple[Any, Any]:
    """(loss mask, bool[n] of what follows the first tool text)."""
    mask, late = np.ones(n, np.uint8), np.zeros(n, np.bool_)
    if turns and n >= 30:
        for at in sorted(rng.integers(5, n - 10, turns).tolist()):
            mask[at : at + int(rng.integers(2, 9))] = 0
            late[at if not late.any() else n :] = True
    return mask, late


def _bursts(rng: np.random.Generator, n: int, strength: float) -> Any:
    """exp of an autocorrelated normal series: noise comes in stretches."""
    if not strength:
        return np.ones(n)
    out, level = np.empty(n), 0.0
    for i, step in enumerate(rng.normal(0, strength * 0.43, n)):
        level = 0.9 * level + step
        out[i] = level
    return np.exp(out)


def _record(log: Log, plan: Plan, ids: dict[str, str], row: dict[str, Any]) -> None:
    rng, n, step = plan.rng, row["n"], row["step"]
    tokens = rng.integers(0, 50_000, n).astype(np.int32)
    rollout, training = both_sides(rng, row["true"], row["noise"], plan.rounding, plan.tail_df)
    common = {"step": step, "sample_id": row["id"]}
    log.add(
        "r0",
        "rollout.sample",
        **common,
        group_id=row["group"],
        engine=f"e{row['engine']}",
        response_token_ids=tokens,
        prompt_token_ids=np.zeros(row["prompt"], np.int32),
        loss_mask=row["mask"],
        turn=row["turns"],
        finish_reason="length" if n >= 600 else "stop",
        chunks=row["chunks"],
        cache={"cached_tokens": row["cached"], "writer_version": row.get("cache_writer", f"v{step}"), "block_size": 16},
        spec={"drafted": 20 * row["spec"], "accepted": 9 * row["spec"]},
        sampling={"temperature": 1.0, "top_p": 1.0, "seed": int(rng.integers(1 << 30))},
        weight_spans=[{"version": f"v{step}", "start": 0, "end": n}],
        labels={"pool": f"p{row['number'] % 3}", **row.get("labels", {})},
    )
    given = {"weight_version": f"v{step}", **common}
    log.add("r0", "logprobs", source="rollout", values=rollout, contract_id=ids["r"], **given)
    given |= {"contract_id": ids["t"], "layout_id": f"L{row['layout']}", "source": "training"}
    writer = f"t{row['rank']}"
    if plan.shards > 1 and n >= 2 * plan.shards and row["marked"]:
        edges = np.linspace(0, n, 2 * plan.shards + 1).astype(int).tolist()
        for rank in range(plan.shards):
            ranges = [(edges[j], edges[j + 1]) for j in (rank, 2 * plan.shards - 1 - rank)]
            shard = {"axis": "sequence", "rank": rank, "world_size": plan.shards, "ranges": ranges}
            values = np.concatenate([training[a:b] for a, b in ranges])
            log.add(writer, "logprobs", values=values, shard=shard, **given)
        return
    digests = {"token_digest": token_digest(tokens), "mask_digest": mask_digest(row["mask"])}
    log.add(writer, "logprobs", values=training, **digests, **given)
