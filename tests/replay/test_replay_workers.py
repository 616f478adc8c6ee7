"""Claim: who scores changes no bit: this process, one worker or four; a worker that is lost costs its unit a second
try, and a sample that no worker survives costs itself alone."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from rlk_ledger.history import load_history
from rlk_ledger.ledger import Ledger
from rlk_ledger.pairs import pair
from rlk_ledger_replay.checkpoint import CheckpointError
from rlk_ledger_replay.executors import Plan, choice
from rlk_ledger_replay.executors.lanes import Lost, deal, drive
from rlk_ledger_replay.executors.processes import Process
from rlk_ledger_replay.preparation import Prepared, Request, prepare
from rlk_ledger_replay.record import events
from rlk_ledger_replay.replay_command import replay as command
from rlk_ledger_replay.run import replay
from rlk_ledger_replay.scores import Scores, score, scorings
from rlk_ledger_replay.work import Entry, Model, Outcome, Refused, Scored, Unit

RUN = "r1"
Make = Callable[..., Ledger]


def prepared(ledger: Ledger, samples: int = 8) -> Prepared:
    history = load_history(ledger, RUN)
    pairing = pair(history)
    found = prepare(ledger, history, pairing, pairing.pairs, Request(samples))
    return replace(found, passes=found.passes[:2])


def scored(found: Prepared, plan: Plan, advance: Callable[[int], None] = lambda _: None) -> Scores:
    assert found.tokens is not None
    return score(found.selection.pairs, found.tokens, found.passes, found.models, plan=plan, advance=advance)


def bits(scores: Scores) -> dict[str, bytes]:
    return {name: values.tobytes() for name, values in scores.values.items()}


def entries(lengths: Sequence[int]) -> list[Entry]:
    return [Entry(f"s{index}", np.zeros(length, dtype=np.int32), 1) for index, length in enumerate(lengths)]


def test_samples_are_dealt_by_what_they_are_and_evenly() -> None:
    some = entries([5, 90, 17, 17, 3, 60, 41, 8, 8, 8, 30])
    dealt = deal(some, 3, 2)
    turned = deal(some[::-1], 3, 2)
    assert [[one.sample for unit in lane for one in unit] for lane in dealt] == [
        [one.sample for unit in lane for one in unit] for lane in turned
    ]
    assert sorted(one.sample for lane in dealt for unit in lane for one in unit) == sorted(one.sample for one in some)
    assert all(len(unit) <= 2 for lane in dealt for unit in lane)
    many = deal(entries(range(2, 302)), 4, 32)
    costs = [sum(one.cost for unit in lane for one in unit) for lane in many]
    assert max(costs) - min(costs) <= 4


def test_workers_give_the_bits_of_this_process_and_one_bar(make_run: Make) -> None:
    found = prepared(make_run(groups=4))
    alone = scored(found, Plan())
    told: list[int] = []
    apart = scored(found, Plan(workers=2), told.append)
    assert bits(apart) == bits(alone)
    assert apart.unchanged == alone.unchanged == {0: True, 1: True}
    assert apart.decisions == alone.decisions
    assert found.tokens is not None
    assert sum(told) == scorings(found.tokens, found.passes)


def test_a_worker_killed_in_the_middle_is_replaced_and_its_unit_scored_again(
    make_run: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = prepared(make_run(groups=4))
    alone = scored(found, Plan())
    started: list[int] = []

    class Mortal(Process):
        def score(self, unit: Unit) -> Outcome:
            started.append(self.pid)
            if len(started) == 2:
                os.kill(self.pid, signal.SIGKILL)
            return super().score(unit)

    monkeypatch.setattr(choice, "Process", Mortal)
    assert bits(scored(found, Plan(isolate=True))) == bits(alone)
    assert len(set(started)) == 2


def test_a_worker_is_heard_by_a_process_that_holds_many_files(make_run: Make) -> None:
    """A descriptor above 1,023 is one that select() refuses."""
    found = prepared(make_run(groups=4))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        assert bits(scored(found, Plan(isolate=True))) == bits(scored(found, Plan()))
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class Fragile:
    """A worker that dies of one sample, and answers others with their length."""

    def __init__(self) -> None:
        self.alive = True

    def score(self, unit: Unit) -> Outcome:
        assert self.alive
        if any(one.sample == "s5" for one in unit.entries):
            raise Lost("its worker is gone: it crashed with SIGSEGV")
        return Scored(tuple(np.full(len(one.ids_T), 1.0, dtype=np.float32) for one in unit.entries))

    def close(self) -> dict[Model, bool]:
        return {}

    def kill(self) -> None:
        self.alive = False


def test_a_sample_no_worker_survives_costs_itself_alone() -> None:
    unit = Unit(Model(Path("none")), None, "prefill", tuple(entries([4] * 9)), "")  # type: ignore[arg-type]
    done: dict[str, Outcome] = {}
    workers: list[Fragile] = []

    def start(_: int) -> Fragile:
        workers.append(Fragile())
        return workers[-1]

    drive([[unit]], start, lambda one, outcome: done.update(dict.fromkeys((e.sample for e in one.entries), outcome)))
    assert {name for name, outcome in done.items() if isinstance(outcome, Refused)} == {"s5"}
    assert len(done) == 9
    assert 3 <= len(workers) <= 8


def test_a_run_goes_on_without_the_samples_a_deadline_or_a_crash_took(
    make_run: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = "s3/"

    class Picky(Process):
        def score(self, unit: Unit) -> Outcome:
            if any(one.sample.startswith(lost) for one in unit.entries):
                os.kill(self.pid, signal.SIGSEGV)
            return super().score(unit)

    monkeypatch.setattr(choice, "Process", Picky)
    monkeypatch.setattr("rlk_ledger_replay.scores.BATCH", 1)
    monkeypatch.setattr("rlk_ledger_replay.executors.lanes.TRIES", 1)
    ledger = make_run(groups=3, attention=None)  # no dtypes, so no floors: three passes
    result = replay(ledger, RUN, request=Request(5, plan=Plan(isolate=True)), keep=False)
    assert [pair.sample.sample_id for pair in result.prepared.selection.pairs].count("s3") == 1
    assert result.counts()["samples"] == 5
    (gap,) = [one for one in result.findings if one.finding_id == "replay.failed"]
    assert gap.evidence["of"] == 5
    assert "SIGSEGV" in gap.evidence["reason"]
    assert result.exit_code == 3
    assert result.judgement.shares is not None
    (attempt,) = [f for kind, f in events(result) if kind == "case.attempted" and f["status"] == "error"]
    assert attempt["request"]["samples"] == ["s3"]


def test_a_unit_past_its_deadline_is_ended_and_said_to_be(make_run: Make) -> None:
    found = prepared(make_run(groups=2), 2)
    late = scored(found, Plan(isolate=True, deadline=1e-3))
    assert set(late.lost) == {0, 1}
    assert all("--deadline" in reason for reason in late.lost.values())
    assert np.isnan(late.values["rollout.prefill"]).all()


@pytest.mark.parametrize("plan", [Plan(), Plan(isolate=True)])
def test_weights_that_change_after_they_were_checked_are_not_computed_on(
    make_run: Make, weights: Path, tmp_path: Path, plan: Plan
) -> None:
    found = prepared(make_run(groups=2), 2)
    (folder,) = {one.folder for one in found.models.values()} - {weights / "v1"}
    data = bytearray((folder / "model.safetensors").read_bytes())
    kept = bytes(data)
    data[-2] ^= 1
    (folder / "model.safetensors").write_bytes(data)
    try:
        if plan.apart:
            assert any("changed after they were checked" in reason for reason in scored(found, plan).lost.values())
        else:
            with pytest.raises(CheckpointError, match="changed after they were checked"):
                scored(found, plan)
    finally:
        (folder / "model.safetensors").write_bytes(kept)


def test_a_deadline_without_workers_is_refused(make_run: Make) -> None:
    done = CliRunner().invoke(command, [RUN, "--ledger", make_run(groups=1).url, "--deadline", "3"])
    assert "--isolate" in str(done.exception)
