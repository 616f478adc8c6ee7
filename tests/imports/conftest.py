"""Dumps of every format, what an import of them must yield, and ways to write more of them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rlk_ledger.audit import audit
from rlk_ledger.audit.finding import AuditResult
from rlk_ledger.cli import main
from rlk_ledger.history import History, load_history
from rlk_ledger.importers import read
from rlk_ledger.importers.model import Batch
from rlk_ledger.ledger import open_ledger

DATA = Path(__file__).parent / "data"


@pytest.fixture(scope="session")
def data() -> Path:
    """The folder of the shipped dumps."""
    return DATA


@pytest.fixture(scope="session")
def truth() -> list[dict[str, Any]]:
    """What both engines of the shipped dumps really computed, sample by sample."""
    return json.loads((DATA / "truth.json").read_text())


@pytest.fixture
def dumps(tmp_path: Path) -> Path:
    """A writable copy of the shipped dumps."""
    return Path(shutil.copytree(DATA, tmp_path / "dumps"))


@pytest.fixture(autouse=True)
def own_spool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test touches the machine's spool or ledger."""
    monkeypatch.setenv("RLK_SPOOL", str(tmp_path / "spool"))
    monkeypatch.delenv("RLK_LEDGER", raising=False)


class Imports:
    """Runs `rlk-ledger import` against one ledger."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.url = str(folder / "ledger")
        self.capsys = capsys

    def __call__(self, form: str, path: Path, *options: str) -> dict[str, Any]:
        """The JSON document of an import that was taken; its exit code is in it."""
        code, out, error = self.run(form, path, *options, "--json")
        assert out, error
        document = json.loads(out)
        assert (document["exit_code"], error) == (code, "")
        return document

    def run(self, form: str, path: Path, *options: str) -> tuple[int, str, str]:
        """(exit code, stdout, stderr) of one import."""
        self.capsys.readouterr()
        code = main(["import", form, str(path), "--ledger", self.url, *options])
        captured = self.capsys.readouterr()
        return code, captured.out, captured.err

    def refused(self, form: str, path: Path, *options: str) -> str:
        """The one sentence an import is refused with; nothing of it is in the ledger."""
        before = self.runs()
        code, out, error = self.run(form, path, *options)
        assert (code, out) == (2, ""), out + error
        assert "Traceback" not in error
        assert "internal error" not in error
        assert error.count("\n") == 1
        assert self.runs() == before
        return error.strip()

    def runs(self) -> list[str]:
        """Runs in the ledger; none where there is no ledger."""
        return open_ledger(self.url).runs() if (Path(self.url) / "ledger.json").exists() else []

    def history(self, run_id: str) -> History:
        """The run as audit reads it."""
        return load_history(open_ledger(self.url), run_id)

    def audit(self, run_id: str) -> AuditResult:
        """What the audit says of the run."""
        return audit(self.history(run_id))


@pytest.fixture
def imports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Imports:
    """Imports into one new ledger."""
    return Imports(tmp_path, capsys)


@pytest.fixture
def batch_of() -> Callable[[str, Path], Batch]:
    """Reads files of a format without writing anything."""
    return lambda form, path: read(form, path, lambda done, total: None)


def rollout(**fields: Any) -> dict[str, Any]:
    """One sample of a rollout dump of slime: three prompt tokens, two response tokens."""
    return {
        "index": 0,
        "group_index": 0,
        "tokens": [1, 2, 3, 4, 5],
        "response_length": 2,
        "rollout_log_probs": [-0.5, -1.5],
        "weight_versions": ["7"],
        "status": "completed",
        "reward": 1.0,
        **fields,
    }


def trained(**fields: Any) -> dict[str, Any]:
    """One row of a train dump of slime, of the sample of `rollout`."""
    return {
        "sample_index": 0,
        "rollout_position": 0,
        "data_parallel_rank": 0,
        "tokens": [1, 2, 3, 4, 5],
        "response_lengths": 2,
        "total_lengths": 5,
        "loss_masks": torch.tensor([1, 1]),
        "log_probs": torch.tensor([-0.625, -1.25]),
        "rollout_log_probs": torch.tensor([-0.5, -1.5]),
        **fields,
    }


def save(folder: Path, rollouts: list[dict[str, Any]] | None, *ranks: list[dict[str, Any]], step: int = 7) -> Path:
    """Writes the dumps of one step below `folder`: rollouts, and one train file for each list of rows."""
    (folder / "rollout_data").mkdir(parents=True, exist_ok=True)
    (folder / "train_data").mkdir(parents=True, exist_ok=True)
    if rollouts is not None:
        torch.save({"rollout_id": step, "samples": rollouts}, folder / f"rollout_data/{step}.pt")
    for rank, rows in enumerate(ranks):
        torch.save({"rollout_id": step, "rank": rank, "samples": rows}, folder / f"train_data/{step}_{rank}.pt")
    return folder
