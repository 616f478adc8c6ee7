"""A run that has everything a prune must not lose."""

from pathlib import Path
from typing import Any

import numpy as np

from rlk_ledger.build import build, event
from rlk_ledger.chain import Ending
from rlk_ledger.ledger import Ledger, open_ledger
from rlk_ledger.records import Record
from rlk_ledger.retention import Policy

RUN = "r1"
A, B, C = "0a" * 16, "0b" * 16, "0c" * 16
ALL = Policy(everything=True)


def opened(writer: str, role: str, rank: int = 0, seq: int = 0, **more: Any) -> Record:
    return event(RUN, writer, seq, "writer.opened", role=role, rank=rank, world_size=2, **more)


def step_events(writer: str, seq: int, step: int, source: str) -> list[Record]:
    tokens = np.arange(step, step + 4)
    sample = {"sample_id": f"s{step}", "response_token_ids": tokens, "loss_mask": np.ones(4, np.uint8), "step": step}
    spans = [{"version": f"v{step}", "start": 0, "end": 4}]
    values = np.linspace(-2.5, -0.5, 4, dtype=np.float32) - step
    score = {"sample_id": f"s{step}", "source": source, "contract_id": "c", "values": values, "step": step}
    out = []
    if source == "rollout":
        out.append(event(RUN, writer, seq, "rollout.sample", weight_spans=spans, **sample))
    return [*out, event(RUN, writer, seq + len(out), "logprobs", weight_version=f"v{step}", **score)]


def life(writer: str, role: str, steps: int, gap: bool = False) -> list[Record]:
    """A writer that opens its run, records `steps` steps, loses two numbers where asked to, and closes."""
    out = [event(RUN, writer, 0, "run.opened", roles={"rollout": 2, "training": 1}), opened(writer, role, seq=1)]
    body = {"mode": "processed", "temperature": 1.0}
    out.append(event(RUN, writer, 2, "contract.declared", kind="logprob", version="1", body=body))
    for step in range(steps):
        out += step_events(writer, len(out), step, role)
    if gap:
        n = len(out)
        out.append(event(RUN, writer, n + 2, "gap", kind="bulk", first=n, last=n + 1, reason="budget"))
    return [*out, event(RUN, writer, out[-1].seq + 1, "writer.closed", reason="done")]


def make(url: Path, *writers: list[Record], per_segment: int = 4, **options: Any) -> Ledger:
    for records in writers:
        build(str(url), RUN, records, roles={"rollout": 2, "training": 1}, per_segment=per_segment, **options)
    return open_ledger(str(url))


def whole(tmp_path: Path) -> Path:
    """Two writers, six steps, a dropped range, a rank that never reported, and a writer killed with bytes lost."""
    url = tmp_path / "l"
    make(url, life(A, "rollout", 6, gap=True), life(B, "training", 6))
    killed = [event(RUN, C, 0, "run.opened", roles={}), opened(C, "training", rank=1, seq=1, parent_writer=B)]
    make(url, killed, endings={C: Ending(20, 1)})
    return url


def segments(root: Path) -> set[str]:
    return {p.name for p in root.rglob("segment/*/*.parquet")}
