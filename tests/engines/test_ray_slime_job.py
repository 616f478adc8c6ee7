"""A job of slime's shape on a real Ray cluster: a rollout manager and two trainer ranks open their own writers."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from rlk_ledger.audit import audit
from rlk_ledger.history import load_history
from rlk_ledger.ledger import open_ledger
from rlk_ledger.recover import recover
from rlk_ledger_sdk.integrations.ray import env_vars

ray = pytest.importorskip("ray")
pytestmark = [
    pytest.mark.engines,
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # the local cluster's sockets outlive their owners
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
_STANDIN = Path(__file__).parents[1] / "integrations"
_HOOKS = "rlk_ledger.integrations.slime"
_ARGS = {
    "custom_rollout_log_function_path": f"{_HOOKS}.log_rollout",
    "rollout_data_postprocess_path": f"{_HOOKS}.postprocess",
    "actor_num_gpus_per_node": 2,
}


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, _node_ip_address="127.0.0.1")
    yield
    ray.shutdown()


class RolloutManager:
    """Generates; knows nothing of the recorder but the paths in its arguments."""

    def __init__(self) -> None:
        import slime_standin as job

        engine = ModuleType("slime.rollout.sglang_rollout")
        engine.generate = job.generate  # type: ignore[attr-defined]
        sys.modules[engine.__name__] = engine
        self.job = job

    def generate(self, rollout_id: int) -> Any:
        self.job.ENGINE.now = self.job.Engine(version=rollout_id + 1, seed=rollout_id)
        return self.job.rollout(self.job.make_args(**_ARGS), rollout_id, self.job.prompts(16 * rollout_id, 4, 4))


class TrainActor:
    """One context-parallel rank; sets RANK and WORLD_SIZE as slime's TrainRayActor does."""

    def __init__(self, rank: int, size: int) -> None:
        import slime_standin as job

        os.environ["RANK"], os.environ["WORLD_SIZE"] = str(rank), str(size)
        state = ModuleType("megatron.core.parallel_state")
        place = SimpleNamespace(tensor_model=(0, 1), context=(rank, size), data=(0, 1))
        for name, (mine, all_) in vars(place).items():
            setattr(state, f"get_{name}_parallel_rank", lambda mine=mine: mine)
            setattr(state, f"get_{name}_parallel_world_size", lambda all_=all_: all_)
        state.is_pipeline_last_stage = state.model_parallel_is_initialized = lambda: True  # type: ignore[attr-defined]
        sys.modules[state.__name__] = state
        self.job, self.rank, self.size = job, rank, size

    def train(self, rollout_id: int, data: Any) -> int:
        self.job.Trainer(self.job.make_args(**_ARGS), rollout_id + 1, self.rank, self.size).train_actor(
            rollout_id, data
        )
        return os.getpid()


def test_two_command_line_options_and_a_runtime_env_make_a_clean_record(tmp_path: Path) -> None:
    variables = env_vars(
        RLK_LEDGER=str(tmp_path / "ledger"),
        RLK_RUN_ID="job",
        RLK_SPOOL=str(tmp_path / "spool"),
        RLK_SHIPPER="off",
        PYTHONPATH=os.pathsep.join([str(_STANDIN), *filter(None, [os.environ.get("PYTHONPATH")])]),
    )
    options = {"num_cpus": 0, "runtime_env": {"env_vars": variables}}
    manager = ray.remote(RolloutManager).options(name="rollout-manager", **options).remote()
    trainers = [ray.remote(TrainActor).options(name=f"actor-{r}", **options).remote(r, 2) for r in range(2)]
    for rollout_id in range(2):
        data = manager.generate.remote(rollout_id)
        ray.get([trainer.train.remote(rollout_id, data) for trainer in trainers])
    for actor in (manager, *trainers):
        ray.kill(actor, no_restart=True)
    recover(tmp_path / "spool")
    history = load_history(open_ledger(str(tmp_path / "ledger")), "job")
    result = audit(history)
    assert [f.finding_id for f in result.findings if f.severity != "info"] == []
    assert result.verdict == "pass"
    jobs = [w for w in history.writers.values() if w["role"] in ("rollout", "training")]
    assert {(w["role"], w["rank"], w["labels"]["ray_actor"]) for w in jobs} == {
        ("rollout", 0, "rollout-manager"),
        ("training", 0, "actor-0"),
        ("training", 1, "actor-1"),
    }
    places = {w["rank"]: w["parallel"]["cp"] for w in jobs if w["role"] == "training"}
    assert places == {0: {"rank": 0, "size": 2}, 1: {"rank": 1, "size": 2}}
    assert len(history.samples) == 32
    assert sum(s.source == "training" for s in history.scores) == 64
