"""What Ray says of this process. Asked only where the job has imported Ray and connected to it; never imported here."""

import sys
from typing import Any

_WORKER = 1  # ray's mode of a process that runs tasks or an actor; a driver answers questions about actors by warning


def ray_context() -> Any | None:
    """Ray's runtime context of this process, or None where Ray is not loaded or not connected."""
    ray = sys.modules.get("ray")
    try:
        return ray.get_runtime_context() if ray is not None and ray.is_initialized() else None
    except Exception:  # a half-imported or shut down Ray refuses in its own way
        return None


def ray_labels() -> dict[str, str]:
    """Labels that place this process in a Ray cluster; empty outside one.

    ray_job_id, ray_node_id and ray_worker_id everywhere; in an actor also ray_actor_id, ray_actor (its name, where it
    has one) and ray_restarted ("true" for a process that replaces one that died).
    """
    context = ray_context()
    if context is None:
        return {}
    found = {name: _ask(context, f"get_{name}") for name in ("job_id", "node_id", "worker_id")}
    if in_worker(context) and (actor := _ask(context, "get_actor_id")):
        found |= {"actor_id": actor, "actor": _ask(context, "get_actor_name")}
        found["restarted"] = "true" if _ask(context, "was_current_actor_reconstructed") == "True" else None
    return {f"ray_{name}": value for name, value in found.items() if value}


def in_worker(context: Any) -> bool:
    """Whether the process of this runtime context runs a task or an actor."""
    return getattr(getattr(context, "worker", None), "mode", None) == _WORKER


def ray_train_place() -> tuple[int, int] | None:
    """(world rank, world size) of a Ray Train worker, else None."""
    train = sys.modules.get("ray.train")
    try:
        context = train.get_context() if train is not None else None
        return None if context is None else (int(context.get_world_rank()), int(context.get_world_size()))
    except Exception:  # outside a Ray Train worker every version refuses in its own way
        return None


def _ask(context: Any, name: str) -> str | None:
    try:
        answer = getattr(context, name)
        answer = answer() if callable(answer) else answer
    except Exception:  # what this version does not know or will not say here stays out
        return None
    return None if answer in (None, "") else str(answer)
