"""Ledgers made for the report's tests: any list of events, written as one segment through the real writers."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlk_ledger.chain import Chain
from rlk_ledger.contact import meet
from rlk_ledger.ledger import Ledger, open_ledger
from rlk_ledger.records import make_record
from rlk_ledger.store import open_store
from rlk_ledger_schemas.events import check_fields, encode
from rlk_ledger_schemas.fingerprints import contract_id
from rlk_ledger_schemas.objects import FORMAT, RunInfo

Event = tuple[str, str, dict[str, Any]]
Make = Callable[[list[Event]], Ledger]
EDGES = [math.log(0.8), math.log(1.2)]
BODY = {
    "mode": "processed",
    "temperature": 0.7,
    "head_dtype": "float32",
    "alignment": "token_i_given_before_i",
    "execution_path": "decode",
}
DIGEST = "sum64x2:" + "ab" * 16


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Makes a ledger with one run, `run`, of (writer, type, fields) events; each writer is closed at the end."""

    def build(events: list[Event], run_id: str = "run-1") -> Ledger:
        store = open_store(str(tmp_path / "ledger"))
        info = RunInfo(
            format=FORMAT,
            ledger_id="",
            run_id=run_id,
            roles={"rollout": 1, "training": 1},
            mode={"fast": "off", "consistency": "audit"},
            redaction="none",
            created_us=1_700_000_000_000_000,
        )
        writers = dict.fromkeys(writer for writer, _, _ in events)
        ids = {name: f"{index:032x}" for index, name in enumerate(writers, 1)}
        seqs = dict.fromkeys(writers, 0)
        records = []
        closing: list[Event] = [(name, "writer.closed", {"reason": "done"}) for name in writers]
        for clock, (writer, kind, fields) in enumerate([*events, *closing], 1):
            assigned = {
                "schema_version": 1,
                "seq": seqs[writer],
                "wall_ns": 1_700_000_000_000_000_000 + clock,
                "mono_ns": clock,
                "run_id": run_id,
                "writer_id": ids[writer],
            }
            seqs[writer] += 1
            wire, arrays = check_fields(kind, dict(fields), assigned)
            records.append(make_record(encode(wire), arrays))
        chain = Chain(store, meet(store, info), wall_us=lambda: 1_700_000_100_000_000)
        chain.publish(chain.draft(records))
        return open_ledger(store.url)

    return build


def opened(writer: str, role: str, **more: Any) -> Event:
    """The event that opens a writer of one rank."""
    engine = {"name": f"engine-{role}", "version": "1", "instance": f"{role}-0"}
    return writer, "writer.opened", {"role": role, "rank": 0, "world_size": 1, "engine": engine, **more}


def sides() -> list[Event]:
    """Both writers opened and their contracts declared."""
    return [
        ("a", "run.opened", {"roles": {"rollout": 1, "training": 1}}),
        opened("a", "rollout", environment={"python": "3.11.2", "pins": [{"package": "torch", "version": "2.13.0"}]}),
        opened("b", "training", environment={"python": "3.11.2", "pins": [{"package": "torch", "version": "2.12.1"}]}),
        ("a", "contract.declared", {"kind": "logprob", "version": "1", "body": BODY}),
        ("b", "contract.declared", {"kind": "logprob", "version": "1", "body": trained()}),
    ]


def trained() -> dict[str, Any]:
    """The training side's contract."""
    return {**BODY, "execution_path": "full_prefill"}


def sample(
    sample_id: str, step: int, tokens: Any, mask: list[int], rollout: Any, training: Any | None, **more: Any
) -> list[Event]:
    """One sample with the rollout's scores and, unless None, training's."""
    version = f"v{step}"
    common = {"step": step, "sample_id": sample_id}
    events: list[Event] = [
        (
            "a",
            "rollout.sample",
            {
                **common,
                "response_token_ids": tokens,
                "loss_mask": mask,
                "tokenizer": "bytes",
                "engine": "rollout-0",
                "weight_spans": [{"version": version, "start": 0, "end": len(mask)}],
                **more,
            },
        ),
        (
            "a",
            "logprobs",
            {
                **common,
                "source": "rollout",
                "values": rollout,
                "contract_id": contract_id("logprob", "1", BODY),
                "weight_version": version,
            },
        ),
    ]
    if training is not None:
        events.append(
            (
                "b",
                "logprobs",
                {
                    **common,
                    "source": "training",
                    "values": training,
                    "contract_id": contract_id("logprob", "1", trained()),
                    "weight_version": version,
                    "pass_id": "logprob",
                },
            )
        )
    return events


def weights(steps: int) -> list[Event]:
    """Versions v0 ... published and taken, the last one under a wrong digest."""
    events: list[Event] = []
    for step in range(steps):
        name, digest = f"v{step}", f"sum64x2:{step:032x}"
        fields = {"step": step, "weight_version": name, "digest": digest, "tensor_count": 26}
        events.append(("b", "weights.published", fields))
        held = digest if step < steps - 1 else DIGEST
        events.append(("a", "weights.loaded", {**fields, "digest": held, "engine": "rollout-0", "what": "holds"}))
    return events


def healthy(steps: int = 4, groups: int = 4, size: int = 3, noise: float = 0.03) -> list[Event]:
    """A run whose two sides differ by rounding-like noise, with tool tokens masked in the middle of each response."""
    random = np.random.default_rng(7)
    text = b"x in range(10):\n        total += x\n    return total \xc3\xa9\n"
    events = [*sides(), *weights(steps)]
    for step in range(steps):
        for index in range(groups * size):
            ids = [*text, 257]
            mask = [0 if 12 <= i < 20 else 1 for i in range(len(ids))]
            r = -np.abs(random.gamma(0.6, 1.2, len(ids))).astype(np.float32) - np.float32(1e-4)
            t = np.minimum(r + random.normal(0, noise, len(ids)) * (0.3 + np.abs(r)), -1e-6).astype(np.float32)
            name = f"step{step}-group{index // size}-{index % size}"
            prompt = [256, *b'def total():\n    """Sum of the first numbers."""\n    for ']
            more = {"group_id": f"step{step}-group{index // size}", "prompt_token_ids": prompt}
            events += sample(name, step, ids, mask, r, t, **more)
    return events


def interval(value: float, low: float | None, high: float | None) -> dict[str, float | None]:
    """An interval as events hold it."""
    return {"value": value, "low": low, "high": high}


def replayed(verdict: str = "pass") -> list[Event]:
    """What a replay of a healthy run records."""
    base = {"replay_id": "replay-1"}
    case = {**base, "case_id": "sha256:" + "1" * 64}
    arms = ["both_native", "training_reference_only", "rollout_reference_only", "both_reference"]
    numbers = {
        "share_rollout": interval(0.49, 0.41, 0.57),
        "share_training": interval(0.51, 0.43, 0.59),
        "error_rollout": interval(0.035, 0.031, 0.039),
        "error_training": interval(0.036, 0.032, 0.041),
        "drift": interval(0.0502, 0.0451, 0.0561),
        "floor_rollout": interval(0.041, 0.038, 0.044),
        "floor_training": interval(0.043, 0.039, 0.046),
        "floor_drift": interval(0.0594, 0.0551, 0.0640),
        "multiple_rollout": interval(0.86, 0.78, 0.95),
        "multiple_training": interval(0.84, 0.75, 0.96),
        "multiple_drift": interval(0.85, 0.76, 1.12),
    }
    evidence = {
        **numbers,
        "noise": {"rollout": {"abs_dlogp_mean": 0.02, "schedules": 4.0}},
        "chain": {
            name: {"mean": 0.0001, "rms": rms, "max": 0.2, "sample_sum": 0.004}
            for name, rms in (
                ("training_over_prefill", 0.036),
                ("prefill_over_decode", 0.0),
                ("decode_over_rollout", 0.035),
                ("training_over_rollout", 0.0502),
            )
        },
        "counts": {"tokens": 1140, "samples": 24, "groups": 12, "available": 48},
        "clip_edges": EDGES,
        "rules": {"far_ratio": 2.0, "floor_multiple": 1.5, "share_one": 0.8, "share_both": 0.2},
    }
    reason = "The drift is 0.85 [0.76, 1.12] times its measured noise floor."
    events: list[Event] = [
        opened("c", "replay"),
        ("c", "replay.planned", {**base, "arms": arms, "samples": 24}),
    ]
    for index, arm in enumerate(arms):
        metrics = {"abs_dlogp_mean": 0.03 - 0.01 * index, "abs_dlogp_p99": 0.2, "abs_dlogp_max": 0.4}
        metrics |= {"clip_fraction": 0.011, "mismatch_fraction": 0.97}
        zero = dict.fromkeys(metrics, 0.0)
        scored = {"applied": True, "tokens": 1140, "samples": 24, "metrics": zero if index == 3 else metrics}
        events.append(("c", "case.attempted", {**case, "arm": arm, "status": "completed"}))
        events.append(("c", "arm.scored", {**case, "arm": arm, **scored}))
    gates = [("reference.self_check", "passed", "decode equals prefill bitwise at 1,140 tokens")]
    gates += [("evidence.samples", "unknown", "2 samples were left out: no prompt recorded")]
    events += [("c", "gate.checked", {**base, "gate": g, "status": s, "reason": why}) for g, s, why in gates]
    finding = {"finding_id": "drift.within_floor", "severity": "info", "where": {}, "evidence": numbers}
    events.append(("c", "finding.raised", {**finding, "next_step": "Nothing to fix.", "subject": "replay-1"}))
    judged = {"verdict": verdict, "subject": "replay-1", "decision": "within_floor", "reason": reason, "exit_code": 0}
    events.append(("c", "verdict.reached", {**judged, "evidence": evidence}))
    return events


@pytest.fixture(name="sides")
def _sides() -> Callable[..., list[Event]]:
    return sides


@pytest.fixture(name="sample")
def _sample() -> Callable[..., list[Event]]:
    return sample


@pytest.fixture(name="healthy")
def _healthy() -> Callable[..., list[Event]]:
    return healthy


@pytest.fixture(name="replayed")
def _replayed() -> Callable[..., list[Event]]:
    return replayed
