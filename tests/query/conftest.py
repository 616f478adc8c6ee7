"""A ledger with two small runs."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlk_ledger.build import build, event
from rlk_ledger.ledger import Ledger
from rlk_ledger.records import Record
from rlk_ledger_schemas.fingerprints import contract_id

ROLLOUT, TRAINING = "a" * 32, "b" * 32
N = 10
VERSIONS = 3


class Writers:
    """Numbers and keeps the records of one run."""

    def __init__(self, run: str) -> None:
        self.run = run
        self.seq: dict[str, int] = {}
        self.records: list[Record] = []

    def add(self, writer: str, type_: str, /, **fields: Any) -> Record:
        number = self.seq.get(writer, 0)
        self.seq[writer] = number + 1
        self.records.append(event(self.run, writer, number, type_, **fields))
        return self.records[-1]


def run_records(run: str, seed: int, lagging: bool = False) -> list[Record]:
    """Three steps of four samples; with `lagging` the last step's training pass has the version before."""
    rng, log = np.random.default_rng(seed), Writers(run)
    contract = {"kind": "logprob", "version": "1", "body": {"mode": "processed", "temperature": 1.0}}
    for writer, role in ((ROLLOUT, "rollout"), (TRAINING, "training")):
        log.add(writer, "writer.opened", role=role, rank=0, world_size=1)
        log.add(writer, "contract.declared", **contract)
    log.add(ROLLOUT, "knob.applied", path="rollout.eager", requested=True, actual=True, status="applied")
    for step in range(VERSIONS):
        digest = f"sha256:{step:064x}"
        log.add(TRAINING, "weights.published", step=step, weight_version=f"v{step}", digest=digest, tensor_count=1)
        for i in range(4):
            late = lagging and step == VERSIONS - 1
            add_sample(log, rng, step, i, f"v{step - 1}" if late else f"v{step}")
    return log.records


def add_sample(log: Writers, rng: np.random.Generator, step: int, i: int, trained: str) -> None:
    """One sample of ten tokens, the first two masked, whose sides differ by 0.01 times the step's number from 1."""
    common = {"step": step, "sample_id": f"{log.run}-{step}.{i}"}
    mask = np.ones(N, np.uint8)
    mask[:2] = 0
    log.add(
        ROLLOUT,
        "rollout.sample",
        **common,
        group_id=f"g{step}",
        response_token_ids=rng.integers(0, 50, N).astype(np.int32),
        loss_mask=mask,
        weight_spans=[{"version": f"v{step}", "start": 0, "end": N}],
        engine=f"e{i % 2}",
        turn=i % 2,
        cache={"cached_tokens": 8 * (i % 2)},
    )
    values = -rng.gamma(1.0, 1.0, N).astype(np.float32) - np.float32(0.1)
    given = {**common, "contract_id": contract_id("logprob", "1", {"mode": "processed", "temperature": 1.0})}
    log.add(ROLLOUT, "logprobs", **given, source="rollout", values=values, weight_version=f"v{step}")
    shifted = values + np.float32(0.01 * (step + 1))
    log.add(TRAINING, "logprobs", **given, source="training", values=shifted, weight_version=trained)


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
