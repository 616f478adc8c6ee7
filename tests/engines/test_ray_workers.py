"""Recording inside real Ray workers: one writer per process, hard kills, restarts, tasks that share a worker."""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rlk_ledger
from rlk_ledger.ledger import open_ledger
from rlk_ledger.recover import recover
from rlk_ledger.verify import verify
from rlk_ledger_sdk.integrations.ray import env_vars, labels

ray = pytest.importorskip("ray")

pytestmark = [
    pytest.mark.engines,
    # sockets and subprocess handles of the local cluster outlive the objects that opened them
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:Tip.*:FutureWarning:ray"),
]
_START = {"num_cpus": 2, "include_dashboard": False, "log_to_driver": False, "_node_ip_address": "127.0.0.1"}


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    ray.init(**_START)
    yield
    ray.shutdown()


class Engine:
    """A rollout actor that records until somebody ends it."""

    def __init__(self, rank: int | None = None, size: int | None = None) -> None:
        if rank is not None:
            rlk_ledger.init(role="rollout", rank=rank, world_size=size, roles={"rollout": size})

    def record(self, count: int = 1) -> tuple[int, str | None]:
        for i in range(count):
            with rlk_ledger.scope(step=i):
                reference = rlk_ledger.record("weights.published", weight_version="1", digest="d:0", tensor_count=1)
        return os.getpid(), reference.writer_id

    def burst(self, acknowledged: str) -> None:
        """Never returns; every sequence number that record() returned is in the file before the next call."""
        out = os.open(acknowledged, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        while True:
            reference = rlk_ledger.record(
                "logprobs", sample_id="s", source="rollout", contract_id="c", values=[-0.5] * 500
            )
            os.write(out, b"%d\n" % reference.seq)

    def leave(self) -> None:
        os._exit(3)


def variables(folder: Path) -> dict[str, str]:
    """What workers that record into `folder` need; shipping is left to the test."""
    return env_vars(
        RLK_LEDGER=str(folder / "ledger"),
        RLK_RUN_ID="r",
        RLK_ROLE="rollout",
        RLK_SPOOL=str(folder / "spool"),
        RLK_SHIPPER="off",
    )


def started(folder: Path, **options: Any) -> Any:
    """An Engine actor class whose workers record into `folder`."""
    return ray.remote(Engine).options(num_cpus=0, runtime_env={"env_vars": variables(folder)}, **options)


def shipped(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Every event of every rollout writer, after what is left in the spool was recovered."""
    recover(folder / "spool")
    events: dict[str, list[dict[str, Any]]] = {}
    for writer, _, event, _ in open_ledger(str(folder / "ledger")).read_events("r"):
        events.setdefault(writer, []).append(event)
    opened = {w: next((e for e in held if e["type"] == "writer.opened"), {}) for w, held in events.items()}
    return {w: held for w, held in events.items() if opened[w].get("role") == "rollout"}


def opening(events: list[dict[str, Any]]) -> dict[str, Any]:
    return next(e for e in events if e["type"] == "writer.opened")


def waited(condition: Any, seconds: float = 60.0) -> None:
    """Polls `condition` until it holds; a hang fails here with its own name."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.05)


def ended(pid: int) -> bool:
    """Whether a process is gone, reaped or not."""
    try:
        return " Z " in Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True


def killed(actor: Any, pid: int, how: str) -> None:
    if how == "ray.kill":
        ray.kill(actor, no_restart=True)
    elif how == "SIGKILL":
        os.kill(pid, signal.SIGKILL)
    else:
        actor.leave.remote()
    waited(lambda: ended(pid))


def test_every_actor_is_one_writer_with_its_rank_and_name(tmp_path: Path) -> None:
    actors = [started(tmp_path, name=f"rollout-{r}").remote(r, 2) for r in range(2)]
    pids, writers = zip(*ray.get([a.record.remote(2) for a in actors]))
    for actor, pid in zip(actors, pids):
        killed(actor, pid, "ray.kill")
    held = shipped(tmp_path)
    assert set(held) == set(writers)
    for rank, writer in enumerate(writers):
        opened = opening(held[writer])
        assert (opened["rank"], opened["world_size"]) == (rank, 2)
        assert opened["labels"]["ray_actor"] == f"rollout-{rank}"
        assert opened["labels"]["ray_job_id"] == ray.get_runtime_context().get_job_id()
        assert opened["labels"]["ray_node_id"] == ray.get_runtime_context().get_node_id()
        assert "ray_restarted" not in opened["labels"]
    assert len({opening(held[w])["labels"]["ray_actor_id"] for w in writers}) == 2


@pytest.mark.parametrize("how", ["ray.kill", "SIGKILL", "os._exit"])
def test_what_a_killed_actor_had_recorded_is_in_the_ledger(tmp_path: Path, how: str) -> None:
    log = tmp_path / "acknowledged"
    actor = started(tmp_path, max_concurrency=2).remote(0, 1)
    pid, writer = ray.get(actor.record.remote())
    actor.burst.remote(str(log))
    waited(lambda: log.exists() and log.stat().st_size > 2000)
    killed(actor, pid, how)
    acknowledged = {int(line) for line in log.read_text().splitlines()}
    held = shipped(tmp_path)
    assert len(acknowledged) > 200
    assert acknowledged <= {e["seq"] for e in held[writer]}
    assert verify(str(tmp_path / "ledger"), deep=True).exit_code != 1, "nothing contradicts the receipts"


def test_the_shipper_an_actor_started_outlives_it_and_ships_the_rest(tmp_path: Path) -> None:
    log = tmp_path / "acknowledged"
    environment = {**variables(tmp_path), "RLK_SHIPPER": "process"}
    actor = (
        ray.remote(Engine).options(max_concurrency=2, num_cpus=0, runtime_env={"env_vars": environment}).remote(0, 1)
    )
    pid, writer = ray.get(actor.record.remote())
    actor.burst.remote(str(log))
    waited(lambda: log.exists() and log.stat().st_size > 2000)
    killed(actor, pid, "ray.kill")
    acknowledged = {int(line) for line in log.read_text().splitlines()}

    def arrived() -> bool:
        with contextlib.suppress(rlk_ledger.errors.LedgerError):
            events = open_ledger(str(tmp_path / "ledger")).read_events("r")
            return acknowledged <= {seq for w, seq, _, _ in events if w == writer}
        return False

    waited(arrived)


def test_a_restarted_actor_is_another_writer_of_the_same_run(tmp_path: Path) -> None:
    actor = started(tmp_path, max_restarts=1, name="again").remote(0, 1)
    pid, first = ray.get(actor.record.remote())
    killed(actor, pid, "os._exit")
    answer: list[Any] = []

    def answers() -> bool:
        with contextlib.suppress(ray.exceptions.RayError):
            answer[:] = ray.get(actor.record.remote())
        return bool(answer)

    waited(answers)
    second = answer[1]
    killed(actor, answer[0], "ray.kill")
    held = shipped(tmp_path)
    assert set(held) == {first, second}
    before, after = opening(held[first])["labels"], opening(held[second])["labels"]
    assert before["ray_actor_id"] == after["ray_actor_id"]
    assert before["ray_worker_id"] != after["ray_worker_id"]
    assert after["ray_restarted"] == "true"
    assert {e["run_id"] for events in held.values() for e in events} == {"r"}


def test_tasks_that_share_a_worker_share_its_writer_and_are_told_apart_by_labels(tmp_path: Path) -> None:
    environment = {"env_vars": variables(tmp_path)}

    @ray.remote(num_cpus=1, runtime_env=environment)
    def score(step: int) -> tuple[int, str | None]:
        with rlk_ledger.scope(step=step, labels=labels()):
            reference = rlk_ledger.record("weights.published", weight_version="1", digest="d:0", tensor_count=1)
        return os.getpid(), reference.writer_id

    answers = [ray.get(score.options(name=f"score-{i}").remote(i)) for i in range(4)]
    assert len(set(answers)) < 4, "Ray reused a worker process"
    assert len({pid for pid, _ in answers}) == len({writer for _, writer in answers})
    for pid in {pid for pid, _ in answers}:
        os.kill(pid, signal.SIGKILL)
        waited(lambda pid=pid: ended(pid))
    held = shipped(tmp_path)
    assert set(held) == {writer for _, writer in answers}
    events = [e for events in held.values() for e in events if e["type"] == "weights.published"]
    assert {e["labels"]["ray_task"] for e in events} == {f"score-{i}" for i in range(4)}
    assert len({e["labels"]["ray_task_id"] for e in events}) == 4


def test_the_driver_is_no_worker_and_has_no_actor() -> None:
    found = labels()
    assert found["ray_job_id"] == ray.get_runtime_context().get_job_id()
    assert not {"ray_actor_id", "ray_task"} & set(found)


def test_the_redaction_key_never_enters_a_runtime_env(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLK_REDACTION_KEY", "secret")
    monkeypatch.setenv("RLK_LEDGER", "here")
    assert env_vars()["RLK_LEDGER"] == "here"
    assert "RLK_REDACTION_KEY" not in env_vars()
