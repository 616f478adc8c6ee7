"""Claim: a replay over Ray actors has the bits of one in this process, with 1, 2 and 4 of them, and with one killed in
the middle."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlk_ledger.build import build, event
from rlk_ledger.history import load_history
from rlk_ledger.ledger import Ledger
from rlk_ledger.pairs import pair
from rlk_ledger_replay.executors import Plan, choice
from rlk_ledger_replay.executors.ray import Actor
from rlk_ledger_replay.preparation import Prepared, Request, prepare
from rlk_ledger_replay.scores import Scores, score, scorings
from rlk_ledger_replay.work import Outcome, Unit
from rlk_ledger_schemas.fingerprints import contract_id, mask_digest, token_digest

ray = pytest.importorskip("ray")

pytestmark = [
    pytest.mark.engines,
    # sockets and subprocess handles of the local cluster outlive the objects that opened them
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:Tip.*:FutureWarning:ray"),
]
RUN, SAMPLES, LENGTH = "r1", 12, 30


def records() -> Iterator[Any]:
    """Twelve samples with made-up log-probabilities: what is scored does not depend on them."""
    import rlk_ledger_replay

    model = Path(rlk_ledger_replay.__path__[0]) / "model"
    numbers = {"rollout": 0, "training": 0}

    def say(side: str, kind: str, /, **fields: Any) -> Any:
        numbers[side] += 1
        return event(RUN, side, numbers[side] - 1, kind, **fields)

    body = {"mode": "processed", "temperature": 1.0, "alignment": "token_i_given_before_i"}
    for side in numbers:
        yield say(side, "writer.opened", role=side, rank=0, world_size=1, engine={"name": side, "instance": side})
        yield say(side, "contract.declared", kind="logprob", version="1", body=body)
    told = {"weight_version": "v0", "digest": "sha256:00", "tensor_count": 1, "path": str(model)}
    yield say("training", "weights.published", **told)
    rng = np.random.default_rng(0)
    for index in range(SAMPLES):
        ids = rng.integers(0, 256, LENGTH + index).tolist()
        mask = [1] * len(ids)
        digests = {"token_digest": token_digest(ids), "mask_digest": mask_digest(mask)}
        sample = {"sample_id": f"s{index}", "prompt_token_ids": [256, 1, 2], "response_token_ids": ids}
        spans = [{"version": "v0", "start": 0, "end": len(ids)}]
        yield say(
            "rollout", "rollout.sample", **sample, loss_mask=mask, weight_spans=spans, engine="rollout", **digests
        )
        for side in numbers:
            values = (-rng.random(len(ids))).astype(np.float32)
            named = {"source": side, "contract_id": contract_id("logprob", "1", body), "weight_version": "v0"}
            yield say(side, "logprobs", sample_id=f"s{index}", values=values, pass_id=side, **named, **digests)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    url = str(tmp_path_factory.mktemp("ray") / "ledger")
    ledger: Ledger = build(url, RUN, list(records()), roles={"rollout": 1, "training": 1})
    history = load_history(ledger, RUN)
    pairing = pair(history)
    prepared = prepare(ledger, history, pairing, pairing.pairs, Request(SAMPLES))
    assert prepared.blocked is None
    return replace(prepared, passes=prepared.passes[:2])


@pytest.fixture(scope="module")
def alone(found: Prepared) -> dict[str, bytes]:
    return bits(scored(found, Plan()))


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, _node_ip_address="127.0.0.1")
    yield
    ray.shutdown()


def scored(found: Prepared, plan: Plan, advance: Callable[[int], None] = lambda _: None) -> Scores:
    assert found.tokens is not None
    return score(found.selection.pairs, found.tokens, found.passes, found.models, plan=plan, advance=advance)


def bits(scores: Scores) -> dict[str, bytes]:
    assert not scores.lost
    return {name: values.tobytes() for name, values in scores.values.items()}


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_any_number_of_actors_gives_the_bits_of_this_process(
    found: Prepared, alone: dict[str, bytes], workers: int
) -> None:
    told: list[int] = []
    result = scored(found, Plan("ray", workers), told.append)
    assert bits(result) == alone
    assert result.unchanged == {0: True}
    assert found.tokens is not None
    assert sum(told) == scorings(found.tokens, found.passes)


def test_an_actor_killed_in_the_middle_is_replaced_and_its_shard_scored_again(
    found: Prepared, alone: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlk_ledger_replay.scores.BATCH", 3)
    killed: list[int] = []
    made: list[Actor] = []

    class Mortal(Actor):
        units = 0

        def score(self, unit: Unit) -> Outcome:
            made.append(self)
            self.units += 1
            if self.units == 2 and not killed:
                killed.append(self.pid())
                os.kill(killed[0], signal.SIGKILL)
            return super().score(unit)

    monkeypatch.setattr(choice, "Actor", Mortal)
    assert bits(scored(found, Plan("ray", 2))) == alone
    assert len(killed) == 1
    assert len(set(made)) == 3
