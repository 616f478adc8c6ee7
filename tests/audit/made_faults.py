"""Faults put into made runs: each changes a run's plan, so that everything else still varies."""

from collections.abc import Callable
from typing import Any

import numpy as np
from made_runs import BODY, ROLLOUT, Log, Plan

from rlk_ledger_schemas.fingerprints import contract_id, mask_digest


def _noisy(factor: float, row: dict[str, Any], where: Any = slice(None)) -> None:
    """Multiplies the difference of the two sides by `factor` at `where`, on the rollout side."""
    d = row["rollout"].astype(np.float64) - row["training"]
    d[where] = d[where] * factor
    row["rollout"] = (row["training"] + d).astype(np.float32)


def _enough(plan: Plan, per_group: int = 6, rounding: str = "none") -> None:
    plan.steps, plan.groups, plan.per_group, plan.rounding = 5, 4, per_group, rounding
    plan.confident = min(plan.confident, 0.3)


def _stale_cache(plan: Plan) -> None:
    _enough(plan)
    plan.lagging = False

    def fault(row: dict[str, Any]) -> None:
        if row["step"] > 0 and row["cache"]["cached_tokens"] == 16:
            row["cache"]["writer_version"] = f"v{row['step'] - 1}"
            _noisy(8.0, row)

    plan.faults.append(fault)


def _bad_engine(plan: Plan) -> None:
    _enough(plan)
    plan.engines, plan.engine_by_group, plan.group_spread = 3, False, 0.1
    plan.faults.append(lambda row: _noisy(6.0, row) if row["engine"] == "vllm-1" else None)


def _bad_shard(plan: Plan) -> None:
    _enough(plan)
    plan.cp = 2

    def fault(row: dict[str, Any]) -> None:
        n = len(row["mask"])
        edges = np.linspace(0, n, 5).astype(int)
        _noisy(8.0, row, slice(edges[1], edges[3]))

    plan.faults.append(fault)


def _garbled_spec(plan: Plan) -> None:
    _enough(plan)
    plan.spec = True

    def fault(row: dict[str, Any]) -> None:
        if row["spec"]["drafted"]:
            row["rollout"][::9] -= plan.rng.uniform(1, 6, len(row["rollout"][::9])).astype(np.float32)

    plan.faults.append(fault)


def _bad_label(plan: Plan) -> None:
    """A dimension this code has never heard of."""
    _enough(plan)
    plan.labelled = False

    def fault(row: dict[str, Any]) -> None:
        chosen = bool(plan.rng.integers(0, 2))
        row["extra"]["labels"] = {"kernel_build": "b" if chosen else "a"}
        if chosen:
            _noisy(6.0, row)

    plan.faults.append(fault)


def _seam(plan: Plan) -> None:
    _enough(plan)
    plan.turns, plan.length = True, 120.0

    def fault(row: dict[str, Any]) -> None:
        row["mask"][20:26] = 0
        starts = np.flatnonzero(np.diff(row["mask"].astype(np.int8)) == 1) + 1
        for at in starts:
            _noisy(20.0, row, slice(at, at + 4))
            row["rollout"][at] -= np.float32(1.0)

    plan.faults.append(fault)


def _shift(side: str, lag: int) -> Callable[[Plan], None]:
    def build(plan: Plan) -> None:
        _enough(plan)

        def fault(row: dict[str, Any]) -> None:
            values = row[side]
            moved = np.empty_like(values)
            if lag > 0:
                moved[:-lag], moved[-lag:] = values[lag:], 0.0
            else:
                moved[-lag:], moved[:lag] = values[:lag], 0.0
                moved[:-lag] = 0.0
                moved[-lag:] = values[:lag]
            row[side] = moved

        plan.faults.append(fault)

    return build


def _hidden_temperature(plan: Plan) -> None:
    """Training forgets the temperature and both sides declare that they applied it."""
    _enough(plan)
    plan.temperature = 0.6
    plan.declared = {side: {**BODY, "temperature": 0.6} for side in "rt"}

    def fault(row: dict[str, Any]) -> None:
        row["training"] = (row["training"] * 0.6).astype(np.float32)

    plan.faults.append(fault)


def _renormalised(side: str, recorded: bool) -> Callable[[Plan], None]:
    def build(plan: Plan) -> None:
        _enough(plan)
        plan.noise = min(plan.noise, 0.01)
        plan.declared = {s: {**BODY, "temperature": plan.temperature, "top_p": 0.8} for s in "rt"}

        def fault(row: dict[str, Any]) -> None:
            mass = plan.rng.uniform(0.8, 0.95, len(row["mask"])).astype(np.float32)
            other = "training" if side == "rollout" else "rollout"
            row[other] = (row[other] + np.log(mass)).astype(np.float32)
            row["kept_mass"] = mass if recorded else None

        plan.faults.append(fault)
        if not recorded:
            plan.edits.append(_declare_top_p)

    return build


def _declare_top_p(log: Log) -> None:
    for _, _, envelope, _ in log.rows:
        if envelope["type"] == "rollout.sample":
            envelope["sampling"] = {**envelope["sampling"], "top_p": 0.8}


def _values(side: str, change: Callable[[np.ndarray, Plan], None]) -> Callable[[Plan], None]:
    def build(plan: Plan) -> None:
        _enough(plan)

        def fault(row: dict[str, Any]) -> None:
            row[side] = row[side].copy()
            if row["mask"][:20].all():
                change(row[side], plan)

        plan.faults.append(fault)

    return build


def _set(index: slice, value: float) -> Callable[[np.ndarray, Plan], None]:
    def change(values: np.ndarray, plan: Plan) -> None:
        values[index] = value

    return change


def _probabilities(values: np.ndarray, plan: Plan) -> None:
    values[:] = np.exp(values)


def _clamped(values: np.ndarray, plan: Plan) -> None:
    values[2:4] = -20.0


def _copied(plan: Plan) -> None:
    _enough(plan)

    def fault(row: dict[str, Any]) -> None:
        if row["step"] == 1:
            row["training"] = row["rollout"].copy()

    plan.faults.append(fault)


def _mask_digest(plan: Plan) -> None:
    """Training counts tool tokens that the engine's mask leaves out."""
    _enough(plan)
    plan.cp = 1

    def fault(row: dict[str, Any]) -> None:
        row["mask"][5:9] = 0
        row["score_extra"]["t"]["mask_digest"] = mask_digest(np.ones_like(row["mask"]))

    plan.faults.append(fault)


def _stale_engine(plan: Plan) -> None:
    _enough(plan)
    plan.engines, plan.stale_engine = 2, "vllm-1"


def _never_trained(plan: Plan) -> None:
    _enough(plan)

    def fault(row: dict[str, Any]) -> None:
        row["drop_training"] = row["step"] == 2

    plan.faults.append(fault)


def _replica(plan: Plan) -> None:
    _enough(plan)
    plan.cp, plan.second_pass = 1, False

    def edit(log: Log) -> None:
        for writer, rank in (("t-a", 0), ("t-b", 1)):
            place = {"tp": {"rank": rank, "size": 2}}
            log.add(writer, "writer.opened", role="training", rank=rank, world_size=2, parallel=place)
        tokens = np.arange(16, dtype=np.int32)
        log.add(
            ROLLOUT,
            "rollout.sample",
            sample_id="twin",
            step=0,
            response_token_ids=tokens,
            loss_mask=np.ones(16, np.uint8),
            weight_spans=[{"version": "v0", "start": 0, "end": 16}],
        )
        body = {**plan.declared["t"], "execution_path": "full_prefill"}
        common = {
            "sample_id": "twin",
            "step": 0,
            "weight_version": "v0",
            "contract_id": contract_id("logprob", "1", body),
        }
        values = np.linspace(-2, -0.5, 16).astype(np.float32)
        log.add(ROLLOUT, "logprobs", source="rollout", values=values, **common)
        log.add("t-a", "logprobs", source="training", values=values + np.float32(1e-3), **common)
        values[7] += 0.5
        log.add("t-b", "logprobs", source="training", values=values + np.float32(1e-3), **common)

    plan.edits.append(edit)


FAULTS: dict[str, Callable[[Plan], None]] = {
    "stale_cache": _stale_cache,
    "bad_engine": _bad_engine,
    "bad_shard": _bad_shard,
    "garbled_spec": _garbled_spec,
    "bad_label": _bad_label,
    "seam": _seam,
    "rollout_shift": _shift("rollout", 1),
    "training_shift": _shift("training", 1),
    "training_shift_back": _shift("training", -1),
    "hidden_temperature": _hidden_temperature,
    "rollout_renormalised": _renormalised("rollout", True),
    "training_renormalised": _renormalised("training", True),
    "renormalised_unrecorded": _renormalised("rollout", False),
    "nan_training": _values("training", _set(slice(3, 5), float("nan"))),
    "minus_inf": _values("rollout", _set(slice(3, 4), float("-inf"))),
    "sentinel": _values("rollout", _set(slice(6, 7), -1e4)),
    "clamp_floor": _values("training", _clamped),
    "zero_filled": _values("rollout", _set(slice(8, 14), 0.0)),
    "one_filled": _values("training", _set(slice(8, 14), 1.0)),
    "probabilities": _values("rollout", _probabilities),
    "copied": _copied,
    "mask_digest": _mask_digest,
    "stale_engine": _stale_engine,
    "never_trained": _never_trained,
    "replica": _replica,
}
