"""Listens to `generate()` of one live model: every call becomes a `Generation`, whatever the caller asked it to return.

The last logits processor of a call is ours: it is handed the final scores [B, V] of a step together with the tokens
chosen so far, so the value of each chosen token is gathered one step later and nothing larger than one step is kept.
It returns the scores it was given. Beam search and assisted decoding reorder rows between steps: their calls have no
values.
"""

import sys
from collections.abc import Callable
from typing import Any

from rlk_ledger_sdk.guard import guarded
from rlk_ledger_sdk.integrations.torch import selected_logprobs
from rlk_ledger_sdk.integrations.transformers.generation import Drawn, Generation, assemble, drawn_from
from rlk_ledger_sdk.integrations.transformers.numerics import unwrapped


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
    """Wraps `generate` of one model instance until `detach()`; `heard` is told each Generation."""

    def __init__(self, model: Any, heard: Callable[[Generation], None], mode: str = "processed") -> None:
        self._model, self._heard, self._mode = unwrapped(model), heard, mode
        self._tapes: list[_Tape] = []
        self._generate = self._model.generate
        self._processors = self._model._get_logits_processor
        self._model.generate = self._listen
        self._model._get_logits_processor = self._extended

    def detach(self) -> None:
        """Puts the model's own methods back; a second call does nothing."""
        for name in ("generate", "_get_logits_processor"):
            self._model.__dict__.pop(name, None)

    def _listen(self, *args: Any, **kwargs: Any) -> Any:
        tape = _Tape(self._mode == "raw")
        self._tapes.append(tape)
        try:
            output = self._generate(*args, **kwargs)
        finally:
            self._tapes.remove(tape)
        with guarded("transformers generate()"):
            mask = kwargs.get("attention_mask", tape.attention_mask)
            self._tell(tape, output, mask)
        return output

    def _extended(self, *args: Any, **kwargs: Any) -> Any:
        processors = self._processors(*args, **kwargs)
        if self._tapes:
            with guarded("transformers generate()"):
                self._record_on(self._tapes[-1], processors, args, kwargs)
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
