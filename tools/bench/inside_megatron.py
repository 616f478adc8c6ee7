"""Megatron-core as a job to be timed: one CPU rank that scores a batch, learns from it and steps."""

import sys
from pathlib import Path
from typing import Any

from interleaved import Clock, Side, processor_seconds

TESTS = Path(__file__).resolve().parents[2] / "tests" / "engines"
PROMPT, PAD, MICRO_BATCH = 32, 0, 4
_RECORDING = ("batch", "values", "saw_logits", "settle")


class Training:
    """One rank. A pass is one optimiser step over `samples` responses of `tokens` tokens each, scored first."""

    def __init__(self, folder: Path, scratch: Path, samples: int, tokens: int) -> None:
        sys.path.insert(0, str(TESTS))
        import megatron_model as engine
        from megatron.core import __version__

        self.version = str(__version__)
        engine.start(0, 1, scratch / "store")
        self._engine: Any = engine
        self.model: Any = engine.build(folder)
        self._learner = engine.Learner(self.model)
        self.samples, self.tokens = samples, 2 * samples * tokens
        rows = [
            ([(7 * i + j) % 250 for j in range(PROMPT)], [(11 * i + 3 * j) % 250 for j in range(tokens)])
            for i in range(samples)
        ]
        self._parts = [rows[at : at + MICRO_BATCH] for at in range(0, samples, MICRO_BATCH)]
        self._watch: Any = None
        self.clock = Clock()

    def attach(self) -> dict[str, float]:
        """Watches the model from now on when `on`; returns the processor seconds of what is done once.

        `attach`: settings, collectives and contracts. `weights`: the digest of what the job holds, as at every publish.
        """
        import rlk_ledger
        from rlk_ledger.integrations import megatron
        from rlk_ledger_sdk.integrations.megatron.scoring import Scoring

        def attached() -> None:
            self._watch = megatron.attach(self.model, "training-0")

        with rlk_ledger.scope(step=0):
            spent = {"attach": processor_seconds(attached)}
            spent["weights"] = processor_seconds(lambda: self._watch.published("v0"))
        for name in _RECORDING:
            setattr(Scoring, name, self.clock.inside(getattr(Scoring, name)))
        return spent

    @property
    def off(self) -> Side:
        """The job as it is without a recorder."""
        return Side(lambda: None, self._step)

    @property
    def on(self) -> Side:
        """The same job with both of its passes recorded."""
        return Side(lambda: None, self._recorded_step)

    def _batches(self) -> list[Any]:
        return [self._engine.pad([p for p, _ in part], [r for _, r in part], PAD) for part in self._parts]

    def _step(self) -> None:
        for batch in self._batches():
            self._engine.score(self.model, batch)
        for batch in self._batches():
            self._learner.backward(batch, [1.0] * len(batch.prompts))
        self._learner.step()

    def _recorded_step(self) -> None:
        for pass_id in ("logprob", "train"):
            follow = pass_id == "logprob"
            with self._watch.scoring(pass_id, weight_version="v0", values_follow=follow) as scored:
                for at, batch in enumerate(self._batches()):
                    names = [f"{at}-{i}" for i in range(len(batch.prompts))]
                    masks = [[1] * size for size in batch.responses]
                    scored.batch(names, batch.rows, batch.responses, masks, padded_to=batch.ids.shape[1])
                    if follow:
                        scored.values(self._engine.score(self.model, batch))
                    else:
                        self._learner.backward(batch, [1.0] * len(batch.prompts))
        self._learner.step()
