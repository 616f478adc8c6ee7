"""The shape of a run, as `doctor --estimate` is told it, and events of that shape from the real encoder."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import numpy as np

from rlk_ledger.records import Record, make_record
from rlk_ledger_schemas.errors import UsageError
from rlk_ledger_schemas.events import SCHEMA_VERSION, check_fields, encode
from rlk_ledger_schemas.fingerprints import contract_id, token_digest
from rlk_ledger_sdk.redaction import Redaction

PARTS = ("ids", "rollout", "training", "layouts")
VOCABULARY = 150_000
BATCH = 64
"""Samples one layout event speaks of."""
_SEED = 20260101
_KEY = "0123456789abcdef" * 4  # of a made-up key, to see how long hashed ids are


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """One run. Lengths in tokens, `hours` of duration, `flush` and `checkpoint` periods in seconds (0: none).

    `parts` of what is recorded: `ids` (sample, mask and prompt), `rollout` and `training` (log-probabilities of a
    side), `layouts` (one a batch of 64 samples). `passes` is how often the trainer scores each sample.
    """

    tokens: int = 1_000_000
    response: int = 512
    prompt: int = 256
    group: int = 8
    passes: int = 1
    parts: tuple[str, ...] = PARTS
    redaction: str = "none"
    processes: int = 2
    nodes: int = 1
    hours: float = 1.0
    flush: float = 0.0
    checkpoint: float = 300.0

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> "Workload":
        """The workload of command-line options; raises UsageError for a part that does not exist."""
        parts = tuple(part.strip() for part in str(options["record"]).split(",") if part.strip())
        for part in parts:
            if part not in PARTS:
                raise UsageError(f"--record {part!r} is unknown; choose from {', '.join(PARTS)}, separated by commas.")
        if not parts:
            raise UsageError(f"--record is empty; choose from {', '.join(PARTS)}, separated by commas.")
        fields = {name: value for name, value in options.items() if name != "record"}
        return cls(parts=parts, **fields)

    @property
    def samples(self) -> int:
        """Samples of the whole run."""
        return math.ceil(self.tokens / self.response)


class Maker:
    """Makes the events of `count` samples at a time, as one writer would record them, numbered on."""

    def __init__(self, workload: Workload, run_id: str, writer_id: str) -> None:
        self._work = workload
        self._run_id = run_id
        self._writer_id = writer_id
        self._redaction = Redaction.load(workload.redaction, _KEY)
        self._rng = np.random.default_rng(_SEED)
        self._seq = 0
        self._made = 0
        self._contract = contract_id("logprob", "1", {"mode": "processed", "temperature": 1.0})

    def samples(self, count: int) -> list[Record]:
        """The records of the next `count` samples."""
        return [record for _ in range(count) for record in self._sample()]

    def _sample(self) -> Iterator[Record]:
        work, number = self._work, self._made
        self._made += 1
        name, group = f"{number // BATCH}-{number}", f"g{number // work.group}"
        tokens = self._ids(work.response)
        if "ids" in work.parts:
            if work.prompt and number % work.group == 0:
                yield self._record("prompt.recorded", prompt_id=group, token_ids=self._ids(work.prompt))
            yield self._record(
                "rollout.sample",
                sample_id=name,
                group_id=group,
                prompt_id=group if work.prompt else None,
                response_token_ids=tokens,
                loss_mask=np.ones(work.response, np.uint8),
                weight_spans=[{"version": f"v{number // BATCH}", "start": 0, "end": work.response}],
                sampling={"temperature": 1.0, "top_p": 1.0, "seed": number},
                finish_reason="length",
                reward=float(number % 2),
                engine="rollout-0",
            )
        rollout = -self._rng.exponential(0.6, work.response).astype(np.float32)
        if "rollout" in work.parts:
            yield self._scores(name, "rollout", rollout, None)
        if "training" in work.parts:
            for turn in range(work.passes):
                noise = self._rng.normal(0, 0.02, work.response).astype(np.float32)
                yield self._scores(name, "training", rollout + noise, (f"p{turn}", tokens))
        if "layouts" in work.parts and number % BATCH == BATCH - 1:
            yield self._layout(number)

    def _scores(self, name: str, source: str, values: Any, scored: tuple[str, Any] | None) -> Record:
        extra = {} if scored is None else {"pass_id": scored[0], "token_digest": token_digest(scored[1].tolist())}
        return self._record(
            "logprobs",
            sample_id=name,
            source=source,
            values=values,
            contract_id=self._contract,
            weight_version=f"v{self._made // BATCH}",
            **extra,
        )

    def _layout(self, number: int) -> Record:
        names = [f"{number // BATCH}-{n}" for n in range(number - BATCH + 1, number + 1)]
        lengths = [self._work.prompt + self._work.response] * BATCH
        return self._record(
            "batch.layout",
            layout_id=f"l{number // BATCH}",
            sample_order=names,
            sequence_lengths=lengths,
            padding_side="right",
        )

    def _ids(self, count: int) -> Any:
        """Token ids as skewed as text's: the share of id n falls as 1/n."""
        return np.exp(self._rng.uniform(0, np.log(VOCABULARY), count)).astype(np.int32)

    def _record(self, name: str, **fields: Any) -> Record:
        assigned = {
            "schema_version": SCHEMA_VERSION,
            "seq": self._seq,
            "wall_ns": 1_700_000_000_000_000_000 + 997_000 * self._seq,
            "mono_ns": 1_000_000_000 + 997_000 * self._seq,
            "run_id": self._run_id,
            "writer_id": self._writer_id,
        }
        self._seq += 1
        wire, arrays = check_fields(name, {k: v for k, v in fields.items() if v is not None}, assigned)
        if self._work.redaction != "none":
            arrays = self._redaction.apply(name, wire, arrays)
        return make_record(encode(wire), arrays)
