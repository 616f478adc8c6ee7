"""Fields that every event of a block carries: step, rollout_id, attempt, labels."""

import contextlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any

_fields: ContextVar[dict[str, Any] | None] = ContextVar("rlk_ledger_scope", default=None)
current_fields = _fields.get
"""The fields in force in this context, or None."""


@contextlib.contextmanager
def scope(
    *,
    step: int | None = None,
    rollout_id: int | str | None = None,
    attempt: int | None = None,
    labels: Mapping[str, str] | None = None,
) -> Iterator[None]:
    """Gives every event recorded inside the block these fields; an argument of record() wins, labels are merged.

    Scopes nest, follow `contextvars` (each thread and asyncio task has its own) and work as decorators.
    """
    given = {"step": step, "rollout_id": rollout_id, "attempt": attempt, "labels": labels}
    fields = merged(_fields.get() or {}, {k: v for k, v in given.items() if v is not None})
    token = _fields.set(fields)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # left in another context than entered, as generators may
            _fields.reset(token)


def merged(outer: dict[str, Any], inner: dict[str, Any]) -> dict[str, Any]:
    """`inner` over `outer`; `labels` merge key by key."""
    fields = {**outer, **inner}
    if isinstance(outer.get("labels"), Mapping) and isinstance(inner.get("labels"), Mapping):
        fields["labels"] = {**outer["labels"], **inner["labels"]}
    return fields
