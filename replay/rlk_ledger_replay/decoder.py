"""The reference decoder: log-probabilities of recorded tokens, along the training path or the rollout path.

`prefill_logprobs` scores a whole sequence in one pass, as a trainer does; `decode_logprobs` fills the prompt and
then feeds one token at a time over a KV cache, as a rollout engine does. In the same numerics they return the
same bits, alone or in any batch, chunked anywhere, on one thread or several. That identity is the self-check of
replay: a difference between the two paths can then only come from an engine.

A sample is (token_ids, start): `start` is the length of the prompt, and tokens start, start + 1, ... are scored,
each given all tokens before it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch

from rlk_ledger_kernels.errors import OperandError
from rlk_ledger_kernels.probe import Admission, admit
from rlk_ledger_kernels.registry import Decision, resolve
from rlk_ledger_replay.checkpoint import Checkpoint, checked_tensors, load_checkpoint, parse_config
from rlk_ledger_replay.network import Network, shapes_in_use, with_row_tiles
from rlk_ledger_replay.numerics import Numerics
from rlk_ledger_replay.session import Sample, Session, Span

TokenIds: TypeAlias = "Sequence[int] | torch.Tensor"

ROWS_PER_PASS = 1024
ROWS_PER_DECODE = 8192
"""Cached rows of a batch that is prefilled (small keeps activations in cache) or decoded (large has more samples to a
step). Both bound memory and change no bit."""

_OPERATORS = ("embedding", "rms_norm", "linear", "rope", "attention", "swiglu", "selected_logprob")


class Decoder:
    """A decoder of the Llama / Mistral / Qwen2 / Qwen3 family under declared numerics.

    Scoring leaves weights untouched. decisions: which backend runs each operator, for the caller to record.
    """

    def __init__(self, checkpoint: Checkpoint, numerics: Numerics | None = None) -> None:
        """Bind a checked checkpoint to numerics; packing and the probe happen at the first score."""
        self.checkpoint = checkpoint
        self.numerics = numerics or Numerics()
        self.decisions: tuple[Decision, ...] = tuple(resolve(operator) for operator in _OPERATORS)
        self._networks: dict[tuple[int, ...], Network] = {}

    @classmethod
    def load(cls, path: str | Path, numerics: Numerics | None = None) -> Decoder:
        """Read a Hugging Face folder (config.json, *.safetensors); raises CheckpointError."""
        return cls(load_checkpoint(path), numerics)

    @classmethod
    def from_tensors(
        cls, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], numerics: Numerics | None = None
    ) -> Decoder:
        """Use tensors already in memory (and digested), under Hugging Face names; `config` as in config.json.

        Raises CheckpointError. Tensors are kept by reference and must not be written to afterwards.
        """
        return cls(checked_tensors(parse_config(config, "config"), tensors), numerics)

    def with_numerics(self, numerics: Numerics) -> Decoder:
        """A decoder over the same tensors under other numerics."""
        return Decoder(self.checkpoint, numerics)

    def admission(self) -> Admission:
        """What the probe allows on the current thread count; raises InvarianceError when nothing is allowed."""
        return admit(shapes_in_use(self.checkpoint, self.numerics), self.numerics.schedule)

    def prefill_logprobs(self, token_ids: TokenIds, start: int) -> torch.Tensor:
        """Score token_ids[start:] in one pass; float32 [T - start], nats. Raises OperandError."""
        return self.prefill_logprobs_batch([(token_ids, start)])[0]

    def prefill_logprobs_batch(self, samples: Sequence[tuple[TokenIds, int]]) -> list[torch.Tensor]:
        """Score many samples, packed without padding; the bits are those of one at a time. Raises OperandError."""
        scores: list[torch.Tensor] = []
        for session in self._sessions(samples, ROWS_PER_PASS):
            session.prefill()
            scores += session.scores()
        return scores

    def decode_logprobs(self, token_ids: TokenIds, start: int) -> torch.Tensor:
        """Score token_ids[start:] one token at a time over a KV cache; float32 [T - start], nats."""
        return self.decode_logprobs_batch([(token_ids, start)])[0]

    def decode_logprobs_batch(self, samples: Sequence[tuple[TokenIds, int]]) -> list[torch.Tensor]:
        """Decode many samples side by side, each for as long as it lasts; the bits are those of one at a time."""
        scores: list[torch.Tensor] = []
        for session in self._sessions(samples, ROWS_PER_DECODE):
            session.decode()
            scores += session.scores()
        return scores

    def chunked(self, token_ids: TokenIds, start: int, boundaries: Sequence[int]) -> torch.Tensor:
        """Score token_ids[start:] by a prefill cut at `boundaries`; float32 [T - start], nats.

        boundaries: rising positions in 1..T-2; each begins a chunk that reads earlier keys from the cache.
        Raises OperandError when they do not rise or lie outside.
        """
        (session,) = self._sessions([(token_ids, start)], ROWS_PER_PASS)
        inputs = len(token_ids) - 1
        edges = [0, *boundaries, inputs]
        if any(later <= earlier for earlier, later in itertools.pairwise(edges)):
            raise OperandError(f"boundaries {list(boundaries)} must rise within 1..{inputs - 1}")
        for first, end in itertools.pairwise(edges):
            session.feed([Span(0, first, end - first)])
        return session.scores()[0]

    def _sessions(self, samples: Sequence[tuple[TokenIds, int]], rows: int) -> Iterator[Session]:
        """One session per group of samples of at most about `rows` rows together."""
        admission = self.admission()
        network = self._network(admission)
        checked = [self._checked(index, ids, start) for index, (ids, start) in enumerate(samples)]
        for group in _groups(checked, rows):
            yield Session(network, admission, group)

    def _network(self, admission: Admission) -> Network:
        tiles = admission.row_tiles
        if tiles not in self._networks:
            with torch.no_grad():
                self._networks[tiles] = Network(self.checkpoint, with_row_tiles(self.numerics, tiles))
        return self._networks[tiles]

    def _checked(self, index: int, token_ids: TokenIds, start: int) -> Sample:
        try:
            ids_T = torch.as_tensor(token_ids)
        except (TypeError, ValueError, RuntimeError) as error:
            raise OperandError(f"sample {index}: token_ids is not a list of integers ({error})") from None
        if ids_T.dim() != 1 or ids_T.is_floating_point() or ids_T.is_complex() or ids_T.dtype == torch.bool:
            raise OperandError(f"sample {index}: token_ids is {ids_T.dtype} {list(ids_T.shape)}, expected integers [T]")
        if not hasattr(start, "__index__"):
            raise OperandError(f"sample {index}: start is {start!r}, expected the length of the prompt")
        length, limit, vocabulary = ids_T.numel(), self.checkpoint.config.positions, self.checkpoint.config.vocabulary
        if not 1 <= start < length:
            raise OperandError(f"sample {index}: start is {start} of {length} tokens; the prompt needs 1..{length - 1}")
        if length > limit:
            raise OperandError(f"sample {index}: {length} tokens exceed the model's {limit} positions")
        outside = ((ids_T < 0) | (ids_T >= vocabulary)).nonzero()
        if outside.numel():
            at = int(outside[0, 0])
            raise OperandError(
                f"sample {index}: token {int(ids_T[at])} at position {at} is outside 0..{vocabulary - 1}"
            )
        return Sample(ids_T.to(torch.int64), int(start))


def _groups(samples: Sequence[Sample], rows: int) -> Iterator[list[Sample]]:
    """Consecutive samples of at most `rows` rows together (one longer sample is its own group)."""
    group: list[Sample] = []
    taken = 0
    for sample in samples:
        if group and taken + sample.inputs > rows:
            yield group
            group, taken = [], 0
        group.append(sample)
        taken += sample.inputs
    if group:
        yield group
