"""Ray actors as workers: one a lane, started by the replay, or on the cluster it is attached to.

Weights are read by each actor from the same folder, so that folder has to be one every node sees.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Any

from rlk_ledger_replay.executors.lanes import Lost
from rlk_ledger_replay.work import Model, Outcome, Unit, Worker
from rlk_ledger_schemas.errors import UsageError


class Seated(Worker):
    """A worker that can be asked where it sits."""

    def pid(self) -> int:
        """The id of the actor's process, on its own node."""
        return os.getpid()


class Actor:
    """A worker in a Ray actor."""

    def __init__(self, ray: Any, threads: int, timeout: float | None) -> None:
        """Asks for the actor; it starts when there is room."""
        self._ray, self._timeout = ray, timeout
        self._handle = ray.remote(num_cpus=threads, max_restarts=0)(Seated).remote()

    def score(self, unit: Unit) -> Outcome:
        """The values of a unit; raises Lost when the actor dies or the deadline passes."""
        found: Outcome = self._get(self._handle.score.remote(unit))
        return found

    def close(self) -> Mapping[Model, bool]:
        """Whether the weights it held are unchanged; it ends. Raises Lost."""
        unchanged: Mapping[Model, bool] = self._get(self._handle.close.remote())
        self.kill()
        return unchanged

    def pid(self) -> int:
        """The id of the actor's process, on its own node; raises Lost."""
        return int(self._get(self._handle.pid.remote()))

    def kill(self) -> None:
        """Ends it at once."""
        with contextlib.suppress(Exception):
            self._ray.kill(self._handle)

    def _get(self, reference: Any) -> Any:
        errors = self._ray.exceptions
        try:
            return self._ray.get(reference, timeout=self._timeout)
        except errors.GetTimeoutError:
            raise Lost(f"it was ended after its {self._timeout:g} s; --deadline gives it more", late=True) from None
        except (errors.RayActorError, errors.WorkerCrashedError, errors.OutOfMemoryError) as error:
            raise Lost(f"its Ray actor is gone: {str(error).splitlines()[0]}") from None


@contextlib.contextmanager
def cluster(cpus: int) -> Iterator[Any]:
    """The ray module, attached to the running cluster (RAY_ADDRESS), or to one started here and ended afterwards.

    Raises UsageError where Ray is not installed.
    """
    try:
        import ray
    except ImportError as error:
        raise UsageError(f'--executor ray: Ray is not installed ({error}); pip install "rlk-ledger[ray]".') from None
    if ray.is_initialized():
        yield ray
        return
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
    if not os.environ.get("RAY_ADDRESS"):
        quiet |= {"num_cpus": cpus, "include_dashboard": False, "_node_ip_address": "127.0.0.1"}
    ray.init(**quiet)
    try:
        yield ray
    finally:
        ray.shutdown()
