"""Ray: one writer per worker process, named after the actor it runs. Stands on `ray.get_runtime_context()` (2.x).

`rlk_ledger.init()` inside an actor or a task needs nothing from here: the job, node, worker and actor it runs in become
labels of `writer.opened`, and ranks come from Ray Train where that is used. A restarted actor is another process, so it
is another writer of the same run, labelled `ray_restarted`; tasks that share a worker process share its writer.
"""

import os

from rlk_ledger_sdk.cluster import in_worker, ray_context, ray_labels

_NEVER_SENT = frozenset({"RLK_REDACTION_KEY", "RLK_PARENT_WRITER"})
"""The key would stand in the cluster's dashboard; the parent is a process of one node."""


def env_vars(**more: str) -> dict[str, str]:
    """The recorder's variables of this process, for `runtime_env={"env_vars": env_vars(RLK_ROLE="rollout")}`.

    Workers on other nodes inherit no environment: without these they record nothing. RLK_REDACTION_KEY is left out,
    because a runtime_env is readable by everyone who sees the cluster's dashboard. `more` wins over the environment.
    """
    found = {name: value for name, value in os.environ.items() if name.startswith("RLK_") and name not in _NEVER_SENT}
    return {**found, **more}


def labels() -> dict[str, str]:
    """Labels of the task that runs right now, for `scope(labels=labels())`: where it runs, ray_task and ray_task_id."""
    found, context = ray_labels(), ray_context()
    if context is None or not in_worker(context):
        return found
    for label, method in (("ray_task", "get_task_name"), ("ray_task_id", "get_task_id")):
        value = getattr(context, method, lambda: None)()
        if value:
            found[label] = str(value)
    return found


__all__ = ["env_vars", "labels"]
