"""The executor a replay was asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from rlk_ledger_replay.executors.lanes import Remote, Take, drive
from rlk_ledger_replay.executors.processes import Process
from rlk_ledger_replay.executors.ray import Actor, cluster
from rlk_ledger_replay.work import Model, Unit, Worker

Kind = Literal["local", "ray"]


@dataclass(frozen=True)
class Plan:
    """How scoring is run. isolate: in worker processes even where one would do.

    deadline: seconds one batch may take in a worker, None for as long as it likes.
    """

    executor: Kind = "local"
    workers: int = 1
    isolate: bool = False
    deadline: float | None = None

    @property
    def apart(self) -> bool:
        """Whether scoring happens outside this process, so that a crash there is an answer here."""
        return self.executor == "ray" or self.workers > 1 or self.isolate


class Executor(Protocol):
    """Runs lanes of units."""

    def run(self, lanes: Sequence[Sequence[Unit]], take: Take) -> dict[Model, bool]:
        """Calls `take` once for each unit (or once for each part of one that was cut), in this thread.

        Returns whether the weights of each model are unchanged.
        """


class Inline:
    """Everything in this process, one unit after the other."""

    def run(self, lanes: Sequence[Sequence[Unit]], take: Take) -> dict[Model, bool]:
        """See Executor; raises what the decoder raises."""
        worker = Worker()
        for unit in (unit for lane in lanes for unit in lane):
            take(unit, worker.attempt(unit))
        return dict(worker.close())


@dataclass(frozen=True)
class Processes:
    """One local process a lane."""

    threads: int
    deadline: float | None

    def run(self, lanes: Sequence[Sequence[Unit]], take: Take) -> dict[Model, bool]:
        """See Executor."""
        return drive(lanes, lambda _: Process(self.threads, self.deadline), take)


@dataclass(frozen=True)
class RayActors:
    """One Ray actor a lane."""

    threads: int
    deadline: float | None

    def run(self, lanes: Sequence[Sequence[Unit]], take: Take) -> dict[Model, bool]:
        """See Executor; raises UsageError where Ray is not installed."""
        with cluster(max(1, len(lanes)) * self.threads) as ray:

            def start(_: int) -> Remote:
                return Actor(ray, self.threads, self.deadline)

            return drive(lanes, start, take)


def chosen(plan: Plan, threads: int) -> Executor:
    """The executor of a plan."""
    if plan.executor == "ray":
        return RayActors(threads, plan.deadline)
    return Processes(threads, plan.deadline) if plan.apart else Inline()
