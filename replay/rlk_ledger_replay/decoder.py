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

from rlk_ledger_kernels.decision import Decision
from rlk_ledger_kernels.errors import ContractError, OperandError
from rlk_ledger_kernels.ops.attention.plan import DECODE_TILE, PREFILL_TILE
from rlk_ledger_kernels.parallel.mesh import Mesh, simulated_mesh
from rlk_ledger_kernels.probe import Admission, admit
from rlk_ledger_kernels.request import AUTO
from rlk_ledger_replay.checkpoint import Checkpoint, checked_tensors, load_checkpoint, parse_config
from rlk_ledger_replay.experts import Routes
from rlk_ledger_replay.layout import Layout, check_layout
from rlk_ledger_replay.network import Network, with_row_tiles
from rlk_ledger_replay.numerics import Numerics
from rlk_ledger_replay.operators import Operators, bind_operators
from rlk_ledger_replay.padding import token_spans
from rlk_ledger_replay.routed import Routed, joined
from rlk_ledger_replay.session import Sample, Session, Span
from rlk_ledger_replay.shapes import shapes_in_use

TokenIds: TypeAlias = "Sequence[int] | torch.Tensor"

ROWS_PER_PASS = 1024
ROWS_PER_DECODE = 8192
"""Cached rows of a batch that is prefilled (small keeps activations in cache) or decoded (large has more samples to a
step). Both bound memory and change no bit."""


class Decoder:
    """A decoder of the Llama / Mistral / Qwen2 / Qwen3 / Qwen3-MoE family under declared numerics and one layout.

    Scoring leaves weights untouched. decisions: which backend runs each operator, for the caller to record; so are
    `operators.provenance` and `collectives`.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        numerics: Numerics | None = None,
        backend: str = AUTO,
        device: str = "cpu",
        layout: Layout | None = None,
        mesh: Mesh | None = None,
    ) -> None:
        """Bind a checked checkpoint to numerics; packing and the probe happen at the first score.

        backend: `auto`, or a name for every operator that has such a backend. device: where the weights are moved.
        layout: how ranks share the model; no layout changes a bit. mesh: where those ranks are; all in this process
        by default. Every process of a mesh makes the same calls, and each gets all scores.
        Raises ContractError for a layout that would change bits or a backend that promises none, DecisionError when
        nothing can run.
        """
        self.checkpoint = checkpoint
        self.numerics = numerics or Numerics()
        self.layout = layout or Layout()
        self.mesh = mesh or simulated_mesh(self.layout.tp, self.layout.cp)
        self.device = device
        check_layout(self.layout, checkpoint.config, self.numerics)
        if (self.mesh.tp.size, self.mesh.cp.size) != (self.layout.tp, self.layout.cp):
            raise ContractError(
                f"the mesh has tp {self.mesh.tp.size} x cp {self.mesh.cp.size} ranks, the layout "
                f"{self.layout.tp} x {self.layout.cp}; make both alike"
            )
        self._backend = backend
        self.operators: Operators = bind_operators(checkpoint.config, self.numerics, self.layout, backend, device)
        self._networks: dict[tuple[int, ...], Network] = {}

    @classmethod
    def load(cls, path: str | Path, numerics: Numerics | None = None, **chosen: Any) -> Decoder:
        """Read a Hugging Face folder (config.json, *.safetensors); raises CheckpointError. chosen: as of the class."""
        return cls(load_checkpoint(path), numerics, **chosen)

    @classmethod
    def from_tensors(
        cls,
        config: Mapping[str, Any],
        tensors: Mapping[str, torch.Tensor],
        numerics: Numerics | None = None,
        **chosen: Any,
    ) -> Decoder:
        """Use tensors already in memory (and digested), under Hugging Face names; `config` as in config.json.

        Raises CheckpointError. Tensors are kept by reference and must not be written to afterwards.
        """
        return cls(checked_tensors(parse_config(config, "config"), tensors), numerics, **chosen)

    def with_numerics(self, numerics: Numerics) -> Decoder:
        """A decoder over the same tensors, backend and layout under other numerics."""
        return Decoder(self.checkpoint, numerics, self._backend, self.device, self.layout, self.mesh)

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """Which backend runs each operator, and why."""
        return self.operators.decisions

    @property
    def collectives(self) -> tuple[dict[str, Any], ...]:
        """What ranks exchanged so far: the fields of one `collective.observed` event each."""
        return (*self.mesh.tp.observed(), *self.mesh.cp.observed())

    def admission(self) -> Admission:
        """What the probe allows on the current thread count; raises InvarianceError when nothing is allowed."""
        if self.operators.on_blas and self.device == "cpu":
            return admit(shapes_in_use(self.checkpoint.config, self.numerics, self.layout), self.numerics.schedule)
        schedule = self.numerics.schedule
        decided = self.operators.linear.decision.actual
        return Admission(
            threads=torch.get_num_threads(),
            row_tiles=schedule.row_tiles,
            q_tiles=(min(DECODE_TILE, schedule.kv_block), min(PREFILL_TILE, schedule.kv_block)),
            reason=f"not probed: {decided} on {self.device} runs no product of the host's BLAS",
        )

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

    def prefill_padded(self, ids_BT: torch.Tensor, mask_BT: torch.Tensor, starts: Sequence[int]) -> torch.Tensor:
        """Score a rectangular batch, padded on either side or both; the bits are those without padding.

        ids_BT: int64 [B, T]; ids under padding are not read. mask_BT: 1 at tokens, one run in each row. starts: length
        of each prompt, padding not counted. Returns float32 [B, T]: the score of the token at each place, NaN where a
        place is prompt or padding. Raises OperandError.
        """
        spans = token_spans(ids_BT, mask_BT, len(starts))
        samples = [(ids_BT[row, first:end], start) for row, ((first, end), start) in enumerate(zip(spans, starts))]
        scores_BT = torch.full(ids_BT.shape, float("nan"), dtype=torch.float32)
        for row, scores in enumerate(self.prefill_logprobs_batch(samples)):
            end = spans[row][1]
            scores_BT[row, end - len(scores) : end] = scores
        return scores_BT

    def prefill_routed(
        self, samples: Sequence[tuple[TokenIds, int]], given: Sequence[torch.Tensor] | None = None
    ) -> Routed:
        """Score samples of a mixture-of-experts model along given routes, or with its own and tell them.

        given: per sample int64 [T - 1, sparse layers, top_k], as rollouts record them; -1 where nothing was recorded.
        Raises OperandError for a dense model, a layout with cp above 1, or routes of another shape.
        """
        if self.checkpoint.config.experts is None or self.layout.cp > 1:
            raise OperandError("routes exist in a mixture-of-experts model, and are replayed on one cp rank")
        layers = self.checkpoint.config.experts.layers
        admission = self.admission()
        network = self.network(admission)
        total = Routed([], [], 0, 0)
        first = 0
        checked = [self._checked(index, ids, start) for index, (ids, start) in enumerate(samples)]
        for group in _groups(checked, ROWS_PER_PASS):
            routes = Routes()
            if given is not None:
                routes = Routes(given=joined(given[first : first + len(group)], group, layers))
            session = Session(network, admission, group, routes)
            session.prefill()
            total.add(session.scores(), routes, layers, [sample.inputs for sample in group])
            first += len(group)
        return total

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
        network = self.network(admission)
        checked = [self._checked(index, ids, start) for index, (ids, start) in enumerate(samples)]
        for group in _groups(checked, rows):
            yield Session(network, admission, group)

    def network(self, admission: Admission) -> Network:
        """The packed network at the row counts the probe admitted; made once for each."""
        tiles = admission.row_tiles
        if tiles not in self._networks:
            with torch.no_grad():
                numerics = with_row_tiles(self.numerics, tiles)
                self._networks[tiles] = Network(
                    self.checkpoint, numerics, self.operators, self.layout, self.mesh, self.device
                )
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
