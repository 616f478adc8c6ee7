"""The reference decoder as a scorer in a process of its own: the same numbers as in the replay, isolated.

Run as `python -m rlk_ledger_replay.scorers.reference JOB ANSWER`. It is batch-invariant, so layouts change no bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rlk_ledger_kernels.probe import using_threads
from rlk_ledger_replay.checkpoint import load_checkpoint
from rlk_ledger_replay.decoder import Decoder
from rlk_ledger_replay.numerics import Numerics
from rlk_ledger_replay.scorers.held import held_guard
from rlk_ledger_replay.scorers.protocol import Guard, Job, Pass, Statement, plain_knobs
from rlk_ledger_replay.scorers.serve import main


class ReferenceEngine:
    """The deterministic decoder over one checkpoint."""

    def __init__(self, job: Job) -> None:
        """Loads the checkpoint; raises CheckpointError."""
        self.job = job
        self.decoder = Decoder(load_checkpoint(job.folder))

    def statement(self) -> Statement:
        """What runs."""
        held = held_guard(self.decoder.checkpoint.tensors, self.job, "the tensors the decoder packs")
        how = "the reference decoder, batch-invariant"
        return Statement(
            engine="reference",
            version=version("rlk-ledger"),
            device="cpu",
            dtype=self.job.dtype,
            how={"prefill": how, "decode": how},
            knobs=plain_knobs(self._knobs()),
            guards=(held,),
        )

    def _knobs(self) -> dict[str, tuple[Any, Any]]:
        head = self.job.head or self.job.dtype
        return {
            "threads": (self.job.threads, torch.get_num_threads()),
            "head_dtype": (self.job.head, head),
            "logits_dtype": (self.job.logits, self.job.logits or head),
        }

    def score(self, task: Pass) -> tuple[list[NDArray[np.float32]], list[Guard]]:
        """Scores every sequence of the layout, those of one temperature together."""
        values = [np.full(one.scored, np.nan, dtype=np.float32) for one in self.job.sequences]
        wanted = sorted({index for batch in task.layout.batches for index in batch})
        by_temperature: dict[float, list[int]] = {}
        for index in wanted:
            by_temperature.setdefault(self.job.sequences[index].temperature, []).append(index)
        with using_threads(self.job.threads):
            for temperature, members in by_temperature.items():
                for index, row in zip(members, self._run(task, temperature, members)):
                    values[index] = row
        return values, []

    def _run(self, task: Pass, temperature: float, members: Sequence[int]) -> list[NDArray[np.float32]]:
        named: Any = {"compute": self.job.dtype, "lm_head": self.job.head, "logits": self.job.logits}
        decoder = self.decoder.with_numerics(Numerics(**named, temperature=temperature, logprob_mode=self.job.mode))
        run = decoder.prefill_logprobs_batch if task.path == "prefill" else decoder.decode_logprobs_batch
        sequences = [self.job.sequences[index] for index in members]
        return [row.numpy() for row in run([(one.tokens, one.start) for one in sequences])]


if __name__ == "__main__":
    raise SystemExit(main(ReferenceEngine, "rlk_ledger_replay"))
