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


class Listener:
    """Wraps `generate` of one model instance until `detach()`; `heard` is told each Generation.

    Calls of several threads are told apart. Listeners of one model come off in the reverse of the order they came on.
    """

    def __init__(self, model: Any, heard: Callable[[Generation], None], mode: str = "processed") -> None:
        self._model, self._heard, self._mode = unwrapped(model), heard, mode
        self._here = threading.local()
        self._generate = self._model.generate
        self._processors = self._model._get_logits_processor
        self._before = {name: vars(self._model).get(name) for name in _METHODS}
        self._model.generate, self._model._get_logits_processor = self._listen, self._extended

    def detach(self) -> None:
        """Puts back what was there; a second call does nothing."""
        before, self._before = self._before, {}
        for name, method in before.items():
            if method is None:
                vars(self._model).pop(name, None)
            else:
                setattr(self._model, name, method)

    def _listen(self, *args: Any, **kwargs: Any) -> Any:
        tape = _Tape(self._mode == "raw")
        outer, self._here.tape = getattr(self._here, "tape", None), tape
        try:
            output = self._generate(*args, **kwargs)
        finally:
            self._here.tape = outer
        with guarded("transformers generate()"):
            self._tell(tape, output, kwargs.get("attention_mask", tape.attention_mask))
        return output

    def _extended(self, *args: Any, **kwargs: Any) -> Any:
        processors = self._processors(*args, **kwargs)
        tape = getattr(self._here, "tape", None)
        if tape is not None:
            with guarded("transformers generate()"):
                self._record_on(tape, processors, args, kwargs)
        return processors

    def _record_on(self, tape: _Tape, processors: Any, args: Any, kwargs: Any) -> None:
        config = kwargs.get("generation_config", args[0] if args else None)
        tape.config, tape.drawn = config, drawn_from(config, processors)
        tape.prompt_width = kwargs.get("input_ids_seq_length", args[1] if len(args) > 1 else None)
        tape.attention_mask = (kwargs.get("model_kwargs") or {}).get("attention_mask")
        if (getattr(config, "num_beams", None) or 1) == 1:
            processors.insert(0 if tape.raw else len(processors), tape)

    def _tell(self, tape: _Tape, output: Any, attention_mask: Any) -> None:
        sequences = output if hasattr(output, "detach") else output.sequences
        if tape.config is None or tape.prompt_width is None:
            return
        values = tape.finish(sequences)
        self._heard(assemble(sequences, values, tape.config, tape.prompt_width, attention_mask, tape.drawn, self._mode))


@contextmanager
def listening(model: Any, mode: str = "processed") -> Iterator[list[Generation]]:
    """The Generations of every `generate` in the block, in a list that fills; none where a model cannot be wrapped."""
    heard: list[Generation] = []
    listener = None
    with guarded("transformers generate()"):
        listener = Listener(model, heard.append, mode)
    try:
        yield heard
    finally:
        if listener is not None:
            listener.detach()
