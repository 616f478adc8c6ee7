"""Which worker calls move weights."""

from collections.abc import Mapping
from typing import Any

_LOADS = frozenset({"reload_weights", "finish_weight_update", "load_weights", "update_weights_from_path"})


def moves_weights(method: Any) -> bool:
    """Whether a `collective_rpc` of this method ends with other weights in the workers.

    `update_weights` between `start_weight_update` and `finish_weight_update` is part of one load, which ends with the
    last.
    """
    return isinstance(method, str) and method in _LOADS


def load_path(kwargs: Mapping[str, Any] | None) -> str | None:
    """The checkpoint such a call names, or None."""
    path = (kwargs or {}).get("weights_path")
    return None if path is None else str(path)
