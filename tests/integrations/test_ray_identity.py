"""What a Ray stand-in says of a process reaches writer.opened; a Ray that refuses costs nothing."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from rlk_ledger_sdk.cluster import ray_labels
from rlk_ledger_sdk.config import load_config
from rlk_ledger_sdk.integrations.ray import labels


def context(mode: int, **answers: Any) -> SimpleNamespace:
    """A runtime context of Ray 2.60: methods for ids and names, an attribute for restarts."""
    given = {"job_id": "01000000", "node_id": "n1", "worker_id": "w1", "actor_id": None, "actor_name": None}
    given |= {"task_name": "A.f", "task_id": "t1"} | answers
    methods = {f"get_{name}": (lambda value=value: value) for name, value in given.items()}
    return SimpleNamespace(worker=SimpleNamespace(mode=mode), was_current_actor_reconstructed=False, **methods)


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("ray")
    monkeypatch.setitem(sys.modules, "ray", module)
    module.is_initialized = lambda: True  # type: ignore[attr-defined]
    return module


def opened() -> dict[str, Any]:
    config = load_config("/tmp/l", run_id="r", role="rollout")
    assert config is not None
    return config.writer_opened


def test_an_actor_names_itself_in_writer_opened(ray: ModuleType) -> None:
    ray.get_runtime_context = lambda: context(1, actor_id="a1", actor_name="rollout-3")  # type: ignore[attr-defined]
    assert opened()["labels"] == {
        "ray_job_id": "01000000",
        "ray_node_id": "n1",
        "ray_worker_id": "w1",
        "ray_actor_id": "a1",
        "ray_actor": "rollout-3",
    }
    assert labels()["ray_task"] == "A.f"


def test_an_unnamed_actor_has_no_name_and_a_driver_no_actor(ray: ModuleType) -> None:
    ray.get_runtime_context = lambda: context(1, actor_id="a1", actor_name="")  # type: ignore[attr-defined]
    assert "ray_actor" not in ray_labels()
    ray.get_runtime_context = lambda: context(0, actor_id="a1")  # type: ignore[attr-defined]
    assert "ray_actor_id" not in ray_labels()


@pytest.mark.parametrize("refusal", ["not_initialized", "raises", "partly"])
def test_a_ray_that_refuses_costs_labels_and_nothing_else(ray: ModuleType, refusal: str) -> None:
    def refuse() -> Any:
        raise RuntimeError("no")

    ray.get_runtime_context = refuse  # type: ignore[attr-defined]
    if refusal == "not_initialized":
        ray.is_initialized = lambda: False  # type: ignore[attr-defined]
    if refusal == "partly":
        some = context(1)
        some.get_node_id = refuse
        del some.get_worker_id
        ray.get_runtime_context = lambda: some  # type: ignore[attr-defined]
    assert opened().get("labels") == ({"ray_job_id": "01000000"} if refusal == "partly" else None)


def test_without_ray_there_are_no_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    assert "labels" not in opened()
    assert labels() == {}
    assert "ray" not in sys.modules
