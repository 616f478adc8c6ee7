"""Which worker calls move weights."""

from collections.abc import Mapping
from typing import Any

_LOADS = ("reload_weights", "update_weight", "load_weights", "receive_weights", "sync_weights", "finish_weight_update")


def moves_weights(method: Any) -> bool:
    """Whether a `collective_rpc` of this method may end with other weights in the workers, judged by its name.

    vLLM's own are `reload_weights`, `update_weights` and `finish_weight_update`; frameworks add theirs through worker
    extensions. A load too many costs one more reading, one too few a version whose weights were not looked at.
    """
    return isinstance(method, str) and method.startswith(_LOADS)


def finishes(method: str) -> bool:
    """Whether this call only ends a load of several calls."""
    return method.startswith("finish_")


def load_path(kwargs: Mapping[str, Any] | None) -> str | None:
    """The checkpoint such a call names, or None."""
    path = (kwargs or {}).get("weights_path")
    return None if path is None else str(path)
