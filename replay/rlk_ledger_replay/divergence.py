"""Boundaries of the reference decoder itself, as the same events an engine's hooks record.

The decoder is only listened to: methods of one packed network are shadowed for the length of one pass by functions that
call them and look at what they return. Parts that run inside one call (q, k, v, norms of heads, rotation, gate, up,
SwiGLU) are not seen and stay unknown.

Dimensions in names: P packed rows (padded), N packed rows, H hidden size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from rlk_ledger_replay.decoder import Decoder, TokenIds
from rlk_ledger_replay.network import Network, Stream
from rlk_ledger_replay.session import Sample, Session
from rlk_ledger_schemas.errors import UsageError
from rlk_ledger_schemas.fingerprints import sum64x2_digest
from rlk_ledger_sdk.weights import sum64x2

Seen = tuple[str, torch.Tensor]


def reference_boundaries(
    decoder: Decoder, samples: Mapping[str, TokenIds], pass_id: str = "reference", layout_id: str = "reference"
) -> list[tuple[str, dict[str, Any]]]:
    """(event type, fields) of what the decoder hands on at its boundaries while it scores these samples in one pass.

    samples: sample id -> the token ids of prompt and response (the last one is scored, not fed). The first event is the
    `batch.layout` of the pass. Raises UsageError for a decoder of several ranks.
    """
    layout = decoder.layout
    if layout.tp > 1 or layout.cp > 1:
        raise UsageError("boundaries of the reference are captured on one rank; choose Layout() for this decoder.")
    admission = decoder.admission()
    network = decoder.network(admission)
    checked = [Sample(torch.as_tensor(ids).to(torch.int64), 1) for ids in samples.values()]
    session = Session(network, admission, checked)
    rows = sum(sample.inputs for sample in checked)
    seen: list[Seen] = []
    with listening(network, seen):
        session.prefill()
    told = {
        "layout_id": layout_id,
        "sample_order": tuple(samples),
        "sequence_lengths": [sample.inputs for sample in checked],
        "packing": True,
    }
    fields = {"pass_id": pass_id, "layout_id": layout_id, "stage": "output"}
    return [
        ("batch.layout", told),
        *(
            ("boundary.captured", {**fields, **_event(name, order, x_PH[:rows])})
            for order, (name, x_PH) in enumerate(seen)
        ),
    ]


def _event(name: str, order: int, x_NH: torch.Tensor) -> dict[str, Any]:
    held = x_NH.detach().contiguous()
    parts = name.split(".")
    return {
        "boundary": name,
        "order": order,
        "layer": int(parts[1]) if parts[0] == "layers" else None,
        "digest": sum64x2_digest([sum64x2(name, held)]),
        "dtype": str(held.dtype).removeprefix("torch."),
        "shape": list(held.shape),
        "values": held.float().reshape(-1).cpu().numpy(),
    }


@contextlib.contextmanager
def listening(network: Network, seen: list[Seen]) -> Iterator[None]:
    """Appends (part of the chain, tensor) to `seen` for every part a pass of this network hands on, in order."""
    chain = _Chain(seen)
    names = ("_embed", "_attend", "_norm", "_row_parallel", "_add", "_mlp")
    for name in names:
        setattr(network, name, chain.around(name, getattr(network, name)))
    try:
        yield
    finally:
        for name in names:
            delattr(network, name)


class _Chain:
    """Names what the methods of a network return, by the order in which a pass calls them."""

    def __init__(self, seen: list[Seen]) -> None:
        self._seen = seen
        self._parts: Iterator[tuple[str, str]] = iter(())
        self._layer, self._inside = -1, 0

    def around(self, method: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def heard(*args: Any, **kwargs: Any) -> Any:
            self._enter(method)
            self._inside += method == "_mlp"
            found = call(*args, **kwargs)
            self._inside -= method == "_mlp"
            self._hear(method, found)
            return found

        return heard

    def _enter(self, method: str) -> None:
        """Attention opens a layer: what its own norm and its mixing hand on are heard inside and after it."""
        if method == "_attend":
            self._layer += 1
            self._parts = iter(_LAYER)
        elif method == "_embed":
            self._layer = -1

    def _hear(self, method: str, found: Any) -> None:
        if self._inside:  # products inside the MLP: it is heard as a whole
            return
        if method == "_embed":
            self._seen.append(("embedding", _whole(found)))
            return
        expected = next(self._parts, None)
        if expected is None:
            if method == "_norm":
                self._seen.append(("final_norm", _whole(found)))
            return
        if expected[0] != method:
            raise AssertionError(f"layer {self._layer} called {method} where {expected[0]} was expected")
        whole = found[0][0] if method == "_attend" else _whole(found)
        self._seen.append((f"layers.{self._layer}.{expected[1]}", whole))


_LAYER: Sequence[tuple[str, str]] = (
    ("_norm", "input_norm"),
    ("_attend", "attention"),
    ("_row_parallel", "o_proj"),
    ("_add", "attention_residual"),
    ("_norm", "mlp_norm"),
    ("_mlp", "down"),
    ("_add", "mlp_residual"),
)


def _whole(stream: Stream) -> torch.Tensor:
    return stream[0]
