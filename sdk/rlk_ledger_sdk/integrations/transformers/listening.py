"""Listens to `generate()` of one live model: every call becomes a `Generation`, whatever the caller asked it to return.

The last logits processor of a call is ours: it is handed the final scores [B, V] of a step together with the tokens
chosen so far, so the value of each chosen token is gathered one step later and nothing larger than one step is kept.
It returns the scores it was given. Beam search and assisted decoding reorder rows between steps: their calls have no
values.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rlk_ledger_sdk.guard import guarded
from rlk_ledger_sdk.integrations.torch import selected_logprobs
from rlk_ledger_sdk.integrations.transformers.generation import Drawn, Generation, assemble, drawn_from
from rlk_ledger_sdk.integrations.transformers.numerics import unwrapped

_METHODS = ("generate", "_get_logits_processor")
_lock = threading.Lock()
"""Held while a model's listeners change."""


class _Tape:
    """The values of one call: a logits processor that changes nothing."""

    def __init__(self, raw: bool) -> None:
        self.raw = raw
        self.prompt_width: int | None = None
        self.values: list[Any] = []
        self.config: Any = None
        self.drawn = Drawn()
        self.attention_mask: Any = None
        self.broken = False
        self._scores: Any = None

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        if not self.broken:
            self.broken = True
            with guarded("transformers generate()"):
                self._take(input_ids, scores)
                self.broken = False
        return scores

    def _take(self, input_ids: Any, scores: Any) -> None:
        if self._scores is not None:
            self._gather(input_ids[:, -1])
        self._scores = scores.clone() if self.raw else scores  # a later processor may work in place

    def _gather(self, chosen: Any) -> None:
        self.values.append(selected_logprobs(self._scores, chosen))

    def finish(self, sequences: Any) -> Any:
        """Values [B, N] of the finished call, or None where they cannot be told apart."""
        taken = sequences.shape[1] - (self.prompt_width or 0)
        if self._scores is None or self.broken or len(self.values) + 1 != taken:
            return None
        if self._scores.shape[0] != sequences.shape[0]:
            return None
        self._gather(sequences[:, -1])
        self._scores = None
        return sys.modules["torch"].stack(self.values, 1)


class _Hub:
    """The one wrapping of a model instance, whoever listens to it: calls go on to the model's own methods.

    A copy of a wrapped model (deepcopy, pickle) calls the copy's methods and has no listeners.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._before = {name: vars(model).get(name) for name in _METHODS}
        self._begin()
        for name in _METHODS:
            self._own(name)  # raises AttributeError for a model that cannot be wrapped
        model.generate, model._get_logits_processor = self._generate, self._get_logits_processor

    def _begin(self) -> None:
        self._here = threading.local()
        self.listeners: tuple[Listener, ...] = ()

    def __getstate__(self) -> dict[str, Any]:
        return {"_model": self._model, "_before": self._before}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._begin()

    def leave(self) -> None:
        """Puts back what was there, unless another wrapper stands in front of this one: it then passes calls on."""
        held = vars(self._model)
        if all(getattr(held.get(name), "__self__", None) is self for name in _METHODS):
            for name, method in self._before.items():
                if method is None:
                    held.pop(name)
                else:
                    setattr(self._model, name, method)

    def _own(self, name: str) -> Any:
        if self._before[name] is not None:
            return self._before[name]
        method = getattr(type(self._model), name, None)
        return self._model.__getattr__(name) if method is None else method.__get__(self._model)

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        tapes = [(listener, _Tape(listener.mode == "raw")) for listener in self.listeners if listener.hears_this()]
        outer, self._here.tapes = getattr(self._here, "tapes", ()), [tape for _, tape in tapes]
        try:
            output = self._own("generate")(*args, **kwargs)
        finally:
            self._here.tapes = outer
        for listener, tape in tapes:
            with guarded("transformers generate()"):
                listener.tell(tape, output, kwargs.get("attention_mask", tape.attention_mask))
        return output

    def _get_logits_processor(self, *args: Any, **kwargs: Any) -> Any:
        processors = self._own("_get_logits_processor")(*args, **kwargs)
        tapes = getattr(self._here, "tapes", ())
        if tapes:
            with guarded("transformers generate()"):
                config = kwargs.get("generation_config", args[0] if args else None)
                drawn = drawn_from(config, [one for one in processors if type(one) is not _Tape])
                for tape in tapes:
                    tape.config, tape.drawn = config, drawn
                    tape.prompt_width = kwargs.get("input_ids_seq_length", args[1] if len(args) > 1 else None)
                    tape.attention_mask = (kwargs.get("model_kwargs") or {}).get("attention_mask")
                    if (getattr(config, "num_beams", None) or 1) == 1:
                        processors.insert(0 if tape.raw else len(processors), tape)
        return processors


class Listener:
    """Wraps `generate` of one model instance until `detach()`; `heard` is told each Generation.

    `thread` is the one thread (`threading.get_ident()`) whose calls are heard; without it those of all are. Listeners
    of one model may come off in any order; the last one puts the model's own methods back.
    """

    def __init__(
        self, model: Any, heard: Callable[[Generation], None], mode: str = "processed", thread: int | None = None
    ) -> None:
        self.mode, self._heard, self._thread = mode, heard, thread
        inner = unwrapped(model)
        with _lock:
            hub = getattr(vars(inner).get("generate"), "__self__", None)
            self._hub: _Hub | None = hub if type(hub) is _Hub and hub.listeners else _Hub(inner)
            self._hub.listeners = (*self._hub.listeners, self)

    def detach(self) -> None:
        """Stops listening; a second call does nothing."""
        with _lock:
            hub, self._hub = self._hub, None
            if hub is not None:
                hub.listeners = tuple(one for one in hub.listeners if one is not self)
                if not hub.listeners:
                    hub.leave()

    def hears_this(self) -> bool:
        """Whether calls of the running thread are heard."""
        return self._thread in (None, threading.get_ident())

    def tell(self, tape: _Tape, output: Any, attention_mask: Any) -> None:
        """Tells one finished call."""
        sequences = output if hasattr(output, "detach") else output.sequences
        if tape.config is None or tape.prompt_width is None:
            return
        values = tape.finish(sequences)
        self._heard(assemble(sequences, values, tape.config, tape.prompt_width, attention_mask, tape.drawn, self.mode))


@contextmanager
def listening(model: Any, mode: str = "processed") -> Iterator[list[Generation]]:
    """The Generations of every `generate` this thread calls in the block, in a list that fills.

    It stays empty where a model cannot be wrapped.
    """
    heard: list[Generation] = []
    listener = None
    with guarded("transformers generate()"):
        listener = Listener(model, heard.append, mode, threading.get_ident())
    try:
        yield heard
    finally:
        if listener is not None:
            listener.detach()
