"""A framework's worker opens its writer once, and whatever its framework says of itself costs the job nothing."""

import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import rlk_ledger
from rlk_ledger.integrations import slime, verl
from rlk_ledger_sdk.integrations import opening


@pytest.fixture(autouse=True)
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A worker process that has opened nothing yet, of a job that records."""
    monkeypatch.setattr(opening, "_decided", set())
    for name, value in {"RLK_LEDGER": tmp_path / "l", "RLK_RUN_ID": "r", "RLK_SPOOL": tmp_path / "s"}.items():
        monkeypatch.setenv(name, str(value))
    rlk_ledger.close(timeout=0)
    yield
    rlk_ledger.close(timeout=0)


class Refuses:
    def __getattr__(self, name: str) -> Any:
        raise AssertionError("parallel state is not initialized")


@pytest.mark.parametrize("nodes", ["two", [2], object()])
def test_a_job_that_describes_itself_wrongly_goes_on(nodes: Any, caplog: pytest.LogCaptureFixture) -> None:
    args = SimpleNamespace(actor_num_nodes=nodes, actor_num_gpus_per_node=8)
    with caplog.at_level(logging.WARNING, "rlk_ledger"):
        for _ in range(3):
            assert slime.log_rollout(0, args, [], {}, 1.0) is False
    assert len([r for r in caplog.records if "nothing is recorded by this process" in r.message]) == 1


def test_a_half_built_parallel_state_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", Refuses())
    assert slime.postprocess(SimpleNamespace(), 0, {}) is None


@pytest.mark.parametrize("make", [Refuses, lambda: {"actor_rollout_ref": Refuses()}, int])
def test_a_configuration_that_answers_with_errors_goes_on(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLK_ON_ERROR", "warn")
    verl.record_rollout({"responses": [[1]]}, config=make(), step=0)
    assert rlk_ledger.current().enabled
