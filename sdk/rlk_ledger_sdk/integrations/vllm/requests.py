"""Requests in flight: what was asked, and outputs that arrive in pieces."""

import copy
from collections.abc import Iterator
from typing import Any

from rlk_ledger_sdk.integrations.vllm.samples import Request
from rlk_ledger_sdk.integrations.vllm.values import Sampled, sampled

_DELTA = "DELTA"


class InFlight:
    """Requests by id from the moment they are added until their last completion is finished."""

    def __init__(self) -> None:
        self._requests: dict[str, Request] = {}
        self._partial: dict[tuple[str, int], tuple[list[int], list[float | None] | None]] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request_id: str, request: Request) -> None:
        """Remembers what a request was added with."""
        self._requests[request_id] = request

    def drop(self, request_id: str) -> None:
        """Forgets an aborted request."""
        request = self._requests.pop(request_id, None)
        if request is not None and self._partial:
            for key in [key for key in self._partial if key[0] == request_id]:
                del self._partial[key]

    def finished(self, output: Any) -> Iterator[tuple[Any, Request]]:
        """(completion, request) of every completion that `output` finishes, whole even where it came in deltas.

        Of a request that was never added nothing is known to be whole: it gives none.
        """
        request = self._requests.get(output.request_id)
        if request is None:
            return
        delta = request.params is not None and request.params.output_kind.name == _DELTA
        for completion in output.outputs:
            if delta:
                completion = self._joined(output.request_id, completion)
            if completion is not None and completion.finish_reason is not None:
                yield completion, request
        if output.finished:
            self.drop(output.request_id)

    def unfinished(self, output: Any) -> Iterator[tuple[Any, Request]]:
        """(completion, request) of what had arrived when a request was cut short; `output` is the last that arrived."""
        request = self._requests.get(output.request_id)
        if request is None:
            return
        for completion in output.outputs:
            if completion.finish_reason is None:
                cut = copy.copy(completion)
                cut.finish_reason = "abort"
                parts = self._partial.get((output.request_id, completion.index))
                if parts is not None:
                    cut.token_ids, cut.logprobs = parts[0], None if parts[1] is None else Sampled(parts[1])
                yield cut, request

    def _joined(self, request_id: str, completion: Any) -> Any | None:
        key = (request_id, completion.index)
        tokens, values = self._partial.setdefault(key, ([], None if completion.logprobs is None else []))
        tokens.extend(completion.token_ids)
        if values is not None and completion.logprobs:
            values.extend(sampled(completion.logprobs, completion.token_ids))
        if completion.finish_reason is None:
            return None
        del self._partial[key]
        whole = copy.copy(completion)  # the caller's object stays as the engine made it
        whole.token_ids, whole.logprobs = tokens, None if values is None else Sampled(values)
        return whole
