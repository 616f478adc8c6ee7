"""Made runs: healthy ones that vary in everything a real run varies in.

`events(seed)` yields (writer id, seq, envelope fields, arrays) as a ledger would return them. What varies with the
seed: steps, groups, samples, lengths, how confident the text is, noise scale and its dependence on the log-probability,
on the sample, on the group and on the position, heavy tails, low-precision rounding, exact zeros, engines, cache hits,
chunked prefill, speculative decoding, turns with masked tool text, retries, layouts, context-parallel shards, second
passes, weight versions that change mid-response, dropped groups, temperatures and labels.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from rlk_ledger_schemas.arrays import Array
from rlk_ledger_schemas.codec import decode_envelope
from rlk_ledger_schemas.events import check_fields, encode
from rlk_ledger_schemas.fingerprints import mask_digest, sha256, token_digest

Event = tuple[str, int, dict[str, Any], dict[str, Array]]
ROLLOUT, TRAINING = "rollout-0", "train-0"
BODY = {
    "mode": "processed",
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "head_dtype": "float32",
    "logits_dtype": "float32",
    "padded_vocab": 512,
    "alignment": "token_i_given_before_i",
}


class Log:
    """Numbers events per writer and encodes them as the recorder would."""

    def __init__(self, run_id: str = "made") -> None:
        self.run_id = run_id
        self.seq: dict[str, int] = {}
        self.rows: list[Event] = []

    def add(self, writer: str, type_: str, /, **fields: Any) -> dict[str, Any]:
        """Records one event; returns its envelope."""
        seq = self.seq.get(writer, 0)
        self.seq[writer] = seq + 1
        assigned = {"schema_version": 1, "seq": seq, "wall_ns": seq, "mono_ns": seq, "run_id": self.run_id}
        wire, arrays = check_fields(type_, fields, {**assigned, "writer_id": writer})
        envelope = decode_envelope(encode(wire))
        self.rows.append((writer, seq, envelope, arrays))
        return envelope


class Plan:
    """Everything drawn once for a run; faults change it before samples are drawn."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = np.random.default_rng([seed, 20260])
        self.steps = int(rng.integers(3, 9))
        self.groups = int(rng.integers(2, 6))
        self.per_group = int(rng.integers(2, 7))
        self.length = float(rng.uniform(20, 110))
        self.noise = float(10 ** rng.uniform(-3.7, -1.3))
        self.sample_spread = float(rng.uniform(0.0, 0.6))
        self.group_spread = float(rng.uniform(0.0, 0.8))
        self.slope = float(rng.uniform(0.0, 0.6))
        self.growth = float(rng.uniform(0.0, 2.0))
        self.tail_df = float(rng.choice([2.5, 4.0, 1e6]))
        self.rounding = str(rng.choice(["none", "none", "bfloat16", "saturated"]))
        self.confident = float(rng.choice([0.0, 0.3, 0.7]))
        self.engines = int(rng.integers(1, 4))
        self.engine_by_group = bool(rng.integers(0, 2))
        self.layouts = int(rng.integers(1, 4))
        self.turns = bool(rng.integers(0, 2))
        self.spec = bool(rng.integers(0, 2))
        self.routes = bool(rng.integers(0, 2))
        self.cp = int(rng.choice([1, 1, 2, 4]))
        self.second_pass = bool(rng.integers(0, 2))
        self.lagging = bool(rng.integers(0, 3) == 0)
        self.temperature = float(rng.choice([1.0, 1.0, 0.6, 1.3]))
        self.labelled = bool(rng.integers(0, 2))
        self.declared: dict[str, dict[str, Any]] = {side: {**BODY, "temperature": self.temperature} for side in "rt"}
        self.faults: list[Callable[[dict[str, Any]], None]] = []
        self.stale_engine: str | None = None
        self.edits: list[Callable[[Log], None]] = []


def events(seed: int, change: "Callable[[Plan], None] | None" = None) -> list[Event]:
    """One run; `change` edits its plan before anything is drawn (see made_faults)."""
    plan = Plan(seed)
    if change is not None:
        change(plan)
    log = Log()
    ids = _open(log, plan)
    for step in range(plan.steps):
        _sync(log, plan, step)
        for group in range(plan.groups):
            _group(log, plan, ids, step, group)
    for edit in plan.edits:
        edit(log)
    return log.rows


def _open(log: Log, plan: Plan) -> dict[str, str]:
    log.add(ROLLOUT, "run.opened", roles={"rollout": 1, "training": 1}, mode={"consistency": "audit"})
    log.add(ROLLOUT, "writer.opened", role="rollout", rank=0, world_size=1, engine={"name": "vllm"})
    log.add(TRAINING, "writer.opened", role="training", rank=0, world_size=1, engine={"name": "megatron"})
    ids = {}
    for side, writer in (("r", ROLLOUT), ("t", TRAINING)):
        path = "decode" if side == "r" else "full_prefill"
        ids[side] = log.add(
            writer,
            "contract.declared",
            kind="logprob",
            version="1",
            body={**plan.declared[side], "execution_path": path},
        )["contract_id"]
    for i in range(plan.layouts):
        log.add(TRAINING, "batch.layout", layout_id=f"L{i}", micro_batch=1 << i, packing=i % 2 == 1)
    log.add(ROLLOUT, "knob.applied", path="rollout.enforce_eager", requested=True, actual=True, status="applied")
    return ids


def _sync(log: Log, plan: Plan, step: int) -> None:
    digest = sha256(f"weights {step}".encode())
    common = {"weight_version": f"v{step}", "tensor_count": 12, "skipped": []}
    log.add(TRAINING, "weights.published", step=step, digest=digest, **common)
    for engine in range(plan.engines):
        name = f"vllm-{engine}"
        held = sha256(b"weights 0") if name == plan.stale_engine else digest
        log.add(ROLLOUT, "weights.loaded", step=step, digest=held, engine=name, what="received", **common)


def _group(log: Log, plan: Plan, ids: dict[str, str], step: int, group: int) -> None:
    rng = plan.rng
    group_effect = float(np.exp(rng.normal(0, plan.group_spread)))
    engine_of_group = int(rng.integers(plan.engines))
    for i in range(plan.per_group):
        engine = engine_of_group if plan.engine_by_group else int(rng.integers(plan.engines))
        number = (step * plan.groups + group) * plan.per_group + i
        row = _draw(plan, f"s{number:04d}", step, f"g{step}.{group}", engine, group_effect)
        for fault in plan.faults:
            fault(row)
        _record(log, plan, ids, row)


def _draw(plan: Plan, sample_id: str, step: int, group: str, engine: int, group_effect: float) -> dict[str, Any]:
    rng = plan.rng
    n = int(np.clip(rng.lognormal(np.log(plan.length), 0.5), 8, 400))
    truth = -rng.gamma(1.2, float(rng.uniform(0.6, 1.6)), n)
    confident = rng.random(n) < plan.confident
    truth[confident] = -(10 ** rng.uniform(-7, -3, int(confident.sum())))
    sample_effect = float(np.exp(rng.normal(0, plan.sample_spread)))
    scale = plan.noise * group_effect * sample_effect
    scale = scale * (1 + plan.slope * np.abs(truth)) * np.minimum(1.0, np.abs(truth) * 3 + 1e-4)
    scale = scale * (1 + plan.growth * np.arange(n) / 200)
    heavy = rng.standard_t(plan.tail_df, (2, n)) if plan.tail_df < 1e5 else rng.normal(size=(2, n))
    rollout = _rounded((truth + scale * heavy[0]) / plan.temperature, plan.rounding)
    training = _rounded((truth + scale * heavy[1]) / plan.temperature, plan.rounding)
    mask, turn = _mask(plan, n)
    return {
        "sample_id": sample_id,
        "step": step,
        "group_id": group,
        "tokens": rng.integers(0, 512, n).astype(np.int32),
        "prompt": rng.integers(0, 512, int(rng.integers(4, 40))).astype(np.int32),
        "mask": mask,
        "turn": turn,
        "rollout": rollout,
        "training": training,
        "truth": truth,
        "engine": f"vllm-{engine}",
        "cache": {"cached_tokens": int(rng.choice([0, 8, 16])), "writer_version": f"v{step}", "block_size": 16},
        "chunks": [0, 16] if rng.random() < 0.3 else [0],
        "spec": {"drafted": int(rng.integers(0, 2)) * 20, "accepted": 9} if plan.spec else None,
        "coverage": 1.0 if plan.routes else None,
        "attempt": int(rng.random() < 0.2),
        "layout": int(rng.integers(plan.layouts)),
        "versions": [(f"v{step}", 0, n)],
        "training_version": f"v{step}",
        "extra": {},
        "score_extra": {"r": {}, "t": {}},
        "pass_noise": scale * rng.normal(size=n),
        "kept_mass": None,
        "drop_training": False,
    }


def _mask(plan: Plan, n: int) -> tuple[np.ndarray, int]:
    """A loss mask with one masked tool text a turn, and the turn."""
    mask, turn = np.ones(n, np.uint8), 0
    if plan.turns and n > 24:
        turn = int(plan.rng.integers(0, 3))
        for _ in range(turn):
            at = int(plan.rng.integers(4, n - 8))
            mask[at : at + int(plan.rng.integers(1, 8))] = 0
    return mask, turn


def _rounded(values: np.ndarray, how: str) -> np.ndarray:
    """As an engine would hold the values: a softmax rounds a little above zero at most, and never far."""
    out = np.where(values > 0.02, -values, values).astype(np.float32)
    if how == "bfloat16":
        return (out.view(np.uint32) + 0x8000 & 0xFFFF0000).astype(np.uint32).view(np.float32)
    if how == "saturated":
        out[out > -1e-4] = 0.0
    return out


def _record(log: Log, plan: Plan, ids: dict[str, str], row: dict[str, Any]) -> None:
    common = {"step": row["step"], "sample_id": row["sample_id"]}
    log.add(ROLLOUT, "rollout.sample", **common, **_sample_fields(plan, row))
    given = {"contract_id": ids["r"], "weight_version": f"v{row['step']}", **row["score_extra"]["r"]}
    log.add(ROLLOUT, "logprobs", **common, source="rollout", values=row["rollout"], **given)
    if not row["drop_training"]:
        _train(log, plan, ids, row)


def _sample_fields(plan: Plan, row: dict[str, Any]) -> dict[str, Any]:
    rng, n, step, spans = plan.rng, len(row["mask"]), row["step"], row["versions"]
    if plan.lagging and step > 0 and rng.random() < 0.3:
        cut = n // 2
        spans = [(f"v{step - 1}", 0, cut), (f"v{step}", cut, n)]
    optional = {
        "spec": row["spec"],
        "routed_experts": None if row["coverage"] is None else {"coverage": row["coverage"]},
        "labels": {"pool": f"p{int(rng.integers(2))}"} if plan.labelled else None,
        "kept_mass": row["kept_mass"],
    }
    return {
        **{name: row[name] for name in ("group_id", "attempt", "turn", "engine", "cache", "chunks")},
        "response_token_ids": row["tokens"],
        "prompt_token_ids": row["prompt"],
        "loss_mask": row["mask"],
        "token_digest": token_digest(row["tokens"]),
        "weight_spans": [{"version": v, "start": a, "end": b} for v, a, b in spans],
        "sampling": {"temperature": plan.temperature, "top_p": 1.0, "seed": int(rng.integers(1 << 30))},
        "status": "completed",
        **{k: v for k, v in optional.items() if v is not None},
        **row["extra"],
    }


def _train(log: Log, plan: Plan, ids: dict[str, str], row: dict[str, Any]) -> None:
    n, step = len(row["mask"]), row["step"]
    common = {
        "step": step,
        "sample_id": row["sample_id"],
        "source": "training",
        "contract_id": ids["t"],
        "weight_version": row["training_version"],
        "layout_id": f"L{row['layout']}",
        **row["score_extra"]["t"],
    }
    if plan.cp > 1 and n >= 2 * plan.cp:
        edges = np.linspace(0, n, 2 * plan.cp + 1).astype(int).tolist()
        for rank in range(plan.cp):
            ranges = [(edges[j], edges[j + 1]) for j in (rank, 2 * plan.cp - 1 - rank)]
            values = np.concatenate([row["training"][a:b] for a, b in ranges])
            shard = {"axis": "sequence", "rank": rank, "world_size": plan.cp, "ranges": ranges}
            log.add(TRAINING, "logprobs", values=values, shard=shard, start=ranges[0][0], **common)
        return
    digest = {} if "token_digest" in common else {"token_digest": token_digest(row["tokens"])}
    masked = {} if "mask_digest" in common else {"mask_digest": mask_digest(row["mask"])}
    log.add(TRAINING, "logprobs", values=row["training"], pass_id="logprob", **common, **digest, **masked)
    if plan.second_pass:
        again = (row["training"] + row["pass_noise"]).astype(np.float32)
        log.add(TRAINING, "logprobs", values=np.minimum(again, 0), pass_id="update", **common, **digest, **masked)
