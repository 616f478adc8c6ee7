"""verl's own code, where verl 0.9 and TransferQueue are installed: registry, trainer step, agent-loop output, queue.

Only the model behind `actor_rollout_wg` is a table. Skipped where verl is not there: it pins transformers and
tensordict against the other engines of this environment.
"""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rlk_ledger
from rlk_ledger.audit import AuditResult, audit
from rlk_ledger.history import load_history
from rlk_ledger.integrations.verl import install, record_old_log_probs, record_rollout

pytest.importorskip("verl")
queue = pytest.importorskip("transfer_queue")
ray = pytest.importorskip("ray")
pytestmark = [
    pytest.mark.engines,
    *(  # what verl's imports and the local cluster warn of is theirs
        pytest.mark.filterwarnings(f"ignore::{kind}")
        for kind in ("DeprecationWarning", "FutureWarning", "UserWarning", "SyntaxWarning", "ResourceWarning")
    ),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

_path = Path(__file__).parents[1] / "integrations" / "test_verl.py"
_spec = importlib.util.spec_from_file_location("verl_standin", _path)
assert _spec is not None
assert _spec.loader is not None
standin = importlib.util.module_from_spec(_spec)
sys.modules["verl_standin"] = standin
_spec.loader.exec_module(standin)


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.init(num_cpus=16, include_dashboard=False, log_to_driver=False, _node_ip_address="127.0.0.1")
    queue.init()
    yield
    queue.close()
    ray.shutdown()


class Actors:
    """The worker group: writes full-length log_probs and entropy of each key (entry i scores token i+1)."""

    def __init__(self, temperature: float) -> None:
        self.temperature, self.step = temperature, 0

    def compute_log_prob(self, batch: Any) -> Any:
        from verl.utils.tensordict_utils import list_of_dict_to_tensordict

        table, fields = standin.log_table(self.step - 1, self.temperature), []
        for key in batch.keys:
            held = queue.kv_batch_get(keys=[key], partition_id="train", select_fields=["prompts", "responses"])
            ids = np.concatenate([held["prompts"][0].numpy(), held["responses"][0].numpy()])
            values = torch.tensor(np.append(table[ids[:-1], ids[1:]], 0.0), dtype=torch.float32)
            fields.append({"log_probs": values, "entropy": torch.ones_like(values)})
        return queue.kv_batch_put(keys=batch.keys, partition_id="train", fields=list_of_dict_to_tensordict(fields))


def put(rows: list[dict[str, Any]]) -> Any:
    """What AgentLoopWorkerTQ puts into the queue for these trajectories."""
    from transfer_queue import KVBatchMeta
    from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput
    from verl.utils.tensordict_utils import list_of_dict_to_tensordict

    keys, fields, tags = [], [], []
    for r in rows:
        output = AgentLoopOutput(
            prompt_ids=r["prompt"],
            response_ids=r["response"],
            response_mask=r["mask"],
            response_logprobs=r["values"],
            reward_score=r["score"],
            num_turns=2,
            metrics=AgentLoopMetrics(),
        )
        one = output.as_dict()
        keys.append(f"{r['uid']}_{r['session']}_0")
        fields.append({**one, "uid": r["uid"], "loss_mask": one["response_mask"]})
        tags.append({"status": "success", "min_global_steps": r["step"], "max_global_steps": r["step"]})
    queue.kv_batch_put(keys=keys, partition_id="train", fields=list_of_dict_to_tensordict(fields), tags=tags)
    return KVBatchMeta(keys=keys, tags=tags, partition_id="train")


def trained(folder: Path, temperature: float) -> AuditResult:
    """Three old-log-prob steps of verl's registered sync trainer, audited."""
    from omegaconf import OmegaConf
    from verl.trainer.ppo.v1 import get_trainer_cls

    assert "sync" in install()
    trainer = object.__new__(get_trainer_cls("sync"))
    settings = standin.config()
    settings["actor_rollout_ref"]["actor"] |= {"loss_agg_mode": "token-mean", "loss_scale_factor": None}
    trainer.config, trainer.trainer_mode, trainer.local_trigger_step = OmegaConf.create(settings), "sync", 0
    trainer.actor_rollout_wg = Actors(temperature)
    where = {"spool": folder / "s", "shipper": "inline", "roles": {"training": 1}}
    rlk_ledger.init(folder / "l", run_id="r", role="training", **where)
    for step in (1, 2, 3):
        trainer.global_steps = trainer.actor_rollout_wg.step = step
        trainer._compute_old_log_prob(put(standin.trajectories(step)), metrics={})
    rlk_ledger.close()
    history = load_history(rlk_ledger.open(folder / "l"), "r")
    assert (len(history.samples), len(history.scores)) == (48, 96)
    return audit(history)


def test_a_clean_run_of_verls_own_trainer_step_passes(tmp_path: Path) -> None:
    result = trained(tmp_path, 0.7)
    assert result.verdict == "pass"
    assert [f.finding_id for f in result.findings if f.severity != "info"] == []


def test_a_temperature_that_is_not_applied_is_named(tmp_path: Path) -> None:
    result = trained(tmp_path, 1.0)
    assert "contract.differs" in {f.finding_id for f in result.findings}


def test_verls_own_dataproto_is_found_again_after_it_was_reordered(tmp_path: Path) -> None:
    from verl.protocol import DataProto

    rows = standin.trajectories(1)
    made = standin.padded(rows)
    data = DataProto.from_dict(tensors=made.batch, non_tensors=made.non_tensor_batch, meta_info=made.meta_info)
    where = {"spool": tmp_path / "s", "shipper": "inline", "roles": {"training": 1}}
    rlk_ledger.init(tmp_path / "l", run_id="r", role="training", **where)
    record_rollout(data, config=standin.config(), step=1)
    order = torch.randperm(16, generator=torch.Generator().manual_seed(3))
    data.reorder(order)
    old = standin.pad(standin.scored([rows[i] for i in order.tolist()], 0))
    data = data.union(DataProto.from_dict(tensors={"old_log_probs": old}))
    record_old_log_probs(data, config=standin.config(), step=1, weight_version=0)
    rlk_ledger.close()
    result = audit(load_history(rlk_ledger.open(tmp_path / "l"), "r"))
    assert result.verdict == "pass"
