"""A ledger with two small runs."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlk_ledger.build import build, event
from rlk_ledger.ledger import Ledger
from rlk_ledger.records import Record

N = 10
VERSIONS = 3


def run_records(run: str, seed: int, lagging: bool = False) -> list[Record]:
    """Three steps of four samples; with `lagging` the last step's training pass has the next version."""
    rng = np.random.default_rng(seed)
    seq: dict[str, int] = {}
    out: list[Record] = []

    def add(writer: str, type_: str, /, **fields: Any) -> None:
        number = seq.get(writer, 0)
        seq[writer] = number + 1
        out.append(event(run, writer, number, type_, **fields))

    body = {"mode": "processed", "temperature": 1.0}
    for writer, role in (("a" * 32, "rollout"), ("b" * 32, "training")):
        add(writer, "writer.opened", role=role, rank=0, world_size=1)
        add(writer, "contract.declared", kind="logprob", version="1", body=body)
    contract = out[1]
    from rlk_ledger_schemas.codec import decode_envelope

    contract_id = decode_envelope(contract.envelope)["contract_id"]
    add("a" * 32, "knob.applied", path="rollout.eager", requested=True, actual=True, status="applied")
    for step in range(VERSIONS):
        digest = f"sha256:{step:064x}"
        add("b" * 32, "weights.published", step=step, weight_version=f"v{step}", digest=digest, tensor_count=1)
        for i in range(4):
            sample = f"{run}-{step}.{i}"
            mask = np.ones(N, np.uint8)
            mask[:2] = 0
            spans = [{"version": f"v{step}", "start": 0, "end": N}]
            tokens = rng.integers(0, 50, N).astype(np.int32)
            common = {"step": step, "sample_id": sample}
            add(
                "a" * 32,
                "rollout.sample",
                **common,
                group_id=f"g{step}",
                response_token_ids=tokens,
                loss_mask=mask,
                weight_spans=spans,
                engine=f"e{i % 2}",
                turn=i % 2,
                cache={"cached_tokens": 8 * (i % 2)},
            )
            values = -rng.gamma(1.0, 1.0, N).astype(np.float32) - np.float32(0.1)
            given = {"contract_id": contract_id, "weight_version": f"v{step}"}
            add("a" * 32, "logprobs", **common, source="rollout", values=values, **given)
            late = lagging and step == VERSIONS - 1
            given["weight_version"] = f"v{step - 1}" if late else f"v{step}"
            add(
                "b" * 32,
                "logprobs",
                **common,
                source="training",
                values=values + np.float32(0.01 * (step + 1)),
                **given,
            )
    return out


@pytest.fixture(scope="session")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Runs `one` (several segments, one of them shipped twice) and `two` (one segment, its last step off-policy)."""
    root = str(tmp_path_factory.mktemp("query") / "ledger")
    records = run_records("one", 0)
    build(root, "one", records, roles={"rollout": 1, "training": 1}, per_segment=10)
    build(root, "one", records[:10])
    build(root, "two", run_records("two", 1, lagging=True), roles={"rollout": 1, "training": 1})
    return root


@pytest.fixture
def ledger(url: str) -> Ledger:
    """The ledger, opened afresh."""
    from rlk_ledger.ledger import open_ledger

    return open_ledger(url)


@pytest.fixture
def segments_read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Paths of segments read from now on."""
    from rlk_ledger.store import FileStore

    paths: list[str] = []
    read = FileStore.read

    def spy(self: FileStore, path: str) -> bytes:
        if "/segment/" in path or path.startswith("segment/"):
            paths.append(str(Path(path)))
        return read(self, path)

    monkeypatch.setattr(FileStore, "read", spy)
    return paths
