"""The job around the hooks: whether this process records, and which function of the user's a hook stands in for."""

import importlib
import os
from collections.abc import Callable
from typing import Any

from rlk_ledger_schemas.errors import ConfigError
from rlk_ledger_sdk.integrations.opening import opened
from rlk_ledger_sdk.integrations.slime.framework import Framework
from rlk_ledger_sdk.integrations.slime.parallel import this_rank


def recording(framework: Framework, args: Any, role: str) -> bool:
    """Whether this process records; its writer is opened at the first question."""
    engine = framework.engine if role == "rollout" else "megatron"
    return opened(framework.name, role, engine, lambda: _options(args, role))


def own(framework: Framework, args: Any, what: str, hook: Any = None) -> Callable[..., Any] | None:
    """The function a hook stands in for, or None where there is none.

    Named by `args.rlk_<what>_path` (a line of --custom-config-path) or RLK_<WHAT>_PATH, else the framework's default.
    Raises what importing it raises: a job whose own function is missing must not run without it.
    """
    path = getattr(args, f"rlk_{what}_path", None) or os.environ.get(f"RLK_{what.upper()}_PATH")
    path = path or framework.defaults.get(what)
    if not path:
        return None
    module, _, name = path.rpartition(".")
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    if found == hook:
        raise ConfigError(f"{framework.name}: rlk_{what}_path names the recorder's own hook; name the job's function.")
    return found


def _options(args: Any, role: str) -> dict[str, Any]:
    """The roles every process of the job declares alike, and a trainer rank's place in its groups."""
    if role != "training":
        return {"roles": _roles(args)}
    rank = this_rank()
    places = {"tp": (rank.tp, rank.tp_size), "cp": (rank.cp, rank.cp_size), "dp": (rank.dp, rank.dp_size)}
    return {"roles": _roles(args), "parallel": {name: {"rank": r, "size": n} for name, (r, n) in places.items()}}


def _roles(args: Any) -> dict[str, int]:
    nodes, each = getattr(args, "actor_num_nodes", None), getattr(args, "actor_num_gpus_per_node", None)
    world = int(os.environ.get("WORLD_SIZE") or 0) if nodes is None or each is None else int(nodes) * int(each)
    return {"rollout": 1, "training": world} if world > 0 else {"rollout": 1}
