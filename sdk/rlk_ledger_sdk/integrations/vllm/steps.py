"""A hook in the engine core: where prefills were cut, and which requests shared a step with one.

It reads what the scheduler decided and changes nothing. A step without a prefill costs a few looks.
"""

import itertools
import os
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from rlk_ledger_sdk.api import record
from rlk_ledger_sdk.guard import guarded
from rlk_ledger_sdk.integrations.vllm import names

REMEMBERED = 1 << 16
"""Prefills kept for a front end in this process, which takes each when its completion is recorded."""


class Prefill(NamedTuple):
    """How one completion's prompt was computed: tokens found in the cache, then the positions where chunks ended.

    `ends` is None for a request that was preempted: it was computed again, with part of its response.
    """

    cached: int
    ends: list[int] | None


class Steps:
    """Watches one scheduler. Owned by the thread that calls `schedule`."""

    def __init__(self, engine: str | None, prefix: str) -> None:
        self._prefills: dict[str, Prefill] = {}
        self._labels = {"order": "scheduler", "phase": "prefill"} | ({} if engine is None else {"engine": engine})
        self._prefix = prefix
        self._layouts = (f"{prefix}-{os.getpid()}-step{i}" for i in itertools.count())
        self._names: dict[str, str] = {}
        self._open: dict[str, int] = {}
        """Requests whose prefill goes on, with the length of their prompt."""

    def wrap(self, schedule: Callable[..., Any]) -> Callable[..., Any]:
        """`schedule`, looked at after each call."""

        def looked_at(*args: Any, **kwargs: Any) -> Any:
            decided = schedule(*args, **kwargs)
            if decided.scheduled_new_reqs or self._open or decided.finished_req_ids or _resumed(decided):
                with guarded("vllm scheduler"):
                    self.look(decided)
            return decided

        return looked_at

    def take(self, name: str) -> Prefill | None:
        """The prefill of a completion, handed out once; None when its engine core is another process."""
        return self._prefills.pop(name, None)

    def look(self, decided: Any) -> None:
        """Takes in one SchedulerOutput."""
        for gone in decided.finished_req_ids:
            self._open.pop(gone, None)
            self._names.pop(gone, None)
        tokens = decided.num_scheduled_tokens
        prefilling = self._again(_resumed(decided)) + self._new(decided.scheduled_new_reqs, tokens)
        prefilling += self._continued(decided, tokens)
        if prefilling:
            self._record(tokens)

    def _new(self, requests: Sequence[Any], tokens: dict[str, int]) -> int:
        for request in requests:
            prompt = len(request.prompt_token_ids or ())
            name = self._names[request.req_id] = names.of_internal(request.req_id, self._prefix)
            self._prefills[name] = Prefill(request.num_computed_tokens, [])
            if len(self._prefills) > REMEMBERED:
                del self._prefills[next(iter(self._prefills))]
            self._chunk(request.req_id, request.num_computed_tokens + tokens[request.req_id], prompt)
        return len(requests)

    def _again(self, requests: Collection[str]) -> int:
        for request_id in requests:
            self._open.pop(request_id, None)
            name = self._names.get(request_id, "")
            if name in self._prefills:
                self._prefills[name] = self._prefills[name]._replace(ends=None)
        return len(requests)

    def _continued(self, decided: Any, tokens: dict[str, int]) -> int:
        if not self._open:
            return 0
        cached = decided.scheduled_cached_reqs
        going = [(r, n) for r, n in zip(cached.req_ids, cached.num_computed_tokens) if r in self._open and r in tokens]
        for request_id, computed in going:
            self._chunk(request_id, computed + tokens[request_id], self._open[request_id])
        return len(going)

    def _chunk(self, request_id: str, end: int, prompt: int) -> None:
        prefill = self._prefills.get(self._names[request_id])
        if prefill is not None and prefill.ends is not None:
            prefill.ends.append(min(end, prompt))
        if end < prompt:
            self._open[request_id] = prompt
        else:
            self._open.pop(request_id, None)

    def _record(self, tokens: dict[str, int]) -> None:
        """One batch.layout: rows of a flat batch in the scheduler's order, no padding."""
        lengths = list(tokens.values())
        record(
            "batch.layout",
            layout_id=next(self._layouts),
            sample_order=[self._names.get(r) or names.of_internal(r, self._prefix) for r in tokens],
            offsets=[0, *itertools.accumulate(lengths)][:-1],
            sequence_lengths=lengths,
            padding_side="none",
            packing=True,
            labels=self._labels,
        )


def _resumed(decided: Any) -> Collection[str]:
    """Requests that a SchedulerOutput takes up again after preemption: their cache was given away."""
    resumed: Collection[str] = getattr(decided.scheduled_cached_reqs, "resumed_req_ids", ())
    return resumed
