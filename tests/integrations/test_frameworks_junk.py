"""Whatever a framework hands over, its hooks return what they always do and raise nothing into the job."""

import importlib.util
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import rlk_ledger
from rlk_ledger.integrations import slime, verl, vime
from rlk_ledger.verify import verify

_spec = importlib.util.spec_from_file_location("slime_standin", Path(__file__).with_name("slime_standin.py"))
assert _spec is not None
assert _spec.loader is not None
job = sys.modules.get("slime_standin") or importlib.util.module_from_spec(_spec)
if "slime_standin" not in sys.modules:
    sys.modules["slime_standin"] = job
    _spec.loader.exec_module(job)

JUNK = [
    None,
    object(),
    "text",
    -1,
    2.5,
    float("nan"),
    [],
    [None],
    {},
    {"a": object()},
    torch.zeros(2, 3),
    [[1], [2, 3]],
]


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Path]:
    where = {"spool": tmp_path / "s", "shipper": "inline", "on_error": "warn"}
    rlk_ledger.init(tmp_path / "l", run_id="r", role="rollout", **where)
    yield tmp_path / "l"
    rlk_ledger.close()
    assert verify(str(tmp_path / "l"), deep=True).exit_code != 1, "the record itself stays whole"


def sample() -> Any:
    return job.Sample(
        0,
        5,
        tokens=[1, 2, 3, 4],
        response_length=2,
        loss_mask=[1, 1],
        rollout_log_probs=[-1.0, -2.0],
        status=job.Status.COMPLETED,
        weight_versions=["1"],
    )


def test_a_sample_with_junk_in_any_field(ledger: Path) -> None:
    for field, junk in product(job.Sample.__dataclass_fields__, JUNK):
        one = sample()
        setattr(one, field, junk)
        assert slime.sample(job.make_args(), one, rollout_id=0) is None
        assert vime.log_rollout(0, job.make_args(), [one], {}, 0.0) is False


def test_arguments_of_another_version(ledger: Path) -> None:
    batch = {"sample_indices": [5], "tokens": [[1, 2, 3]], "response_lengths": [2], "loss_masks": [[1, 1]]}
    for name, junk in product(vars(job.make_args()), JUNK):
        args = job.make_args(**{name: junk})
        assert slime.log_rollout(0, args, [sample()], {}, 0.0) is False
        assert slime.postprocess(args, 0, {**batch, "log_probs": [[-1.0, -2.0]]}) is None
        delattr(args, name)
        assert slime.log_rollout(0, args, [sample()], {}, 0.0) is False


def test_a_training_batch_with_junk_in_any_column(ledger: Path) -> None:
    batch = {"sample_indices": [5], "tokens": [[1, 2, 3]], "response_lengths": [2], "loss_masks": [[1, 1]]}
    batch |= {"log_probs": [[-1.0, -2.0]], "rollout_log_probs": [[-1.0, -2.0]]}
    for column, junk in product([*batch, "max_seq_lens"], JUNK):
        assert slime.postprocess(job.make_args(), 0, {**batch, column: junk}) is None
        assert slime.postprocess(job.make_args(), 0, {**batch, column: [junk]}) is None
        assert vime.postprocess(job.make_args(), 0, junk) is None


def test_a_verl_batch_with_junk_in_any_column(ledger: Path) -> None:
    batch = {
        "responses": torch.tensor([[5, 6], [7, 8]]),
        "prompts": torch.tensor([[0, 1], [1, 2]]),
        "attention_mask": torch.tensor([[0, 1, 1, 1], [1, 1, 1, 0]]),
        "response_mask": torch.ones(2, 2, dtype=torch.long),
        "rollout_log_probs": -torch.ones(2, 2),
        "old_log_probs": -torch.ones(2, 2),
        "uid": ["a", "a"],
    }
    for column, junk in product(batch, JUNK):
        for value in (junk, [junk, junk]):
            verl.record_rollout({**batch, column: value}, config=junk)
            verl.record_old_log_probs({**batch, column: value}, config={"actor_rollout_ref": junk})
        verl.record_rollout(junk)
