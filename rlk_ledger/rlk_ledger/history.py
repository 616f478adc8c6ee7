"""A run's recorded facts in memory, as numpy arrays and plain values: what audit, drift and replay read.

Nothing here judges; relations between events are `pairs.py` and `audit/`. Order is (writer, seq): clocks are labels.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rlk_ledger.refusals import Refused, refuse
from rlk_ledger_schemas.arrays import Array
from rlk_ledger_schemas.fingerprints import mask_digest, sha256

if TYPE_CHECKING:
    from rlk_ledger.ledger import Ledger
    from rlk_ledger.tombstones import Pruned

Event = tuple[str, int, dict[str, Any], dict[str, Array]]
Span = tuple[str, int, int]

_REPORT_EVERY = 500
_GENERATIONS = 16
"""Forks of forks that are followed to the process that opened the run."""
_ASSIGNED = frozenset({"type", "schema_version", "wall_ns", "mono_ns", "run_id", "writer_id", "seq"})
_SAMPLE_KNOWN = frozenset(
    {"sample_id", "attempt", "step", "rollout_id", "group_id", "prompt_id", "session_id", "token_digest"}
    | {"mask_digest", "sampling", "weight_spans", "chunks", "reward", "metadata_source", "labels"}
)
_SCORE_KNOWN = frozenset(
    {"sample_id", "attempt", "step", "rollout_id", "source", "start", "contract_id", "weight_version", "pass_id"}
    | {"layout_id", "token_digest", "mask_digest", "shard", "metadata_source", "labels"}
)


def as_numpy(array: Array) -> npt.NDArray[Any]:
    """A read-only numpy view of an event array; bfloat16 widens exactly to float32."""
    if array.dtype == "bfloat16":
        return (np.frombuffer(array.data, "<u2").astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(array.data, np.dtype(array.dtype).newbyteorder("<"))


@dataclass(slots=True, eq=False)
class Sample:
    """One sampled response. Arrays have one entry a response token; `dims` holds the other recorded plain values.

    `response_token_ids` is int32 (uint64 under hash redaction, empty under drop), `loss_mask` uint8.
    `token_digest` and `mask_digest` are the recorded ones where the engine recorded them, else computed. `token_key`
    says how its tokens are redacted: ids under two of them do not compare.
    """

    sample_id: str
    attempt: int | None
    step: int | None
    group_id: str | None
    prompt_id: str | None
    prompt_token_ids: npt.NDArray[Any] | None
    response_token_ids: npt.NDArray[Any]
    loss_mask: npt.NDArray[np.uint8]
    token_digest: str
    mask_digest: str
    own_token_digest: str | None
    own_mask_digest: str
    weight_spans: tuple[Span, ...]
    sampling: dict[str, Any]
    engine: str | None
    cache: dict[str, Any]
    chunks: tuple[int, ...]
    routed_experts: dict[str, Any]
    routes: npt.NDArray[Any] | None
    status: str | None
    reward: float | None
    kept_mass: npt.NDArray[np.float32] | None
    position_ids: npt.NDArray[np.int32] | None
    metadata_source: dict[str, str]
    labels: dict[str, str]
    dims: dict[str, Any]
    writer_id: str
    seq: int
    token_key: str = "none"

    @property
    def key(self) -> tuple[str, int | None]:
        """What makes a sample one: its id and attempt."""
        return self.sample_id, self.attempt

    def __len__(self) -> int:
        return len(self.loss_mask)


@dataclass(slots=True, eq=False)
class Score:
    """One `logprobs` event: float32 `values` (nats) of one side's pass over a sample, or a shard of it."""

    sample_id: str
    attempt: int | None
    step: int | None
    source: str
    values: npt.NDArray[np.float32]
    start: int
    value_class: npt.NDArray[np.uint8] | None
    contract_id: str
    weight_version: str | None
    pass_id: str | None
    layout_id: str | None
    token_digest: str | None
    mask_digest: str | None
    token_ids: npt.NDArray[Any] | None
    shard: dict[str, Any] | None
    partials: dict[str, npt.NDArray[np.float32]]
    metadata_source: dict[str, str]
    dims: dict[str, Any]
    writer_id: str
    seq: int
    mono_ns: int
    token_key: str = "none"


@dataclass(slots=True, eq=False)
class Fact:
    """Any other event as it was recorded: fields without the assigned ones."""

    type: str
    writer_id: str
    seq: int
    fields: dict[str, Any]
    arrays: dict[str, Array]


@dataclass(slots=True, eq=False)
class History:
    """A run in memory. `facts` maps an event type to its events in (writer, seq) order; `pruned` is what is gone.

    `refused` are events that no recorder can have written; nothing else here holds them.
    """

    run_id: str = ""
    samples: list[Sample] = field(default_factory=list)
    scores: list[Score] = field(default_factory=list)
    facts: dict[str, list[Fact]] = field(default_factory=dict)
    writers: dict[str, dict[str, Any]] = field(default_factory=dict)
    contracts: dict[str, dict[str, Any]] = field(default_factory=dict)
    prompts: dict[str, npt.NDArray[Any]] = field(default_factory=dict)
    redaction: str = "none"
    token_keys: dict[str, str] = field(default_factory=dict)
    pruned: "Pruned | None" = None
    refused: list[Refused] = field(default_factory=list)

    @classmethod
    def from_events(cls, events: Iterable[Event], run_id: str = "") -> "History":
        """The history of (writer id, seq, envelope fields, arrays) tuples, in any order."""
        history = cls(run_id)
        for writer_id, seq, fields, arrays in sorted(events, key=lambda event: (event[0], event[1])):
            history._add(writer_id, seq, fields, arrays)
        for sample in history.samples:
            if sample.prompt_token_ids is None and sample.prompt_id is not None:
                sample.prompt_token_ids = history.prompts.get(sample.prompt_id)
        history._tell_keys()
        return history

    def _tell_keys(self) -> None:
        """Says of samples and scores how their tokens are redacted; a forked child's way is its parent's."""
        rows: list[Sample | Score] = [*self.samples, *self.scores]
        for row in rows:
            writer: str | None = row.writer_id
            for _ in range(_GENERATIONS):
                if writer is None or writer in self.token_keys:
                    break
                writer = self.writers.get(writer, {}).get("parent_writer")
            row.token_key = self.token_keys.get(writer or "", "none")

    def _add(self, writer_id: str, seq: int, fields: dict[str, Any], arrays: dict[str, Array]) -> None:
        kind = fields["type"]
        refused = refuse(writer_id, seq, fields, arrays)
        if refused is not None:
            self.refused.append(refused)
            return
        if not self.run_id:
            self.run_id = fields.get("run_id") or ""
        if kind == "rollout.sample":
            self.samples.append(_sample(writer_id, seq, fields, arrays))
        elif kind == "logprobs":
            self.scores.append(_score(writer_id, seq, fields, arrays))
        else:
            self._add_fact(Fact(kind, writer_id, seq, {k: v for k, v in fields.items() if k not in _ASSIGNED}, arrays))

    def _add_fact(self, fact: Fact) -> None:
        self.facts.setdefault(fact.type, []).append(fact)
        if fact.type == "writer.opened":
            self.writers[fact.writer_id] = fact.fields
        elif fact.type == "contract.declared" and fact.fields.get("contract_id"):
            self.contracts[fact.fields["contract_id"]] = fact.fields
        elif fact.type == "run.opened":
            self.redaction = fact.fields.get("redaction") or self.redaction
            way = (fact.fields.get("redaction") or "none", fact.fields.get("redaction_key_id") or "")
            self.token_keys[fact.writer_id] = " ".join(way).strip()
        elif fact.type == "prompt.recorded":
            own = as_numpy(fact.arrays["token_ids"]) if "token_ids" in fact.arrays else np.empty(0, np.int32)
            prefix = self.prompts.get(fact.fields.get("prefix_of") or "")
            self.prompts[fact.fields["prompt_id"]] = own if prefix is None else np.concatenate([prefix, own])

    def role(self, writer_id: str) -> str | None:
        """The role a writer opened with."""
        opened = self.writers.get(writer_id)
        return None if opened is None else opened.get("role")

    def of(self, kind: str) -> Iterator[Fact]:
        """The events of one type that is neither a sample nor a score."""
        yield from self.facts.get(kind, ())


def _sample(writer_id: str, seq: int, fields: dict[str, Any], arrays: dict[str, Array]) -> Sample:
    mask = as_numpy(arrays["loss_mask"]) if "loss_mask" in arrays else np.empty(0, np.uint8)
    tokens = arrays.get("response_token_ids")
    own_tokens = sha256(tokens.data) if tokens is not None and tokens.dtype == "int32" else None
    own_mask = mask_digest(mask.astype(np.uint8))
    return Sample(
        sample_id=fields["sample_id"],
        attempt=fields.get("attempt"),
        step=fields.get("step"),
        group_id=fields.get("group_id"),
        prompt_id=fields.get("prompt_id"),
        prompt_token_ids=as_numpy(arrays["prompt_token_ids"]) if "prompt_token_ids" in arrays else None,
        response_token_ids=as_numpy(tokens) if tokens is not None else np.empty(0, np.int32),
        loss_mask=mask,
        token_digest=fields.get("token_digest") or own_tokens or "",
        mask_digest=fields.get("mask_digest") or own_mask,
        own_token_digest=own_tokens,
        own_mask_digest=own_mask,
        weight_spans=tuple((s["version"], s["start"], s["end"]) for s in fields.get("weight_spans") or ()),
        sampling=fields.get("sampling") or {},
        engine=fields.get("engine"),
        cache=fields.get("cache") or {},
        chunks=tuple(fields.get("chunks") or ()),
        routed_experts=fields.get("routed_experts") or {},
        routes=as_numpy(arrays["routed_experts.array"]) if "routed_experts.array" in arrays else None,
        status=fields.get("status"),
        reward=fields.get("reward"),
        kept_mass=as_numpy(arrays["kept_mass"]) if "kept_mass" in arrays else None,
        position_ids=as_numpy(arrays["position_ids"]) if "position_ids" in arrays else None,
        metadata_source=fields.get("metadata_source") or {},
        labels=fields.get("labels") or {},
        dims={k: v for k, v in fields.items() if k not in _SAMPLE_KNOWN and k not in _ASSIGNED},
        writer_id=writer_id,
        seq=seq,
    )


def _score(writer_id: str, seq: int, fields: dict[str, Any], arrays: dict[str, Array]) -> Score:
    partials = {k.partition(".")[2]: as_numpy(a) for k, a in arrays.items() if k.startswith("partials.")}
    return Score(
        sample_id=fields["sample_id"],
        attempt=fields.get("attempt"),
        step=fields.get("step"),
        source=fields["source"],
        values=as_numpy(arrays["values"]).astype(np.float32, copy=False),
        start=fields.get("start") or 0,
        value_class=as_numpy(arrays["value_class"]) if "value_class" in arrays else None,
        contract_id=fields.get("contract_id") or "",
        weight_version=fields.get("weight_version"),
        pass_id=fields.get("pass_id"),
        layout_id=fields.get("layout_id"),
        token_digest=fields.get("token_digest"),
        mask_digest=fields.get("mask_digest"),
        token_ids=as_numpy(arrays["token_ids"]) if "token_ids" in arrays else None,
        shard=fields.get("shard"),
        partials=partials,
        metadata_source=fields.get("metadata_source") or {},
        dims={k: v for k, v in fields.items() if k not in _SCORE_KNOWN and k not in _ASSIGNED},
        writer_id=writer_id,
        seq=seq,
        mono_ns=fields.get("mono_ns") or 0,
    )


def load_history(
    ledger: "Ledger", run_id: str, where: str | None = None, progress: Callable[[int, int], None] | None = None
) -> History:
    """The history of one run of an opened ledger.

    `where` is a SQL condition over the `samples` view that selects samples (facts are never filtered). `progress` is
    called with (bytes read, bytes in all) now and then. Raises LedgerError when the run does not exist, UsageError when
    the condition does not parse.
    """
    events = ledger.read_events(run_id)
    history = History.from_events(events if progress is None else _counted(ledger, run_id, events, progress), run_id)
    history.pruned = ledger.run(run_id).pruned()
    if where is None:
        return history
    from rlk_ledger.views import select_samples

    chosen = select_samples(ledger, run_id, where)
    history.samples = [sample for sample in history.samples if sample.sample_id in chosen]
    history.scores = [score for score in history.scores if score.sample_id in chosen]
    return history


def _counted(
    ledger: "Ledger", run_id: str, events: Iterable[Event], progress: Callable[[int, int], None]
) -> Iterator[Event]:
    """Passes events on, reporting the share of the run's segment bytes they stand for."""
    held = ledger.run(run_id).held
    size, count = held.total("bytes"), max(1, held.total("rows"))
    for number, event in enumerate(events):
        if number % _REPORT_EVERY == 0:
            progress(size * number // count, size)
        yield event
    progress(size, size)
